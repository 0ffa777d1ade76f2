"""Choose the parsers for a model's text: by flag, by a plugin's hook, or by fit to the checkpoint.

Plugins that implement `modulm_choose_parser` decide first. Otherwise the parser that best fits the
checkpoint's chat template, tokens and model type is used (`fitting`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modulm.contracts.decision import Decision, Verdict
from modulm.errors import ConfigError, PluginError
from modulm.loading import open_checkpoint
from modulm.plugins.kinds import find_kind
from modulm_parsing.evidence import Evidence, evidence_of
from modulm_parsing.fitting import Match, Offer, match, offers_of

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.quantization import CheckpointInfo
    from modulm.plugins.manager import PluginManager

__all__ = [
    "choose_parser",
    "fitting_parser",
    "parser_decisions",
    "with_declared_parsers",
    "with_parsers",
]

_KINDS = ("tool_parsers", "reasoning_parsers")
_NOTHING = "no evidence for it"


def with_declared_parsers(config: EngineConfig, plugins: PluginManager) -> EngineConfig:
    """Return the configuration with parsers that fit the checkpoint; user settings take precedence.

    Raises ConfigError if tool calls are required and no parser is known for the model.
    """
    return with_parsers(config, parser_decisions(config, plugins))


def with_parsers(config: EngineConfig, decisions: tuple[Decision, Decision]) -> EngineConfig:
    """Return the configuration with the decisions applied; see `with_declared_parsers`."""
    tool, reasoning = (decision.winner for decision in decisions)
    flags: dict[str, Any] = {}
    if config.structured_outputs.reasoning_parser is None and reasoning is not None:
        flags["reasoning_parser"] = reasoning
    if config.tool_calls.tool_call_parser is None and tool is not None:
        flags["tool_call_parser"] = tool
    elif config.tool_calls.enable_auto_tool_choice and tool is None:
        raise ConfigError(
            "tool_call_parser",
            f"required by enable_auto_tool_choice, but for {config.model.model} "
            f"{decisions[0].reason}. Set one; see `modulm plugins list tool_parsers`",
        )
    return config.with_(**flags)


def parser_decisions(config: EngineConfig, plugins: PluginManager) -> tuple[Decision, Decision]:
    """Choose the tool parser and the reasoning parser, with reasons."""
    flags = config.tool_calls.tool_call_parser, config.structured_outputs.reasoning_parser
    names = dict(zip(_KINDS, flags, strict=True))
    decisions = {
        kind: _flag_decision(kind, name) for kind, name in names.items() if name is not None
    }
    if len(decisions) < len(_KINDS):
        checkpoint = open_checkpoint(config, plugins)
        for kind in _KINDS:
            if kind not in decisions:
                decisions[kind] = choose_parser(plugins, kind, checkpoint.info)
        open_kinds = [kind for kind in _KINDS if names[kind] is None and not decisions[kind].winner]
        if open_kinds:
            evidence, offers = evidence_of(config, checkpoint), offers_of(plugins)
            settled = [d.winner for kind, d in decisions.items() if kind not in open_kinds]
            beside = settled[0] if settled else None
            for kind in open_kinds:
                decisions[kind] = fitting_parser(kind, offers[kind], evidence, plugins, beside)
    return decisions["tool_parsers"], decisions["reasoning_parsers"]


def choose_parser(plugins: PluginManager, kind: str, checkpoint: CheckpointInfo) -> Decision:
    """Return the parser that a plugin's hook chooses for a checkpoint, or none.

    `kind` is "tool_parsers" or "reasoning_parsers". A parser that is disabled is not chosen.
    """
    noun = find_kind(kind).noun
    choice = plugins.hook.modulm_choose_parser(kind=kind, checkpoint=checkpoint)
    if choice is None or plugins.switched_off(kind, choice.name) is not None:
        return Decision(noun, (), None, "no flag is set and no plugin chooses one")
    reason = f"{choice}{plugins.stand_in(plugins.find(kind, choice.name))}"
    return Decision(noun, (Verdict(choice.name),), choice.name, reason)


def _flag_decision(kind: str, name: str) -> Decision:
    """Return the user's choice; an empty name disables the parser."""
    noun = find_kind(kind).noun
    if not name:
        return Decision(noun, (), None, "disabled by flag")
    return Decision(noun, (Verdict(name),), name, "set by flag")


def fitting_parser(
    kind: str,
    offers: tuple[Offer, ...],
    evidence: Evidence,
    plugins: PluginManager,
    beside: str | None = None,
) -> Decision:
    """Return the parser that fits best. beside: the parser of the other kind, if it is decided.

    On ties, third-party packages come first, then the alphabetical order.
    """
    verdicts = [(offer, _verdict(offer, kind, evidence, beside)) for offer in offers]
    fitting = [(offer, match_) for offer, match_ in verdicts if isinstance(match_, Match)]
    fitting.sort(key=lambda each: (each[1].rank, each[0].foreign), reverse=True)
    near = [Verdict(o.name, v) for o, v in verdicts if isinstance(v, str) and v != _NOTHING]
    while fitting and (broken := _broken(plugins, fitting[0][0])):
        near.insert(0, Verdict(fitting.pop(0)[0].name, broken))
    noun = find_kind(kind).noun
    if not fitting:
        return Decision(noun, tuple(near), None, _silent(evidence, kind))
    (winner, best), *others = fitting
    equal = [offer.name for offer, match_ in others if match_.rank == best.rank]
    reason = best.reason
    if equal:
        reason += f"; {', '.join(equal)} fit as well"
    if winner.foreign:
        reason += f"; {winner.declaration.origin}"
    weaker = [
        Verdict(
            offer.name, None if match_.rank == best.rank else f"fits less well: {match_.reason}"
        )
        for offer, match_ in others
    ]
    return Decision(noun, (Verdict(winner.name), *weaker, *near), winner.name, reason)


def _verdict(offer: Offer, kind: str, evidence: Evidence, beside: str | None) -> Match | str:
    verdict = match(offer.fit, kind, evidence)
    if isinstance(verdict, Match) and offer.fit.alone and beside not in (None, offer.name):
        return f"reads whole messages, so it cannot be combined with {beside}"
    return verdict


def _broken(plugins: PluginManager, offer: Offer) -> str | None:
    """Return why a parser cannot be used, or None. Imports it, so pass only the chosen one."""
    try:
        plugins.load(offer.declaration.kind, offer.name)
    except PluginError as error:
        return str(error)
    return None


def _silent(evidence: Evidence, kind: str) -> str:
    sources: Mapping[str, object] = {
        "chat template": evidence.template(kind),
        "added tokens": evidence.tokens,
        "model type": evidence.models,
    }
    seen = [name for name, value in sources.items() if value]
    return f"no installed parser fits {', '.join(seen) or 'the checkpoint'}"
