"""How families write calls of tools in JSON or Python: a reader for each form, over a block without the markers around it.

Readers emit calls as they come (`source.py`), and raise ValueError for text that is none. Forms without JSON are in `tags.py`.
"""

from __future__ import annotations

import ast
import json
import re
import string

from stepwell.server.api.parsing.pieces import Call
from stepwell.server.api.parsing.source import DONE, SPACE, Reading, Source, Texts
from stepwell.server.api.parsing.tags import dsml, qwen_coder

_ARGUMENTS = ("arguments", "parameters")
_FENCE = "`"
_KIMI_HEAD = re.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


# ---- JSON -------------------------------------------------------------------------------------------


def json_calls(source: Source, texts: Texts) -> Reading[None]:
    """Objects one after the other, in a list or behind semicolons, perhaps as a block of Markdown."""
    yield from _objects(source, bare=False)


def json_answer(source: Source, texts: Texts) -> Reading[None]:
    """As `json_calls`, without markers that distinguish it from other JSON: an object with a name alone is no call."""
    yield from _objects(source, bare=True)


def arguments_alone(source: Source, name: str, id: str | None = None) -> Reading[None]:
    """A call that was named before: its arguments are the object that comes next."""
    if not name or (yield from source.skip(SPACE)) != "{":
        raise ValueError("a call needs a name and an object of arguments")
    yield Call(name=name, id=id)
    yield from source.object()


def _objects(source: Source, *, bare: bool) -> Reading[None]:
    yield from _fence(source)
    while (first := (yield from source.skip(SPACE + ";,[]"))) == "{":
        yield from _object(source, bare=bare)
    if first == _FENCE:
        first = yield from source.skip(SPACE + _FENCE)
    if first:
        raise ValueError("something else than calls")


def _fence(source: Source) -> Reading[None]:
    if (yield from source.skip(SPACE)) == _FENCE:
        yield from source.skip(_FENCE)
        yield from source.skip(string.ascii_letters + "_")


def _object(source: Source, *, bare: bool) -> Reading[None]:
    """`{"name": ..., "arguments": {...}}`, emitted as the arguments come, or once it is whole if the name comes after them."""
    name, arguments, emitted = "", None, False
    yield from source.must_have("{")
    while (first := (yield from source.skip(SPACE + ","))) == '"':
        key = yield from source.string()
        yield from source.skip(SPACE)
        yield from source.must_have(":")
        begins = yield from source.skip(SPACE)
        if key in _ARGUMENTS and begins == "{" and name and arguments is None:
            emitted, arguments = True, ""
            yield from arguments_alone(source, name)
            continue
        value = yield from source.value()
        if key == "name" and not name and begins == '"':
            name = json.loads(value)
            name.encode()  # raises ValueError for half characters
        elif key in _ARGUMENTS and arguments is None:
            arguments = value
    if first != "}" and not (emitted and not first):  # the last of its brackets may be missing
        raise ValueError("an object that does not end")
    yield from source.must_have("}")
    yield DONE if emitted else _held(name, arguments, bare=bare)


def _held(name: str, arguments: str | None, *, bare: bool) -> Call:
    """A call whose arguments were not emitted as they came. They may be JSON within JSON, or missing. Raises ValueError."""
    if not name or (bare and arguments is None):
        raise ValueError("no call")
    found = json.loads(arguments or "{}")
    if isinstance(found, str):
        arguments, found = _whole(found), json.loads(found or "{}")
    if not isinstance(found, dict):
        raise ValueError("arguments that are no object")
    return Call(name=name, arguments=arguments or "{}", ends=True)


def _whole(text: str) -> str:
    """JSON in which half characters are escapes again, as the model wrote them: they cannot be encoded."""
    return text.encode(errors="backslashreplace").decode()


# ---- names, then JSON -------------------------------------------------------------------------------


