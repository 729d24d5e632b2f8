"""Options of `stepwell serve` for how a model is offered: its names, its template, how long answers may be and take.

Read and checked before weights are. Starts nothing.
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
        help="what clients may call the model, one name or several (default: its own name)",
    )  # fmt: skip
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja template in place of the model's own")
    group.add_argument(
        "--max-model-len", type=int, metavar="N",
        help="most tokens of a prompt and its answer (default: what the model was made for and memory holds)",
    )  # fmt: skip
    group.add_argument(
        "--default-max-tokens", type=int, metavar="N",
        help="length of answers where a request does not say, or what fits (default: 16 for completions, for chats all)",
    )  # fmt: skip
    group.add_argument(
        "--request-timeout", type=float, metavar="SECONDS",
        help="after which a request ends with an error, in the queue or under way (default: none)",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """What was asked for, checked. Without names the model has its own; without a template its own too."""

    names: tuple[str, ...] = ()
    template: str | None = None
    default_max_tokens: int | None = None
    request_timeout_s: float | None = None

    def serving(self, checkpoint: Checkpoint) -> dict[str, Any]:
        """As `ModelServer` takes it."""
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
            limits.append(f"{self.default_max_tokens:,} tokens where a request does not say")
        if self.request_timeout_s is not None:
            limits.append(f"{self.request_timeout_s:g} s a request")
        return [("answers", ", ".join(limits))] if limits else []


def read(args: Namespace) -> Offered:
    """Raises ConfigError for what cannot work, and for a template that cannot be read or compiled."""
    names = tuple(dict.fromkeys(args.served_model_name or ()))
    if not all(names):
        raise ConfigError("--served-model-name must not be empty: leave it out for the model's own name")
    if args.default_max_tokens is not None and args.default_max_tokens < 1:
        raise ConfigError(f"--default-max-tokens must be at least 1, got {args.default_max_tokens}")
    if args.request_timeout is not None and not 0 < args.request_timeout < float("inf"):
        raise ConfigError(f"--request-timeout must be more than 0 seconds, got {args.request_timeout}; leave it out for none")
    return Offered(
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
            raise ConfigError(f"--chat-template {file} is larger than {format_bytes(_LARGEST_TEMPLATE)}: it is no template")
        source = raw.decode()
    except OSError as error:
        raise ConfigError(f"--chat-template cannot be read: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--chat-template {file} must be text in UTF-8") from None
    ChatTemplate(source)  # it says so now if it is none, not after weights were read
    return source
