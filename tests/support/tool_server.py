"""A tool server (MCP) for tests, over stdio: `python tool_server.py`."""

from __future__ import annotations

import asyncio
import os

from mcp.server.fastmcp import FastMCP

#: Names that `wait` waits for, and those that it waits for no longer; for servers in the test's own
#: process.
waiting: set[str] = set()
released: set[str] = set()


def make() -> FastMCP:
    """Create the server."""
    server = FastMCP("tests", stateless_http=True)

    @server.tool()
    def get_weather(city: str) -> str:
        """The weather of a city."""
        return f"It rains in {city}."

    @server.tool()
    def shout(text: str) -> str:
        """Say it loudly."""
        return text.upper() * 1000

    @server.tool()
    def fail() -> str:
        """Never works."""
        raise ValueError("out of order")

    @server.tool()
    async def wait(name: str) -> str:
        """Wait until somebody says so: `released`."""
        waiting.add(name)
        while name not in released:
            await asyncio.sleep(0.005)
        return f"{name} is released"

    @server.tool()
    def leave() -> str:
        """End the server's process."""
        os._exit(3)

    @server.tool()
    def variables() -> str:
        """The names of the process' environment variables."""
        return " ".join(os.environ)

    return server


if __name__ == "__main__":
    make().run()
