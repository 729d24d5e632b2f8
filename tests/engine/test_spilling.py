"""Engines whose attention rows may be on the host alone: settings, traffic on devices that are too small, drafts, and figures.

That no bit changes is proved in `tests/parity/test_spilled_rows.py`.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from engine.arriving_loads import ArrivingLoads
from engine.drafted import target
from engine.families import checkpoint
from engine.small import DEFAULTS, PAGE, alone, greedy, prompt, run, small, tokens_of
from parity.spilling import SPARSE, memory_of, poison_freed, press, report, short
from stepwell.base.config import WritePolicy
from stepwell.base.errors import ConfigError
from stepwell.base.ids import Kind, Tier
from stepwell.base.spec.families import from_config
from stepwell.engine import Engine, EngineConfig, Finish, GenerateRequest, Limits, Sampling, build_engine
from stepwell.engine.building.settings import check_settings
from stepwell.engine.passes.rows import Rows
from stepwell.engine.passes.spilled import Piece, Spilled
from stepwell.engine.passes.spilling import SHORT_RUN
from stepwell.memory.row_pages import ABSENT
from stepwell.sparse.places import HOST, ORDINAL, ROWS, Places
from stepwell.tiers.eviction import make_room
from waiting import run_to_the_end, settle

pytest.importorskip("transformers")

LIMITS = Limits(chunk_tokens=64, max_running=6)


def engine_for(family: str, **settings: Any) -> Engine:
    """With rows that may spill, and a device for six requests of a thousand tokens at most."""
    defaults = {"sparse": "dsa", "hot_rows": 2 * PAGE, "limits": LIMITS}
    return build_engine(short(checkpoint(family)), EngineConfig(**(DEFAULTS | defaults | settings)))


# ---- settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"host_memory": 0}, "host tier"),
        ({"write": WritePolicy.EXCLUSIVE}, "write=through"),
        ({"write": WritePolicy.SELECTIVE}, "write=through"),
        ({"hot_rows": -1}, "0 or more"),
        ({"sparse": None}, "hot_rows needs sparse attention"),
        ({"sparse": "quest", "host_memory": 0}, "quest` with hot_rows.*host tier.*leave hot_rows out"),
        ({"sparse": "clusterkv", "write": WritePolicy.EXCLUSIVE}, "clusterkv` with hot_rows.*write=through"),
        ({"sparse_budget": 100}, "leave sparse_budget out"),
        ({"sparse_budget": 0, "sparse": "quest"}, "a number of tokens"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_weights_are_read(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        check_settings(EngineConfig(**({"sparse": "dsa", "hot_rows": 64} | settings)))


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "deepseek_v4", "mistral", "mamba2"])
def test_models_without_an_index_of_their_own_are_refused(family: str) -> None:
    with pytest.raises(ConfigError, match="no index"):
        engine_for(family)


def test_a_device_without_room_beside_hot_rows_is_refused() -> None:
    with pytest.raises(ConfigError, match="lower hot_rows"):
        engine_for("deepseek_v32", hot_rows=10**6, device_memory="100KiB")
    with pytest.raises(ConfigError, match=r"6 requests that select 100,000 rows each.*sparse_budget"):
        engine_for("llama", sparse="quest", sparse_budget=100_000)


def test_hot_rows_are_no_more_than_the_longest_request_has_tokens() -> None:
    """More would be memory that no request can use, and too much of it for this device."""
    with engine_for("deepseek_v32", hot_rows=10**6) as engine:
        press(engine)
        found = report(engine)
        assert found.hot_rows == engine.max_context == 1024 and found.beside_bytes < 2**20
        asks = [greedy(prompt(200, seed=at), 12) for at in range(3)]
        assert [tokens_of(each) for each in run(engine, asks)] == alone("deepseek_v32", asks)


def test_what_is_needed_beside_pages_is_taken_off_the_device() -> None:
    with small("deepseek_v32") as plain, engine_for("deepseek_v32") as engine:
        sizes = [each.cache.stats().tier(Tier.DEVICE).size_bytes for each in (plain, engine)]
        places = engine._runner._pages.spilling
        assert places is not None
        tensors = [places.stages, places.places.key_GS, places.places.stamp_GS, places.places.worth_S]
        tensors += [places._plan.source_M, places._plan.target_M, places._plan.claim_M, places._plan.winner_M]
        assert sizes[0] - sizes[1] == sum(each.nbytes for each in tensors)


def test_stores_and_hosts_hold_the_same_bytes_and_layers_that_share_a_selection_share_a_group() -> None:
    for family in SPARSE:
        config = checkpoint(family).config
        plain, sparse = from_config(config), from_config(config, sparse="dsa")
        assert plain.fingerprint == sparse.fingerprint and plain.spill is None and sparse.spill is not None
        assert sparse.spill.group_of == {"kv": (0, 1, 2) if family == "deepseek_v32" else (0, 1, 1, 2, 2)}


# ---- traffic ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("seed", range(3))
def test_answers_are_the_same_whatever_is_shed_preempted_and_aborted(family: str, seed: int) -> None:
    """Conversations that share beginnings and part, more of them than fit, some aborted at any moment."""
    random = Random(seed)
    shared = prompt(random.randrange(60, 200), seed=seed)
    asks = [
        greedy([*shared[: random.randrange(len(shared))], *prompt(random.randrange(5, 250), seed=100 * seed + at)], 25,
               priority=random.randrange(3), use_cache=random.random() < 0.9)
        for at in range(10)
    ]  # fmt: skip
    memory = ("1000KiB", "1100KiB", "1300KiB")[seed] if family == "glm_moe_dsa" else ("700KiB", "800KiB", "1MiB")[seed]
    with engine_for(family, device_memory=memory, host_memory="3MiB", hot_rows=random.choice((0, PAGE, 3 * PAGE))) as engine:
        poison_freed(engine)
        numbers = [engine.submit(ask) for ask in asks]
        victims, answers = set(random.sample(numbers, 3)), {number: [] for number in numbers}  # type: ignore[var-annotated]
        ends: dict[int, Finish] = {}
        while engine.num_open:
            if random.random() < 0.05 and (left := victims - ends.keys()):
                engine.abort(min(left))
            for delta in engine.step():
                answers[delta.request] += delta.tokens
                assert delta.error is None, delta.error
                if delta.finish is not None:
                    ends[delta.request] = delta.finish
            engine.cache.audit()
        assert engine.cache.stats().counters["spilled_pages"] > 0
        assert report(engine).hot_pages == 0, "hot pages go with their leases"
    expected = dict(zip(numbers, alone(family, asks), strict=True))
    for number, tokens in answers.items():
        if ends[number] is Finish.ABORTED:
            assert tokens == expected[number][: len(tokens)]
        else:
            assert tokens == expected[number]


@pytest.mark.parametrize("family", SPARSE)
def test_a_request_longer_than_the_device_has_rows_for_answers_alone(family: str) -> None:
    with small(family) as engine:
        expected = tokens_of(run(engine, [greedy(prompt(900), 30)])[0])
    with engine_for(family, device_memory="800KiB") as engine:
        played = run(engine, [greedy(prompt(900), 30)])[0]
        assert tokens_of(played) == expected and played[-1].usage is not None and not played[-1].usage.preemptions
        layout = engine.cache._state.arena(Tier.DEVICE).layout
        assert layout.size_bytes < 58 * sum(layout.strides.values()), "not all of it would have fitted"


@pytest.mark.parametrize("family", SPARSE)
def test_a_long_prompt_beside_rows_that_are_away_is_read_where_it_lies(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not row by row for each of its tokens, as what is picked of rows on the host is: that would be gigabytes a layer."""
    seen = []
    rows = Spilled.rows

    def watched(self: Spilled, given: Rows, piece: Piece) -> Rows:
        found = rows(self, given, piece)
        if piece.paging.looks[0].stop - piece.paging.looks[0].start > SHORT_RUN:
            seen.append(piece.resident)
            assert found.places is None, "a long run is resident or staged"
        return found

    monkeypatch.setattr(Spilled, "rows", watched)
    prompts = [prompt(300, seed=1), prompt(200, seed=2)]
    with small(family) as engine:
        expected = [tokens_of(run(engine, [greedy(each, 20)])[0]) for each in prompts]
    with engine_for(family) as engine:
        press(engine)
        numbers = [engine.submit(greedy(prompts[0], 20))]
        answers: dict[int, list[int]] = {}
        while engine.num_open:
            for delta in engine.step():
                answers.setdefault(delta.request, []).extend(delta.tokens)
            if len(numbers) == 1 and len(answers.get(numbers[0], ())) == 5:
                numbers.append(engine.submit(greedy(prompts[1], 20)))
    assert [answers[number] for number in numbers] == expected and any(seen)


