"""Options of `stepwell serve` for the model's names, its chat template, and limits of answers.

Parsed and checked before weights are read.
"""

from __future__ import annotations

from argparse import Namespace
from argparse import _ArgumentGroup as ArgumentGroup
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwell.base.errors import ConfigError
from stepwell.base.units import format_bytes

if TYPE_CHECKING:
    from stepwell.engine.loading.checkpoint import Checkpoint

_LARGEST_TEMPLATE = 1 << 20


def configure(group: ArgumentGroup) -> None:
    group.add_argument(
        "--served-model-name", nargs="+", action="extend", metavar="NAME",
        help="names of the model in requests (default: its own name)",
    )  # fmt: skip
    group.add_argument("--chat-template", metavar="FILE", help="Jinja template in place of the model's own")
    group.add_argument(
        "--max-model-len", type=int, metavar="N",
        help="most tokens of a prompt and its answer (default: the model's limit, or what fits into memory)",
    )  # fmt: skip
    group.add_argument(
        "--default-max-tokens", type=int, metavar="N",
        help="length of answers to requests without max_tokens (default: 16 for completions, unlimited for chats)",
    )  # fmt: skip
    group.add_argument(
        "--request-timeout", type=float, metavar="SECONDS",
        help="time after which a waiting or running request ends with an error (default: none)",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """The checked options. Without names or a template, the model's own are used."""

    names: tuple[str, ...] = ()
    template: str | None = None
    default_max_tokens: int | None = None
    request_timeout_s: float | None = None

    def serving(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """The arguments for `ModelServer`."""
        name, *aliases = self.names or (checkpoint.name,)
        return {
            "name": name,
            "aliases": tuple(aliases),
            "chat": checkpoint.chat if self.template is None else checkpoint.chat.with_source(self.template),
            "default_max_tokens": self.default_max_tokens,
            "request_timeout_s": self.request_timeout_s,
        }

    def summary(self) -> list[tuple[str, str]]:
        limits = []
        if self.default_max_tokens is not None:
            limits.append(f"{self.default_max_tokens:,} tokens by default")
        if self.request_timeout_s is not None:
            limits.append(f"{self.request_timeout_s:g} s a request")
        return [("answers", ", ".join(limits))] if limits else []


def read(args: Namespace) -> AnswerOptions:
    """Raises ConfigError for invalid options, and for a template that cannot be read or compiled."""
    names = tuple(dict.fromkeys(args.served_model_name or ()))
    if not all(names):
        raise ConfigError("--served-model-name must not be empty: leave it out for the model's own name")
    if args.default_max_tokens is not None and args.default_max_tokens < 1:
        raise ConfigError(f"--default-max-tokens must be at least 1, got {args.default_max_tokens}")
    if args.request_timeout is not None and not 0 < args.request_timeout < float("inf"):
        raise ConfigError(f"--request-timeout must be more than 0 seconds, got {args.request_timeout}; leave it out for none")
    return AnswerOptions(
        names=names,
        template=None if args.chat_template is None else _template(Path(args.chat_template)),
        default_max_tokens=args.default_max_tokens,
        request_timeout_s=args.request_timeout,
    )


def _template(file: Path) -> str:
    from stepwell.engine.loading.chat import ChatTemplate

    try:
        with file.open("rb") as opened:
            raw = opened.read(_LARGEST_TEMPLATE + 1)
        if len(raw) > _LARGEST_TEMPLATE:
            raise ConfigError(f"--chat-template {file} is larger than {format_bytes(_LARGEST_TEMPLATE)}: is it a template?")
        source = raw.decode()
    except OSError as error:
        raise ConfigError(f"--chat-template cannot be read: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--chat-template {file} must be UTF-8 text") from None
    ChatTemplate(source)  # fails now, not after weights were read
    return source
