"""`stepwell demo`: a real server, a conversation with tools, a kill, and the same conversation again."""

from stepwell.cli.demo.command import COMMAND

__all__ = ["COMMAND"]
