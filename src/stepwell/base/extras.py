"""How to add an extra to this installation: from the checkout, repository or index that it was installed from."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname


def install(extra: str) -> str:
    """The command that installs `stepwell` with this extra, or several separated by commas."""
    try:
        origin = json.loads(distribution("stepwell").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # run from its sources
        origin = {}
    url = origin.get("url", "")
    if "dir_info" in origin and (folder := Path(url2pathname(urlsplit(url).path))).is_dir():
        return f"pip install {'-e ' if origin['dir_info'].get('editable') else ''}'{folder}[{extra}]'"
    if "vcs_info" in origin:
        return f"pip install 'stepwell[{extra}] @ {origin['vcs_info']['vcs']}+{url}'"
    return f"pip install 'stepwell[{extra}]'"
