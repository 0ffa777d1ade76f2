"""`mcp_servers` and tools of type `mcp_toolset`: tools that this server runs.

Requests name tool servers of the operator (--tool-server) by name, not by address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modulm_route_anthropic.schema import TOOLSET
from modulm_server.errors import ApiError
from modulm_server.hosted_tools import hosted_tools
from modulm_server.json_body import bad_field
from modulm_server.tool_servers import ToolServerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from modulm_route_anthropic.schema import CountRequest, MessagesRequest
    from modulm_server.api_keys import ApiKey
    from modulm_server.hosted_tools import HostedTools
    from modulm_server.tool_servers import ToolServer, ToolServers

__all__ = ["hosted_tools_of"]

_SERVER = ("type", "name", "url", "tool_configuration")
_TOOLSET = ("type", "mcp_server_name", "default_config", "configs", "cache_control")
_CONFIG = ("enabled", "defer_loading")


async def hosted_tools_of(
    body: MessagesRequest | CountRequest, servers: ToolServers, key: ApiKey | None
) -> HostedTools:
    """Find the tools that a request lets the server run. Raises ApiError: 400 for wrong fields, 502
    if a server cannot be reached.
    """
    named = {}
    for index, entry in enumerate(body.mcp_servers or ()):
        where = f"mcp_servers[{index}]"
        _check_keys("mcp_servers", where, entry, _SERVER)
        server = servers.find(_name("mcp_servers", f"{where}.name", entry.get("name")), key, where)
        _check_address(where, entry, server)
        named[server.settings.label] = entry.get("tool_configuration")
    tools: list[dict[str, Any]] = []
    for index, tool in enumerate(body.tools or ()):
        if tool.get("type") != TOOLSET:
            tools.append({"type": "function", "name": tool.get("name")})
            continue
        where = f"tools[{index}]"
        _check_keys("tools", where, tool, _TOOLSET)
        label = _name("tools", f"{where}.mcp_server_name", tool.get("mcp_server_name"))
        allowed = await _allowed(where, tool, servers.find(label, key, where))
        tools.append(_tool(label, allowed))
        named.pop(label, None)
    # The older form of the API: a server without a toolset.
    for label, configuration in named.items():
        chosen = configuration or {}
        if chosen.get("enabled", True):
            tools.append(_tool(label, chosen.get("allowed_tools")))
    hosted = await hosted_tools(tools, servers, key)
    for each in hosted.by_name.values():
        if each.approval:
            raise bad_field(
                "tools",
                f"calls of the tool server {each.label!r:.60} need approvals, which messages do "
                "not have: use /v1/chat/completions or /v1/responses",
            )
    return hosted


def _tool(label: str, allowed: Any) -> dict[str, Any]:
    tool = {"type": "mcp", "server_label": label, "require_approval": "never"}
    return tool if allowed is None else {**tool, "allowed_tools": allowed}


async def _allowed(where: str, toolset: Mapping[str, Any], server: ToolServer) -> list[str] | None:
    """Return the names of the tools that a toolset enables; None for all."""
    enabled = _enabled(f"{where}.default_config", toolset.get("default_config"), True)
    configs = toolset.get("configs") or {}
    if not isinstance(configs, dict):
        raise bad_field("tools", f"{where}.configs must be an object")
    chosen = {
        name: _enabled(f"{where}.configs.{name:.60}", config, enabled)
        for name, config in configs.items()
    }
    if enabled and all(chosen.values()):
        return None
    try:
        offered = await server.tools()
    except ToolServerError as error:
        raise ApiError(502, str(error), param="tools", code="tool_server") from error
    return [tool["name"] for tool in offered if chosen.get(tool["name"], enabled)]


def _enabled(where: str, config: Any, default: bool) -> bool:
    if config is None:
        return default
    _check_keys("tools", where, config, _CONFIG)
    if config.get("defer_loading"):
        raise bad_field("tools", f"{where}.defer_loading: all tools are loaded at once")
    enabled = config.get("enabled", default)
    if not isinstance(enabled, bool):
        raise bad_field("tools", f"{where}.enabled must be true or false")
    return enabled


def _check_keys(field: str, where: str, entry: Any, known: tuple[str, ...]) -> None:
    if not isinstance(entry, dict):
        raise bad_field(field, f"{where} must be an object")
    if unknown := [key for key in entry if key not in known and entry[key] is not None]:
        raise bad_field(
            field,
            f"{where}.{unknown[0][:64]} is not supported: this server uses tool servers that its "
            "operator names (--tool-server), by name",
        )


def _check_address(where: str, entry: Mapping[str, Any], server: ToolServer) -> None:
    """An address must be the one that the operator has chosen."""
    if entry.get("type", "url") != "url":
        raise bad_field("mcp_servers", f"{where}.type must be url")
    if entry.get("url") not in (None, "", server.settings.url):
        raise bad_field(
            "mcp_servers",
            f"{where}.url is not the address of the tool server {server.settings.label!r:.60}: "
            "leave it out",
        )


def _name(field: str, where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise bad_field(field, f"{where} must be a string")
    return value
