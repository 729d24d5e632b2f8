"""What a cache does as time passes: outcomes are applied, what ran out is dropped, and callers that have nothing else to do wait.

Decides nothing about requests; `facade.py` has the orders that engines give.
"""

from __future__ import annotations

from collections.abc import Callable

from stepwell.base.errors import LeaseError, LoadFailed
from stepwell.cache.report import StepReport
from stepwell.store_tier.ticket import Ticket
from stepwell.store_tier.tier import StoreTier
from stepwell.tiers.lease import Lease, Leases, LeaseState
from stepwell.tiers.lifetime import Pins, drop_expired
from stepwell.tiers.state import CacheState

POLL_S = 0.0005  # between two steps of `wait` where some answers do not wake
UPKEEP_S = 0.02  # between two steps of `wait` at most, for what the clock decides
DRAIN_S = 0.02  # between two steps of `close`: what one job hangs on must not hold up the others


class Upkeep:
    """Steps one cache. Its thread."""

    def __init__(self, state: CacheState, store_tier: StoreTier, leases: Leases, pins: Pins) -> None:
        self._state = state
        self._store_tier = store_tier
        self._leases = leases
        self._pins = pins
        self._unreported: StepReport | None = None  # what `wait` found, for the next `step` to report

    def step(self) -> StepReport:
        """One step, with findings of earlier ones that were not reported yet. Never blocks."""
        report, earlier = self._advance(), self._unreported
        self._unreported = None
        return report.after(earlier) if earlier is not None else report

    def wait(self, held: Lease | Ticket, timeout_s: float) -> None:
        """Steps until a ticket or a lease is ready, with every answer. Raises LoadFailed and LeaseError."""
        clock, wakeup = self._state.clock, self._state.wakeup
        deadline_s = clock.now() + timeout_s
        while not held.ready:
            wakeup.answered.clear()
            if isinstance(held, Lease) and not held.failed:
                held.must_be(LeaseState.LOADING)
            self._unreported = self._advance().after(self._unreported or StepReport())
            if isinstance(held, Lease) and held.failed:
                raise LoadFailed(f"{held}: bytes it needed did not arrive; release it and look the prompt up again")
            if not held.ready:
                if (now := clock.now()) >= deadline_s:
                    raise LeaseError(f"{held} is not ready after {timeout_s:g} s")
                until_s = min(deadline_s, held.ended_s) if isinstance(held, Ticket) and held.awaited else deadline_s
                if wakeup.polled:
                    clock.sleep(POLL_S)
                else:
                    clock.wait(wakeup.answered, min(UPKEEP_S, until_s - now))

    def close(self, timeout_s: float) -> bool:
        """Waits for copies and then for the store, for so long in all, and stops the workers; false when something is left."""
        state, store_tier = self._state, self._store_tier
        deadline_s = state.clock.now() + timeout_s
        try:
            self._settle(deadline_s, lambda: state.copies.num_awaited, state.copies.drain)
            store_tier.end_deferral()
            self._settle(deadline_s, lambda: state.copies.num_awaited + store_tier.num_awaited, self._drain)
            undone = state.copies.num_running + store_tier.num_busy
        finally:
            state.copies.withdraw_all()
            store_tier.close()
            state.copies.close()
        return not undone

    # ---- inside -----------------------------------------------------------------------------------

    def _advance(self) -> StepReport:
        state = self._state
        state.give_back_host()
        completions = state.copies.apply()
        errors = {done.job: done.error for done in completions if done.error is not None}
        timeout_s = state.copy_timeout_s
        errors |= dict.fromkeys(state.copies.give_up_overdue(timeout_s), f"no answer within {timeout_s:g} s")
        detached, store_failures = self._store_tier.step()
        self._pins.drop_expired()
        drop_expired(state, self._pins.nodes)
        settled = self._leases.settle(errors)
        return StepReport(
            completed=len(completions),
            failures=(*errors.values(), *store_failures),
            ready=settled.ready,
            failed=settled.failed,
            finished=settled.finished,
            running=state.copies.num_running,
            storing=self._store_tier.num_busy,
            detached=tuple(detached),
        )

    def _drain(self, timeout_s: float) -> None:
        if self._state.copies.num_awaited:
            self._state.copies.drain(timeout_s)
        self._store_tier.drain(timeout_s)

    def _settle(self, deadline_s: float, num_awaited: Callable[[], int], drain: Callable[[float], None]) -> None:
        """Steps until nothing is awaited, or the time is over."""
        clock = self._state.clock
        self._advance()
        while num_awaited() and clock.now() < deadline_s:
            drain(min(deadline_s - clock.now(), DRAIN_S))
            self._advance()
