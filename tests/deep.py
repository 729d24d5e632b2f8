"""Which tests `make test` leaves out and `make test-all` runs: slow ones that repeat a quick test on more inputs.

`pytest tests/some_file.py` runs everything in the file; only `-m "not deep"`, as `make test` has it, leaves deep tests out.
Three rules mark tests by their parameters, and two lists name the rest. tests/FAULTS.md says which test catches which fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import pytest

# Windows; a recurrent state with experts; latents with an index.
QUICK_FAMILIES = ("gemma3", "qwen3_next", "deepseek_v32")
FAMILIES = {
    *QUICK_FAMILIES, "llama", "qwen3", "mistral", "gpt_oss", "qwen3_5", "falcon_h1", "mamba2", "deepseek_v3", "glm_moe_dsa",
    "deepseek_v4", "kimi_linear",
}  # fmt: skip

QUICK_SEEDS = 4  # of a random test with a parameter `seed`

# Here one case of a test is quick, or one for each quick family.
ONE_CASE = (
    "connectors/",
    "crash/test_cache_over_log.py",
    "engine/",
    "parity/",
    "server/test_call_forms.py",
    "unit/server/test_cut_off_calls.py",
    "unit/server/test_streamed_calls.py",
    "unit/sim/",
    "unit/sparse/",
    "unit/tiers/test_held_order.py",
)
ONE_CASE_FROM = 5  # cases: tests with fewer keep them all

DEEP = (
    "bench/",
    "connectors/test_python_page.py::test_an_example_runs_as_it_is_written",
    "connectors/test_transformers_lives.py::test_a_killed_process_leaves_what_was_stored",
    "connectors/test_vllm_events.py",
    "connectors/test_vllm_media.py",
    "crash/test_failing_disk.py",
    "crash/test_power_loss.py",
    "engine/kernels/test_models_with_triton.py",
    "engine/kernels/test_triton_drawing.py::test_rows_of_every_kind_with_any_settings_draw_what_plain_torch_draws",
    "engine/kernels/test_triton_drawing.py::test_tokens_come_as_often_as_they_are_likely",
    "engine/kernels/test_spilling_with_triton.py",
    "engine/test_changing_ranks.py",
    "engine/test_deepseek_v4.py",
    "engine/test_edits.py::test_preemption_changes_no_answer",
    "engine/test_experts.py::test_kernels_equal_the_reference",
    "engine/test_gpt_oss.py",
    "engine/test_guided.py::test_engines_that_read_later_and_engines_with_drafts_answer_alike",
    "engine/test_guided.py::test_thoughts_stand_before_a_grammar_alone_in_batches_and_with_drafts",
    "engine/test_imported_rows.py",
    "engine/test_kimi_linear.py",
    "engine/test_rank_schedules.py",
    "engine/test_recorded_spilling.py",
    "engine/test_recurrent_models.py",
    "engine/test_sampling.py::test_answers_do_not_depend_on_the_batch_the_order_the_chunks_or_the_room",
    "engine/test_shards.py",
    "engine/test_spilled_selectors.py",
    "engine/test_spilling.py::test_answers_are_the_same_whatever_is_shed_preempted_and_aborted",
    "engine/test_spilling.py::test_drafts_of_the_models_own_layer_are_verified_over_rows_on_the_host",
    "engine/test_workers.py::test_a_lost_rank_fails_its_requests_and_comes_back_with_a_warm_host",
    "engine/test_workers.py::test_an_engine_that_cannot_be_finished_leaves_no_process_behind",
    "engine/test_workers.py::test_kernels_that_fail_again_on_new_ranks_are_counted_again",
    "engine/test_workers.py::test_nobody_asks_without_end_while_ranks_are_down",
    "engine/test_workers.py::test_without_restarts_requests_are_refused_with_the_rank",
    "engine/test_workers.py::test_a_pass_that_fails_on_one_rank_alone_loses_it_for_the_others_wait_for_it",
    "engine/test_workers.py::test_a_rank_killed_amid_copies_leaves_the_cache_sound",
    "engine/test_workers.py::test_a_rank_that_is_stopped_while_it_loads_is_missed_long_before_its_start_is_late",
    "engine/test_workers.py::test_what_a_store_brings_while_ranks_start_is_copied_when_they_run",
    "fault/test_known_bugs_ranks_and_cost.py::test_evicting_costs_the_same_in_a_small_and_in_a_large_tree",
    "fault/test_store_does_no_harm.py",
    "mooncake/",
    "parity/test_narrow_checkpoints.py",
    "parity/test_sparse_resumption.py",
    "parity/test_spilled_keys_and_values.py",
    "server/test_long_prompts.py",
    "server/test_ranked_servers.py",
    "server/test_schemas_of_tools.py",
    "server/test_shared_log_servers.py",
    "server/test_tracing.py",
    "shared_log/test_shared_log_processes.py",
    "unit/cli/test_demo_command.py::test_the_second_life_resumes_from_what_the_first_had_stored_when_it_was_killed",
    "unit/cli/test_kv_event_options.py::test_a_missing_package_is_named_with_the_command_that_installs_it",
    "unit/cli/test_plain_install.py",
    "unit/cli/test_serve_command.py::test_a_second_signal_does_not_wait_for_answers",
    "unit/cli/test_serve_tenants.py::test_sighup_without_tenants_is_a_line_in_the_log",
    "unit/cli/test_serve_tenants.py::test_tenants_are_read_again_at_sighup_and_a_file_that_is_wrong_changes_nothing",
    "unit/sim/test_plan_command.py",
    "unit/sim/test_pool.py",
    "unit/sim/test_why.py",
    "unit/store_tier/test_late.py::test_a_full_store_does_not_give_up_what_is_worth_more",
    "unit/transfer/test_first_calls.py",
    "unit/tree/test_garbage.py",
    "unit/tree/test_own_orders.py",
)


def is_quick(config: pytest.Config) -> bool:
    """Whether this run leaves deep tests out."""
    return bool(config.getoption("markexpr") == "not deep")


def is_listed(place: str) -> bool:
    """Whether DEEP names a test (`file::function`), its file or its folder."""
    return f"{place}::".startswith(tuple(each if each.endswith("/") else f"{each}::" for each in DEEP))


def mark_deep(items: Iterable[pytest.Item]) -> None:
    """Adds the marker `deep` to each deep test among those collected."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if is_listed(_place(item)):
            item.add_marker("deep")
        else:
            cases[_place(item)].append(item)
    for place, each in cases.items():
        _mark_cases(place, each)


def _mark_cases(place: str, cases: list[pytest.Item]) -> None:
    """Applies the three rules to the cases of one test."""
    families = [_family(item) for item in cases]
    named = [name for name in families if name is not None]
    quick = {*named} & {*QUICK_FAMILIES} or {*named[:1]}
    seen: set[str | None] = set()
    for item, family in zip(cases, families, strict=True):
        another_case = place.startswith(ONE_CASE) and len(cases) >= ONE_CASE_FROM and family in seen
        another_family = family is not None and family not in quick
        if another_case or another_family or _seed(item) >= QUICK_SEEDS:
            item.add_marker("deep")
        else:
            seen.add(family)


def _place(item: pytest.Item) -> str:
    """The test's file and function below tests/, without its parameters."""
    return item.nodeid.partition("[")[0].removeprefix("tests/")


def _params(item: pytest.Item) -> dict[str, object]:
    found = getattr(item, "callspec", None)
    return {} if found is None else found.params


def _family(item: pytest.Item) -> str | None:
    return next((each for each in _params(item).values() if isinstance(each, str) and each in FAMILIES), None)


def _seed(item: pytest.Item) -> int:
    seed = _params(item).get("seed", 0)
    return seed if isinstance(seed, int) else 0
