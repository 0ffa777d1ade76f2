"""Tools of type `mcp` in a request: which they are, and calls of them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from attrs import define, field, frozen

from modulm_server.errors import ApiError
from modulm_server.json_body import bad_field
from modulm_server.tool_servers import Outcome, ToolServer, ToolServerError, ToolServers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from modulm_server.api_keys import ApiKey

__all__ = ["DECLINED", "HostedTool", "HostedTools", "hosted_tools"]

#: The result of a call that the client did not approve.
DECLINED = "the user did not approve this call"

_KNOWN = ("type", "server_label", "server_description", "allowed_tools", "require_approval")
_FUNCTION = re.compile("[A-Za-z0-9_-]{1,64}")


@frozen(eq=False)
class HostedTool:
    """A tool that the server runs. approval: a call needs the client's approval."""

    server: ToolServer
    name: str
    approval: bool

    @property
    def label(self) -> str:
        """The label of its server."""
        return self.server.settings.label

    async def call(self, arguments: str) -> Outcome:
        """Call it with JSON arguments that the model wrote."""
        try:
            table = json.loads(arguments or "{}")
        except ValueError:
            return Outcome(None, "the arguments are not JSON")
        if not isinstance(table, dict):
            return Outcome(None, "the arguments are not an object")
        return await self.server.call(self.name, table)


@define(eq=False)
class HostedTools:
    """The hosted tools of a request. by_name: the model's name of a tool -> the tool. functions:
    in the chat API's form. listed: items of type mcp_list_tools.
    """

    by_name: dict[str, HostedTool] = field(factory=dict)
    functions: list[dict[str, Any]] = field(factory=list)
    listed: list[dict[str, Any]] = field(factory=list)

    def find(self, label: str, name: str) -> HostedTool | None:
        """Return a tool of a server; None if the request does not allow it."""
        tools = self.by_name.values()
        return next((t for t in tools if (t.label, t.name) == (label, name)), None)

    def model_name(self, label: str, name: str) -> str:
        """The model's name of a tool; also of one that the request does not have."""
        for model_name, tool in self.by_name.items():
            if (tool.label, tool.name) == (label, name):
                return model_name
        return name

    async def run(self, item: dict[str, Any]) -> None:
        """Call the tool of an item of type mcp_call, and put the result into it."""
        tool = self.find(item["server_label"], item["name"])
        missing = Outcome(None, "the request does not allow this tool")
        outcome = missing if tool is None else await tool.call(item["arguments"])
        item["output"], item["error"] = outcome.output, outcome.error
        item["status"] = "completed" if outcome.error is None else "failed"


async def hosted_tools(
    tools: Sequence[Mapping[str, Any]], servers: ToolServers, key: ApiKey | None
) -> HostedTools:
    """Find the tools of type mcp. Raises ApiError: 400 for wrong fields, 502 if a server cannot be
    reached.
    """
    hosted = HostedTools()
    used_names = {str(tool.get("name")) for tool in tools if tool.get("type") == "function"}
    for index, tool in enumerate(tools):
        if tool.get("type") != "mcp":
            continue
        where = f"tools[{index}]"
        _check(where, tool)
        server = servers.find(tool["server_label"], key, where)
        try:
            offered = await server.tools()
        except ToolServerError as error:
            raise ApiError(502, str(error), param="tools", code="tool_server") from error
        allowed = _names(tool.get("allowed_tools"), f"{where}.allowed_tools")
        chosen = [each for each in offered if allowed is None or each["name"] in allowed]
        for each in chosen:
            name = each["name"]
            if name in used_names or not _FUNCTION.fullmatch(name):
                name = re.sub("[^A-Za-z0-9_-]", "_", f"{server.settings.label}__{name}")[:64]
            if name in used_names:
                raise bad_field("tools", f"{where}: two tools are called {name!r}")
            used_names.add(name)
            approval = _needs_approval(tool.get("require_approval", "always"), each["name"], where)
            forced = server.settings.approval == "always"
            hosted.by_name[name] = HostedTool(server, each["name"], forced or approval)
            function = {
                "name": name, "description": each["description"],
                "parameters": each["input_schema"],
            }  # fmt: skip
            hosted.functions.append({"type": "function", "function": function})
        hosted.listed.append(
            {
                "id": f"mcpl_{uuid4().hex}",
                "type": "mcp_list_tools",
                "server_label": server.settings.label,
                "tools": chosen,
                "error": None,
            }
        )
    return hosted


def _check(where: str, tool: Mapping[str, Any]) -> None:
    if unknown := [key for key in tool if key not in _KNOWN]:
        raise bad_field(
            "tools",
            f"{where}.{unknown[0][:64]} is not supported: this server uses tool servers that its "
            "operator names (--tool-server), by server_label",
        )
    if not isinstance(tool.get("server_label"), str):
        raise bad_field("tools", f"{where}.server_label must be a string")


def _names(value: Any, where: str) -> frozenset[str] | None:
    """Read a list of tool names, or a filter with `tool_names`. None: all."""
    if value is None:
        return None
    names = value.get("tool_names") if isinstance(value, dict) else value
    if isinstance(value, dict) and set(value) != {"tool_names"}:
        raise bad_field("tools", f"{where}: only tool_names is supported")
    if not isinstance(names, list) or any(not isinstance(name, str) for name in names):
        raise bad_field("tools", f"{where} must be a list of names")
    return frozenset(names)


def _needs_approval(setting: Any, name: str, where: str) -> bool:
    """Whether calls of a tool need an approval, by `require_approval`."""
    if setting in ("always", "never"):
        return bool(setting == "always")
    if not isinstance(setting, dict) or not setting or set(setting) - {"always", "never"}:
        raise bad_field(
            "tools", f"{where}.require_approval must be always, never, or have lists of both"
        )
    for key, value in setting.items():
        names = _names(value, f"{where}.require_approval.{key}")
        if names is not None and name in names:
            return bool(key == "always")
    return "never" in setting or "always" not in setting
