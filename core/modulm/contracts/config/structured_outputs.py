"""Structured outputs, and reasoning parsers."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group, parser_name

__all__ = ["StructuredOutputsConfig"]


@flag_group
class StructuredOutputsConfig(FlagGroup):
    """Structured outputs, and reasoning parsers."""

    title = "StructuredOutputsConfig"
    table = "structured_outputs_config"

    reasoning_parser: str | None = flag(
        None,
        "Parser that separates reasoning from answers. Default (auto): the checkpoint's.",
        kind="reasoning_parsers",
        choices=("auto", "none"),
        key="reasoning_parser",
        parse=parser_name,
        common=True,
    )
    reasoning_parser_plugin: str = flag(
        "",
        "Python file that registers reasoning parsers.",
        key="reasoning_parser_plugin",
        unit="path",
        registers=True,
    )
    backend: str = flag(
        "auto",
        "Backend that compiles constraints.",
        kind="grammars",
        choices=("auto",),
        key="backend",
        nested=True,
    )
    disable_any_whitespace: bool = flag(
        False, "Disallow optional whitespace in JSON.", key="disable_any_whitespace", nested=True
    )
    disable_additional_properties: bool = flag(
        False,
        "Treat objects as if additionalProperties were false.",
        key="disable_additional_properties",
        nested=True,
    )
    compile_timeout: float = flag(
        10.0, "Time to compile a constraint.", unit="s", key="compile_timeout", nested=True, least=0
    )
    compile_memory: int = flag(
        1 << 30,
        "Maximum memory to compile a constraint.",
        unit="bytes",
        key="compile_memory",
        nested=True,
        least=1,
    )
    compile_workers: int = flag(
        2, "Constraints to compile at a time.", key="compile_workers", nested=True, least=1
    )
    enable_in_reasoning: bool = flag(
        False, "Apply the constraint to reasoning, too.", key="enable_in_reasoning", nested=True
    )
