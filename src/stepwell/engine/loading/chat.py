"""Chat messages as one prompt, by the template a model brings along.

Templates are code of strangers: they run in a sandbox, see plain data only, and can neither change it nor reach files, modules
or the objects behind it. Knows no tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from stepwell.base.errors import ConfigError

PLAIN = r"""
{%- for message in messages -%}
    {{ message.role + ": " }}
    {%- if message.content is string %}{{ message.content }}{% else %}
        {%- for part in message.content or [] %}{{ part.text }}{% endfor %}
    {%- endif %}
    {{- "\n" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "assistant:" }}{% endif %}"""
"""For models that bring none: who says what, line by line."""

ROLE_MARKERS = ("\nuser:", "\nassistant:", "\nsystem:")
"""Where an answer ends that was made by PLAIN: the model goes on with the next message, for it knows no token that ends one."""

_LONGEST_REPEAT = 1 << 20
_LARGEST_POWER = 64


class ChatTemplate:
    """A compiled template. Rendering is a question: it changes nothing. Any number of threads may ask."""

    def __init__(
        self, source: str | None = None, *, bos_token: str = "", eos_token: str = "", now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Raises ConfigError for a template that is not one. Without `source`: PLAIN."""
        self.source = PLAIN if source is None else source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._now = now
        environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(self.source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ConfigError(f"the chat template cannot be compiled: {error}") from None

    @property
    def is_plain(self) -> bool:
        """Whether the model brought none."""
        return self.source == PLAIN

    def with_source(self, source: str) -> ChatTemplate:
        """Another template for the same model. Raises ConfigError for one that is not one."""
        return ChatTemplate(source, **self._tokens, now=self._now)

    def mentions(self, name: str) -> bool:
        """Whether a name stands anywhere in the template: one that does not drops what is given under it."""
        return re.search(rf"\b{name}\b", self.source) is not None

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True, options: Mapping[str, Any] | None = None,
    ) -> str:  # fmt: skip
        """The prompt. `options` are names that only some templates know, such as `enable_thinking`.

        Raises ConfigError when the messages are not plain data, or the template refuses them or fails.
        """
        names = {**(options or {}), "messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(**(_plain(names) | self._tokens))
        except ConfigError:
            raise
        except Exception as error:  # whatever a stranger's code can raise
            raise ConfigError(f"the chat template does not take these messages: {error}") from None


class _Sandbox(ImmutableSandboxedEnvironment):
    """Also keeps short programs from making large values."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (_is_small(left) and _is_small(right)):
            raise jinja2.TemplateRuntimeError("a power of large numbers")
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, str | list | tuple) and isinstance(times, int) and len(repeated) * times > _LONGEST_REPEAT:
                raise jinja2.TemplateRuntimeError("a repetition too long")
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training. Here it is its content."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _is_small(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= _LARGEST_POWER


def _raise(message: object) -> NoReturn:
    raise jinja2.TemplateRuntimeError(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As models were trained with: no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _plain(names: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that is JSON through and through, so that no object of ours can be reached.

    Made piece by piece: writing JSON and reading it again would hold the interpreter for as long as the longest message takes.
    """
    try:
        return {name: _copied(value) for name, value in names.items()}
    except (TypeError, RecursionError) as error:
        raise ConfigError(f"chat messages must be plain JSON: {error}") from None


def _copied(value: Any) -> Any:
    if value is None or type(value) in (str, bool, int, float):
        return value
    if type(value) in (list, tuple):
        return [_copied(each) for each in value]
    if type(value) is dict and all(type(key) is str for key in value):
        return {key: _copied(each) for key, each in value.items()}
    raise TypeError(f"{value!r:.80} is none")