def test_before_every_pass_the_device_is_told_where_rows_are() -> None:
    """Also where nothing changed. Headers say what the cache says, whatever was in these bytes before."""
    with engine_for("deepseek_v32", device_memory="800KiB") as engine:
        for rows in memory_of(engine).values():
            rows.fill_(0xEE)
        spilling = engine._runner._pages.spilling
        assert spilling is not None
        places, pages = spilling.places, spilling.row_pages
        compute = engine._runner.model.layers[0].attention.indexer  # type: ignore[attr-defined]
        assert compute is not None
        for at in range(3):
            engine.submit(greedy(prompt(200 + 100 * at, seed=at), 10))
        while engine.num_open:
            before, now = engine.passes, int(places.now_1)
            engine.step()
            assert int(places.now_1) - now == engine.passes - before
            placed = np.flatnonzero((pages.rows != ABSENT) | (pages.host != ABSENT))
            placed = np.setdiff1d(placed, [*pages._changed])  # what changed behind the pass waits for the next
            header_N3 = places.header_P3[torch.from_numpy(placed)].numpy()
            assert (header_N3[:, ROWS] == pages.rows[placed]).all() and (header_N3[:, HOST] == pages.host[placed]).all()
            assert (header_N3[:, ORDINAL] == pages._ordinal[placed]).all()
        assert engine.cache.stats().counters["spilled_pages"] > 0


