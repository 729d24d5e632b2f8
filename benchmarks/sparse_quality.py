"""What picking loses: perplexity against the budget, and facts found in a long text, with Quest and ClusterKV beside dense.

    make sparse-quality                     both models, contexts of 4,096 (12 minutes of CPU time) and 7,424 tokens
    make sparse-quality ARGS="--quick"      a context of 2,048 tokens (5 minutes of CPU time)

The context is this project's own documents, with facts put between paragraphs ("Zorbin Kellavar was born in the town of
Marrowick."). It is computed once, by dense attention. What follows is computed as an answer would be, every token picking for
itself: the text goes on for some hundred tokens, whose perplexity is measured; and of each fact the beginning is repeated, and it
counts as found if every token of the rest is the likeliest one. "window" chooses nothing: the first 16 tokens and the last ones.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from engine.machine import machine
from engine.models import checkpoint_of
from sparse.context import NEVER, Context, built, with_budget
from sparse.quality_plot import draw
from stepwell.engine.models.base import Decoder
from stepwell.engine.models.selectors import RECENT, SINKS

ROOT = Path(__file__).parents[1]
MODELS = ("smollm2-135m", "gemma-3-270m")
DOCUMENTS = ("architecture.md", "operations.md", "policies.md", "security.md", "tenants.md")
FACTS = (
    ("Zorbin Kellavar was born in the town of", " Marrowick"),
    ("Old Mister Pellworth keeps his savings in a", " teapot"),
    ("Thalia Quimby lives in the village of", " Osterfeld"),
    ("The code that opens the vault in Lisbon is", " 7391"),
    ("Doctor Ebbweather wrote his thesis about", " jellyfish"),
    ("The captain of the ship Aurelia was named", " Bartholomew Finch"),
    ("The violin of Ingrid Vasterholm was stolen in", " Bucharest"),
    ("Professor Lindqvarn teaches the history of", " candles"),
)
METHODS = {"window": ("quest", (64,)), "quest": ("quest", (64,)), "clusterkv": ("clusterkv", (256, 64))}  # by pages, the first
# of them in which a budget has room for what is always picked


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Tokens of a context, how its text goes on, and what is asked of it: tokens, of which the last `answers` are the answer."""

    context: Sequence[int]
    following: Sequence[int]
    questions: Sequence[tuple[Sequence[int], int]]


def main() -> None:
    args = _arguments()
    console, started = Console(width=120), time.monotonic()
    results: list[dict[str, Any]] = []
    for length in args.contexts:
        for name in args.models:
            task = task_of(name, length, args.tokens)
            at = time.monotonic()
            context = Context.compute(name, task.context)
            console.print(f"{name}: {length:,} tokens computed in {time.monotonic() - at:.0f} s", highlight=False)
            results += measure(name, context, task, args.budgets)
            console.print(table_of(name, length, results))
            write(args, results, round(time.monotonic() - started))
    console.print(f"{time.monotonic() - started:.0f} s; written to {args.json.name} and {args.svg.name}")


def write(args: argparse.Namespace, results: Sequence[dict[str, Any]], seconds: int) -> None:
    text = hashlib.sha256("".join((ROOT / "docs" / each).read_text() for each in DOCUMENTS).encode()).hexdigest()
    settings = {"budgets": args.budgets, "tokens": args.tokens, "text_sha256": text}
    args.json.write_text(
        json.dumps({"machine": machine("cpu"), "seconds": seconds, **settings, "results": results}, indent=1) + "\n"
    )
    args.svg.write_text(draw(panels_of(results)))


