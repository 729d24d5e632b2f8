"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Health(Enum):
    FINE = "fine"
    SLOW = "could be better"  # a server runs, slower or with less than it could have
    BROKEN = "broken"  # a server would fail, or fail later


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`change` says what to do; empty where nothing is to be done."""

    check: str
    health: Health
    found: str
    change: str = ""

    def __post_init__(self) -> None:
        assert (self.health is Health.FINE) == (not self.change), f"{self} must say what to change, or be fine"


def fine(check: str, found: str) -> Finding:
    return Finding(check=check, health=Health.FINE, found=found)


def slow(check: str, found: str, change: str) -> Finding:
    return Finding(check=check, health=Health.SLOW, found=found, change=change)


def broken(check: str, found: str, change: str) -> Finding:
    return Finding(check=check, health=Health.BROKEN, found=found, change=change)
