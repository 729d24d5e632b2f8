"""The pages of docs/reference, made from the code: flags, metrics, HTTP routes and the Python API.

    python tools/reference.py            writes the pages
    python tools/reference.py --check    writes nothing; exit status 1 if a page differs from the code

Flags come from the parser of the `stepwell` command. Everything else is read from the source text, so neither torch nor a
web framework has to be installed, and no server starts. `tests/unit/test_reference.py` runs the check.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

Node = TypeVar("Node", bound=ast.AST)

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stepwell"
PAGES = ROOT / "docs" / "reference"
NOTE = "<!-- Made by tools/reference.py. Do not edit: change the code, then run `make docs`. -->"
PACKAGES = ("stepwell", "stepwell.engine", "stepwell.connectors.transformers")
METRIC_CALLS = {
    "CounterMetricFamily": "counter", "GaugeMetricFamily": "gauge", "HistogramMetricFamily": "histogram",
    "Counter": "counter", "Gauge": "gauge", "Histogram": "histogram", "_counter": "counter", "_histogram": "histogram",
}  # fmt: skip
CALLERS = {  # dependencies of routes, and who passes them
    "require_key": "key holders",
    "require_overview": "key holders except tenants; the admin token",
    "require_owner": "tenants; the admin token",
    "require_admin": "the admin token",
    "peer_check": "the peer token",
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes docs/reference from the code.")
    parser.add_argument("--check", action="store_true", help="only say which pages differ from the code")
    args = parser.parse_args(argv)
    differing = [name for name, text in pages().items() if not is_current(name, text)]
    if args.check:
        if differing:
            print(f"differ from the code: {', '.join(differing)} (python tools/reference.py writes them)", file=sys.stderr)
        return bool(differing)
    PAGES.mkdir(exist_ok=True)
    for name, text in pages().items():
        (PAGES / name).write_text(text)
    return 0


def pages() -> Mapping[str, str]:
    """The text of each page, by the name of its file."""
    return {"flags.md": flags(), "metrics.md": metrics(), "http.md": routes(), "python.md": python()}


def is_current(name: str, text: str) -> bool:
    return (PAGES / name).is_file() and (PAGES / name).read_text() == text


# ---- flags ----------------------------------------------------------------------------------------


def flags() -> str:
    from stepwell.cli.main import build_parser

    parts = ["# Flags", NOTE, "Every command and flag of `stepwell`, as `stepwell COMMAND --help` prints them."]
    for name, parser in commands(build_parser(), "stepwell"):
        parts.append(f"## {name}\n\n{parser.description or ''}".rstrip())
        for title, actions in grouped(parser).items():
            if title:
                parts.append(f"### {name.split()[-1]}: {title}")
            rows = [f"| {spelled(each)} | {cell(meaning(each))} |" for each in actions]
            parts.append("\n".join(["| flag | meaning |", "| --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def commands(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parser's commands, deepest names only, in the order of `--help`."""
    nested = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    if not nested:
        yield name, parser
    for action in nested:
        for word, each in action.choices.items():
            yield from commands(each, f"{name} {word}")


def grouped(parser: argparse.ArgumentParser) -> dict[str, list[argparse.Action]]:
    """What a command takes, by the title of its group; "" for arguments and flags outside of groups."""
    found: dict[str, list[argparse.Action]] = {}
    for group in parser._action_groups:
        title = "" if group.title in ("options", "positional arguments") else group.title or ""
        shown = [each for each in group._group_actions if is_shown(each)]
        if shown:
            found.setdefault(title, []).extend(shown)
    return found


def is_shown(action: argparse.Action) -> bool:
    hidden = action.help == argparse.SUPPRESS
    return not hidden and not isinstance(action, argparse._HelpAction | argparse._SubParsersAction)


def spelled(action: argparse.Action) -> str:
    value = ""
    if action.nargs != 0:
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""
        metavar = action.metavar if isinstance(action.metavar, str) else ""
        value = metavar or choices or (action.dest.upper() if action.option_strings else action.dest)
        value = f"[{value}]" if action.nargs in ("?", "*") else f"{value} ..." if action.nargs == "+" else value
    return f"`{' '.join([*(action.option_strings[-1:]), value]).strip()}`".replace("|", "\\|")


def meaning(action: argparse.Action) -> str:
    text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")
    return f"{text} (required)" if action.required and action.option_strings else text


