"""Which parsers read a model's text: by flag, or as a plugin chooses for its checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modulm.errors import ConfigError
from modulm.loading import open_checkpoint
from modulm.plugins.defaults import choose_parser
from modulm.plugins.explain import Decision, Verdict
from modulm.plugins.kinds import find_kind

if TYPE_CHECKING:
    from modulm.config import EngineConfig
    from modulm.plugins.manager import PluginManager

__all__ = ["parser_decisions", "with_declared_parsers"]


def with_declared_parsers(config: EngineConfig, plugins: PluginManager) -> EngineConfig:
    """The configuration with the parsers that fit the checkpoint; what the user gave stays.

    Raises ConfigError if the model is to decide on calling tools and no parser is known for it.
    """
    tool, reasoning = (decision.winner for decision in parser_decisions(config, plugins))
    flags: dict[str, Any] = {}
    if config.structured_outputs.reasoning_parser is None and reasoning is not None:
        flags["reasoning_parser"] = reasoning
    if config.tool_calls.tool_call_parser is None and tool is not None:
        flags |= {"tool_call_parser": tool, "enable_auto_tool_choice": True}
    elif config.tool_calls.enable_auto_tool_choice and tool is None:
        raise ConfigError(
            "tool_call_parser",
            f"enable_auto_tool_choice needs one, and no plugin knows one for {config.model.model}: "
            "name it, see `modulm plugins list tool_parsers`",
        )
    return config.with_(**flags)


def parser_decisions(config: EngineConfig, plugins: PluginManager) -> tuple[Decision, Decision]:
    """Which tool parser and which reasoning parser, and why: by flag, or as a plugin chooses."""
    given = config.tool_calls.tool_call_parser, config.structured_outputs.reasoning_parser
    tool = _decision(config, plugins, "tool_parsers", given[0])
    return tool, _decision(config, plugins, "reasoning_parsers", given[1])


def _decision(
    config: EngineConfig, plugins: PluginManager, kind: str, given: str | None
) -> Decision:
    if given is None:
        return choose_parser(plugins, kind, open_checkpoint(config, plugins).info)
    candidates = tuple(Verdict(entry.name) for entry in plugins.names(kind))
    return Decision(find_kind(kind).noun, candidates, given, "given by flag")
