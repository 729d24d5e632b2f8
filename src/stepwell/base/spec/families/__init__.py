"""From a Hugging Face `config.json` to a `ModelSpec`: the registration of every family of models.

The only place that knows models by name: what a family keeps, and which module of the engine builds it. Reads a mapping and
returns a value; opens no file and imports no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from stepwell.base.errors import ConfigError, SpecError
from stepwell.base.spec.families import attention, compressed, latent, recurrent, summaries
from stepwell.base.spec.families.dtypes import KV_DTYPES, Dtypes, choose_dtypes
from stepwell.base.spec.families.fields import Fields
from stepwell.base.spec.model import ModelSpec
from stepwell.base.spec.schedule import Schedule
from stepwell.base.spec.shapes import Prefix
from stepwell.base.spec.spill import Spill
from stepwell.base.spec.states import StateSpec

__all__ = ["KV_DTYPES", "from_config", "known_model_types", "served_family"]

DEFAULT_PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models whose states and layers are built alike, under the `model_type` that configs give them.

    `model` is the module of `stepwell.engine.models` whose `build` makes one, imported when a model is built. The engine runs
    `model_types` with it; `planned` are known for planning alone.
    """

    model_types: tuple[str, ...] = ()
    planned: tuple[str, ...] = ()
    model: str | None = None
    schedule: Callable[[Fields], Schedule]  # the states that each layer keeps: states are counted and models built by it
    states: Callable[[Fields, Dtypes, Schedule], Iterator[StateSpec]]
    draft: Callable[[Fields, Dtypes, int], Iterator[StateSpec]] | None = None  # for the tokens of a page
    page_tokens: int = DEFAULT_PAGE_TOKENS
    heads: Callable[[Fields], attention.Heads] | None = (
        None  # of layers with full attention, if summaries can choose rows for them
    )
    spill: Callable[[Schedule], Spill] | None = None  # for models with an index of their own
    fp8_rows: bool = False  # whether its attention rows have a format in eight bits


def _gqa(schedule: Callable[[Fields], Schedule], *model_types: str, planned: tuple[str, ...] = ()) -> Family:
    return Family(
        model_types=model_types, planned=planned, model="dense", schedule=schedule, states=attention.gqa_states,
        heads=attention.read_heads,
    )  # fmt: skip


_VARIANTS = ("", "_text", "_moe", "_moe_text")
_FAMILIES = (
    _gqa(attention.full_schedule, "llama", planned=("minimax_m2",)),
    _gqa(attention.mixtral_schedule, planned=("mixtral",)),
    _gqa(attention.mistral_schedule, "mistral"),
    _gqa(attention.qwen_schedule, "qwen2", "qwen3"),
    _gqa(attention.qwen2_moe_schedule, planned=("qwen2_moe",)),
    _gqa(attention.qwen3_moe_schedule, "qwen3_moe"),
    Family(
        model_types=("gemma3", "gemma3_text"), model="gemma3", schedule=attention.gemma3_schedule,
        states=partial(attention.gqa_states, heads=attention.gemma3_heads), heads=attention.gemma3_heads,
    ),
    Family(model_types=("gpt_oss",), model="gpt_oss", schedule=attention.gpt_oss_schedule, states=attention.gqa_states),
    Family(planned=("mimo_v2", "mimo_v2_flash"), schedule=attention.mimo_schedule, states=attention.mimo_states),
    Family(
        model_types=("deepseek_v3", "kimi_k2"), planned=("deepseek_v2", "kimi_k25"), model="deepseek_v3",
        schedule=latent.mla_schedule, states=latent.mla_states, draft=latent.mla_draft, fp8_rows=True,
    ),
    Family(
        model_types=("deepseek_v32",), model="deepseek_v32", schedule=latent.v32_schedule, states=latent.dsa_states,
        draft=latent.dsa_draft, spill=latent.dsa_spill, fp8_rows=True,
    ),
    Family(
        model_types=("glm_moe_dsa",), model="deepseek_v32", schedule=latent.glm_schedule, states=latent.dsa_states,
        draft=latent.dsa_draft, spill=latent.dsa_spill, fp8_rows=True,
    ),
    Family(
        model_types=("deepseek_v4",), model="deepseek_v4", schedule=compressed.compressed_schedule,
        states=compressed.compressed_states, page_tokens=256, fp8_rows=True,
    ),
    Family(
        model_types=("qwen3_next", *(f"qwen3_5{variant}" for variant in _VARIANTS)),
        planned=tuple(f"qwen3_{minor}{variant}" for minor in (6, 8) for variant in _VARIANTS), model="qwen3_next",
        schedule=recurrent.delta_net_schedule, states=recurrent.delta_net_states,
    ),
    Family(
        model_types=("kimi_linear", "kimi_k3"), model="kimi_linear", schedule=recurrent.kimi_schedule,
        states=recurrent.kimi_states, fp8_rows=True,
    ),
    Family(
        model_types=("falcon_h1",), model="falcon_h1", schedule=recurrent.falcon_h1_schedule, states=recurrent.falcon_h1_states,
    ),
    Family(model_types=("mamba2",), model="mamba2", schedule=recurrent.mamba2_schedule, states=recurrent.mamba2_states),
)  # fmt: skip

_CLASS_ENDINGS = ("ForCausalLM", "ForConditionalGeneration")