# ---- metrics --------------------------------------------------------------------------------------


def metrics() -> str:
    found: dict[str, tuple[str, str, str]] = {}
    for path in sorted((SOURCE / "server" / "monitoring").glob("*.py")):
        for call in nodes(path, ast.Call):
            name = called(call)
            if name in METRIC_CALLS and len(call.args) >= 2 and is_text(call.args[0]) and is_text(call.args[1]):
                series, says = text_of(call.args[0]), text_of(call.args[1])
                kind = METRIC_CALLS[name]
                found[series + ("_total" if kind == "counter" else "")] = (kind, ", ".join(labels_of(call)), says)
    units = re.search(r"^_UNITS = \((.*)\)$", (SOURCE / "server/monitoring/engine_metrics.py").read_text(), re.MULTILINE)
    assert units is not None, "the units of the cache's counters are not where they were"
    for unit in re.findall(r'"(\w+)"', units[1]):
        found[f"stepwell_cache_{unit}_total"] = ("counter", "event", f"Counters of the cache that count {unit}.")
    rows = [f"| `{name}` | {kind} | {labels} | {cell(says)} |" for name, (kind, labels, says) in sorted(found.items())]
    table = "\n".join(["| name | kind | labels | meaning |", "| --- | --- | --- | --- |", *rows])
    also = sorted(set(re.findall(r'"(vllm:\w+)"', (SOURCE / "server/monitoring/metrics.py").read_text())))
    parts = [
        "# Metrics", NOTE,
        "Every series of `GET /metrics`. What to watch is in [operations](../operations.md#what-to-watch).", table,
        "`process_*` adds the CPU time, memory and open files of the process.",
        "## In vLLM's names", "With `--vllm-metrics`, labelled `model_name` and `engine`; counters end in `_total`.",
        "\n".join(f"* `{name}`" for name in also),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def labels_of(call: ast.Call) -> list[str]:
    """Labels of a metric: a list, by position or as `labels=`, or further texts of `_counter`."""
    lists = [each for each in [*call.args[2:3], *(word.value for word in call.keywords if word.arg == "labels")] if is_list(each)]
    if lists:
        return [text_of(each) for each in lists[0].elts]  # type: ignore[attr-defined]
    return [text_of(each) for each in call.args[2:] if is_text(each)]


# ---- routes ---------------------------------------------------------------------------------------


def routes() -> str:
    rows = []
    for path in sorted((SOURCE / "server").rglob("*.py")):
        for maker in nodes(path, ast.FunctionDef):
            rows += [row for function in maker.body for row in routes_of(maker, function)]
    table = "\n".join(["| route | who may call it | what it does |", "| --- | --- | --- |", *sorted(rows)])
    says = (
        "Every route of `stepwell serve`. Fields of requests: [operations](../operations.md#requests) and\n"
        "[answers](../answers.md). Without `--api-key` and `--tenants` every client is a key holder."
    )
    page = "`GET /ui` serves a page for a browser, open to everyone; it holds no figures itself."
    return "\n\n".join(["# HTTP routes", NOTE, says, table, page]) + "\n"


def routes_of(maker: ast.FunctionDef, statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.If):
        for inner in statement.body:
            yield from routes_of(maker, inner)
    if not isinstance(statement, ast.AsyncFunctionDef):
        return
    for decorator in statement.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func).startswith("router."):
            verbs = re.findall(r"'([A-Z]+)'", ast.unparse(decorator)) or [ast.unparse(decorator.func)[7:].upper()]
            verb = "GET" if ast.unparse(decorator.func) == "router.api_route" else verbs[0]
            says = ast.get_docstring(statement)
            assert says, f"{statement.name} ({maker.name}) has no docstring: it is the route's description"
            who = callers(ast.unparse(decorator), ast.unparse(maker))
            yield f"| `{verb} {text_of(decorator.args[0])}` | {who} | {cell(says.split(chr(10) * 2)[0])} |"


def callers(decorator: str, maker: str) -> str:
    own = [who for name, who in CALLERS.items() if f"{name}(" in decorator]
    if "keyed" in decorator:
        own = [CALLERS["require_key"]]
    router = re.search(r"APIRouter\((.*)\)", maker)
    shared = [who for name, who in CALLERS.items() if router is not None and f"{name}(" in router[1]]
    who = (own or shared or ["everyone"])[0]
    return f"{who}; everyone with `--open-metrics`" if "open_metrics" in decorator + (router[1] if router else "") else who


