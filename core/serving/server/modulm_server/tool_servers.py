"""Tool servers that the operator names: clients of the Model Context Protocol over stdio and HTTP.

The file of --tool-server has a table `servers`; docs/tool-servers.md lists the keys.
"""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen
from attrs.validators import instance_of

from modulm.errors import ConfigError
from modulm.plugins.index import to_install
from modulm_server.json_body import bad_field

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping, Sequence

    from modulm_server.api_keys import ApiKey
    from modulm_server.flags import ServerConfig

__all__ = [
    "Outcome",
    "ServerSettings",
    "ToolServer",
    "ToolServerError",
    "ToolServers",
    "read_servers",
]

log = logging.getLogger("modulm_server")

#: Seconds for a sign of life of a server, one of whose calls has failed.
_PING = 5.0
_KEYS = ("command", "env", "cwd", "url", "headers", "tools", "keys", "approval")


@frozen(kw_only=True)
class ServerSettings:
    """One server of the file. command: of a server over stdio; url: of one over HTTP.

    tools: names that may be used, None for all. keys: names of API keys that may use it, None for
    all. approval: "always": each call needs an approval, whatever the request says; "request": as
    the request says.
    """

    label: str
    command: tuple[str, ...] = ()
    env: Mapping[str, str] = field(factory=dict)
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(factory=dict)
    tools: frozenset[str] | None = None
    keys: frozenset[str] | None = None
    approval: str = field(default="request", validator=instance_of(str))


@frozen
class Outcome:
    """The result of a call. error: why there is none."""

    output: str | None
    error: str | None = None


def read_servers(path: str) -> dict[str, ServerSettings]:
    """Read the file of --tool-server, by label. Raises ConfigError."""
    import yaml

    try:
        table = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("tool_server", f"{path}: cannot be read: {reason:.200}") from error
    servers = table.get("servers") if isinstance(table, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError("tool_server", f"{path}: needs a table `servers`")
    return {str(label): _settings(path, str(label), entry) for label, entry in servers.items()}


def _settings(path: str, label: str, entry: Any) -> ServerSettings:
    def wrong(message: str) -> ConfigError:
        return ConfigError("tool_server", f"{path}: servers.{label}: {message}")

    if not isinstance(entry, dict):
        raise wrong("must be a table")
    if unknown := [key for key in entry if key not in _KEYS]:
        raise wrong(f"{unknown[0]!r:.60} is not one of {', '.join(_KEYS)}")
    if ("command" in entry) == ("url" in entry):
        raise wrong("needs either command or url")
    for key in ("command", "tools", "keys"):
        value = entry.get(key, ["x"])
        if not isinstance(value, list) or not value or any(not isinstance(v, str) for v in value):
            raise wrong(f"{key} must be a list of strings")
    for key in ("env", "headers"):
        value = entry.get(key, {})
        if not isinstance(value, dict) or any(not isinstance(v, str) for v in value.values()):
            raise wrong(f"{key} must be a table of strings")
    for key in ("url", "cwd"):
        if not isinstance(entry.get(key, ""), str):
            raise wrong(f"{key} must be a string")
    if entry.get("approval", "request") not in ("always", "request"):
        raise wrong("approval must be always or request")
    lists = {key: frozenset(entry[key]) for key in ("tools", "keys") if key in entry}
    command = tuple(entry.get("command", ()))
    return ServerSettings(label=label, **{**entry, **lists, "command": command})


@define(eq=False)
class ToolServer:
    """A session with one server, opened when it is needed and again after it broke.

    timeout: seconds of a call. most: bytes of a result.
    """

    settings: ServerSettings
    timeout: float
    most: int
    _task: asyncio.Task[None] | None = field(default=None, init=False)
    _ready: asyncio.Future[Any] | None = field(default=None, init=False)
    _closing: asyncio.Event = field(factory=asyncio.Event, init=False)
    _tools: list[dict[str, Any]] | None = field(default=None, init=False)

    async def tools(self) -> list[dict[str, Any]]:
        """Return the tools that may be used: name, description, input_schema.

        Raises ToolServerError if the server cannot be reached.
        """
        if self._tools is None:
            session = await self._session()
            try:
                listed = await asyncio.wait_for(session.list_tools(), self.timeout)
            except Exception as error:
                await self._close_broken(session, error)
                raise self._failure(error) from error
            allowed = self.settings.tools
            self._tools = [
                {
                    "name": tool.name,
                    "description": tool.description or "",
                    "input_schema": tool.inputSchema,
                    "annotations": None,
                }
                for tool in listed.tools
                if allowed is None or tool.name in allowed
            ]
        return self._tools

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Outcome:
        """Call a tool. Never raises: what went wrong is in the outcome."""
        try:
            session = await self._session()
        except ToolServerError as error:
            return Outcome(None, str(error))
        try:
            result = await asyncio.wait_for(session.call_tool(name, dict(arguments)), self.timeout)
        except Exception as error:
            await self._close_broken(session, error)
            late = isinstance(error, TimeoutError)
            return Outcome(
                None, f"no result within {self.timeout:g} s" if late else str(self._failure(error))
            )
        text = "\n".join(_text(part) for part in result.content)
        data = text.encode()
        if len(data) > self.most:
            text = data[: self.most].decode(errors="ignore") + "\n[cut: the result was longer]"
        return Outcome(None, text or "the tool failed") if result.isError else Outcome(text)

    async def _close_broken(self, session: Any, error: Exception) -> None:
        """End a session in which a call has failed, unless its server still answers: other
        requests use it, too.
        """
        if not await self._answers(session, error) and self._is(session):
            await self.close()

    async def _answers(self, session: Any, error: Exception) -> bool:
        """Whether a server answers that has answered a call with an error, or not in time."""
        from mcp.shared.exceptions import McpError
        from mcp.types import CONNECTION_CLOSED

        if isinstance(error, McpError):
            return bool(error.error.code != CONNECTION_CLOSED)
        if not isinstance(error, TimeoutError):
            return False
        try:
            await asyncio.wait_for(session.send_ping(), min(_PING, self.timeout))
        except Exception:
            return False
        return True

    def _is(self, session: Any) -> bool:
        """Whether a session is the current one."""
        ready = self._ready
        return (
            ready is not None and ready.done() and not ready.exception()
            and ready.result() is session
        )  # fmt: skip

    async def close(self) -> None:
        """End the session, and the process of a server over stdio."""
        task, self._task, self._ready, self._tools = self._task, None, None, None
        if task is None:
            return
        self._closing.set()
        done, _ = await asyncio.wait([task], timeout=5)
        if not done:
            task.cancel()

    async def _session(self) -> Any:
        if self._task is None or self._task.done() or self._ready is None:
            self._closing = asyncio.Event()
            self._ready = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run(self._ready, self._closing))
            self._task.add_done_callback(partial(self._tell_end, self._ready))
        try:
            return await asyncio.wait_for(asyncio.shield(self._ready), self.timeout)
        except Exception as error:
            await self.close()
            raise self._failure(error) from error

    async def _run(self, ready: asyncio.Future[Any], closing: asyncio.Event) -> None:
        """Hold the session open: its contexts must be entered and left by one task."""
        try:
            async with AsyncExitStack() as stack:
                session = await self._open(stack)
                ready.set_result(session)
                await closing.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(self._failure(error))
                ready.exception()  # it may be that nobody waits any more
            else:
                log.warning("%s", self._failure(error))

    def _tell_end(self, ready: asyncio.Future[Any], task: asyncio.Task[None]) -> None:
        """Tell whoever waits for a session at once that it was cancelled, maybe before it began."""
        if not ready.done():
            ready.set_exception(self._failure(ConnectionError("the session was cut off")))
            ready.exception()

    async def _open(self, stack: AsyncExitStack) -> Any:
        import httpx
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        settings = self.settings
        if settings.url is not None:
            http = httpx.AsyncClient(headers=dict(settings.headers), timeout=self.timeout)
            await stack.enter_async_context(http)
            streams = await stack.enter_async_context(
                streamable_http_client(settings.url, http_client=http)
            )
        else:
            command, *arguments = settings.command
            errors = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
            stack.callback(errors.close)
            streams = await stack.enter_async_context(
                stdio_client(
                    StdioServerParameters(
                        command=command, args=arguments, env=dict(settings.env), cwd=settings.cwd
                    ),
                    errlog=errors,
                )
            )
        session = await stack.enter_async_context(ClientSession(streams[0], streams[1]))
        await session.initialize()
        return session

    def _failure(self, error: BaseException) -> ToolServerError:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, ToolServerError):
            return error
        reason = str(error) or type(error).__name__
        return ToolServerError(f"tool server {self.settings.label}: {reason:.300}")


