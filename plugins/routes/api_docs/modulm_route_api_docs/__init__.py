"""`/docs`: the server's own description in Swagger UI, which comes with this package."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from modulm_server.flags import ServerConfig
from modulm_server.page_files import PageFiles, content_policy
from modulm_server.route import RouteFamily

__all__ = ["ApiDocs"]

#: Swagger UI draws with style attributes and with images inside its style sheet.
_POLICY = content_policy(
    script_src="'self'",
    style_src="'self' 'unsafe-inline'",
    img_src="'self' data:",
    connect_src="'self'",
)


class ApiDocs(RouteFamily):
    """`/docs`, and `/redoc` which leads there. Nothing is loaded from elsewhere."""

    name = "api_docs"
    api = 2

    def absent(self) -> str | None:
        off = self.context.config.group(ServerConfig).disable_fastapi_docs
        return "--disable-fastapi-docs" if off else None

    def router(self) -> APIRouter:
        self._files = PageFiles(files(__package__).joinpath("files"), _POLICY)
        router = APIRouter()
        for path, endpoint in (
            ("/docs", self.page),
            ("/docs/{file:path}", self.file),
            ("/redoc", self.moved),
        ):
            router.add_api_route(path, endpoint, methods=["GET"], include_in_schema=False)
        return router

    async def page(self, request: Request) -> Response:
        """The page."""
        return self._files.response(request, "docs.html")

    async def file(self, request: Request, file: str) -> Response:
        """What the page loads."""
        return self._files.response(request, file)

    async def moved(self) -> Response:
        """Links to the other viewer, which is not here, lead to this one."""
        return RedirectResponse("docs")