def step_through(engine: Engine) -> None:
    while engine.num_open:
        engine.step()


def test_what_a_failed_pass_was_told_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_for("deepseek_v32", device_memory="800KiB") as engine:
        spilling = engine._runner._pages.spilling
        assert spilling is not None
        places, pages, apply = spilling.places, spilling.row_pages, Places.apply
        engine.submit(greedy(prompt(300, seed=1), 4))
        while engine.num_open:
            engine.step()
        engine.submit(greedy(prompt(300, seed=2), 4))
        monkeypatch.setattr(Places, "apply", lambda *_: (_ for _ in ()).throw(MemoryError("none left")))
        with pytest.raises(MemoryError):
            step_through(engine)
        monkeypatch.setattr(Places, "apply", apply)
        engine.step()
        engine.submit(greedy(prompt(60, seed=3), 2))
        while engine.num_open:
            engine.step()
        placed = np.flatnonzero((pages.rows != ABSENT) | (pages.host != ABSENT))
        placed = np.setdiff1d(placed, [*pages._changed])
        header_N3 = places.header_P3[torch.from_numpy(placed)].numpy()
        assert (header_N3[:, ROWS] == pages.rows[placed]).all() and (header_N3[:, HOST] == pages.host[placed]).all()


@pytest.mark.parametrize("selector", ["dsa", "quest"])
def test_warming_up_builds_what_rows_on_the_host_need_and_leaves_nothing_behind(selector: str) -> None:
    """Slots, copies and reads; the last as attention reads them. Nothing is counted, and pages are again where they are."""
    family, more = ("deepseek_v32", {}) if selector == "dsa" else ("llama", {"sparse_budget": 112})
    with engine_for(family, sparse=selector, **more) as engine:
        spilling = engine._runner._pages.spilling
        assert spilling is not None
        calls: list[str] = []
        for name in ("_resolve", "_fetch", "_read"):
            setattr(spilling, name, noted(calls, name, getattr(spilling, name)))
        engine.warm_up()
        assert {*calls} == {"_resolve", "_fetch", "_read"}
        settle(engine.cache)
        assert engine.cache.stats().tier(Tier.DEVICE).used_bytes == 0
        found = report(engine)
        assert found.resident == found.misses == found.host_pages == 0
        engine.cache.audit()
        engine.submit(greedy(prompt(100), 8))
        step_through(engine)
        assert report(engine).misses == 0, "what it said of a page is said no more"


def noted(calls: list[str], name: str, of: Any) -> Any:
    return lambda *given: (calls.append(name), of(*given))[1]


@pytest.mark.parametrize("family", SPARSE)
@pytest.mark.parametrize("memory", ["4MiB", "800KiB"])
def test_a_pass_that_begins_while_layers_arrive_waits_for_rows_too(family: str, memory: str) -> None:
    """Both of a page's objects come in one load; where only the index fits, rows stay on the host and none are waited for."""
    known, ask = greedy(prompt(600)), greedy(prompt(600) + prompt(90, seed=1))
    with engine_for(family, device_memory=memory) as engine:
        loads = ArrivingLoads(engine)
        poison_freed(engine)
        run(engine, [known])
        settle(engine.cache)
        core = engine.cache._state
        make_room(core, Tier.DEVICE, {Kind.PREFIX: core.arena(Tier.DEVICE).layout.rows(Kind.PREFIX) + 1})
        loads.waits.clear()
        (deltas,) = run(engine, [ask])
        assert deltas[-1].error is None and tokens_of(deltas) == alone(family, [ask])[0]
        index_only = engine.cache.stats().counters.get("loaded_index_only_pages", 0)
        assert loads.num_begun == 1 and (index_only > 10) == (memory == "800KiB")
        first = {each: loads.waits.index(each) for each in loads.waits}
        for state in ("kv", "index"):
            layers = [first[state, layer] for layer in range(engine.cache.spec.state(state).layers)]
            assert layers == sorted(layers), "a layer is waited for when the pass comes to it"
        engine.cache.audit()


