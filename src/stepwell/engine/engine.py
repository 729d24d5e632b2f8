"""A small serving engine: a model, a cache, a queue. One `step` is one pass over everybody's next tokens.

    engine = Engine.load("gemma-3-270m", store="log:/var/cache/stepwell")
    answer = engine.generate("Once upon a time", max_tokens=32)

One thread only; `EngineLoop` runs one behind a server.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from stepwell.base.errors import BadTokens, ConfigError, StepwellError
from stepwell.base.meters import Clock, SystemClock
from stepwell.cache.facade import Cache
from stepwell.cache.report import StepReport
from stepwell.engine.answering import Answering
from stepwell.engine.footprint import Footprint, longest_request
from stepwell.engine.guided import Guides
from stepwell.engine.passes.spilling import SpillReport
from stepwell.engine.request import Ask, Chunk, Delta, Finish, Request, Sampling, TokenLogprob, Usage
from stepwell.engine.runner import RANK_LOST, Passes, PassesLost, RanksReport, Runner
from stepwell.engine.scheduler import MAX_FAILED_LEASES, Limits, Scheduler
from stepwell.engine.speculation import Speculation
from stepwell.engine.text import StopFinder, Text
from stepwell.engine.unread import Unread
from stepwell.store.api import Store

log = logging.getLogger(__name__)

IDLE_S = 0.0005  # between steps that only wait for copies
UPKEEP_S = 0.02  # between steps without requests, or without ranks to compute them: backups still go on
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
    """Made by `stepwell.engine.build.load_engine`, which `Engine.load` calls."""

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
        self.max_alone = max_context if max_alone is None else max_alone  # the same without the cache: such requests do not spill
        self.footprint = footprint  # of its device memory
        self.clock = clock or SystemClock()
        self.scheduler = Scheduler(cache, self.limits, self.clock, None if speculation is None else speculation.ahead)
        self.stores = [] if store is None else [store]  # that it closes: the attached one, and those on their way out
        self.on_detached: Callable[[Store], None] = self._close_detached  # told when nothing uses a store any more
        self.passes = 0
        self._failed_kernels = 0
        self._unread: Unread | None = None  # the pass that runs while its requests are already planned further
        self._reads_later = speculation is None and isinstance(runner, Runner) and runner.goes_ahead
        self._runner = runner
        self._speculation = speculation
        self._gone: PassesLost | None = None  # why passes will never run again
        self.lost: str | None = None  # why nothing can be computed now: which rank was lost, until new ones run
        selector = runner.facts.selector
        self._answering = Answering(cache, self.scheduler, self.clock, dense_tokens=None if selector is None else selector.count)
        self._eos_ids = eos_ids
        self._last_id = 0
        self._streams: dict[int, deque[Delta]] = {}
        self._longest: dict[int, int] = {}  # tokens that a request may have, by pages of it that may spill

    @classmethod
    def load(cls, model: str, **settings: Any) -> Engine:
        """An engine for a checkpoint by path or name; settings as in `EngineConfig`. Raises ConfigError."""
        from stepwell.engine.build import load_engine

        return load_engine(model, **settings)

    @property
    def vocab_size(self) -> int:
        return self._runner.facts.vocab_size

    @property
    def kernels(self) -> dict[str, str]:
        """What runs each operation of a pass, for people; of a draft's passes, where that is something else."""
        lines = self._runner.kernels.lines()
        draft = None if self._speculation is None else self._speculation.kernels
        others = {} if draft is None else draft.lines()
        return lines | {f"draft {name}": line for name, line in others.items() if line != lines.get(name)}

    @property
    def spilling(self) -> SpillReport | None:
        """What came of rows that may be on the host alone; None for engines whose rows do not spill."""
        return self._runner.spilling

    @property
    def ranks(self) -> RanksReport | None:
        """How the ranks stand that compute in processes of their own; None where the model is in this one."""
        return self._runner.ranks

    @property
    def num_open(self) -> int:
        """Requests that wait or run."""
        return len(self._answering.requests)

    # ---- requests ---------------------------------------------------------------------------------

    def submit(self, ask: Ask) -> int:
        """Queues a request and returns its number. Raises ConfigError or BadTokens, or PassesLost where nothing can be computed
        any more; then it queues nothing.
        """
        if self._gone is not None:
            raise PassesLost(f"rank {self._gone.rank} was lost, and nothing can be computed without it", rank=self._gone.rank)
        sampling = ask.sampling
        if sampling.prompt_logprobs is not None:
            ask = replace(ask, use_cache=False)  # what is cached would not be computed, and nothing could be told of it
        most = self._most_tokens(ask)
        room = most - len(ask.tokens)
        if room < 1 or (sampling.max_tokens or 0) > room:
            raise ConfigError(
                f"{len(ask.tokens)} prompt tokens and {sampling.max_tokens or 1} to come exceed the {most} "
                f"that this server can hold; shorten the prompt or ask for less"
                + (", or use the cache" if not ask.use_cache and most < self.max_context else "")
            )
        if len(ask.tokens) and not 0 <= min(ask.tokens) <= max(ask.tokens) < self.vocab_size:
            raise BadTokens(f"token ids must be from 0 to {self.vocab_size - 1}")
        named = [*sampling.stop_token_ids, *(token for token, _ in sampling.logit_bias)]
        if named and not 0 <= min(named) <= max(named) < self.vocab_size:
            raise BadTokens(f"stop_token_ids and logit_bias must name tokens from 0 to {self.vocab_size - 1}")
        if sampling.stop and self.text is None:
            raise ConfigError("stop strings need a tokenizer, and this model has none")
        keeps_on = sampling.ignore_eos and ask.guide is None  # behind the end of a grammar nothing can come
        self._last_id += 1
        arrived_s = ask.arrived_s if ask.arrived_s is not None else self.clock.now()
        request = Request(
            id=self._last_id,
            ask=ask,
            namespace=self.cache.namespace_for(salt=ask.salt, tenant=ask.tenant),
            max_tokens=sampling.most_tokens(room),
            stream=self.text.stream(ask.tokens, special=sampling.show_special) if self.text is not None else None,
            stops=StopFinder(sampling.stop),
            ends_on=frozenset(sampling.stop_token_ids) | (frozenset() if keeps_on else self._eos_ids),
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            arrived_s=arrived_s,
            entered_s=self.clock.now(),
            waits_since_s=arrived_s,
            tokens=list(ask.tokens),
        )
        self.scheduler.enter(request)
        self._answering.requests[request.id] = request
        return request.id

    def _most_tokens(self, ask: Ask) -> int:
        """How many tokens a request may have in all: rows of answers that pick are not published, and stay on the device."""
        selector = self._runner.facts.selector
        if not ask.use_cache or selector is None or self.cache.spec.spill is None:
            return self.max_context if ask.use_cache else self.max_alone
        size = self.cache.spec.page_tokens
        pages = max(len(ask.tokens), selector.count) // size
        if pages not in self._longest:  # whole pages spill, so that there are few different answers
            longest = longest_request(self.cache, self.limits.chunk_tokens, spills_upto=pages * size, most=self.max_context)
            self._longest[pages] = longest
        return self._longest[pages]

    def abort(self, number: int) -> None:
        """Ends a request, at any moment; unknown or ended ones are ignored."""
        request = self._answering.requests.get(number)
        if request is not None:
            self._answering.end(request, Finish.ABORTED)

    def step(self) -> list[Delta]:
        """One pass: what came of copies, who may begin, everybody's next tokens. Returns what was added to answers.

        Raises what a pass raises, once the requests of that pass have ended with the reason; the next step says so.
        """
        try:
            with self._runner.on_device():
                self._step()
        except PassesLost as error:
            self._lose(error)
        except BaseException as error:
            self._unread = None
            self._runner.wait()  # a pass that was queued before still writes into pages that are given back now
            self._fail_active(f"{type(error).__name__}: {error}")  # what it left in their pages is not known
            raise
        return self._answering.deltas()

    def _step(self) -> None:
        if not self._runner.tend():
            self._settle(self.cache.step())  # backups go on, and what the store has comes up
            return
        self.lost = None
        self._settle(self.cache.step())
        self.scheduler.admit()
        self._end_failed()
        self._go_ahead()
        if self._unread is None:
            chunks = self.scheduler.plan()
            self._end_failed()
            if chunks:
                self._compute(chunks)

    @property
    def idle(self) -> bool:
        """Whether a step would only wait: for copies, for the store, or for nothing at all."""
        if self.lost is not None:
            return True
        return self._unread is None and not any(request.runs for request in self.scheduler.active.values())

    @property
    def pause_s(self) -> float:
        """How long to wait before the next step: 0 where it would do something."""
        if not self.idle:
            return 0.0
        return IDLE_S if self.num_open and self.lost is None else UPKEEP_S

    @property
    def gone(self) -> bool:
        """Whether nothing will ever be computed again."""
        return self._gone is not None

    @property
    def on_cuda(self) -> bool:
        return self._runner.facts.on_cuda

    def warm_up(self) -> float:
        """Computes two short prompts and some steps, so that nobody waits for kernels to be built; the seconds it took.

        Where rows may spill, also a step that finds some on the host. Before the first request. Leaves nothing cached.
        """
        began_s, count = time.monotonic(), max(min(self.max_alone // 2, 64), 1)
        likeliest = Sampling(max_tokens=min(4, self.max_alone - count), ignore_eos=True)
        for sampling in (likeliest, replace(likeliest, temperature=1.0, top_k=2, top_p=0.9)):
            self.submit(Ask(tokens=[0] * count, sampling=sampling, use_cache=False))
        while self.num_open:
            self.step()
        self.step()
        self._runner.warm_up(self.cache, self.max_alone)
        self._count_fallbacks()
        return time.monotonic() - began_s

    def generate(self, prompt: str | Sequence[int], **more: Any) -> Answer:
        """A whole answer: `stream` to its end."""
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
        """An answer piece by piece. `more` are fields of `Sampling` or `Ask`. Raises StepwellError when it cannot be finished."""
        sampling = Sampling(**{name: more.pop(name) for name in Sampling.__dataclass_fields__.keys() & more.keys()})
        number = self.submit(Ask(tokens=self.encode(prompt), sampling=sampling, **more))
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
                for delta in self.step():  # which may be somebody else's, who streams beside this one
                    if delta.request in self._streams:
                        self._streams[delta.request].append(delta)
                if pause_s := self.pause_s:
                    time.sleep(pause_s)
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
        """Ends all requests, waits for what is to be kept, and stops."""
        for number in list(self._answering.requests):
            self.abort(number)
        self._unread = None
        try:
            self._runner.wait()  # for what it still writes into memory that would be given to others
            if not self.cache.close():
                log.warning("not everything that was to be stored was stored in time: a store or a copy is slow, or hangs")
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
        if store in self.stores:  # others are whoever attached them to close
            self.stores.remove(store)
            store.close()

    def _settle(self, report: StepReport) -> None:
        """A lease whose bytes did not arrive is given back, and its request looks again; so is a store to whoever closes it."""
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
                request.sources = None  # where its prompt comes from is yet to be seen
            self.scheduler.put_back(request)

    def _end_failed(self) -> None:
        failed, self.scheduler.failed = self.scheduler.failed, []
        for request, error in failed:
            if request.id in self._answering.requests:
                self._answering.end(request, Finish.FAILED, error=error)

    def _lose(self, error: PassesLost) -> None:
        """What ran passes is gone, and the device tier with it. Requests of theirs fail; others wait for new ranks, if any come.
        What the host and the store have is as good as before.
        """
        self._unread, self.lost = None, str(error)
        self._failed_kernels = 0  # new ranks try them again
        self.cache.counters.add("rank_losses")
        told = f"{RANK_LOST}{error.rank}: ask again"
        self._fail_active(told)
        try:
            self._runner.end()  # before anything that they may still write to is given to others
            self.cache.lose_device()
        except BaseException:
            self._gone = error  # new ranks would not have what others still believe to be on the device
            raise
        if not self._runner.restart():
            self._gone = error
            for request in list(self._answering.requests.values()):
                self._answering.end(request, Finish.FAILED, error=told)

    def _fail_active(self, error: str) -> None:
        for request in list(self.scheduler.active.values()):
            self._answering.end(request, Finish.FAILED, error=error)

    def _go_ahead(self) -> None:
        """Starts the pass behind the one that is not read yet, where there is one to start; then reads that one."""
        before, self._unread = self._unread, None
        if before is None:
            return
        chunks = self.scheduler.plan_ahead()
        if chunks and self._can_be_read_later(chunks):
            self._start(chunks, before)
        self._answering.take(before)
        self._begins(chunks if self._unread is not None else ())

    def _can_be_read_later(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the host needs no more of a pass than its tokens, and may read them while the next one runs."""
        return self._reads_later and not any(chunk.arriving or _needs_host(chunk) for chunk in chunks)

    def _start(self, chunks: Sequence[Chunk], before: Unread | None = None) -> None:
        """Starts a pass that is read when the next one was started."""
        assert isinstance(self._runner, Runner), f"{self._runner} is read before the next pass"
        self._unread = self._runner.start(chunks, before)
        for chunk in chunks:
            chunk.request.started = chunk.end
        self.passes += 1
        self._count_fallbacks()

    def _begins(self, chunks: Sequence[Chunk]) -> None:
        """The device begins with these only now, for it was busy with the pass before: how long prompts take is measured."""
        for chunk in chunks:
            lease = chunk.request.lease
            if lease is not None and chunk.start < lease.prompt_tokens:
                self.cache.begins(lease)

    def _compute(self, chunks: Sequence[Chunk]) -> None:
        if self._can_be_read_later(chunks):
            self._start(chunks)
            return
        if self._speculation is None:
            chosen = self._runner.choose(chunks)
        else:
            assert isinstance(self._runner, Runner), "drafts are for models in this process"
            chunks, logits = self._speculation.run(chunks, self._runner)
            chosen = self._runner.choices(chunks, logits)
        self.passes += 1
        self._count_fallbacks()
        self._answering.choose(chunks, chosen)

    def _count_fallbacks(self) -> None:
        """Kernels of the model and of its draft that failed in this pass, and run in plain torch from now on."""
        draft = None if self._speculation is None else self._speculation.kernels
        failed = len(self._runner.kernels.failed) + (0 if draft is None else len(draft.failed))
        if failed > self._failed_kernels:
            self.cache.counters.add("kernel_fallbacks", failed - self._failed_kernels)
            self._failed_kernels = failed


def _needs_host(chunk: Chunk) -> bool:
    """Whether the host computes something from a chunk's logits, or has to know its token before the next is chosen."""
    sampling = chunk.request.ask.sampling
    return bool(chunk.told) or (chunk.completes and (sampling.logprobs is not None or chunk.request.needs_tokens))
