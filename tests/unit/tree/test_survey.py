"""What takes up space in a tree, and that asking costs no more in a large one."""

from __future__ import annotations

from tree_bench import Bench

from stepwell import Namespace, Tier
from stepwell.policy.placement import Trigger
from stepwell.tree.node import Use
from stepwell.tree.survey import survey

PAGE_BYTES, PAGE = 32, 4


def test_each_byte_belongs_to_one_stretch() -> None:
    bench = Bench()
    bench.insert([1, 2, 3, 4])
    bench.insert([1, 2, 5])
    bench.insert([1, 2, 5], tier=Tier.HOST)
    found = survey(bench.tree, show=10)
    assert found.complete and found.num_stretches == 3
    spans = {(each.start // PAGE, each.end // PAGE): each for each in found.stretches}
    assert spans.keys() == {(0, 2), (2, 4), (2, 3)}
    assert spans[0, 2].branches == 2 and spans[0, 2].page_bytes == [2 * PAGE_BYTES, 2 * PAGE_BYTES]
    assert spans[2, 4].branches == 0 and spans[2, 4].page_bytes == [2 * PAGE_BYTES, 0]
    assert spans[2, 3].page_bytes == [PAGE_BYTES, PAGE_BYTES]
    held = sum(bench.arena(tier).used_bytes for tier in (Tier.DEVICE, Tier.HOST))
    doubled = 2 * PAGE_BYTES  # pages 1 and 2 of the second path, which the bench still holds and the tree did not take
    assert sum(each.total_bytes for each in found.stretches) == held - doubled


def test_the_largest_come_first_and_no_more_than_asked_for() -> None:
    bench = Bench()
    for size in (2, 7, 4):
        bench.insert([10 * size + at for at in range(size)])
    found = survey(bench.tree, show=2)
    assert [each.end // PAGE for each in found.stretches] == [7, 4] and found.num_stretches == 3


def test_nodes_in_a_row_are_one_stretch() -> None:
    bench = Bench(pages=2048)
    bench.insert(list(range(600)))
    found = survey(bench.tree, show=3)
    assert [(each.start, each.end // PAGE, each.branches) for each in found.stretches] == [(0, 600, 0)]


def test_a_checkpoint_saves_what_lies_before_it_up_to_the_one_above() -> None:
    bench = Bench()
    bench.insert([1, 2, 3, 4, 5, 6])
    for page in (2, 5):
        made = bench.checkpoint([1, 2, 3, 4, 5, 6], page)
        assert made is not None
        made.checkpoint.trigger = Trigger.BRANCH if page == 2 else Trigger.PROMPT_END
    bench.insert([1, 2, 3, 9])  # splits the node between the two
    bench.checkpoint([1, 2, 3, 4, 5, 6], 5, Tier.HOST)
    found = survey(bench.tree, show=10)
    saved = {each.boundary // PAGE: (each.saves_tokens // PAGE, each.trigger) for each in found.checkpoints}
    assert saved == {2: (2, Trigger.BRANCH), 5: (3, Trigger.PROMPT_END)}
    deep = found.checkpoints[0]
    assert deep.boundary == 5 * PAGE and all(deep.size_bytes) and not deep.in_use
    tally = found.triggers[Trigger.PROMPT_END]
    assert (tally.count, tuple(tally.size_bytes)) == (1, deep.size_bytes)
    assert sum(each.checkpoints for each in found.stretches) == 2


def test_a_survey_of_a_large_tree_looks_at_a_few_nodes_and_says_so() -> None:
    bench = Bench(pages=4096)
    for first in range(500):
        bench.insert([first, 1000 + first], use=Use(at_s=float(first)))
    found = survey(bench.tree, show=500, most_looks=40)
    assert not found.complete and found.num_stretches == 40
    assert {each.used_at_s for each in found.stretches} == {float(at) for at in range(460, 500)}, "the newest are looked at"


def test_checkpoints_are_looked_at_within_the_bound_too() -> None:
    bench = Bench(pages=4096)
    path = list(range(100))
    bench.insert([777])
    bench.insert(path)
    for page in range(1, 60):
        bench.checkpoint(path, page)
    assert survey(bench.tree, show=5, most_looks=61).complete
    found = survey(bench.tree, show=5, most_looks=30)
    assert not found.complete and [each.end // PAGE for each in found.stretches] == [100], "its checkpoints took all looks"


def test_one_path_with_many_checkpoints_is_looked_at_within_the_bound() -> None:
    bench = Bench(pages=4096)
    path = list(range(100))
    bench.insert(path)
    for page in range(1, 60):
        bench.checkpoint(path, page)
    found = survey(bench.tree, show=500, most_looks=20)
    assert len(found.checkpoints) == 19 == sum(each.count for each in found.triggers.values()) and not found.complete
    assert [each.checkpoints for each in found.stretches] == [59], "how many there are is known without looking at them"


def test_no_namespace_uses_up_the_looks_of_others() -> None:
    bench = Bench(pages=4096)
    crowd, quiet = Namespace(model="m", layout="l", tenant="crowd"), Namespace(model="m", layout="l", tenant="quiet")
    bench.insert([1, 2, 3], space=quiet)
    for first in range(300):
        bench.insert([first, 1000 + first], space=crowd)
    found = survey(bench.tree, show=500, most_looks=60)
    assert {each.space for each in found.stretches} == {crowd.digest, quiet.digest} and not found.complete


def test_an_empty_tree_has_nothing_and_all_of_it_was_seen() -> None:
    found = survey(Bench().tree, show=5)
    assert found.complete and not found.stretches and not found.checkpoints and not found.triggers