def test_a_request_that_cannot_spill_is_refused_where_all_its_rows_would_not_fit() -> None:
    with engine_for("deepseek_v32", device_memory="800KiB") as engine:
        tokens = prompt(engine.max_alone)
        assert 100 < engine.max_alone < engine.max_context == 1024
        with pytest.raises(ConfigError, match=f"{engine.max_alone} that this server can hold.*or use the cache"):
            engine.submit(greedy(tokens, 1, use_cache=False))
        played = run(engine, [greedy(tokens, 1), greedy(tokens[:-4], 4, use_cache=False)])
        assert [deltas[-1].finish for deltas in played] == [Finish.LENGTH] * 2
    with small("deepseek_v32") as engine:
        assert engine.max_alone == engine.max_context


# ---- drafts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("hot_rows", [0, 2 * PAGE, 6 * PAGE])
def test_drafts_of_the_models_own_layer_are_verified_over_rows_on_the_host(hot_rows: int) -> None:
    """Several query rows of a request select together. Draft rows stay on the device."""
    made = short(target("deepseek_v32", own_layer=True))
    asks = [
        GenerateRequest(tokens=prompt(length, seed=length), sampling=Sampling(max_tokens=24, logprobs=1))
        for length in (40, 180, 97)
    ]
    settings = DEFAULTS | {"draft": "mtp", "limits": LIMITS}
    with build_engine(made, EngineConfig(**settings)) as engine:
        expected = run(engine, asks)
    with build_engine(made, EngineConfig(**settings, sparse="dsa", hot_rows=hot_rows)) as engine:
        press(engine)
        played = run(engine, asks)
        again = run(engine, [replace(ask, tokens=[*ask.tokens, *prompt(20)]) for ask in asks])
        found = report(engine)
    for one, other in zip(played, expected, strict=True):
        assert tokens_of(one) == tokens_of(other)
        logprobs = [[each.logprob for delta in deltas for each in delta.logprobs] for deltas in (one, other)]
        assert logprobs[0] == logprobs[1], "the same bits"
        assert one[-1].usage is not None and other[-1].usage is not None
        assert one[-1].usage.accepted_tokens == other[-1].usage.accepted_tokens
    assert sum(deltas[-1].usage.accepted_tokens for deltas in again if deltas[-1].usage is not None) > 0
    assert found.misses and (found.read_through == found.misses) == (hot_rows == 0)


# ---- figures ----------------------------------------------------------------------------------------


def test_state_and_metrics_show_what_came_of_rows() -> None:
    pytest.importorskip("prometheus_client")
    from stepwell.server.monitoring.engine_metrics import _families, read_state

    with engine_for("deepseek_v32") as engine:
        press(engine)
        engine.submit(greedy(prompt(200), 20))
        for _ in range(12):
            engine.step()
        state = read_state(engine)
        assert state.spilling == engine.spilling and state.spilling is not None and state.spilling.host_pages > 5
        shown = {(sample.name, *sample.labels.values()): sample.value for family in _families(state) for sample in family.samples}
        found = state.spilling
        assert shown["stepwell_sparse_steps_total",] == found.steps > 0
        assert shown["stepwell_sparse_rows_total", "hits"] == found.hits > 0
        assert shown["stepwell_sparse_rows_total", "misses"] == found.misses > 0
        assert shown["stepwell_sparse_rows_total", "read_through"] == found.read_through
        row_bytes = engine.cache.spec.state("kv").row_bytes
        assert found.fetched_bytes == (found.misses - found.read_through) * row_bytes
        assert shown["stepwell_sparse_bytes_total", "fetched"] == found.fetched_bytes > 0
        assert shown["stepwell_sparse_pages", "host"] == found.host_pages
        assert shown["stepwell_sparse_pages", "hot"] == found.hot_pages == 2
        run_to_the_end(engine)
    with small("deepseek_v32") as engine:
        state = read_state(engine)
        assert state.spilling is None and not [each for each in _families(state) if "sparse" in each.name]


def test_figures_that_come_late_are_in_the_next_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA what a report asks for has seldom come when it looks."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    with engine_for("deepseek_v32") as engine:
        press(engine)
        run(engine, [greedy(prompt(200), 20)])
        late = Late()
        engine._runner._pages.spilling.places.counts._copied = late  # type: ignore[union-attr, assignment]
        report(engine)
        for _ in range(2):
            assert not late.done, "asked for, and on its way"
            late.done = True
            assert report(engine).misses > 0


class Late:
    """An event that has passed when the test says so."""

    done = True

    def record(self, stream: object) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


def test_pages_of_a_device_without_rows_that_spill_are_what_they_were() -> None:
    with small("deepseek_v32") as engine:
        assert engine._runner._pages.spilling is None and engine.cache.row_pages is None
        assert Kind.ROWS not in engine.cache._state.arena(Tier.DEVICE).layout.strides