def task_of(name: str, length: int, more: int) -> Task:
    """Facts lie at equal distances, between paragraphs."""
    text = checkpoint_of(name).text
    assert text is not None, f"{name} has no tokenizer"
    tokens: list[int] = list(text.encode(""))  # what a text begins with
    left = [(length * (2 * number + 1) // (2 * len(FACTS)), "".join(fact)) for number, fact in enumerate(FACTS)]
    for piece in "\n\n".join((ROOT / "docs" / each).read_text() for each in DOCUMENTS).split("\n\n"):
        if left and len(tokens) >= left[0][0]:
            tokens += text.encode(f"{left.pop(0)[1]}.\n\n", special=False)
        tokens += text.encode(f"{piece}\n\n", special=False)
    assert not left and len(tokens) >= length + more, "the documents are too short"
    questions = []
    for begun, rest in FACTS:
        asked, whole = (text.encode(f"\n\n{each}", special=False) for each in (begun, begun + rest))
        assert list(whole[: len(asked)]) == list(asked), f"the tokens of {begun + rest!r} do not begin with those of its question"
        questions.append((whole, len(whole) - len(asked)))
    return Task(context=tokens[:length], following=tokens[length : length + more], questions=questions)


def measure(name: str, context: Context, task: Task, budgets: Sequence[int]) -> list[dict[str, Any]]:
    made = []
    dense = built(name, None, page_tokens=64)
    made.append({"method": "dense", "page": 64, "budget": None, **figures(dense, context, task)})
    for method, (selector, sizes) in METHODS.items():
        models = {page: built(name, selector, page_tokens=page) for page in sizes}
        for budget in budgets:
            page = next((each for each in sizes if _least(selector, each) <= budget < len(context.tokens)), None)
            if page is not None:
                picking = with_budget(models[page], budget, window=method == "window")
                made.append({"method": method, "page": page, "budget": budget, **figures(picking, context, task)})
    return [{"model": name, "context": len(context.tokens), **each} for each in made]


def _least(selector: str, page: int) -> int:
    """The smallest budget."""
    unit = page if selector == "clusterkv" else 16
    return SINKS + max(RECENT, unit) + unit


def figures(model: Decoder, context: Context, task: Task) -> dict[str, Any]:
    """Everything is computed as an answer: each of its tokens looks at what it picks."""
    started, length = time.monotonic(), len(context.tokens)
    runs = [task.following, *(asked for asked, _ in task.questions)]
    page = model.spec.page_tokens
    pages = context.over(model, sum(-(-len(run) // page) * page for run in runs))
    picks_from = NEVER if model.selector is None else length
    following, *asked = pages.forward(model, runs, length, picks_from, logits=True)
    loss = torch.nn.functional.cross_entropy(following[:-1], torch.tensor(task.following[1:])).item()
    found = 0
    for logits, (tokens, answers) in zip(asked, task.questions, strict=True):
        found += logits[-answers - 1 : -1].argmax(dim=-1).tolist() == list(tokens[-answers:])
    seconds = round(time.monotonic() - started, 1)
    return {"loss": loss, "perplexity": math.exp(loss), "found": found, "facts": len(asked), "seconds": seconds}


def table_of(name: str, length: int, results: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=f"{name}, behind {length:,} tokens", title_justify="left")
    for head in ("method", "pages of", "tokens picked", "perplexity", "of dense", "facts found"):
        table.add_column(head, justify="left" if head == "method" else "right")
    mine = [each for each in results if each["model"] == name and each["context"] == length]
    dense = mine[0]["perplexity"]
    for each in mine:
        budget = "all" if each["budget"] is None else f"{each['budget']:,}"
        share = f"{each['perplexity'] / dense:.3f}"
        found = f"{each['found']} of {each['facts']}"
        table.add_row(each["method"], str(each["page"]), budget, f"{each['perplexity']:.2f}", share, found)
    return table


def panels_of(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    panels: dict[str, Any] = {}
    for each in results:
        title = f"{each['model']}, behind {each['context']:,} tokens"
        if each["budget"] is None:
            panels[title] = (each["perplexity"], {})
        else:
            panels[title][1].setdefault(each["method"], []).append((each["budget"], each["perplexity"]))
    return panels


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a context of 2,048 tokens, two budgets")
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME", help=f"(default: {' '.join(MODELS)})")
    parser.add_argument("--contexts", nargs="+", type=int, metavar="TOKENS", help="multiples of 256 (default: 4096 7424)")
    parser.add_argument("--budgets", nargs="+", type=int, metavar="TOKENS", help="(default: 256 512 1024 2048)")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="whose perplexity counts (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=ROOT / "bench-sparse-quality.json", help="(default: %(default)s)")
    parser.add_argument("--svg", type=Path, default=ROOT / "bench-sparse-quality.svg", help="(default: %(default)s)")
    args = parser.parse_args()
    args.contexts = args.contexts or ([2048] if args.quick else [4096, 7424])
    args.budgets = args.budgets or ([256, 1024] if args.quick else [256, 512, 1024, 2048])
    return args


if __name__ == "__main__":
    sys.exit(main())
