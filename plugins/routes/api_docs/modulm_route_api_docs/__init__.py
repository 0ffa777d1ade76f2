"""`/docs`: the server's OpenAPI schema in Swagger UI, which this package includes."""

from __future__ import annotations

from importlib.resources import files

from fastapi import APIRouter, Request
from starlette.responses import RedirectResponse, Response

from modulm_server.flags import ServerConfig
from modulm_server.page_files import PageFiles, content_policy
from modulm_server.route import RouteFamily

__all__ = ["ApiDocs"]

#: Swagger UI needs style attributes and data: images.
_POLICY = content_policy(
    script_src="'self'",
    style_src="'self' 'unsafe-inline'",
    img_src="'self' data:",
    connect_src="'self'",
)


class ApiDocs(RouteFamily):
    """`/docs`, and `/redoc` which redirects there. Loads nothing from other hosts."""

    name = "api_docs"
    api = 2
    shared_paths = ("*",)

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
        """Serve the page."""
        return self._files.response(request, "docs.html")

    async def file(self, request: Request, file: str) -> Response:
        """Serve a file of the page."""
        return self._files.response(request, file)

    async def moved(self) -> Response:
        """Redirect to /docs."""
        return RedirectResponse("docs")
