"""The `stepwell` command: runs a subcommand, and prints a user's error as one line.

A new subcommand is a module with a `COMMAND`, listed in `COMMANDS`.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from stepwell import __version__
from stepwell.base.errors import ConfigError, StepwellError
from stepwell.base.extras import install
from stepwell.cli import build_kernels, demo, doctor, explain, plan, replay, serve, spec, store, trace
from stepwell.cli.command import EXIT_USER_ERROR, Command, printable, with_flags

COMMANDS: tuple[Command, ...] = (
    build_kernels.COMMAND, demo.COMMAND, doctor.COMMAND, explain.COMMAND, plan.COMMAND, replay.COMMAND,
    serve.COMMAND, spec.COMMAND, store.COMMAND, trace.COMMAND,
)  # fmt: skip

EXIT_INTERRUPTED = 130
_NEGATIVE = re.compile(r"-\d")


class _Parser(ArgumentParser):
    """Raises ConfigError for a wrong command line, and refers to the help of the subcommand that has the error."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see `{self.prog} --help`)")


def build_parser() -> ArgumentParser:
    parser = _Parser(prog="stepwell", description="A tiered cache for everything a language model remembers about a prompt.")
    parser.add_argument("--version", action="version", version=f"stepwell {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.summary, description=command.summary)
        command.configure(subparser)
        subparser.set_defaults(run=partial(_run, command))
    return parser


def _run(command: Command, args: Namespace) -> int:
    try:
        return command.run(args)
    except ModuleNotFoundError as error:
        if not command.extra or (error.name or "stepwell").split(".")[0] == "stepwell":
            raise
        how = install(command.extra)
        raise ConfigError(f"stepwell {command.name} needs {error.name}, which is not installed: {how}") from None


def _parse(argv: Sequence[str]) -> Namespace:
    """Parses a command line. A negative number after an option is its value. Raises ConfigError."""
    given: list[str] = []
    for each in argv:
        if given and _NEGATIVE.match(each) and given[-1].startswith("--") and "=" not in given[-1]:
            given[-1] += f"={each}"
        else:
            given.append(each)
    return build_parser().parse_args(given)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status; 2 for a user's error."""
    try:
        args = _parse(sys.argv[1:] if argv is None else argv)
        status = int(args.run(args))
        sys.stdout.flush()
        return status
    except StepwellError as error:
        print("\n".join(map(printable, f"stepwell: error: {with_flags(str(error))}".split("\n"))), file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does: write nothing more, not even at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
