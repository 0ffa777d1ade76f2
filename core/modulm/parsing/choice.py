"""Which parsers read a model's text: by flag, by what its checkpoint declares, or by a plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from modulm.errors import ConfigError
from modulm.loading import open_checkpoint
from modulm.plugins import manager
from modulm.plugins.defaults import choose_parser
from modulm.plugins.explain import Decision, Verdict
from modulm.plugins.kinds import find_kind

if TYPE_CHECKING:
    from modulm.config import EngineConfig
    from modulm.contracts.checkpoint import NamedCheckpoint

__all__ = ["parser_decisions", "with_declared_parsers"]


def with_declared_parsers(config: EngineConfig) -> EngineConfig:
    """The configuration with the parsers that fit the checkpoint; what the user gave stays.

    Raises ConfigError if the model is to decide on calling tools and no parser is known for it.
    """
    tool, reasoning = (decision.winner for decision in parser_decisions(config))
    flags: dict[str, Any] = {}
    if config.structured_outputs.reasoning_parser is None and reasoning is not None:
        flags["reasoning_parser"] = reasoning
    if config.frontend.tool_call_parser is None and tool is not None:
        flags |= {"tool_call_parser": tool, "enable_auto_tool_choice": True}
    elif config.frontend.enable_auto_tool_choice and tool is None:
        raise ConfigError(
            "tool_call_parser",
            f"enable_auto_tool_choice needs one, and {config.model.model} declares none: name it, "
            "see `modulm plugins list tool_parsers`",
        )
    return config.with_(**flags)


def parser_decisions(config: EngineConfig) -> tuple[Decision, Decision]:
    """Which tool parser and which reasoning parser, and why.

    A flag comes first, then what a named checkpoint declares, then what a plugin chooses for the
    checkpoint.
    """
    plugins, name = manager.current(), config.model.model
    declared: type[NamedCheckpoint] | None = None
    if any(entry.name == name for entry in plugins.names("checkpoints")):
        declared = plugins.load("checkpoints", name)
    tool_name = declared.tool_parser if declared else None
    reasoning_name = declared.reasoning_parser if declared else None
    given = config.frontend.tool_call_parser, config.structured_outputs.reasoning_parser
    tool = _parser_decision(config, "tool_parsers", given[0], tool_name)
    reasoning = _parser_decision(config, "reasoning_parsers", given[1], reasoning_name)
    return tool, reasoning


def _parser_decision(
    config: EngineConfig, kind: str, given: str | None, declared: str | None
) -> Decision:
    plugins, subject = manager.current(), find_kind(kind).noun
    candidates = tuple(Verdict(entry.name) for entry in plugins.names(kind))
    if given is not None:
        return Decision(subject, candidates, given, "given by flag")
    if declared is not None:
        return Decision(subject, candidates, declared, f"{config.model.model} declares it")
    if not plugins.hook.modulm_choose_parser.get_hookimpls():
        return Decision(subject, candidates, None, "no flag, and no plugin chooses one")
    return choose_parser(plugins, kind, open_checkpoint(config).info).decision
