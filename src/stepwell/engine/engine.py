"""A small serving engine: a model, a cache, a queue. One `step` runs one pass over the next tokens of all running requests.

    engine = load_engine("gemma-3-270m", store="log:/var/cache/stepwell")
    answer = engine.generate("Once upon a time", max_tokens=32)

One thread only; `EngineLoop` runs one behind a server.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Event
from types import TracebackType
from typing import Any

from stepwell.base.errors import ConfigError, StepwellError
from stepwell.base.meters import Clock, SystemClock
from stepwell.cache.facade import Cache
from stepwell.cache.report import StepReport
from stepwell.engine.ops.guarded import is_out_of_memory
from stepwell.engine.passes.spilling import SpillReport
from stepwell.engine.requests.guided import Guides
from stepwell.engine.requests.request import Delta, Finish, GenerateRequest, Sampling, TokenLogprob, Usage
from stepwell.engine.requests.text import Text
from stepwell.engine.running.runner import RANK_LOST, Passes, PassesLost, RanksReport
from stepwell.engine.running.speculation import Speculation
from stepwell.engine.scheduling.answering import Answering
from stepwell.engine.scheduling.footprint import Footprint
from stepwell.engine.scheduling.passing import Passing
from stepwell.engine.scheduling.request_builder import RequestBuilder
from stepwell.engine.scheduling.scheduler import MAX_FAILED_LEASES, Limits, Scheduler
from stepwell.engine.trouble import TroubleLog
from stepwell.store.api import Store

log = logging.getLogger(__name__)

IDLE_S = 0.0005  # between steps that wait for copies on ranks, which do not wake the engine
UPKEEP_S = 0.02  # between steps without a wake-up: for backups and time limits
MAX_FAILURES = 2 * MAX_FAILED_LEASES


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: Finish
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of all tokens of the prompt but the first


class Engine:
    """Made by `stepwell.engine.load_engine` and other functions of `building/build.py`."""

    def __init__(
        self,
        runner: Passes,
        cache: Cache,
        text: Text | None,
        *,
        limits: Limits | None = None,
        max_context: int,
        max_alone: int | None = None,
        footprint: Footprint,
        eos_ids: frozenset[int] = frozenset(),
        store: Store | None = None,
        speculation: Speculation | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.cache = cache
        self.text = text
        self.guides = None if text is None else Guides(text, vocab_size=runner.facts.vocab_size, eos_ids=eos_ids)
        self.limits = limits or Limits()
        self.max_context = max_context  # tokens of a prompt and its answer
        # The same for requests without the cache, which do not spill.
        self.max_alone = max_context if max_alone is None else max_alone
        self.footprint = footprint  # of its device memory
        self.clock = clock or SystemClock()
        self.scheduler = Scheduler(cache, self.limits, self.clock, None if speculation is None else speculation.ahead)
        self.stores = [] if store is None else [store]  # the engine closes them: the attached one, and those being detached
        self.on_detached: Callable[[Store], None] = self._close_detached  # called when nothing uses a store any more
        self._runner = runner
        self._speculation = speculation
        self._kernel_changes = 0
        self._gone: PassesLost | None = None  # why no pass will ever run again
        self._stalled = False  # the last step computed nothing: running requests wait for copies to free memory
        self.lost: str | None = None  # why no pass can run now: which rank was lost, until new ranks run
        selector = runner.facts.selector
        self._answering = Answering(cache, self.scheduler, self.clock, dense_tokens=None if selector is None else selector.count)
        self.passing = Passing(runner, speculation, cache, self.scheduler, self._answering)
        self._builder = RequestBuilder(
            cache, text, runner.facts, self.clock, chunk_tokens=self.limits.chunk_tokens, max_context=max_context,
            max_alone=self.max_alone, eos_ids=eos_ids,
        )  # fmt: skip
        self._trouble = TroubleLog(cache, self.clock)
        self._streams: dict[int, deque[Delta]] = {}
        self._woken = Event()
        cache.wake_by(self._on_answer)

    @property
    def vocab_size(self) -> int:
        return self._runner.facts.vocab_size

    @property
    def kernels(self) -> dict[str, str]:
        """What runs each operation of a pass, as text; also of a draft's passes if that differs."""
        lines = self._runner.kernels.lines()
        draft = None if self._speculation is None else self._speculation.kernels
        others = {} if draft is None else draft.lines()
        return lines | {f"draft {name}": line for name, line in others.items() if line != lines.get(name)}

    @property
    def spilling(self) -> SpillReport | None:
        """Statistics of rows that may be on the host only; None for engines whose rows do not spill."""
        return self._runner.spilling

    @property
    def ranks(self) -> RanksReport | None:
        """The state of ranks in processes of their own; None if the model is in this process."""
        return self._runner.ranks

    @property
    def passes(self) -> int:
        """The number of passes run so far."""
        return self.passing.count

    @property
    def num_open(self) -> int:
        """The number of waiting and running requests."""
        return len(self._answering.requests)

    # ---- requests ---------------------------------------------------------------------------------

    def submit(self, submitted: GenerateRequest) -> int:
        """Queues a request and returns its number. Raises ConfigError or BadTokens, or PassesLost if no pass can run any more;
        then it queues nothing.
        """
        if self._gone is not None:
            raise PassesLost(f"rank {self._gone.rank} was lost, and nothing can be computed without it", rank=self._gone.rank)
        request = self._builder.build(submitted)
        self.scheduler.enter(request)
        self._answering.requests[request.id] = request
        return request.id

    def abort(self, number: int) -> None:
        """Ends a request at any time; unknown or ended ones are ignored."""
        request = self._answering.requests.get(number)
        if request is not None:
            self._answering.end(request, Finish.ABORTED)

    def step(self) -> list[Delta]:
        """Applies finished copies, admits requests, runs one pass. Returns what was added to answers.

        A pass that runs out of memory is repeated without captured graphs, if there are any. If a pass raises, its requests end
        with the reason, which the next step returns, and the error is raised.
        """
        try:
            with self._runner.on_device():
                self._step()
        except PassesLost as error:
            self._lose(error)
        except BaseException as error:
            if is_out_of_memory(error) and self._runner.drop_graphs():
                log.warning(
                    "a pass ran out of memory: captured graphs are dropped, and its requests are computed again: %s", error
                )
                self.cache.counters.add("graphs_dropped")
                self.passing.put_back()
                return self._answering.deltas()
            self.passing.drop()
            self._runner.wait()  # an earlier pass still writes into pages that are released now
            self._fail_active(f"{type(error).__name__}: {error}")  # the contents of their pages are unknown
            raise
        return self._answering.deltas()

    def _step(self) -> None:
        if not self._runner.poll():
            self._settle(self.cache.step())  # backups and prefetches go on
            return
        self.lost = None
        if self._kernel_changes != (changes := self._runner.kernels.changes):
            self._kernel_changes = changes
            self.cache.forget_speeds()  # passes are faster from now on
        passes = self.passing.count
        self._settle(self.cache.step())
        self.scheduler.admit()
        self._end_failed()
        self.passing.go_ahead()
        if self.passing.unread is None:
            chunks = self.scheduler.plan()
            self._end_failed()
            if chunks:
                self.passing.compute(chunks)
        self._stalled = self.passing.count == passes

    @property
    def idle(self) -> bool:
        """Whether a step would compute nothing: there are no requests, or all wait for copies or the store."""
        if self.lost is not None:
            return True
        runs = any(request.runs for request in self.scheduler.active.values())
        return self.passing.unread is None and (self._stalled or not runs)

    @property
    def pause_s(self) -> float:
        """The longest wait before the next step if nothing wakes the engine; 0 if a step would do something."""
        if not self.idle:
            return 0.0
        if not self.num_open or self.lost is not None:
            return UPKEEP_S
        return min(UPKEEP_S if self.cache.wakes else IDLE_S, self.scheduler.limit_in_s())

    def rest(self) -> None:
        """Waits until a step has something to do: a copy or read that a request waits for has finished, `wake` was called, or
        `pause_s` have passed. Returns at once if a step would do something now.
        """
        if pause_s := self.pause_s:
            self._woken.wait(pause_s)
        self._woken.clear()

    def wake(self) -> None:
        """Ends `rest`, or the next one. From any thread."""
        self._woken.set()

    def _on_answer(self) -> None:
        """On a worker's thread. Backups alone do not wake the engine: `UPKEEP_S` is enough for them."""
        if self.num_open:
            self._woken.set()

    @property
    def gone(self) -> bool:
        """Whether no pass will ever run again."""
        return self._gone is not None

    @property
    def on_cuda(self) -> bool:
        return self._runner.facts.on_cuda

    def warm_up(self) -> float:
        """Computes two short prompts and some steps, so that no request waits for kernels to be built. Returns the seconds taken.

        If rows may spill, also runs a step with rows on the host. Call it before the first request. Leaves nothing cached.
        """
        began_s, count = time.monotonic(), max(min(self.max_alone // 2, 64), 1)
        likeliest = Sampling(max_tokens=min(4, self.max_alone - count), ignore_eos=True)
        for sampling in (likeliest, replace(likeliest, temperature=1.0, top_k=2, top_p=0.9)):
            self.submit(GenerateRequest(tokens=[0] * count, sampling=sampling, use_cache=False))
        while self.num_open:
            self.step()
        self.step()
        self._runner.warm_up(self.cache, self.max_alone)
        self.passing.count_fallbacks()
        return time.monotonic() - began_s

    def generate(self, prompt: str | Sequence[int], **more: Any) -> Answer:
        """Returns a whole answer: `stream` to its end."""
        deltas = list(self.stream(prompt, **more))
        last = deltas[-1]
        assert last.finish is not None and last.usage is not None, f"an answer without an end: {last}"
        return Answer(
            text="".join(delta.text for delta in deltas),
            tokens=tuple(token for delta in deltas for token in delta.tokens),
            logprobs=tuple(each for delta in deltas for each in delta.logprobs),
            finish=last.finish,
            usage=last.usage,
            prompt_logprobs=deltas[0].prompt_logprobs,
        )

    def stream(self, prompt: str | Sequence[int], **more: Any) -> Iterator[Delta]:
        """Yields an answer as deltas. `more`: fields of `Sampling` or `GenerateRequest`.

        Raises StepwellError if it cannot be finished.
        """
        sampling = Sampling(**{name: more.pop(name) for name in Sampling.__dataclass_fields__.keys() & more.keys()})
        number = self.submit(GenerateRequest(tokens=self.encode(prompt), sampling=sampling, **more))
        mine = self._streams[number] = deque[Delta]()
        try:
            while True:
                while mine:
                    delta = mine.popleft()
                    if delta.error is not None:
                        raise StepwellError(delta.error)
                    yield delta
                    if delta.finish is not None:
                        return
                for delta in self.step():  # may belong to another stream of this engine
                    if delta.request in self._streams:
                        self._streams[delta.request].append(delta)
                if not mine:
                    self.rest()
        finally:
            del self._streams[number]
            self.abort(number)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.text is None:
            raise ConfigError("this model has no tokenizer: give token ids")
        return self.text.encode(prompt)

    def close(self) -> None:
        """Ends all requests, waits for writes to the store, and stops."""
        for number in list(self._answering.requests):
            self.abort(number)
        self.passing.drop()
        try:
            self._runner.wait()  # it may still write into memory that is freed below
            before = self.cache.counters["store_ops_failed"]
            if not self.cache.close():
                log.warning("some pages were not stored in time: a store or a copy is slow, or hangs")
            if failed := self.cache.counters["store_ops_failed"] - before:
                log.warning("some pages were not stored: %d operations of the store failed at the end", failed)
        finally:
            try:
                self._runner.close()
            finally:
                for store in self.stores:
                    store.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- inside -----------------------------------------------------------------------------------

    def _close_detached(self, store: Store) -> None:
        if store in self.stores:  # other stores are closed by the code that attached them
            self.stores.remove(store)
            store.close()

    def _settle(self, report: StepReport) -> None:
        """Requeues requests whose loads failed; hands detached stores to `on_detached`."""
        self._trouble.after_step(report.failures)
        for store in report.detached:
            self.on_detached(store)
        for lease in report.failed:
            request = next((each for each in self.scheduler.active.values() if each.lease is lease), None)
            if request is None:
                continue  # it has ended since
            request.failures += 1
            if request.failures > MAX_FAILURES:
                self._answering.end(request, Finish.FAILED, error="copies of its state failed again and again")
                continue
            if request.first_token_s is None:
                request.sources = None  # the next lookup decides where its prompt comes from
            self.scheduler.put_back(request)

    def _end_failed(self) -> None:
        failed, self.scheduler.failed = self.scheduler.failed, []
        for request, error in failed:
            if request.id in self._answering.requests:
                self._answering.end(request, Finish.FAILED, error=error)

    def _lose(self, error: PassesLost) -> None:
        """A rank is lost, and the device tier with it. Running requests fail; waiting ones wait for new ranks, if any start.
        The host tier and the store stay valid.
        """
        self.passing.drop(kernels=True)  # new ranks try them again
        self.lost = str(error)
        self.cache.counters.add("rank_losses")
        reason = f"{RANK_LOST}{error.rank}: send the request again"
        self._fail_active(reason)
        try:
            self._runner.end()  # before memory that they may still write to is reused
            self.cache.lose_device()
        except BaseException:
            self._gone = error  # the cache still lists pages on the device that new ranks would not have
            raise
        if not self._runner.restart():
            self._gone = error
            for request in list(self._answering.requests.values()):
                self._answering.end(request, Finish.FAILED, error=reason)

    def _fail_active(self, error: str) -> None:
        for request in list(self.scheduler.active.values()):
            self._answering.end(request, Finish.FAILED, error=error)
