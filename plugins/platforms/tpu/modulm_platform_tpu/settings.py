"""Settings of the engine that programs depend on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from attrs import frozen

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.platform import Flags

__all__ = ["AUTO", "LOOKUPS", "Settings", "drafter_of", "settings_of"]

#: Drafters that run no model.
LOOKUPS = ("ngram", "suffix")

#: The value of `--speculative` that chooses a drafter by the model.
AUTO = "auto"

#: Compile at start; used if no installed package has `--optimization-level`.
_LEVEL = 2


@frozen(kw_only=True)
class Settings:
    """Settings of the engine that programs depend on.

    level: of `--optimization-level`. samples: the most tokens that a step samples; None: as many
    as it has. rank: of adapters, 0 without. embeds: whether prompts may have embeddings. drafts:
    whether a drafter may run a model.
    """

    level: int = _LEVEL
    samples: int | None = 0
    rank: int = 0
    embeds: bool = False
    drafts: bool = False


def settings_of(config: Flags, rows: int) -> Settings:
    """Read the settings. rows: the most rows of a step."""
    values = _values(config)
    drafts: int | None = 0
    drafter = drafter_of(config)
    if drafter is not None:
        table = values.get("speculative_config") or {}
        drafts = values.get("spec_tokens") or table.get("num_speculative_tokens")
    return Settings(
        level=values.get("optimization_level", _LEVEL),
        samples=None if drafts is None else rows * (1 + drafts),
        rank=values.get("max_lora_rank", 0) if values.get("enable_lora") else 0,
        embeds=bool(values.get("enable_prompt_embeds")),
        drafts=drafter not in (None, *LOOKUPS),
    )


def drafter_of(config: Flags) -> str | None:
    """Return the name of the drafter that the flags choose, `AUTO`, or None."""
    values = _values(config)
    table = values.get("speculative_config") or {}
    name = values.get("spec_method") or table.get("method")
    if name is None and (table.get("model") or values.get("spec_model")):
        name = "draft_model"
    chosen = name or values.get("speculative") or "off"
    return None if chosen == "off" else str(chosen)


def _values(config: Flags) -> dict[str, Any]:
    """The values of all flags by name; packages that are not installed have none."""
    return {spec.name: value for spec, value in cast("EngineConfig", config).values()}
