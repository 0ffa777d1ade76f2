"""The flags of media in prompts, by vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from modulm.config.schema.flags import FlagGroup, flag, flag_group
from modulm.errors import ConfigError

__all__ = ["KINDS", "MediaConfig", "MediaKind"]

MediaKind: TypeAlias = Literal["image", "audio", "video"]

#: The kinds of media, by the names that vLLM's flags and prompts have for them.
KINDS: tuple[MediaKind, ...] = ("image", "audio", "video")


@flag_group
class MediaConfig(FlagGroup):
    """Images, audio and video in prompts, for models that take them."""

    title = "MediaConfig"

    limit_mm_per_prompt: Mapping[str, Any] = flag(
        {}, 'Most media of each kind in a prompt, as {"image": 4}; 999 where a kind is left out.'
    )
    mm_processor_kwargs: Mapping[str, Any] = flag(
        {}, "Arguments for the checkpoint's processor, such as sizes of images."
    )
    mm_processor_cache_gb: float = flag(
        4.0, "Room for what processors made of media, by content; 0: none is kept.",
        unit="GiB", least=0,
    )  # fmt: skip
    language_model_only: bool = flag(
        False, "Take no media: as a limit of 0 for every kind in --limit-mm-per-prompt."
    )

    def __attrs_post_init__(self) -> None:
        for kind, given in self.limit_mm_per_prompt.items():
            if kind not in KINDS:
                raise ConfigError("limit_mm_per_prompt", f"{kind!r} is none of {', '.join(KINDS)}")
            count = given.get("count") if isinstance(given, Mapping) else given
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ConfigError("limit_mm_per_prompt", f"{kind}: a number of items is expected")
