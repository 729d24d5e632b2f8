"""The conversations of the demo: two users with the same assistant and tools, in turns. Texts only.

A turn is one request. What a tool found comes back as a message of its own, and is asked about next.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]

TOOLS = (
    ("search_library", "Finds passages in the archive of the waterworks.", {"query": "what to look for", "limit": "how many"}),
    ("read_gauge", "The level of a well over the last days.", {"well": "its number", "days": "how many days back"}),
    ("open_ticket", "Asks the maintenance crew for a visit.", {"well": "its number", "reason": "why", "urgent": "true or false"}),
)

_RULES = """You are the assistant of a waterworks that looks after forty stepwells. You answer people who walk from
well to well with a phone in one hand and a notebook in the other, so answer in one or two short sentences, name the
well you speak of, and say where a figure comes from. A stepwell is a deep pond that is reached by flights of steps;
some have seven storeys of pillared landings, and the water may stand on any of them. Levels are measured in steps
below the rim, since every step is as high as the next. In the dry months a well may fall by a step a day; after rain
it rises within hours, and silt rises with it. Never promise a visit that was not ordered with a tool, never guess a
level that no gauge has reported, and when two reports differ, say so and name both. When a question is not about
wells, say kindly that you cannot help. Words in capital letters are names of gates: EAST, LION, OLD and RIVER. Gate
RIVER is closed from July to September. The archive holds reports from 1911 on; the older ones count in hands, of
which four make a step."""

_FOUND = """Report of the inspection of well {well}, second landing. The water stood {low} steps below the rim in the
morning and {high} in the evening, which agrees with the gauge. The third pillar from the left shows a crack as wide
as a coin, first noted in the spring; it has not grown. Silt covers the four lowest steps of the flight at gate
{gate}. The pump was run for {hours} hours without trouble, and the basin filled at the usual rate of one hand in an
hour. Pigeons nest above the upper landing, and the drain below it was cleared of straw. The masons ask for lime
mortar, not cement, since cement broke away with the last frost. The lamp at the foot of the stairs is out of order.
Visitors were few, and none went past the rope. The inspector advises to sweep the steps before the rain, to watch the
crack for another season, and to measure again in {days} days, at the same hour, from the same mark on the wall."""

_ASKED = (
    "How far down is the water in well {well} today, and is that usual for the season?",
    "What did the last inspection of well {well} say about its pillars and its steps?",
    "Which gate should I take to well {well} if I carry a pump, and what should I bring for the masons?",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request: everything said so far by one person, the last of it new."""

    person: str
    number: int  # of this person's turns, from 1
    new: tuple[Message, ...]


def opening() -> Message:
    """The beginning of every conversation: the rules and the tools."""
    tools = [
        {
            "name": name,
            "description": says,
            "parameters": {key: {"type": "string", "description": of} for key, of in fields.items()},
        }
        for name, says, fields in TOOLS
    ]
    return {"role": "system", "content": f"{_RULES}\nYou may call these tools:\n{json.dumps(tools, indent=1)}"}


def turns(rounds: int) -> Iterator[Turn]:
    """The turns of both users, one after the other, `rounds` each."""
    for number in range(1, rounds + 1):
        for at, person in enumerate(("Asha", "Bo")):
            yield Turn(person=person, number=number, new=tuple(_said(7 + 5 * at + number, number)))


def _said(well: int, number: int) -> Iterator[Message]:
    """Before a question the tool's answer to the one before."""
    if number > 1:
        found = _FOUND.format(
            well=well, low=well + 9, high=well + 8, gate="LION" if well % 2 else "EAST", hours=well % 6 + 2, days=number * 3
        )
        content = json.dumps({"tool": "search_library", "query": f"well {well}", "found": found})
        yield {"role": "tool", "tool_call_id": f"call-{number}", "content": content}  # routers want the id
    yield {"role": "user", "content": _ASKED[(number - 1) % len(_ASKED)].format(well=well)}
