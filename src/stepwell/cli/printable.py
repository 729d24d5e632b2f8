"""Text from files, directories and traces as a terminal may show it."""

from __future__ import annotations


def printable(text: str) -> str:
    r"""The text with every character that could steer a terminal (escapes, line ends, changes of direction) written as \x1b."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
