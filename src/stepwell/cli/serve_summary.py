"""The lines that `stepwell serve` prints when it is ready."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from stepwell.base.ids import Tier
from stepwell.base.units import counted, format_bytes

if TYPE_CHECKING:
    from stepwell.base.spec import ModelSpec
    from stepwell.engine.approximate.selectors import Sparse
    from stepwell.engine.building.settings import EngineConfig
    from stepwell.engine.engine import Engine
    from stepwell.engine.passes.spilling import SpillReport
    from stepwell.engine.scheduling.footprint import Footprint
    from stepwell.server.access.tenants import Secrets, TenantsFile
    from stepwell.server.served import Served
    from stepwell.store.api import Store


def lines(
    engine: Engine, name: str, config: EngineConfig, address: str, keys: Secrets, tenants: TenantsFile, *, made: bool
) -> list[tuple[str, str]]:
    """Labels and values of the summary."""
    cache, spec = engine.cache, engine.cache.spec
    sizes = {tier: stats.available_bytes for tier, stats in cache.stats().tiers.items()}  # still empty
    measured, key = engine.footprint, config.store_config.key
    per_token = {Tier.DEVICE: measured.bytes_per_token, Tier.HOST: spec.bytes_per_token}  # devices hold each rank's share
    checkpoint = f", {format_bytes(measured.checkpoint_bytes)} per checkpoint" if measured.checkpoint_bytes else ""
    return [
        ("model", f"{name}, up to {engine.max_context:,} tokens a request"),
        ("passes", f"{engine.limits.chunk_tokens:,} tokens, {counted(engine.limits.max_running, 'request')} at once"),
        ("memory", f"{round(measured.bytes_per_token):,} bytes per token{checkpoint}, pages of {spec.page_tokens} tokens"),
        *([] if spec.narrow is None else [("checkpoints", narrow(engine.footprint, spec))]),
        *([] if config.tensor_parallel == 1 else [("ranks", _ranks(engine, config))]),
        *([] if config.draft is None else [("draft", f"{config.draft}, up to {config.draft_tokens} tokens ahead")]),
        *([] if config.picks is None else [("sparse", sparse(config.picks, engine.spilling))]),
        ("tiers", ", ".join(_tier(tier.label, size, per_token[tier]) for tier, size in sizes.items() if size)),
        ("store", config.store or "none"),
        ("after a kill", after_a_kill(cache.store.resumable_after_s, engine.stores)),
        *([] if key is None else [("store key", f"{key.id.hex()}: only values written with it are used")]),
        ("admin token", f"{keys.admin_token} (for this run)" if made else "as given"),
        ("API key", _api_key_line(keys, tenants)),
        ("page", f"{address}/ui"),
        ("address", address),
    ]


def after_a_kill(resumable_after_s: float | None, stores: Sequence[Store]) -> str:
    """What a restart can resume after `kill -9` or an out-of-memory kill."""
    if resumable_after_s:
        return f"what was cached up to {resumable_after_s:g} s ago can be resumed from the store"
    if resumable_after_s is not None:
        return "cached prompts can be resumed from the store, except pages in flight"
    if not any(store.traits.outlives_process for store in stores):
        return "everything cached is lost: no store outlives the server (--store)"
    return "what is only in memory is lost (--no-durable)"


def sparse(picks: Sparse, rows: SpillReport | None) -> str:
    """The selector, and with rows on the host the number of hot rows and the memory reserved for them."""
    hot = "" if rows is None else f", {rows.hot_rows:,} hot rows a request, {format_bytes(rows.beside_bytes)} reserved for them"
    return (picks.identity or picks.selector) + hot


def formats(served: Served) -> str:
    """The parsers of tool calls and reasoning."""
    found = {"tool calls": served.tool_parser, "reasoning": served.reasoning_parser}
    return ", ".join(f"{what}: {parser or 'not parsed'}" for what, parser in found.items())


def narrow(measured: Footprint, spec: ModelSpec) -> str:
    """The size of checkpoints in eight bits, and their effect."""
    from stepwell.engine.scheduling.footprint import footprint_of

    assert spec.narrow is not None, f"checkpoints of {spec.name!r} are exact"
    cached = footprint_of(spec).checkpoint_bytes
    return (
        f"{spec.narrow.dtype} on the host and in the store: {format_bytes(cached)} instead of "
        f"{format_bytes(measured.checkpoint_bytes)}; what resumes from there is not exact"
    )


def _ranks(engine: Engine, config: EngineConfig) -> str:
    pids = "" if engine.ranks is None else f", processes {', '.join(map(str, engine.ranks.pids))}"
    return f"{config.tensor_parallel}{pids}{'; restarted when one dies' if config.restart_workers else ''}"


def _tier(label: str, size: int, bytes_per_token: Fraction) -> str:
    """A tier's size, also in tokens if tokens take memory."""
    tokens = f" ({int(size / bytes_per_token):,} tokens)" if bytes_per_token else ""
    return f"{label} {format_bytes(size)}{tokens}"


def _api_key_line(keys: Secrets, tenants: TenantsFile) -> str:
    if tenants.tenants:
        return f"one for each of {counted(len(tenants.tenants), 'tenant')}"
    return "required" if keys.api_key is not None else "none: every client that can connect is served"
