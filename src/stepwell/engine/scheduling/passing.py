"""How the next passes run: at once, overlapped with the one in flight, or with a draft's guesses. Plans none itself.

step n      start pass n, then read pass n-1: the device has work while the host reads
"""

from __future__ import annotations

from collections.abc import Sequence

from stepwell.cache.facade import Cache
from stepwell.engine.requests.request import Chunk
from stepwell.engine.running.runner import Passes, Runner
from stepwell.engine.running.speculation import Speculation
from stepwell.engine.running.unread import Unread
from stepwell.engine.scheduling.answering import Answering
from stepwell.engine.scheduling.scheduler import Scheduler


class Passing:
    """For the engine's thread."""

    def __init__(
        self, runner: Passes, speculation: Speculation | None, cache: Cache, scheduler: Scheduler, answering: Answering
    ) -> None:
        self.count = 0  # of passes that were run
        self.unread: Unread | None = None  # the pass in flight, whose requests are already planned further
        self.reads_later = speculation is None and isinstance(runner, Runner) and runner.goes_ahead
        self._runner = runner
        self._speculation = speculation
        self._cache = cache
        self._scheduler = scheduler
        self._answering = answering
        self._failed_kernels = 0
        self._chunks: Sequence[Chunk] = ()  # of the pass that was begun last

    def drop(self, *, kernels: bool = False) -> None:
        """Drops the pass in flight. `kernels`: also the failures of kernels, for others run from now on."""
        self.unread = None
        if kernels:
            self._failed_kernels = 0

    def go_ahead(self) -> None:
        """Starts the pass after the one in flight, if there is one to start; then reads the one that was in flight."""
        before = self.unread
        if before is None:
            return
        chunks = self._scheduler.plan_ahead()
        if not chunks or not self._can_be_read_later(chunks):
            self.read()
            return
        self._start(chunks, before)
        self._answering.take(before)
        self._begins(chunks)

    def read(self) -> None:
        """Reads the pass in flight, if there is one, and starts none."""
        before, self.unread = self.unread, None
        if before is not None:
            self._answering.take(before)

    def put_back(self) -> None:
        """After a pass that ran out of memory: reads the one before it, and queues its requests to be computed again from what
        is cached of them. The content of their pages is unknown.
        """
        self.read()
        for chunk in reversed(self._chunks):
            if self._scheduler.active.get(chunk.request.id) is chunk.request:
                self._scheduler.put_back(chunk.request)

    def _can_be_read_later(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the host needs only the tokens of a pass, and may read them while the next one runs."""
        return self.reads_later and not any(chunk.arriving or _needs_host(chunk) for chunk in chunks)

    def _start(self, chunks: Sequence[Chunk], before: Unread | None = None) -> None:
        """Starts a pass that is read after the next one was started."""
        assert isinstance(self._runner, Runner), f"{self._runner} is read before the next pass"
        self._chunks = chunks
        self.unread = self._runner.start(chunks, before)
        for chunk in chunks:
            chunk.request.started, chunk.request.started_copies = chunk.end, chunk.point_copy is not None
        self.count += 1
        self.count_fallbacks()

    def _begins(self, chunks: Sequence[Chunk]) -> None:
        """The device begins with these only now, after the previous pass: the computing time of prompts is measured."""
        for chunk in chunks:
            lease = chunk.request.lease
            if lease is not None and chunk.start < lease.prompt_tokens:
                self._cache.begins(lease)

    def compute(self, chunks: Sequence[Chunk]) -> None:
        if self._can_be_read_later(chunks):
            self._start(chunks)
            return
        self._chunks = chunks
        if self._speculation is None:
            chosen = self._runner.choose(chunks)
        else:
            assert isinstance(self._runner, Runner), "drafts are for models in this process"
            chunks, logits = self._speculation.run(chunks, self._runner)
            chosen = self._runner.choices(chunks, logits)
        self.count += 1
        self.count_fallbacks()
        self._answering.choose(chunks, chosen)

    def count_fallbacks(self) -> None:
        """Kernels of the model and of its draft that failed in this pass, and are replaced by plain torch from now on."""
        draft = None if self._speculation is None else self._speculation.kernels
        failed = len(self._runner.kernels.failed) + (0 if draft is None else len(draft.failed))
        if failed > self._failed_kernels:
            self._cache.counters.add("kernel_fallbacks", failed - self._failed_kernels)
            self._failed_kernels = failed


def _needs_host(chunk: Chunk) -> bool:
    """Whether the host reads more than a chunk's token, or needs that token before the next one is chosen."""
    sampling = chunk.request.submitted.sampling
    return bool(chunk.prompt_targets) or (chunk.completes and (sampling.logprobs is not None or chunk.request.needs_tokens))