def from_config(
    config: Mapping[str, object],
    *,
    kv_dtype: str | None = None,
    model_dtype: str | None = None,
    page_tokens: int | None = None,
    name: str | None = None,
    draft: bool = False,
    sparse: str | None = None,
    spills: bool = False,
) -> ModelSpec:
    """The memory of the model a `config.json` describes; a text model nested under `text_config` is found.

    `kv_dtype`, `model_dtype` (what it computes in) and `page_tokens` override its own. `draft` adds the optional states of its
    next-token-prediction layers. `sparse` names a selector, and adds what it keeps of the keys; with `dsa` attention rows may
    spill, and with the others where `spills` says so. Raises SpecError for an unknown architecture, naming it, for a field that
    is missing or out of range, naming that, and for a selector the model cannot have.
    """
    if not isinstance(config, Mapping):
        raise SpecError(f"a model config must be a JSON object, got {type(config).__name__}")
    if page_tokens is not None and (not isinstance(page_tokens, int) or isinstance(page_tokens, bool)):
        raise SpecError(f"page_tokens must be a whole number of tokens, got {page_tokens!r}")
    outer = Fields(values=config)
    text = outer.section("text_config") if outer.has("text_config") else outer
    family = _family_of(text, outer)
    dtypes = choose_dtypes(kv_dtype, text, outer, model_dtype=model_dtype)
    if page_tokens is None:
        page_tokens = summaries.CLUSTERKV_PAGE_TOKENS if sparse == summaries.CLUSTERKV else family.page_tokens
    schedule = family.schedule(text)
    states = [*family.states(text, dtypes, schedule)]
    if sparse is not None:
        states += _summaries_of(family, text, sparse, states, page_tokens)
    if draft:
        states += _draft_of(family, text, dtypes, page_tokens)
    spill = _spill_of(family, text, sparse, states, schedule) if spills or sparse == summaries.DSA else None
    title = name or _title(text, outer)
    return ModelSpec(name=title, states=tuple(states), page_tokens=page_tokens, spill=spill, schedule=schedule)


def known_model_types() -> tuple[str, ...]:
    return tuple(sorted(model_type for family in _FAMILIES for model_type in (*family.model_types, *family.planned)))


def served_family(model_type: str) -> Family:
    """The family of a `model_type` that the engine runs. Raises ConfigError for any other."""
    families = {each: family for family in _FAMILIES for each in family.model_types}
    if model_type not in families:
        raise ConfigError(f"the engine cannot run {model_type or 'this model'!r}; it runs {', '.join(sorted(families))}")
    return families[model_type]


def _family_of(text: Fields, outer: Fields) -> Family:
    """The first family that knows a name the config gives itself, the innermost name first."""
    names = [name for config in (text, outer) for name in (config.text("model_type"), *config.texts("architectures")) if name]
    for name in names:
        if family := _BY_KEY.get(_key(name)):
            return family
    named = ", ".join(dict.fromkeys(names)) or "none named in model_type or architectures"
    raise SpecError(f"unknown architecture: {named}; known model types are: {', '.join(known_model_types())}")


def _draft_of(family: Family, text: Fields, dtypes: Dtypes, page_tokens: int) -> Iterator[StateSpec]:
    if family.draft is None:
        raise SpecError(f"draft state is not known for {text.text('model_type') or 'this model'}; leave draft off")
    return family.draft(text, dtypes, page_tokens)


def _summaries_of(
    family: Family, text: Fields, selector: str, states: list[StateSpec], page_tokens: int
) -> list[StateSpec]:  # fmt: skip
    """What a selector adds to a model's states: nothing where the model picks by an index of its own."""
    if selector not in summaries.SELECTORS:
        raise SpecError(f"a selector must be one of {', '.join(summaries.SELECTORS)}, got {selector!r}")
    named = {state.name: state for state in states}
    own, model = "index" in named, text.text("model_type") or "this model"
    if selector == summaries.DSA:
        if family.spill is None:
            raise SpecError(
                f"{model} has no index to pick rows by: dsa is for DeepSeek-V3.2 and GLM-5; choose quest or clusterkv"
            )
        return []
    if own or family.heads is None or "kv" not in named:
        raise SpecError(
            f"{selector} is for models that keep keys and values per head and look at all of the past in some layer, which "
            f"{model} does not{': it picks by its own index (dsa)' if own else ''}"
        )
    return [summaries.summary_state(selector, named["kv"], family.heads(text), page_tokens)]


def _spill_of(family: Family, text: Fields, selector: str | None, states: list[StateSpec], schedule: Schedule) -> Spill:
    """Which rows may be on the host alone. Raises SpecError where none can."""
    if selector is None:
        raise SpecError("rows are read where they are picked from: name what picks them, as in sparse quest")
    if selector == summaries.DSA and family.spill is not None:
        return family.spill(schedule)
    if not all(isinstance(state.shape, Prefix) for state in states):
        raise SpecError(
            f"{text.text('model_type') or 'this model'} has layers with a window as well as layers that pick: its rows "
            f"cannot leave the device; leave hot_rows out"
        )
    return summaries.summary_spill(next(state for state in states if state.name == "kv"))


def _title(text: Fields, outer: Fields) -> str:
    return outer.text("model_type") or text.text("model_type") or next(iter((*outer.texts("architectures"), "model")))


def _key(name: str) -> str:
    """Makes `Qwen3MoeForCausalLM` and `qwen3_moe` the same word."""
    for ending in _CLASS_ENDINGS:
        name = name.removesuffix(ending)
    return name.replace("_", "").replace(".", "").lower()


_BY_KEY = {_key(name): family for family in _FAMILIES for name in (*family.model_types, *family.planned)}
