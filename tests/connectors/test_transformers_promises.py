"""What a prompt cache for Transformers keeps apart, refuses and survives."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from connectors.tiny_models import PAGE, generated, logits, made, opened, prompt, tiny, uncached  # noqa: E402
from engine.families import SMALL  # noqa: E402
from stepwell import BadTokens, ConfigError, LeaseError, StoreConfig, Tier  # noqa: E402
from stepwell.base.ids import Kind  # noqa: E402
from stepwell.connectors.transformers import PromptCache  # noqa: E402
from stepwell.connectors.transformers import prompt_cache as module  # noqa: E402
from stepwell.connectors.transformers.identity import Identity  # noqa: E402
from stepwell.store.memory import MemoryStore  # noqa: E402
from waiting import wait_until  # noqa: E402

TOLERANCE = 1e-4


def close_to(model: Any, ids: torch.Tensor, found: torch.Tensor) -> bool:
    return float((found - uncached(model, ids, found.shape[1])).abs().max()) < TOLERANCE


def test_the_first_calls_are_made_before_the_model_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    model, happened = made("llama"), list[str]()
    monkeypatch.setattr(module, "make_first_calls", lambda: happened.append("first calls"))
    model.register_forward_pre_hook(lambda *_: happened.append("a pass"))
    with opened(model):
        assert happened[:2] == ["first calls", "a pass"]


# ---- whose bytes they are -------------------------------------------------------------------------


def test_models_that_differ_in_one_bit_share_nothing_and_equal_ones_share_all() -> None:
    store, ids, model = MemoryStore(), prompt(1, 100), tiny("llama")
    other = deepcopy(model)
    with torch.no_grad():
        other.model.layers[0].mlp.up_proj.weight[0, 0] *= 1 + 2**-23
    cached = []
    for each in (model, other, deepcopy(model), other):
        with opened(each, store=store) as prompts:
            found, tokens = logits(prompts, ids)
            cached.append(tokens)
            assert close_to(each, ids, found)
    assert cached == [0, 0, 96, 96]


def test_another_config_dtype_or_page_shares_nothing() -> None:
    store, ids, model = MemoryStore(), prompt(2, 100), tiny("llama")
    with opened(model, store=store) as prompts:
        prompts.prefill(ids)
    other = deepcopy(model)
    other.config.rms_norm_eps = 1e-3
    with opened(other, store=store) as prompts:
        assert prompts.prefill(ids).cached == 0
    with opened(deepcopy(model).double(), store=store) as prompts:
        assert prompts.prefill(ids).cached == 0
    with opened(model, store=store, page_tokens=PAGE // 2) as prompts:
        assert prompts.prefill(ids).cached == 0


def test_weights_that_change_under_the_cache_are_another_model() -> None:
    model, ids = deepcopy(tiny("gemma3")), prompt(3, 100)
    with opened(model) as prompts:
        prompts.prefill(ids)
        with torch.no_grad():
            model.model.layers[1].self_attn.q_proj.weight.mul_(1.5)
        found, cached = logits(prompts, ids)
        assert cached == 0 and close_to(model, ids, found)
        assert logits(prompts, ids)[1] == 96
        model.model.embed_tokens.weight = torch.nn.Parameter(model.model.embed_tokens.weight * 0.9)
        assert prompts.prefill(ids).cached == 0
        model.half()
        with pytest.raises(ConfigError, match="create a new one"):
            prompts.prefill(ids)


def test_adapters_that_are_switched_are_another_model() -> None:
    """By the fields that modules of peft have, without peft."""
    model = deepcopy(tiny("llama"))
    layer = model.model.layers[0].mlp
    layer.active_adapters, layer.disable_adapters = ["one"], False
    identity = Identity(model)
    names = [identity.name]
    for active, disabled in ((["two"], False), (["two"], True)):
        layer.active_adapters, layer.disable_adapters = active, disabled
        assert identity.changed() and not identity.changed()
        names.append(identity.name)
    assert len(set(names)) == 3


def test_buffers_that_are_not_saved_are_no_part_of_the_identity_and_others_are() -> None:
    model = deepcopy(tiny("deepseek_v3"))
    identity = Identity(model)
    name, kept = next((name, each) for name, each in model.named_buffers() if name.endswith("e_score_correction_bias"))
    model.model.rotary_emb.inv_freq.mul_(1.0)  # made from the config
    assert not identity.changed()
    before = identity.name
    kept.add_(0.5)
    assert identity.changed() and identity.name != before, name


def test_a_given_identity_stands_for_the_weights_until_they_change() -> None:
    model = deepcopy(tiny("llama"))
    one, same, other = Identity(model, "a"), Identity(deepcopy(model), "a"), Identity(model, "b")
    assert one.name == same.name != other.name and Identity(model).name not in (one.name, other.name)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    assert one.changed() and one.name != same.name and one.name == Identity(model).name


def test_salts_keep_prompts_apart() -> None:
    ids = prompt(4, 50)
    with opened(tiny("llama")) as prompts:
        prompts.prefill(ids, salt="a")
        assert [prompts.prefill(ids, salt=salt).cached for salt in ("b", None, "a")] == [0, 0, 48]


# ---- what is refused --------------------------------------------------------------------------------


def test_a_model_that_is_not_exact_when_cut_is_refused_at_its_first_prompt() -> None:
    model = made("bamba")
    with opened(model, self_test=True) as prompts:
        for _ in range(2):
            with pytest.raises(ConfigError, match="Transformers itself computes it differently"):
                prompts.prefill(prompt(5, 40))
        assert prompts.stats().counters.get("tokens_computed", 0) == 0


def test_a_model_that_keeps_more_than_was_found_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = module.tensors_of
    monkeypatch.setattr(module, "tensors_of", lambda past: tuple(each for each in whole(past) if each.field != "conv_states"))
    with opened(tiny("falcon_h1"), self_test=True) as prompts, pytest.raises(ConfigError, match="rebuilt"):
        prompts.prefill(prompt(6, 40))


def test_layers_that_are_not_known_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"layer 1 .* run this model without"):
        PromptCache(tiny("deepseek_v4"), host_memory="16MiB")


def test_models_with_an_encoder_are_refused() -> None:
    config = transformers.T5Config(
        d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=32, decoder_start_token_id=0
    )
    with pytest.raises(ConfigError, match="encoder"):
        PromptCache(transformers.T5ForConditionalGeneration(config).eval(), host_memory="16MiB")


def test_models_in_training_are_refused() -> None:
    model = deepcopy(tiny("llama")).train()
    with pytest.raises(ConfigError, match=r"model.eval\(\)"):
        PromptCache(model, host_memory="16MiB")
    with opened(model.eval()) as prompts:
        model.train()
        with pytest.raises(ConfigError, match=r"model.eval\(\)"):
            prompts.prefill(prompt(7, 40))
        model.eval()


def test_positions_that_depend_on_the_whole_text_limit_prompts() -> None:
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    config = transformers.LlamaConfig(**{**SMALL, "max_position_embeddings": 128}, rope_parameters=scaling)
    model = transformers.LlamaForCausalLM(config).eval()
    with opened(model, self_test=True) as prompts:
        assert close_to(model, prompt(8, 128), logits(prompts, prompt(8, 128))[0])
        with pytest.raises(BadTokens, match="beyond 128"):
            prompts.prefill(prompt(8, 129))


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([1, 2, 3], None, "must be a tensor"),
        (torch.ones(5, dtype=torch.long), None, "batch, tokens"),
        (torch.ones(1, 0, dtype=torch.long), None, "at least one token"),
        (torch.full((1, 40), 128), None, "out of range 0..127"),
        (torch.ones(2, 40, dtype=torch.long), torch.tensor([[0] + [1] * 39, [1] * 40]), "without padding"),
    ],
)
def test_prompts_that_cannot_be_told_apart_are_refused(ids: torch.Tensor, mask: torch.Tensor | None, message: str) -> None:
    with opened(tiny("llama")) as prompts, pytest.raises(BadTokens, match=message):
        prompts.prefill(ids, attention_mask=mask)


@pytest.mark.parametrize(
    "options",
    [
        {"past_key_values": transformers.DynamicCache()},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"inputs_embeds": torch.zeros(1, 40, 64)},
        {"assistant_model": object()},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_do_not_go_with_a_resumed_prompt_are_refused(options: dict[str, Any]) -> None:
    with opened(tiny("llama")) as prompts, pytest.raises(ConfigError, match=next(iter(options))):
        prompts.generate(prompt(9, 40), **options)


def test_generate_is_refused_where_transformers_would_compute_the_prompt_again() -> None:
    with opened(tiny("mamba2")) as prompts, pytest.raises(ConfigError, match="cache_params=past"):
        prompts.generate(prompt(10, 40))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host_memory": "1KiB"}, "at least"),
        ({"host_memory": 0}, "host_memory must be"),
        ({"store_options": {"budget": "1GiB"}}, "need a store"),
        ({"host_memory": "900TiB"}, "host_memory"),
        ({"chunk_tokens": 8}, "chunk_tokens"),
        ({"store": "nowhere:"}, "nowhere"),
    ],
)
def test_settings_that_cannot_work_say_what_would(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message), opened(tiny("llama"), **settings):
        pass


def test_a_version_of_transformers_that_keeps_its_caches_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.connectors.transformers.model_pass.__version__", "4.57.1")
    with pytest.raises(ConfigError, match="Transformers 5 or later"), opened(tiny("llama")):
        pass


def test_a_closed_cache_says_so() -> None:
    with opened(tiny("llama")) as prompts:
        pass
    assert prompts.close()
    with pytest.raises(ConfigError, match="closed"):
        prompts.prefill(prompt(11, 40))


# ---- what is survived -------------------------------------------------------------------------------


def test_a_prompt_whose_bytes_do_not_arrive_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("falcon_h1"), prompt(12, 60)
    with opened(model) as prompts:
        prompts.prefill(ids)
        begin = prompts._prefill._copies.begin

        def failing(plan: Any) -> Any:
            if plan.copies[0].source.tier is Tier.HOST:
                raise OSError("no such device")
            return begin(plan)

        monkeypatch.setattr(prompts._prefill._copies, "begin", failing)
        found, cached = logits(prompts, ids)
        assert cached == 0 and close_to(model, ids, found)
        monkeypatch.undo()
        assert logits(prompts, ids)[1] == 48


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_a_prompt_whose_save_fails_is_computed_and_the_next_saves_it(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny(family), prompt(12, 100)
    with opened(model, chunk_tokens=2 * PAGE) as prompts:
        begin, failures = prompts._prefill._copies.begin, [OSError("no such device")]

        def failing(plan: Any) -> Any:
            if plan.copies[0].target.tier is Tier.HOST and failures:
                raise failures.pop()
            return begin(plan)

        monkeypatch.setattr(prompts._prefill._copies, "begin", failing)
        found, cached = logits(prompts, ids)
        assert cached == 0 and close_to(model, ids, found) and not failures
        logits(prompts, ids)
        found, cached = logits(prompts, ids)
        assert cached == 96 and close_to(model, ids, found)


def test_a_page_that_is_not_staged_is_never_copied() -> None:
    ids = prompt(13, 60)
    with opened(tiny("llama")) as prompts:
        prefill = prompts._prefill
        inner, layout = prefill._layout.pack_prefix, prefill._layout
        layout.pack_prefix = lambda past, pages: inner(past, pages)[:, : len(pages) - 1]  # type: ignore[method-assign]
        with pytest.raises(LeaseError, match="the engine named 2"):
            prompts.prefill(ids)
        layout.pack_prefix = inner  # type: ignore[method-assign]
        assert logits(prompts, ids)[1] == 0 and logits(prompts, ids)[1] == 48


def test_prompts_beyond_the_host_memory_are_still_right() -> None:
    model = tiny("gemma3")
    with opened(model, host_memory="256KiB") as prompts:
        for seed in range(20, 26):
            ids = prompt(seed, 200)
            assert close_to(model, ids, logits(prompts, ids)[0])


@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_a_prompt_that_the_host_cannot_hold_is_computed_and_tried_once(family: str) -> None:
    model, ids = tiny(family), prompt(26, 400, rows=2)
    with opened(model, host_memory="128KiB", chunk_tokens=2 * PAGE) as prompts:
        found, cached = logits(prompts, ids)
        assert cached == 0 and close_to(model, ids, found)
        assert 0 < prompts.stats().counters["save_skipped_no_room"] <= 2


def test_threads_take_turns() -> None:
    model = tiny("gemma3")
    prompts_of = [prompt(seed % 3, 80) for seed in range(9)]
    expected = [generated(model, ids) for ids in prompts_of]
    with opened(model, self_test=True) as prompts, ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda ids: prompts.generate(ids, max_new_tokens=6, do_sample=False), prompts_of))
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert prompts.stats().counters["tokens_host"] > 0


def test_backups_go_on_between_calls() -> None:
    """Nothing is closed before the store is looked at."""
    ids, store = prompt(14, 60), MemoryStore()
    with opened(tiny("falcon_h1"), store=store, store_config=StoreConfig(checkpoint_delay_s=0)) as prompts:
        prompts.prefill(ids)
        wait_until(lambda: len(store._values) == 3 + 2, "three pages, a point and its manifest")


def test_the_thread_that_steps_never_meets_a_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_S", 1e-4)
    attach = PromptCache._attach

    def slowly(prompts: PromptCache, *args: Any) -> None:
        attach(prompts, *args)
        time.sleep(0.05)

    monkeypatch.setattr(PromptCache, "_attach", slowly)
    for seed in range(3):
        with opened(tiny("llama"), store=MemoryStore()) as prompts:
            for tokens in (40, 80):
                prompts.prefill(prompt(seed, tokens))
            stepper = prompts._stepper
            assert stepper is not None and stepper.is_alive()
        assert not stepper.is_alive()


def test_a_miss_is_explained_by_the_models_own_words() -> None:
    ids = prompt(15, 100)
    with opened(tiny("falcon_h1")) as prompts:
        prompts.prefill(ids)
        text = str(prompts.explain(torch.cat([ids[:, :70], prompt(16, 30)], 1)))
        assert "states" in text, text
        with pytest.raises(BadTokens, match="one prompt"):
            prompts.explain(prompt(16, 30, rows=2))


def test_the_spec_is_the_models_own() -> None:
    with opened(tiny("gemma3")) as prompts:
        spec = prompts.spec
    shapes = sorted((str(state.shape), state.layers, state.row_bytes) for state in spec.states)
    assert shapes == [("prefix", 1, 128)] * 2 + [("window 23", 3, 128)] * 2
    assert spec.row_order is not None and replace(spec, row_order=None).fingerprint != spec.fingerprint
    with opened(tiny("mamba2")) as prompts:
        assert not prompts.spec.parts(Kind.PREFIX) and prompts.spec.parts(Kind.POINT)
