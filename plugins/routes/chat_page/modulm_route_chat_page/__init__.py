"""A chat page at `/`: one file, no build step, nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

from modulm_server.route import RouteFamily

__all__ = ["ChatPage"]


class ChatPage(RouteFamily):
    """The page. It talks to the same API as everybody else, and asks for a key if it must."""

    name = "chat_page"
    api = 2

    def router(self) -> APIRouter:
        self._html = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
        self._policy = _policy(self._html)
        router = APIRouter()
        for method in ("GET", "HEAD"):
            router.add_api_route("/", self.page, methods=[method], include_in_schema=False)
        return router

    async def page(self) -> Response:
        """The page itself."""
        headers = {
            "Content-Security-Policy": self._policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }
        return Response(self._html, headers=headers, media_type="text/html")


def _policy(html: str) -> str:
    """Only the page's own script and style run, and only this server is talked to."""
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:", "base-uri 'none'"]
    for tag in ("script", "style"):
        inside = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        hashes = " ".join(f"'sha256-{_digest(text)}'" for text in inside)
        rules.append(f"{tag}-src {hashes}")
    return "; ".join([*rules, "form-action 'none'", "frame-ancestors 'none'"])


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
