"""The cells that are done, in one JSON file that is whole after each of them: a run that is stopped goes on where it was."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from policies.gaps import rows_of, summary_of
from policies.grid import Cell


class Results:
    """What a file has, by the cells' keys."""

    def __init__(self, path: Path) -> None:
        """Reads what is there. Raises ValueError for a file that is not a report's."""
        self._path = path
        self._cells: dict[str, dict[str, Any]] = {}
        if path.exists():
            try:
                self._cells = {cell["key"]: cell for cell in json.loads(path.read_text())["cells"]}
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is not a policy report ({error!r}): name another file, or remove it") from None

    def forget(self, policies: Iterable[str]) -> None:
        """These are to be replayed again, as after a change to them."""
        gone = set(policies)
        self._cells = {key: cell for key, cell in self._cells.items() if cell["policy"] not in gone}

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        return [cell for cell in cells if cell.key not in self._cells]

    def of(self, cells: Iterable[Cell]) -> list[dict[str, Any]]:
        """Those of `cells` that are done, in their order."""
        return [self._cells[cell.key] for cell in cells if cell.key in self._cells]

    def add(self, cell: dict[str, Any]) -> None:
        """Adds one, and writes the file: all of it or nothing."""
        self._cells[cell["key"]] = cell
        self.write()

    def write(self, asked: Iterable[Cell] | None = None) -> None:
        """With the summary of `asked`, once they are done."""
        machine = {"cpu": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
        whole: dict[str, Any] = {"machine": machine}
        if asked is not None:
            rows = rows_of(self.of(asked))
            whole |= {"summary": summary_of(rows).as_json(), "rows": [row.as_json() for row in rows]}
        part = self._path.with_name(f"{self._path.name}.part")
        part.write_text(json.dumps(whole | {"cells": list(self._cells.values())}, indent=1) + "\n")
        part.replace(self._path)
