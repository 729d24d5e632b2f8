"""From a pass to answers: tokens are chosen, committed, turned into text, and answers end. Plans and computes nothing.

Keeps the open requests, and what was added to their answers since it was last collected. One thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stepwell.base.meters import Clock
from stepwell.cache.facade import Cache
from stepwell.engine.ops.drawing import NAN_LOGITS
from stepwell.engine.requests.request import Chunk, Delta, Finish, Request, Usage
from stepwell.engine.running.unread import Unread
from stepwell.engine.sampling.choices import Chosen, ChosenRows, WaitForChoices
from stepwell.engine.scheduling.scheduler import Scheduler
from stepwell.tiers.lease import Sources

_NOT_NUMBERS = "the model's output for this request is not a number"


class Answering:
    def __init__(
        self,
        cache: Cache,
        scheduler: Scheduler,
        clock: Clock,
        *,
        dense_tokens: int | None = None,
    ) -> None:
        self.requests: dict[int, Request] = {}  # that wait or run
        self._cache = cache
        self._scheduler = scheduler
        self._clock = clock
        self._dense_tokens = dense_tokens  # answers attend to everything up to here and pick afterwards. None without a selector
        self._deltas: list[Delta] = []

    def deltas(self) -> list[Delta]:
        """Returns and clears what was added to answers."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def take(self, computed: Unread) -> None:
        """Applies the tokens of a pass in flight. Waits for it. Requests that have ended since it began get nothing from
        it.
        """
        tokens = computed.read()
        for chunk, lease in zip(computed.chunks, computed.leases, strict=True):
            request = chunk.request
            if request.id not in self.requests or request.lease is not lease:
                continue
            assert request.runs, f"{request} was computed on, and its lease is not ready any more"
            row = computed.rows.get(request.id)
            if row is not None and tokens[row] == NAN_LOGITS:
                self.end(request, Finish.FAILED, error=_NOT_NUMBERS)
                continue
            self._commit(request, chunk.end, chunk.point_copy)
            if row is not None:
                self._add(request, Chosen(token=tokens[row]))

    def choose(self, chunks: Sequence[Chunk], chosen: WaitForChoices) -> None:
        """Applies the result of a pass that has begun: tokens for the chunks that complete their requests. Waits for it.

        A chunk whose pages did not arrive gets nothing: the next step queues its request again.
        """
        missed = [chunk for chunk in chunks if chunk.arriving and not self._arrived(chunk.request)]
        if len(missed) == len(chunks):
            return  # their pass is not waited for: it may wait for bytes that never come
        choices, row = chosen(), 0
        for chunk in chunks:
            first, row = row, row + chunk.num_logits
            if chunk in missed:
                continue
            told = len(chunk.prompt_targets)
            if not self._tell(chunk, choices, first):
                continue
            if chunk.completes:
                self._go_on(chunk, choices, first + told)
            else:
                self._commit(chunk.request, chunk.end, chunk.point_copy)

    def end(self, request: Request, finish: Finish, *, last: Delta | None = None, error: str | None = None) -> None:
        """Ends an answer, with what was added last, and releases what its request holds."""
        self._scheduler.leave(request)
        del self.requests[request.id]
        last = last or Delta(request=request.id)
        self._deltas.append(replace(last, finish=finish, usage=_usage(request, self._clock.now()), error=error))

    # ---- inside -----------------------------------------------------------------------------------

    def _tell(self, chunk: Chunk, choices: ChosenRows, row: int) -> bool:
        """Keeps the new logprobs of a chunk's part of the prompt. Returns whether the request continues."""
        request = chunk.request
        for at in range(len(chunk.prompt_targets)):
            told = self._chosen(request, choices, row + at)
            if told is None:
                return False
            if chunk.start + at == len(request.prompt_logprobs):  # after preemption a part of it is computed again
                assert told.logprob is not None, f"{request} has no logprob"
                request.prompt_logprobs.append(told.logprob)
        return True

    def _chosen(self, request: Request, choices: ChosenRows, row: int) -> Chosen | None:
        """The token chosen from a row; None if there could be none, and the request has ended."""
        if request.broken is not None:
            self.end(request, Finish.FAILED, error=request.broken)
            return None
        chosen = choices.of(row)
        if chosen is None:  # what it left in its pages must not be published
            self.end(request, Finish.FAILED, error=_NOT_NUMBERS)
        return chosen

    def _go_on(self, chunk: Chunk, choices: ChosenRows, row: int) -> None:
        """The next tokens, each chosen as if it were alone: as long as the model chooses what was proposed, and one more.

        tokens     ... last | guess | guess | guess       rows of logits: one for each of these
        chosen              | same  | other |             two more tokens; what was computed behind them is overwritten later
        """
        request = chunk.request
        request.proposed += len(chunk.proposed)
        for at, guess in enumerate((*chunk.proposed, None)):
            chosen = self._chosen(request, choices, row + at)
            if chosen is None:
                return
            upto = len(request.tokens)
            self._commit(request, upto, chunk.point_copy if upto == chunk.end else None)
            request.accepted += chosen.token == guess
            if not self._add(request, chosen) or chosen.token != guess:
                return

    def _arrived(self, request: Request) -> bool:
        """Whether everything has arrived that a pass over a request's chunk has waited for."""
        assert request.lease is not None, f"{request} was computed without a lease"
        return self._cache.wait_arriving(request.lease)

    def _commit(self, request: Request, upto: int, point_copy: int | None) -> None:
        lease = request.lease
        assert lease is not None, f"{request} was computed without a lease"
        if self._dense_tokens is not None and upto > max(request.prompt_tokens, self._dense_tokens):
            lease.publishes = False  # rows computed with picking cannot serve as a prompt's, which attends to everything
        self._cache.commit(lease, upto, point_copy=point_copy)

    def _add(self, request: Request, chosen: Chosen) -> bool:
        """Adds a token: text as far as it is certain, and the end if this is one. Returns whether the answer continues."""
        token = chosen.token
        request.tokens.append(token)
        if request.first_token_s is None:
            request.first_token_s = self._clock.now()
        answered = request.answer_tokens
        early = answered < request.submitted.sampling.min_tokens
        ends = token in request.ends_on and (
            not early or request.submitted.guide is not None
        )  # the guide decides when it must end
        text = "" if ends or request.stream is None else self._text(request, token)
        finish, reason = None, None
        if ends or request.stops.found:
            finish, reason = Finish.STOP, request.stops.found if not ends else self._stop_token(request, token)
        elif answered >= request.max_tokens:
            finish = Finish.LENGTH
        delta = Delta(
            request=request.id,
            tokens=(token,),
            text=text,
            logprobs=() if chosen.logprob is None else (chosen.logprob,),
            prompt_logprobs=tuple(request.prompt_logprobs) if answered == 1 else (),
        )
        if finish is not None:
            if request.stream is not None:
                text += request.stops.push(request.stream.finish()) + request.stops.finish()
            self.end(request, finish, last=replace(delta, text=text, stop_reason=reason))
            return False
        assert request.lease is not None
        self._cache.append(request.lease, [token])
        self._deltas.append(delta)
        return True

    @staticmethod
    def _text(request: Request, token: int) -> str:
        """The certain part of an answer's text. Stop strings count only after the minimum number of tokens."""
        assert request.stream is not None
        text = request.stream.push(token)
        return text if request.answer_tokens <= request.submitted.sampling.min_tokens else request.stops.push(text)

    @staticmethod
    def _stop_token(request: Request, token: int) -> int | None:
        """A token that the request named; None for those that end every answer."""
        return token if token in request.submitted.sampling.stop_token_ids else None


def _usage(request: Request, now_s: float) -> Usage:
    began = request.began_s if request.began_s is not None else request.arrived_s
    first = request.first_token_s if request.first_token_s is not None else request.arrived_s
    return Usage(
        prompt_tokens=request.prompt_tokens,
        completion_tokens=request.answer_tokens,
        sources=request.sources or Sources(computed=request.prompt_tokens),
        entered_s=request.entered_s - request.arrived_s,
        looked_up_s=_after(request.looked_up_s, request),
        fetched_s=_after(request.fetched_s, request),
        computes_s=_after(request.computes_s, request),
        queued_s=began - request.arrived_s,
        first_token_s=first - request.arrived_s,
        total_s=now_s - request.arrived_s,
        preemptions=request.preemptions,
        proposed_tokens=request.proposed,
        accepted_tokens=request.accepted,
    )


def _after(moment_s: float | None, request: Request) -> float | None:
    return None if moment_s is None else moment_s - request.arrived_s
