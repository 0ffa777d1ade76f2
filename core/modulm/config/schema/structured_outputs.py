"""Answers held to a grammar, and the parsers that take reasoning out of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.config.schema.flags import equip, flag, later

__all__ = ["StructuredOutputsConfig"]


@frozen(kw_only=True, field_transformer=equip)
class StructuredOutputsConfig:
    """Answers held to a grammar, and the parsers that take reasoning out of them."""

    TITLE: ClassVar[str] = "StructuredOutputsConfig"
    TABLE: ClassVar[str | None] = "structured_outputs_config"

    reasoning_parser: str | None = flag(
        None,
        "Parser that takes reasoning out of answers.",
        kind="reasoning_parsers",
        key="reasoning_parser",
        parse=lambda value: str(value) if value else None,
    )
    reasoning_parser_plugin: str = flag(
        "", "Python file that registers reasoning parsers.", key="reasoning_parser_plugin"
    )
    backend: str = flag(
        "auto",
        "Grammar backend.",
        kind="grammars",
        choices=("auto",),
        key="backend",
        own=False,
    )
    disable_any_whitespace: bool = flag(
        False, "Allow no free whitespace in JSON.", key="disable_any_whitespace", own=False
    )
    disable_additional_properties: bool = flag(
        False,
        "Treat objects as if additionalProperties were false.",
        key="disable_additional_properties",
        own=False,
    )
    enable_in_reasoning: bool = flag(
        False, "Hold the reasoning to the grammar too.", key="enable_in_reasoning", own=False
    )
    reasoning_config: Mapping[str, Any] | None = flag(
        None, "Texts that begin and end reasoning.", state=later("reasoning budgets")
    )
    guided_decoding_backend: str | None = flag(
        None,
        "Grammar backend.",
        kind="grammars",
        choices=("auto",),
        deprecated="use --structured-outputs-config.backend",
    )
    guided_decoding_disable_fallback: bool | None = flag(
        None,
        "Never try a second grammar backend.",
        deprecated="a second grammar backend is never tried",
    )
    guided_decoding_disable_any_whitespace: bool | None = flag(
        None,
        "Allow no free whitespace in JSON.",
        deprecated="use --structured-outputs-config.disable_any_whitespace",
    )
    guided_decoding_disable_additional_properties: bool | None = flag(
        None,
        "Treat objects as if additionalProperties were false.",
        deprecated="use --structured-outputs-config.disable_additional_properties",
    )
    enable_reasoning: bool = flag(
        False, "Take reasoning out of answers.", deprecated="--reasoning-parser alone does it"
    )
