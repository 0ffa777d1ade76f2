"""Prompts that are stored on the server and used by requests by id.

A folder holds a JSON file per prompt: `ID.json`, and `ID@VERSION.json` for other versions. It
contains request fields (instructions, tools, text, temperature ...), which the request may
override, and `input`, which precedes the request's. `{{name}}` in its strings is a variable,
replaced verbatim by the request's value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from attrs import frozen

from modulm.errors import ConfigError
from modulm_route_responses.schema import ResponsesRequest, messages_of
from modulm_server.errors import ApiError
from modulm_server.json_body import bad_field, decode

if TYPE_CHECKING:
    from modulm_route_responses.flags import ResponsesConfig

__all__ = ["StoredPrompts"]

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}(@[A-Za-z0-9_.-]{1,64})?")
_VARIABLE = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}\}")
_BYTES = 1 << 20
#: Request fields that a prompt may set.
_FIELDS = frozenset(
    {
        "input", "instructions", "max_output_tokens", "metadata", "parallel_tool_calls",
        "reasoning", "temperature", "text", "tool_choice", "tools", "top_k", "top_p",
    }
)  # fmt: skip


@frozen
class StoredPrompts:
    """Stored prompts by id and version, read at start; None if not configured."""

    prompts: Mapping[str, Mapping[str, Any]] | None

    @classmethod
    def of(cls, config: ResponsesConfig) -> StoredPrompts:
        """Read the prompts of a configuration. Raises ConfigError naming an invalid file."""
        if config.stored_prompts is None:
            return cls(None)
        folder = Path(config.stored_prompts)
        if not folder.is_dir():
            raise ConfigError("stored_prompts", f"{folder} is not a folder")
        return cls({file.stem: _read(file) for file in sorted(folder.glob("*.json"))})

    def apply(self, body: ResponsesRequest) -> tuple[ResponsesRequest, list[dict[str, Any]]]:
        """Apply the stored prompt of a request; returns (request, the prompt's messages).

        Raises ApiError: 404 for an unknown prompt, 400 for variables that do not match it.
        """
        reference = body.prompt
        if reference is None:
            return body, []
        if self.prompts is None:
            raise bad_field(
                "prompt", "prompt is not enabled: start the server with --stored-prompts FOLDER"
            )
        if unknown := reference.keys() - {"id", "variables", "version"}:
            raise bad_field(
                "prompt", f"prompt has no field {min(unknown)[:64]!r}, only id, variables, version"
            )
        name, version = reference.get("id"), reference.get("version")
        if not isinstance(name, str) or not isinstance(version, str | None):
            raise bad_field("prompt", "prompt: id and version must be strings")
        prompt = self.prompts.get(name if version is None else f"{name}@{version}")
        if prompt is None:
            label = name if version is None else f"{name}, version {version}"
            raise ApiError(404, f"no prompt {label[:130]!r}", param="prompt", code="not_found")
        filled = _fill(prompt, _values(reference.get("variables"), _variables(prompt)))
        messages = filled.pop("input", [])
        messages = (
            [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        )
        overrides = {name: value for name in _FIELDS if (value := getattr(body, name)) is not None}
        return msgspec.structs.replace(body, **{**filled, **overrides}), messages


def _read(file: Path) -> Mapping[str, Any]:
    try:
        if file.stat().st_size > _BYTES:
            raise ConfigError("stored_prompts", f"{file} is larger than {_BYTES} bytes")
        if not _NAME.fullmatch(file.stem):
            raise ConfigError(
                "stored_prompts", f"{file}: a prompt is named ID.json or ID@VERSION.json"
            )
        value = msgspec.json.decode(file.read_bytes())
        if not isinstance(value, dict):
            raise ConfigError("stored_prompts", f"{file} is not a JSON object")
        if unknown := value.keys() - _FIELDS:
            raise ConfigError("stored_prompts", f"{file}: a prompt has no field {min(unknown)!r}")
        request = decode(msgspec.json.encode(value), ResponsesRequest)
        messages_of(request.input, needed=False)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError("stored_prompts", f"{file} cannot be read: {error}") from error
    except ApiError as error:
        raise ConfigError("stored_prompts", f"{file}: {error.message}") from error
    return {name: getattr(request, name) for name in value}


def _variables(value: Any) -> set[str]:
    """The names of all variables in a value's strings."""
    if isinstance(value, str):
        return set(_VARIABLE.findall(value))
    inner = value.values() if isinstance(value, Mapping) else value
    return set().union(*map(_variables, inner)) if isinstance(value, Mapping | list) else set()


def _values(variables: Any, expected: set[str]) -> dict[str, str]:
    """Validate the values of variables. Raises ApiError(400)."""
    variables = {} if variables is None else variables
    if not isinstance(variables, Mapping):
        raise bad_field("prompt", "prompt.variables must be an object")
    if variables.keys() != expected:
        names = ", ".join(sorted(expected)) or "none"
        raise bad_field("prompt", f"prompt.variables must be: {names}")
    return {name: _text(name, value) for name, value in variables.items()}


def _text(name: str, value: Any) -> str:
    if isinstance(value, Mapping) and value.get("type") == "input_text":
        value = value.get("text")
    if not isinstance(value, str):
        raise bad_field("prompt", f"prompt.variables.{name} must be text")
    return value


def _fill(value: Any, values: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return _VARIABLE.sub(lambda match: values[match[1]], value)
    if isinstance(value, Mapping):
        return {name: _fill(inner, values) for name, inner in value.items()}
    return [_fill(inner, values) for inner in value] if isinstance(value, list) else value
