"""A few-shot question set of our own: subjects, each with worked examples and with questions that all begin with them."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

Problem = tuple[str, str]  # a question, and its answer with the way to it


def prompts(subjects: int, questions: int, *, shots: int) -> list[str]:
    """Subject by subject; the questions of one share everything but their last lines."""
    made = []
    for number in range(subjects):
        problem, random = PROBLEMS[number % len(PROBLEMS)], Random(number)
        worked = "".join(f"Question: {asked}\nAnswer: {answer}\n\n" for asked, answer in (problem(random) for _ in range(shots)))
        head = f"Set {number + 1}. Each question has one number for an answer; show how you find it.\n\n{worked}"
        made += [f"{head}Question: {problem(random)[0]}\nAnswer:" for _ in range(questions)]
    return made


def _shop(random: Random) -> Problem:
    count, price, paid = random.randint(2, 9), random.randint(3, 19), 200
    asked = f"Somebody buys {count} notebooks at {price} coins each and pays with a note of {paid}. How much comes back?"
    return (
        asked,
        f"The notebooks cost {count} x {price} = {count * price}, and {paid} - {count * price} = {paid - count * price}.",
    )


def _tank(random: Random) -> Problem:
    filled, drained, hours = random.randint(20, 60), random.randint(5, 19), random.randint(3, 12)
    asked = f"A tank takes in {filled} litres an hour and loses {drained}. What is in it after {hours} hours, if it was empty?"
    gain = filled - drained
    return asked, f"It gains {filled} - {drained} = {gain} an hour, and {hours} x {gain} = {hours * gain}."


def _walk(random: Random) -> Problem:
    steps, landings, flights = random.randint(8, 25), random.randint(2, 9), random.randint(2, 6)
    asked = f"A well has {flights} flights of {landings} landings, with {steps} steps to each landing. How many steps lead down?"
    return asked, f"A flight has {landings} x {steps} = {landings * steps}, so {flights} have {flights * landings * steps}."


def _share(random: Random) -> Problem:
    people, each, left = random.randint(3, 9), random.randint(4, 15), random.randint(1, 2)
    asked = (
        f"{people * each + left} apples are shared by {people} people, who take as many as they can equally. How many are left?"
    )
    return asked, f"Each takes {each}, which makes {people * each} of {people * each + left}: {left} are left."


PROBLEMS: tuple[Callable[[Random], Problem], ...] = (_shop, _tank, _walk, _share)
