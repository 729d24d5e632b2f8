"""The examples of docs/python.md run as they are written there, each in a folder of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
EXAMPLES = dict(re.findall(r"^## ([^\n]*)\n.*?^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
PRINTS = {  # a part of what an example prints, and what it needs
    "The engine": (r"computed=4113\)\n.*\nSources\(device=4032, ", "tokenizers"),
    "The cache under an engine of your own": (r"^resumes at token 4992 of 5000, ", "numpy"),
    "Under Transformers": (r"^0 \[.*\n1472 \[", "transformers"),
    "Verified values": (r"^$", "numpy"),
}


def test_the_page_has_the_examples_that_are_run() -> None:
    assert EXAMPLES.keys() == PRINTS.keys() and PAGE.count("```python") == len(EXAMPLES)


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example_runs_as_it_is_written(title: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed, needed = PRINTS[title]
    pytest.importorskip(needed)
    assert "/tmp/" in EXAMPLES[title]
    exec(compile(EXAMPLES[title].replace("/tmp/", f"{tmp_path}/"), title, "exec"), {})
    said = capsys.readouterr().out
    assert re.search(printed, said), said
