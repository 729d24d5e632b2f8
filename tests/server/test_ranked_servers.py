"""`stepwell serve --tensor-parallel 2`: the command as people type it, a rank that is killed, and a server that is."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from stepwell.cli.demo.server import serving
from waiting import PATIENCE_S, wait_until

QUESTION = [{"role": "user", "content": "Which rank has the first head of every layer, and which one the last? " * 8}]
SMALL = [
    "--model", "random-hybrid", "--served-model-name", "demo", "--device", "cpu", "--device-memory", "64MiB",
    "--host-memory", "64MiB",
]  # fmt: skip


def is_there(pid: int) -> bool:
    """Whether a process runs; an ended process that still awaits its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except OSError:
        return False


def test_a_rank_that_is_killed_is_named_and_comes_back_and_none_outlives_the_server(tmp_path: Path) -> None:
    with serving(SMALL, tmp_path / "alone.log") as server:
        expected = server.ask(QUESTION, max_tokens=12).text
        assert server.state()["ranks"] is None
    log = tmp_path / "ranks.log"
    with serving([*SMALL, "--tensor-parallel", "2", "--restart-workers"], log) as server, ThreadPoolExecutor(1) as pool:
        reported = server.ask(QUESTION, max_tokens=12)
        assert reported.text == expected
        server.wait_until_stored()
        ranks = server.state()["ranks"]
        assert (ranks["state"], ranks["losses"], len(ranks["pids"])) == ("running", 0, 2)
        assert f"2, processes {ranks['pids'][0]}, {ranks['pids'][1]}; restarted when one dies" in log.read_text()
        get = partial(httpx.get, timeout=PATIENCE_S)
        long = {"model": "demo", "prompt": "Go on and on.", "max_tokens": 20_000, "ignore_eos": True}
        asked = pool.submit(httpx.post, f"{server.address}/v1/completions", json=long, timeout=PATIENCE_S)
        wait_until(lambda: server.state()["requests"]["active"], "a request that runs", pause_s=0.05)
        os.kill(ranks["pids"][1], signal.SIGKILL)
        failed = asked.result()
        assert failed.status_code == 503 and "lost with rank 1" in failed.text, failed.text
        assert get(f"{server.address}/health").status_code == 200
        wait_until(lambda: get(f"{server.address}/ready").status_code == 200, "new ranks", pause_s=0.05)
        ranks = server.state()["ranks"]
        assert ranks["losses"] == 1 and "rank 1 was lost: it was ended by SIGKILL" in ranks["last_loss"]
        again = server.ask(QUESTION, max_tokens=12)
        assert again.text == expected and again.host > again.prompt_tokens // 2
    wait_until(lambda: not any(map(is_there, ranks["pids"])), "the end of all ranks", pause_s=0.05)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--tensor-parallel", "3"], "--tensor-parallel 3"),
        (["--tensor-parallel", "0"], "--tensor-parallel must be at least 1"),
        (["--restart-workers"], "--restart-workers is for ranks"),
        (["--tensor-parallel", "2", "--draft", "mtp"], "draft works on one rank only"),
        (["--tensor-parallel", "2", "--sparse", "quest"], "sparse works on one rank only"),
    ],
)
def test_what_cannot_work_is_said_at_once(more: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    from stepwell.cli.main import main

    assert main(["serve", "--port", "0", *SMALL, *more]) != 0
    assert says in capsys.readouterr().err