class ToolServerError(Exception):
    """A tool server cannot be reached, or does not answer as MCP says."""


def _text(part: Any) -> str:
    """Return a part of a result as text."""
    if part.type == "text":
        return str(part.text)
    return f"[{part.type}: not text]"


class ToolServers:
    """The servers of --tool-server."""

    def __init__(self, servers: Sequence[ToolServer] = ()) -> None:
        self._servers = {server.settings.label: server for server in servers}

    @classmethod
    def of(cls, flags: ServerConfig) -> ToolServers:
        """The servers that the flags name. Raises ConfigError, also without the package mcp."""
        if flags.tool_server is None:
            return cls()
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            hint = to_install("modulm-route-responses[tools]")
            raise ConfigError("tool_server", f"tool servers need the package mcp{hint}") from error
        return cls(
            [
                ToolServer(settings, flags.tool_timeout, flags.tool_result_bytes)
                for settings in read_servers(flags.tool_server).values()
            ]
        )

    @classmethod
    def shared(cls, stores: MutableMapping[str, Any], flags: ServerConfig) -> ToolServers:
        """The servers of a family, also for several models. stores: of its context."""
        if "tool_servers" not in stores:
            stores["tool_servers"] = cls.of(flags)
        servers: ToolServers = stores["tool_servers"]
        return servers

    def find(self, label: str, key: ApiKey | None, where: str) -> ToolServer:
        """Return a server that the key may use. Raises ApiError(400) naming the field.

        One that it may not use is treated as one that does not exist.
        """
        server = self._servers.get(label)
        keys = None if server is None else server.settings.keys
        if server is None or (keys is not None and (key is None or key.name not in keys)):
            field = where.partition("[")[0]
            raise bad_field(field, f"{where}: no tool server {label!r:.60} (--tool-server)")
        return server

    async def close(self) -> None:
        """End all sessions."""
        await asyncio.gather(*(server.close() for server in self._servers.values()))
