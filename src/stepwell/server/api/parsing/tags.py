"""How families write calls whose arguments are no JSON: readers that make JSON of them as they come (`source.py`)."""

from __future__ import annotations

import json
import re
from typing import Any

from stepwell.server.api.parsing.pieces import Call
from stepwell.server.api.parsing.source import SPACE, Reading, Source, Texts

_GEMMA_QUOTE = "<escape>"
_NAME = re.compile(r"[^\s<>{}\[\]\"]+")


def dsml(source: Source, texts: Texts) -> Reading[None]:
    """`<invoke name="f"><parameter name="key" string="true">value</parameter></invoke>`, each tag with DeepSeek's mark."""
    parameter, behind_call = '<｜DSML｜parameter name="', "</｜DSML｜invoke>"
    behind_parameter = "</｜DSML｜parameter>"
    while (yield from source.find('<｜DSML｜invoke name="')):
        head, _ = yield from source.until(">")
        yield Call(name=_must_be(head.removesuffix('"')), arguments="{")
        comma = ""
        while (yield from source.next_tag(parameter, behind_call)) == parameter:
            head, _ = yield from source.until(">")
            key, _, kind = head.partition('"')
            prefix, comma = f"{comma}{_quoted(key)}: ", ", "
            if kind.strip() != 'string="false"':
                yield Call(arguments=f'{prefix}"')
                yield from source.text(behind_parameter)
                yield Call(arguments='"')
            else:
                value, _ = yield from source.raw(behind_parameter)
                yield Call(arguments=prefix + _as_json(value))
        yield Call(arguments="}", ends=True)


def qwen_coder(source: Source, texts: Texts) -> Reading[None]:
    """`<function=name><parameter=key>value</parameter></function>`. The schema says which values are text."""
    while (yield from source.find("<function=")):
        head, _ = yield from source.until(">")
        name = _must_be(head.strip())
        yield Call(name=name, arguments="{")
        yield from _parameters(source, texts.get(name, frozenset()))
        yield Call(arguments="}", ends=True)


def _parameters(source: Source, are_text: frozenset[str]) -> Reading[None]:
    """Ends of values may be missing, and so may that of the function where the block was closed.

    The format puts line ends around a value; others are the value's own.
    """
    begin, end, behind = "<parameter=", "</function>", "</parameter>"
    ends = [f"{lead}{marker}" for marker in (behind, begin, end) for lead in ("", "\n")]
    marker = yield from source.next_tag(begin, end, or_end=True)
    comma = ""
    while marker == begin:
        key, _ = yield from source.until(">")
        key = key.strip()
        prefix = f"{comma}{_quoted(key)}: "
        if key in are_text:
            yield Call(arguments=f'{prefix}"')
            marker = yield from source.text(*ends, or_end=True, line_end=True)
            yield Call(arguments='"')
        else:
            value, marker = yield from source.raw(*ends, or_end=True, line_end=True)
            yield Call(arguments=prefix + _as_json(value))
        comma, marker = ", ", marker.strip()
        if marker == behind:
            marker = yield from source.next_tag(begin, end, or_end=True)


def glm(source: Source, texts: Texts) -> Reading[None]:
    """`name<arg_key>key</arg_key><arg_value>value</arg_value>`, with line ends between or without. The schema says which values
    are text. The end of a call may be missing where another begins.
    """
    tag = another = "<tool_call>"
    while tag == another:
        head, tag = yield from source.until("<arg_key>", another, or_end=True)
        name = head.strip()
        if not _NAME.fullmatch(name):
            raise ValueError("a call without a name")
        yield Call(name=name, arguments="{")
        comma, are_text = "", texts.get(name, frozenset())
        while tag == "<arg_key>":
            key, _ = yield from source.until("</arg_key>")
            prefix, comma = f"{comma}{_quoted(key.strip())}: ", ", "
            yield from source.next_tag("<arg_value>")
            if key.strip() in are_text:
                yield Call(arguments=f'{prefix}"')
                yield from source.text("</arg_value>")
                yield Call(arguments='"')
            else:
                value, _ = yield from source.raw("</arg_value>")
                yield Call(arguments=prefix + _as_json(value))
            tag = yield from source.next_tag("<arg_key>", another, or_end=True)
        yield Call(arguments="}", ends=True)


def function_gemma(source: Source, texts: Texts) -> Reading[None]:
    """`call:name{key:<escape>text<escape>,other:3}`"""
    while (yield from source.find("call:")):
        name, _ = yield from source.until("{", consume=False)
        yield Call(name=_must_be(name.strip()))
        yield from _members(source, "{", "}", named=True, ends=True)


def _literal(source: Source) -> Reading[None]:
    first = yield from source.skip(SPACE)
    if first == "{":
        yield from _members(source, "{", "}", named=True)
    elif first == "[":
        yield from _members(source, "[", "]", named=False)
    elif (yield from _quote(source)):
        yield Call(arguments='"')
        yield from source.text(_GEMMA_QUOTE)
        yield Call(arguments='"')
    else:
        value = yield from source.value()
        yield Call(arguments=_as_json(_must_be(value)))


def _members(source: Source, begin: str, end: str, *, named: bool, ends: bool = False) -> Reading[None]:
    yield from source.must_have(begin)
    yield Call(arguments=begin)
    comma = ""
    while (yield from source.skip(f"{SPACE},")) != end:
        if named:
            key = yield from _key(source)
            comma += f"{_quoted(key)}: "
        if comma:
            yield Call(arguments=comma)
        yield from _literal(source)
        comma = ", "
    yield from source.must_have(end)
    yield Call(arguments=end, ends=ends)


def _key(source: Source) -> Reading[str]:
    if (yield from _quote(source)):
        key, _ = yield from source.until(_GEMMA_QUOTE)
        yield from source.until(":")
        return key
    key, _ = yield from source.until(":")
    return key.strip(f'{SPACE}"')


def _quote(source: Source) -> Reading[bool]:
    """Goes behind a quote where one stands, and returns whether it did."""
    if (yield from source.peek(len(_GEMMA_QUOTE))) != _GEMMA_QUOTE:
        return False
    yield from source.must_have(_GEMMA_QUOTE)
    return True


def _must_be(text: str) -> str:
    if not text:
        raise ValueError("something is missing")
    return text


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _as_json(text: str) -> str:
    """A value as JSON where it is some, and as text otherwise."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _quoted(text)
    return text.strip()


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")
