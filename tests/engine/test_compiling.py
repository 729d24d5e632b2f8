"""Kernels that are compiled in the background: served without them first, with them from a pass on, and never waited for."""

from __future__ import annotations

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from engine.small import DEFAULTS, checkpoint  # noqa: E402
from stepwell.base.meters import ManualClock  # noqa: E402
from stepwell.engine import EngineConfig, build_engine  # noqa: E402
from stepwell.engine.ops.attention import attend  # noqa: E402
from stepwell.engine.ops.compiling import LOOK_EVERY_S, Compiler, Compiling  # noqa: E402
from stepwell.engine.ops.guarded import Guarded, NoKernel, NotYet, Report  # noqa: E402
from stepwell.engine.ops.kernels import Kernels  # noqa: E402
from stepwell.engine.start_pass import measure_speed  # noqa: E402


class Child:
    def __init__(self) -> None:
        self.code: int | None = None
        self.terminated = False

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.terminated = True


class Machine:
    """Modules that are compiled when a test says so."""

    def __init__(self, *compiled: str) -> None:
        self.clock = ManualClock()
        self.compiled = set(compiled)
        self.children: dict[str, Child] = {}
        compiler = Compiler(is_compiled=self.compiled.__contains__, start=self._start, progress=lambda name: (1, 4))
        self.compiling = Compiling(compiler, self.clock)

    def _start(self, name: str) -> Child:
        assert name not in self.children, f"{name} is compiled twice"
        self.children[name] = Child()
        return self.children[name]

    def end(self, name: str, code: int = 0) -> bool:
        self.children[name].code = code
        self.clock.advance(LOOK_EVERY_S)
        return self.compiling.settle()


def test_what_is_compiled_already_is_used_at_once() -> None:
    machine = Machine("a", "b")
    machine.compiling.need(["a", "b"])
    assert not machine.children and not machine.compiling.pending


def test_what_is_not_is_compiled_once_and_used_from_when_all_of_it_is_there() -> None:
    machine = Machine("b")
    for _ in range(3):
        with pytest.raises(NotYet):
            machine.compiling.need(["a", "b", "c"])
    assert set(machine.children) == {"a", "c"} and machine.compiling.pending
    assert machine.end("c")
    with pytest.raises(NotYet):
        machine.compiling.need(["a", "b", "c"])
    assert machine.end("a") and not machine.compiling.pending
    machine.compiling.need(["a", "b", "c"])


def test_a_kernel_is_not_used_before_the_pass_in_which_it_was_finished_has_ended() -> None:
    machine = Machine()
    with pytest.raises(NotYet):
        machine.compiling.need(["a"])
    machine.children["a"].code = 0
    with pytest.raises(NotYet):  # another layer of the same pass
        machine.compiling.need(["a"])


def test_what_cannot_be_compiled_is_left_to_plain_torch_for_good() -> None:
    machine = Machine()
    with pytest.raises(NotYet):
        machine.compiling.need(["a"])
    assert machine.end("a", code=1)
    with pytest.raises(NoKernel, match="could not be compiled") as raised:
        machine.compiling.need(["a"])
    assert not isinstance(raised.value, NotYet) and len(machine.children) == 1


def test_closing_ends_the_compilers() -> None:
    machine = Machine()
    with pytest.raises(NotYet):
        machine.compiling.need(["a"])
    machine.compiling.close()
    assert machine.children["a"].terminated


def test_progress_and_an_estimate_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine()
    with caplog.at_level("INFO"), pytest.raises(NotYet):
        machine.compiling.need(["a"])
    with caplog.at_level("INFO"):
        machine.clock.advance(30.0)
        assert not machine.compiling.settle()
    assert "1 of 4 files after 30 s, about 90 s to go" in caplog.text


def test_an_engine_answers_without_a_kernel_and_goes_on_with_it() -> None:
    machine, report, used = Machine(), Report(chosen={"attention": "library"}), list[str]()

    def fast(*args: object, **more: object) -> torch.Tensor:
        machine.compiling.need(["kernel"])
        used.append("kernel")
        return attend(*args, **more)  # type: ignore[arg-type]

    kernels = replace(Kernels(report=report), attend=Guarded("attention", fast, attend, report), compiling=machine.compiling)
    with build_engine(checkpoint("llama"), EngineConfig(**DEFAULTS), kernels=kernels) as engine:
        first = engine.generate([1, 2, 3, 4, 5], max_tokens=4, ignore_eos=True).tokens
        assert not used and engine.kernels["attention"] == "torch (library is being compiled)"
        measure_speed(engine)
        compute = engine.cache._store_tier.compute
        assert compute.seconds(0, 64) is not None
        machine.children["kernel"].code = 0
        machine.clock.advance(LOOK_EVERY_S)
        engine.step()
        assert engine.kernels["attention"] == "library"
        assert engine.cache._store_tier.compute.seconds(0, 64) is None, "the speed measured without the kernel is dropped"
        assert engine.generate([1, 2, 3, 4, 5], max_tokens=4, ignore_eos=True).tokens == first and used