def hermes(source: Source, texts: Texts) -> Reading[None]:
    """JSON, or as Qwen3-Coder writes it, in tags."""
    yield from (json_calls if (yield from source.skip(SPACE)) != "<" else qwen_coder)(source, texts)


def mistral(source: Source, texts: Texts) -> Reading[None]:
    """A list of objects, or `name[ARGS]{...}`, or `name{...}`, each behind a marker of its own."""
    while first := (yield from source.skip(SPACE + ";,]")):
        if first == "{":
            yield from _object(source, bare=False)
        elif first == "[":
            marker = "[TOOL_CALLS]" if (yield from source.peek(2)) == "[T" else "["
            yield from source.must_have(marker)
        else:
            name = yield from source.word("_.-")
            id = yield from _tagged(source, "[CALL_ID]")
            if (yield from source.skip(SPACE)) == "[":
                yield from source.must_have("[ARGS]")
            yield from arguments_alone(source, name, id)


def _tagged(source: Source, tag: str) -> Reading[str | None]:
    """The word behind a tag, if that comes next."""
    if (yield from source.skip(SPACE)) != tag[0] or (yield from source.peek(2)) != tag[:2]:
        return None
    yield from source.must_have(tag)
    return (yield from source.word("_-"))


def kimi(source: Source, texts: Texts) -> Reading[None]:
    """`functions.name:0` names a call, and is its id in the messages that answer it."""
    while (yield from source.find("<|tool_call_begin|>")):
        head, _ = yield from source.until("<|tool_call_argument_begin|>")
        name = _KIMI_HEAD.fullmatch(head.strip())
        if name is None:
            raise ValueError("a call without a name")
        yield from arguments_alone(source, name.group(1), head.strip())
        yield from source.skip(SPACE)
        yield from source.must_have("<|tool_call_end|>")
        yield DONE


def deepseek(source: Source, texts: Texts) -> Reading[None]:
    """V3: `type<sep>name` and a block of JSON. V3.1: `name<sep>{...}`. V3.2 and V4: tags for a call and its parameters."""
    yield from source.skip(SPACE)
    if (yield from source.peek(len("<｜DSML｜"))) == "<｜DSML｜":
        yield from dsml(source, texts)
    while (yield from source.find("<｜tool▁call▁begin｜>")):
        name, _ = yield from source.until("<｜tool▁sep｜>")
        if (yield from source.skip(SPACE)) != "{":
            name, _ = yield from source.until("\n```json\n")
        yield from arguments_alone(source, name.strip())
        yield from source.skip(SPACE + _FENCE)
        yield from source.must_have("<｜tool▁call▁end｜>")
        yield DONE


# ---- Python -----------------------------------------------------------------------------------------


def gemma(source: Source, texts: Texts) -> Reading[None]:
    """JSON, or a list of calls as Python writes them, perhaps as a block of Markdown. Those are emitted when all are there."""
    yield from _fence(source)
    yield from source.skip(SPACE)
    begin = yield from source.peek(2)
    if begin[:1] != "[" or begin in ("[{", "[]"):
        yield from json_answer(source, texts)
        return
    if not begin[1:].isidentifier() and not begin[1:].isspace():
        raise ValueError("no list of calls")
    text = yield from source.rest()
    try:
        calls = _python_calls(ast.parse(text.strip(SPACE + _FENCE), mode="eval").body)
    except (SyntaxError, TypeError, MemoryError) as error:
        raise ValueError(str(error)) from None
    yield from calls


def _python_calls(tree: ast.expr) -> list[Call]:
    if not isinstance(tree, ast.List):
        raise ValueError("no list of calls")
    calls = []
    for each in tree.elts:
        if not isinstance(each, ast.Call) or each.args or any(keyword.arg is None for keyword in each.keywords):
            raise ValueError("no call with named arguments")
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in each.keywords}
        written = _whole(json.dumps(arguments, ensure_ascii=False))
        calls.append(Call(name=ast.unparse(each.func), arguments=written, ends=True))
    return calls
