"""`/ui`: a page to look at a server with. Plain files of this package, without secrets, so that anybody may have them.

The page asks `/cache` and what is below it, with the token that is typed into it. Browsers are told to run and load nothing but
these files, to let nobody frame the page, and to make no markup out of text: names of models, tenants and namespaces come from
others.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter, Response

from stepwell.sim.page import STYLE

MEDIA = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "html": "text/html"}
FILES = ("page.css", "main.js", "panels.js", "charts.js", "dom.js", "icon.svg")
HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # a newer server has a newer page
}


def ui_router() -> APIRouter:
    router = APIRouter()
    router.add_api_route("/ui", _sends("page.html"))
    for name in FILES:
        router.add_api_route(f"/ui/{name}", _sends(name))
    return router


def _sends(name: str) -> Callable[[], Awaitable[Response]]:
    """A route for one file. The style of all our pages comes before the page's own."""
    content = (files("stepwell.server.ui") / name).read_text(encoding="utf-8")
    if name == "page.css":
        content = f"{STYLE}\n{content}"
    media = MEDIA[name.rpartition(".")[2]]

    async def send() -> Response:
        return Response(content, media_type=media, headers=HEADERS)

    return send
