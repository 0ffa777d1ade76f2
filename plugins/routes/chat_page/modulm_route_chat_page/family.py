"""A web page at `/`: a chat, or for pooling models a comparison of texts.

The page needs no build step and loads nothing from other hosts.
"""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import Response

from modulm_route_chat_page.conversations import Conversations, ConversationStore
from modulm_route_chat_page.flags import ChatPageConfig
from modulm_server.json_body import json_response
from modulm_server.page_files import PageFiles, content_policy
from modulm_server.route import RouteFamily
from modulm_server.speech_output import SpeechOutput

__all__ = ["ChatPage"]


#: Policy of the frame that shows HTML and SVG of answers: an origin of its own, without network.
_PREVIEW = content_policy(
    sandbox="allow-scripts",
    script_src="'self' 'unsafe-inline'",
    style_src="'unsafe-inline'",
    img_src="data:",
    font_src="data:",
    media_src="data:",
    frame_ancestors="'self'",
)


class ChatPage(RouteFamily):
    """The page. It uses the public API and asks for a key if the server needs one."""

    name = "chat_page"
    api = 2
    shared_paths = ("*",)

    def router(self) -> APIRouter:
        flags = self.context.config.group(ChatPageConfig)
        self._origins = flags.chat_page_tool_origins
        self._stores = flags.chat_store is not None
        policy = content_policy(
            script_src="'self'",
            style_src="'self'",
            img_src="'self' data:",
            media_src="data:",
            font_src="'self'",
            frame_src="'self'",
            connect_src=" ".join(["'self'", *self._origins]),
            require_trusted_types_for="'script'",
            trusted_types="dompurify",
        )
        folder = files(__package__).joinpath("files")
        self._files = PageFiles(folder, policy)
        self._preview = PageFiles(folder, _PREVIEW)
        router = APIRouter()
        for method in ("GET", "HEAD"):
            router.add_api_route("/", self.page, methods=[method], include_in_schema=False)
        router.add_api_route(
            "/page/{file:path}", self.file, methods=["GET"], include_in_schema=False
        )
        if flags.chat_store is not None:
            Conversations(ConversationStore(flags.chat_store)).add_routes(router)
        return router

    async def page(self, request: Request) -> Response:
        """Serve the page for the model's task."""
        chats = "generate" in self.context.engine.info.tasks
        return self._files.response(request, "chat.html" if chats else "pooling.html")

    async def file(self, request: Request, file: str) -> Response:
        """Serve a file of the page."""
        if file == "about.json":
            return json_response(self._about())
        if file == "preview.html":
            return self._preview.response(request, file)
        return self._files.response(request, file)

    def _speech(self) -> dict[str, object] | None:
        """The server's voices and samples per second, and whether answers are spoken; None if the
        model does not speak.
        """
        output = SpeechOutput(self.context.generation)
        if not output.served:
            return None
        return {
            "voices": list(output.speaker.voices),
            "rate": self.context.engine.info.limit("speech", "rate"),
            "answers": output.speaks_answers,
            "reads": output.speaker.reads_texts,
        }

    def _about(self) -> dict[str, object]:
        """Facts for the page that no other route has. Public."""
        return {
            "tasks": list(self.context.engine.info.tasks),
            "attachments": [*self.context.generation.media.kinds, "text"],
            "tool_origins": list(self._origins),
            "chat_store": self._stores,
            "speech": self._speech(),
        }