# ---- Python ---------------------------------------------------------------------------------------


def python() -> str:
    parts = [
        "# Python API",
        NOTE,
        "Public names by package, with what their docstrings say. Examples: [in Python](../python.md).",
    ]
    for package in PACKAGES:
        parts.append(f"## {package}")
        homes = homes_of(package)
        for name in sorted(homes, key=str.lower):
            parts += described(name, homes[name])
    return "\n\n".join(part for part in parts if part) + "\n"


def homes_of(package: str) -> dict[str, str]:
    """The module of each public name of a package."""
    path = ROOT / "src" / Path(*package.split(".")) / "__init__.py"
    tree = ast.parse(path.read_text())
    imported = {
        alias.asname or alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("stepwell")
        for alias in node.names
    }
    return imported


def described(name: str, module: str) -> Iterator[str]:
    path = ROOT / "src" / Path(*module.split("."))
    path = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            yield f"### {name}\n\n```python\n{signature(node)}\n```"
            yield docstring(node)
        elif isinstance(node, ast.ClassDef) and node.name == name:
            yield f"### {name}\n\n`{module}.{name}`"
            yield docstring(node)
            yield from members(node, base_classes(path, node))


def base_classes(path: Path, node: ast.ClassDef) -> list[ast.ClassDef]:
    """Classes of ours that this one inherits from, which are imported by name."""
    imports = {
        alias.name: each.module
        for each in nodes(path, ast.ImportFrom)
        if each.module and each.module.startswith("stepwell")
        for alias in each.names
    }
    found = []
    for base in node.bases:
        home = imports.get(ast.unparse(base))
        if home is not None:
            file = (ROOT / "src" / Path(*home.split("."))).with_suffix(".py")
            found += [each for each in nodes(file, ast.ClassDef) if each.name == ast.unparse(base)]
    return found


def members(node: ast.ClassDef, bases: Sequence[ast.ClassDef]) -> Iterator[str]:
    fields, methods = [], []
    for each in [member for owner in (node, *bases) for member in owner.body]:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and not each.target.id.startswith("_"):
            default = f" = {ast.unparse(each.value)}" if each.value is not None else ""
            fields.append(f"{each.target.id}: {ast.unparse(each.annotation)}{default}")
        elif isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and each.targets[0].id.isupper():
            fields.append(ast.unparse(each))
        elif isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            methods.append(each)
    if fields:
        yield "```python\n" + "\n".join(fields) + "\n```"
    for method in methods:
        yield f"#### {node.name}.{method.name}\n\n```python\n{signature(method)}\n```"
        yield docstring(method)


def signature(node: ast.FunctionDef) -> str:
    """A call as Python writes it; one argument a line where it is long."""
    words = arguments(node.args)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    line = f"{node.name}({', '.join(words)}){returns}"
    return line if len(line) <= 110 else f"{node.name}(\n" + "".join(f"    {word},\n" for word in words) + f"){returns}"


def arguments(args: ast.arguments) -> list[str]:
    plain = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    words = [argument(each, default) for each, default in zip(plain, defaults, strict=True) if each.arg not in ("self", "cls")]
    if args.vararg is not None:
        words.append("*" + argument(args.vararg, None))
    elif args.kwonlyargs:
        words.append("*")
    words += [argument(each, default) for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return [*words, *(["**" + argument(args.kwarg, None)] if args.kwarg is not None else [])]


def argument(arg: ast.arg, default: ast.expr | None) -> str:
    return ast.unparse(arg) + (f" = {ast.unparse(default)}" if default is not None else "")


def docstring(node: ast.ClassDef | ast.FunctionDef) -> str:
    """The first paragraph."""
    return (ast.get_docstring(node) or "").split("\n\n")[0]


# ---- source text ----------------------------------------------------------------------------------


def nodes(path: Path, kind: type[Node]) -> Iterator[Node]:
    return (each for each in ast.walk(ast.parse(path.read_text())) if isinstance(each, kind))


def called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def is_list(node: ast.expr) -> bool:
    return isinstance(node, ast.List) and all(map(is_text, node.elts))


def text_of(node: ast.expr) -> str:
    assert isinstance(node, ast.Constant), ast.unparse(node)
    return str(node.value)


def cell(text: str) -> str:
    """Text as one cell of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
