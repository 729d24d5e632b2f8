"""A worker: the process of one rank. Holds a shard of the model and of device pages; computes passes and copies pages on request.

    main thread     reads one channel: answers pings, starts copies, ends the process when the scheduler's has ended
    pass thread     reads the other: loads the model, then runs pass after pass. All collectives happen here
    copy threads    loads that requests wait for, and saves alongside

Decides nothing. A failed pass or copy is reported. A failure within a collective or of the GPU ends the process: neither the
process group nor the GPU can be used again.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import mmap
import os
import signal
import socket
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from stepwell.base.errors import StepwellError
from stepwell.base.ids import Kind, Tier
from stepwell.base.meters import SystemClock
from stepwell.base.tasks import Plan, Purpose
from stepwell.engine.workers.messages import (
    BROKE,
    CHOSEN,
    COPIED,
    COPY,
    FAILED,
    LOADED,
    MEMORY,
    READY,
    SETUP,
    pack_chosen,
    read_plan,
)  # fmt: skip
from stepwell.engine.workers.pass_arrays import RUN, PassReader
from stepwell.jobs.channel import Array, Channel, ChannelClosed, Message
from stepwell.jobs.processes import PING, PONG
from stepwell.jobs.workers import WorkQueue

if TYPE_CHECKING:
    from stepwell.base.spec import ModelSpec
    from stepwell.engine.models.base import Decoder

log = logging.getLogger(__name__)

MOST_SLOTS = 1 << 16  # requests with open groups at once
MOST_TEXT = 2000  # characters of a reported error
_WAIT_S = 1.0  # for a message: after that, what other threads could not send is tried again


class Worker:
    def __init__(self, channel: Channel, work: Channel) -> None:
        self._channel, self._work = channel, work
        clock = SystemClock()
        self._urgent, self._saving = WorkQueue("copy", clock, threads=2), WorkQueue("save", clock)
        self._shard: Shard | None = None

    def live(self) -> None:
        """Serves until the channel ends. Sends a sign of life first: from then on silence means that the process is stopped."""
        self._channel.send(Message(kind=PONG))
        Thread(target=self._compute, name="stepwell-pass", daemon=True).start()
        while True:
            self._channel.wait(_WAIT_S)
            for message in self._channel.receive():
                self._take(message)
            self._channel.flush()

    def _take(self, message: Message) -> None:
        if message.kind == PING:
            self._channel.send(Message(kind=PONG))
        elif message.kind == COPY:
            line = self._saving if _may_take_its_time(message) else self._urgent
            line.submit(partial(self._copy, message))
        else:
            raise ChannelClosed(f"unknown message {message.kind!r:.40}")

    def _compute(self) -> None:
        """Handles all messages but copies. An error ends the process."""
        try:
            while True:
                self._work.wait(_WAIT_S)
                for message in self._work.receive():
                    self._work.send(self._answer(message))
                self._work.flush()
                self._look_ahead()
        except ChannelClosed:
            os._exit(0)
        except BaseException as error:
            log.exception("a rank fails")
            reason = str(error) if isinstance(error, StepwellError) else f"{type(error).__name__}: {error}"
            with contextlib.suppress(ChannelClosed):
                self._work.send(Message(kind=FAILED, fields={"error": reason[:MOST_TEXT]}))
                while not self._work.flush():
                    self._work.wait(1.0)
            os._exit(1)

    def _look_ahead(self) -> None:
        """Runs once everything is answered, before the next message arrives."""
        if self._shard is not None:
            self._shard.look_ahead()

    def _answer(self, message: Message) -> Message:
        match message.kind:
            case "setup":
                self._shard = Shard(message)
                return self._shard.loaded()
            case "memory":
                assert self._shard is not None, f"{MEMORY} before {SETUP}"
                self._shard.take_memory(message.number("device_bytes"))
                return Message(kind=READY)
            case "run":
                assert self._shard is not None, f"{RUN} before {SETUP}"
                return self._shard.run(message)
        raise ValueError(f"unknown message {message.kind!r:.40}")

    def _copy(self, message: Message) -> None:
        job, error = message.fields.get("job"), None
        try:
            assert self._shard is not None, f"{COPY} before {SETUP}"
            self._shard.copy(message)
        except BaseException as failure:  # the worker boundary: the error is sent as a value
            error = f"{type(failure).__name__}: {failure}"[:MOST_TEXT]
        with contextlib.suppress(ChannelClosed):
            self._channel.send(Message(kind=COPIED, fields={"job": job, "error": error}))


def _may_take_its_time(message: Message) -> bool:
    return message.fields.get("purpose") == Purpose.SAVE.value and message.fields.get("awaited") is not True


class Shard:
    """One rank's model, and then its memory, as `setup` describes them."""

    def __init__(self, setup: Message) -> None:
        import torch

        from stepwell.engine.loading.checkpoint import open_checkpoint
        from stepwell.engine.models.registry import build_model, spec_of
        from stepwell.engine.ranks import join

        fields = setup.fields
        self.rank, self.size = setup.number("rank"), setup.number("size")
        if fields.get("threads"):
            torch.set_num_threads(setup.number("threads"))
        device = setup.text("device")
        if device.startswith("cuda"):
            torch.cuda.set_device(device)
        checkpoint = open_checkpoint(setup.text("model"))
        self.digest = checkpoint.digest
        self.spec: ModelSpec = spec_of(
            checkpoint.config, dtype=setup.text("dtype"), page_tokens=setup.number("page_tokens"), kv_dtype=fields.get("kv_dtype")
        )
        ranks = join(
            self.rank, self.size, Path(setup.text("meeting")), backend=setup.text("backend"),
            timeout_s=float(setup.number("timeout_s")),
        )  # fmt: skip
        self.model: Decoder = build_model(
            checkpoint.config, checkpoint.source, dtype=setup.text("dtype"), device=device,
            page_tokens=setup.number("page_tokens"), kv_dtype=fields.get("kv_dtype"), kernels=setup.text("kernels"), ranks=ranks,
        )  # fmt: skip
        self._calls = ranks.calls
        self._said: Mapping[str, Mapping[str, str]] = {}
        self._device = device
        self._host: memoryview | None = None
        if (host_bytes := setup.number("host_bytes")) > 0:
            self._host = memoryview(mmap.mmap(setup.number("host_fd"), host_bytes))
        self._alignment = setup.number("alignment")
        self._reader: PassReader | None = None  # once there is memory

    def loaded(self) -> Message:
        import torch

        free = torch.cuda.mem_get_info(self._device)[0] if self._device.startswith("cuda") else 0
        facts = {"free_bytes": free, "vocab_size": self.model.vocab_size, "digest": self.digest}
        return Message(kind=LOADED, fields={**facts, "kernels": dict(self.model.kernels.report.chosen)})

    def take_memory(self, device_bytes: int) -> None:
        from stepwell.engine.passes.open_groups import OpenGroups
        from stepwell.engine.passes.pages import DevicePages
        from stepwell.memory.layout import lay_out
        from stepwell.transfer.shard_copies import ShardCopyEngine
        from stepwell.transfer.torch_memory import TorchMemory

        mine, on_cuda = self.model.spec, self.model.device.type == "cuda"
        layouts = {Tier.DEVICE: lay_out(mine, tier=Tier.DEVICE, budget_bytes=device_bytes, alignment=self._alignment)}
        device, host = TorchMemory(mine, layouts[Tier.DEVICE], self._device, pin=on_cuda), None
        if self._host is not None:
            layouts[Tier.HOST] = lay_out(self.spec, tier=Tier.HOST, budget_bytes=len(self._host), alignment=self._alignment)
            host = TorchMemory(self.spec, layouts[Tier.HOST], "cpu", given=self._host, pin=on_cuda)
        self._counts: Mapping[Tier, Mapping[Kind, int]] = {
            tier: {kind: layout.rows(kind) for kind in layout.strides} for tier, layout in layouts.items()
        }
        self._reader = PassReader(pages=self._counts[Tier.DEVICE], vocab_size=self.model.vocab_size, most_slots=MOST_SLOTS)
        self._copies = ShardCopyEngine(self.spec, device, host, rank=self.rank, ranks=self.size)
        self._pages = DevicePages(mine, {kind: device.rows(kind) for kind in Kind if mine.device_parts(kind)})
        self._open_groups = OpenGroups(self._pages, device=self.model.device)
        if on_cuda:
            _wait_for(self.model.device)  # memory must be cleared before other streams copy into it

    def look_ahead(self) -> None:
        if self._reader is not None:
            self._reader.look_ahead()

    def copy(self, message: Message) -> None:
        plan: Plan = read_plan(message, pages=self._counts)
        self._copies.begin(plan)()

    def run(self, message: Message) -> Message:
        """Runs one pass and returns the answer. An error is reported in it, or raised if no later pass can succeed."""
        try:
            kind, arrays, fields = CHOSEN, self._pass(message), self._news()
        except Exception as error:
            if self._calls.begun != self._calls.ended:
                raise
            if self.model.device.type == "cuda":
                _wait_for(self.model.device)  # raises if the device failed
            log.exception("a pass failed")
            kind, arrays, fields = BROKE, [], {**self._news(), "error": f"{type(error).__name__}: {error}"[:MOST_TEXT]}
        return Message(kind=kind, numbers=(message.numbers[0], self._calls.begun), fields=fields, arrays=arrays)

    def _news(self) -> dict[str, Any]:
        """Changes in what runs operations."""
        report = self.model.kernels.report
        failed, left = dict(report.failed), {name: ", ".join(what) for name, what in report.left.items()}
        said, self._said = self._said, {"failed": failed, "left": left}
        return {name: words for name, words in self._said.items() if words and words != said.get(name)}

    def _pass(self, message: Message) -> list[Array]:
        """Every rank has all logits; rank 0 chooses, and reads how while the device computes. Waits for the device before the
        answer: copies of these pages, on other streams, may begin then.
        """
        from stepwell.engine.passes.batch import Batch
        from stepwell.engine.sampling.choices import Choices

        assert self._reader is not None, f"{RUN} before {MEMORY}"
        given = self._reader.read(message)
        for rows in given.rows:
            while rows.slot is not None and self._open_groups.num_slots <= rows.slot:
                self._open_groups.take()  # the scheduler assigns slots; here they are only reserved
        model = self.model
        batch = Batch(
            given.rows, self._pages, device=model.device, dtype=model.dtype, open_groups=self._open_groups,
            send=model.kernels.send,
        )  # fmt: skip
        logits = model.forward(batch)
        batch.copy_points()
        chosen: list[Array] = []
        if self.rank == 0:
            chosen = pack_chosen(Choices(logits, given.choosing(), model.kernels))
        if model.device.type == "cuda":
            _wait_for_pass(model.device)
        return chosen


def _wait_for(device: Any) -> None:
    """Waits until the device is idle."""
    import torch

    torch.cuda.synchronize(device)


def _wait_for_pass(device: Any) -> None:
    """Waits for this thread's stream. Copies on other streams continue."""
    import torch

    torch.cuda.current_stream(device).synchronize()


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the scheduler's process ends this one
    faulthandler.register(signal.SIGUSR1)  # to find out where it hangs: prints the stacks of all threads
    work, channel = (Channel(socket.socket(fileno=int(each))) for each in sys.argv[-2:])
    worker = Worker(channel, work)
    with contextlib.suppress(ChannelClosed):
        worker.live()
    os._exit(0)  # does not wait for other threads
