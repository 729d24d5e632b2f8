"""`stepwell doctor`, on machines made of files, and once on this one."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from stepwell.base.errors import ConfigError
from stepwell.base.extras import install
from stepwell.base.meters import ManualClock, SystemClock
from stepwell.cli import doctor
from stepwell.cli.doctor import Finding, Health, broken, fine
from stepwell.cli.main import main
from stepwell.store.log.format.segment_list import name_of
from stepwell.store.log.opening import open_directory

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with 8 GiB free and a limit of none."""
    write(tmp_path / "proc/meminfo", f"MemTotal: 9 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/system.slice/stepwell.service\n")
    write(tmp_path / "sys/fs/cgroup/system.slice/stepwell.service/memory.max", "max\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_machine_without_memory_is_broken(root: Path) -> None:
    assert doctor.memory(root) == fine("memory", "8.0 GiB free")
    write(root / "proc/meminfo", "MemAvailable: 1000 kB\n")
    assert doctor.memory(root).health is Health.BROKEN


def test_the_smallest_limit_of_all_groups_is_found(root: Path) -> None:
    assert doctor.group_limit(root).found == "no memory limit"
    write(root / "sys/fs/cgroup/system.slice/memory.max", str(4 * GIB))
    write(root / "sys/fs/cgroup/system.slice/stepwell.service/memory.max", str(6 * GIB))
    found = doctor.group_limit(root)
    assert found.health is Health.SLOW and "4.0 GiB" in found.found and "--host-memory" in found.change
    write(root / "sys/fs/cgroup/system.slice/memory.max", str(16 * GIB))
    write(root / "sys/fs/cgroup/system.slice/stepwell.service/memory.max", str(16 * GIB))
    assert doctor.group_limit(root).health is Health.FINE


def test_groups_of_other_namespaces_are_not_followed(root: Path) -> None:
    write(root / "proc/self/cgroup", "0::/../../elsewhere\n")
    write(root / "sys/fs/cgroup/memory.max", str(2 * GIB))
    assert "2.0 GiB" in doctor.group_limit(root).found


@pytest.mark.parametrize(
    ("text", "health"),
    [
        ("always [madvise] never\n", Health.FINE),
        ("[always] madvise never\n", Health.FINE),
        ("always madvise [never]\n", Health.SLOW),
    ],
)
def test_huge_pages_must_be_allowed(root: Path, text: str, health: Health) -> None:
    write(root / "sys/kernel/mm/transparent_hugepage/enabled", text)
    assert doctor.huge_pages(root).health is health


def test_the_disk_is_measured_where_the_store_would_be_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "LEAST_DISK_BYTES", 0)
    found = doctor.disk(tmp_path / "not" / "made", SystemClock())
    assert found.health is not Health.BROKEN and "/s, reads " in found.found and str(tmp_path) in found.found
    assert list(tmp_path.iterdir()) == []


class SlowClock(ManualClock):
    """Each reading advances the clock by a second."""

    def now(self) -> float:
        self.advance(1.0)
        return super().now()


def test_a_slow_disk_is_told_and_the_probe_of_it_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LEAST_DISK_BYTES", 0)
    found = doctor.disk(tmp_path, SlowClock())
    assert found.health is Health.SLOW and "NVMe" in found.change


def test_a_directory_that_cannot_be_written_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LEAST_DISK_BYTES", 0)
    found = doctor.disk(Path("/proc"), SystemClock())  # where not even root can
    assert found.health is Health.BROKEN and "cannot be written" in found.found


def test_a_full_disk_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LEAST_DISK_BYTES", 1 << 62)
    assert doctor.disk(tmp_path, SystemClock()).health is Health.BROKEN


def have_free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    used = SimpleNamespace(total=GIB, used=GIB - size, free=size)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: used)


def make_log(directory: Path, size: int) -> None:
    """A log of this size, closed as before a restart."""
    clock = ManualClock()
    store = open_directory(directory, clock=clock, budget_bytes=5 * size, segment_bytes=size)
    store.close()
    assert any(path.suffix == ".seg" and path.stat().st_size == size for path in directory.iterdir())


@pytest.mark.parametrize("free", [0, 16 << 20])
def test_a_log_that_fills_its_disk_does_not_block_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    make_log(tmp_path / "store", 32 << 20)
    monkeypatch.setattr(doctor, "LEAST_DISK_BYTES", 24 << 20)
    have_free(monkeypatch, free)
    before = sorted(tmp_path.rglob("*"))
    found = doctor.disk(tmp_path / "store", SystemClock())
    assert found.health is not Health.BROKEN and "and a log of 32.0 MiB" in found.found
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_no_log_of_ours_counts_for_nothing_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LEAST_DISK_BYTES", 24 << 20)
    have_free(monkeypatch, 16 << 20)
    (tmp_path / "films.seg").write_bytes(bytes(32 << 20))
    (tmp_path / name_of(2)).mkdir()
    found = doctor.disk(tmp_path, SystemClock())
    assert found.health is Health.BROKEN and "a log of" not in found.found


@pytest.fixture
def master() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


def test_a_mooncake_master_is_asked_for(master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.store.mooncake.client.load_wheel", lambda: None)
    assert doctor.mooncake("", {"MOONCAKE_MASTER": master}) == fine("mooncake", f"a master listens at {master}")
    gone = doctor.mooncake("", {"MOONCAKE_MASTER": "127.0.0.1:1"})
    assert gone.health is Health.BROKEN and "is mooncake_master running" in gone.change
    unnamed = doctor.mooncake("", {})
    assert unnamed.health is Health.BROKEN and "master_server_address" in unnamed.change


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("fastapi", "pyzmq", "opentelemetry-sdk") else "1.0")
    found = {each.check: each for each in doctor.packages()}
    assert found["serve"].health is Health.BROKEN and found["serve"].change == install("serve")
    assert found["serve"].found == "not installed: fastapi"
    assert found["events"].health is Health.SLOW and found["guided"].health is Health.FINE
    assert found["otel"].change == install("otel")


def test_a_driver_that_torch_cannot_use_is_broken(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [each.health for each in doctor.gpu(root)] == [Health.FINE]
    write(root / "proc/driver/nvidia/version", "NVRM version\n")
    assert [each.health for each in doctor.gpu(root)] == [Health.BROKEN]


def test_an_engine_that_cannot_be_imported_is_told_and_does_not_end_the_examination(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "stepwell.engine.building.gpus", None)
    (found,) = doctor.gpu()
    assert found.health is Health.BROKEN and found.change == install("serve")


def test_this_machine_is_examined_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json", "--store", f"log:{tmp_path}"])
    reported = json.loads(capsys.readouterr().out)
    assert [each["check"] for each in reported["findings"]][:5] == ["disk", "memory", "cgroup", "huge pages", "CUDA"]
    assert status == (1 if reported["broken"] else 0)
    assert reported["broken"] == any(each["health"] == "broken" for each in reported["findings"])


def test_what_is_broken_is_the_exit_status_and_stands_with_what_to_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def examined(*anything: object) -> list[Finding]:
        return [broken("memory", "none", "buy some")]

    monkeypatch.setattr(doctor, "examine", examined)
    assert main(["doctor"]) == 1
    assert "!!  memory" in (out := capsys.readouterr().out) and "change: buy some" in out


def test_a_store_that_is_not_known_cannot_be_checked() -> None:
    assert main(["doctor", "--store", "nothing:"]) == 2
    with pytest.raises(ConfigError, match="needs a directory"):
        list(doctor.check_store("log:", {}, SystemClock()))
