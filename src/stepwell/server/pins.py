"""Pins by number, for people who cannot hold a Python object. Everything here runs on the engine's thread."""

from __future__ import annotations

from dataclasses import dataclass
from math import isinf

from stepwell.engine.engine import Engine
from stepwell.server.access.principals import Principal
from stepwell.tiers.lifetime import Pin


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kept:
    pin: Pin
    prompt_tokens: int
    tenant: str | None
    salt: str | None  # of the request, without the tenant's


class Pins:
    """What is pinned. Pins that ran out are forgotten when somebody looks."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._last = 0

    def add(
        self, engine: Engine, owner: Principal, tokens: list[int], *, salt: str | None, ttl_s: float | None
    ) -> dict[str, object]:
        """Pins what is cached of an owner's prompt. Nothing is kept, and no number given, when that is nothing."""
        namespace = engine.cache.namespace_for(salt=owner.salted(salt), tenant=owner.name)
        pin = engine.cache.pins.add(tokens, namespace=namespace, ttl_s=owner.ttl_s(ttl_s))
        kept = _Kept(pin=pin, prompt_tokens=len(tokens), tenant=owner.name, salt=salt)
        if pin.tokens == 0:
            engine.cache.pins.release(pin)
            return _shown(engine, None, kept)
        self._last += 1
        self._kept[self._last] = kept
        return _shown(engine, self._last, kept)

    def shown(self, engine: Engine, to: Principal) -> list[dict[str, object]]:
        """Those of a tenant to itself, and all to the operator."""
        self._forget_ended(engine)
        return [_shown(engine, number, kept) for number, kept in self._kept.items() if to.operates or kept.tenant == to.name]

    def release(self, engine: Engine, number: int) -> bool:
        """False when there is no such pin, or it ran out."""
        self._forget_ended(engine)
        kept = self._kept.pop(number, None)
        if kept is not None:
            engine.cache.pins.release(kept.pin)
        return kept is not None

    def release_all(self, engine: Engine, *, tenant: str | None, salt: str | None) -> int:
        """Those of a tenant, or of a salt of it; all where neither is given. Returns how many."""
        self._forget_ended(engine)
        everybody = tenant is None and salt is None
        numbers = [
            number
            for number, kept in self._kept.items()
            if everybody or (kept.tenant == tenant and (salt is None or kept.salt == salt))
        ]
        return sum(self.release(engine, number) for number in numbers)

    def _forget_ended(self, engine: Engine) -> None:
        """The cache lets go of pins by the clock, in its step; the next one may be yet to come."""
        now = engine.clock.now()
        for number, kept in list(self._kept.items()):
            if kept.pin.expires_at_s <= now:
                del self._kept[number]


def _shown(engine: Engine, number: int | None, kept: _Kept) -> dict[str, object]:
    until = kept.pin.expires_at_s
    return {
        "id": number,
        "tenant": kept.tenant,
        "pinned_tokens": kept.pin.tokens,
        "prompt_tokens": kept.prompt_tokens,
        "expires_in_s": None if isinf(until) else max(until - engine.clock.now(), 0.0),
    }
