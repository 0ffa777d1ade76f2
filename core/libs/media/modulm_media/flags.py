"""The flags of media in prompts, by vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_network
from typing import Any, Literal, TypeAlias

from modulm.contracts.flags import FlagGroup, flag, flag_group
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
    trust_request_mm_kwargs: bool = flag(
        False, "Let requests bring any mm_processor_kwargs, not only sizes within bounds."
    )
    media_io_kwargs: Mapping[str, Any] = flag(
        {}, 'How files are decoded, by kind, as {"video": {"num_frames": 32, "fps": 2}}.'
    )
    mm_processor_cache_gb: float = flag(
        4.0, "Room for what processors made of media, by content; 0: none is kept.",
        unit="GiB", least=0,
    )  # fmt: skip
    language_model_only: bool = flag(
        False, "Take no media: as a limit of 0 for every kind in --limit-mm-per-prompt."
    )
    mm_encoder_only: bool = flag(
        False, "Load no text model: requests are given the embeddings of their media."
    )
    mm_encoder_tp_mode: str = flag(
        "weights",
        "How several ranks run encoders of prompts: with parts of the weights, or with all of "
        "them and parts of the items.",
        choices=("weights", "data"),
    )
    enable_mm_embeds: bool = flag(
        False, "Take images that are embeddings already (`image_embeds`)."
    )
    allowed_local_media_path: str | None = flag(
        None, "Folder whose files requests may name as file:// URLs; None: they may name none.",
        unit="path",
    )  # fmt: skip
    allowed_media_domains: tuple[str, ...] | None = flag(
        None, "Hosts that media are fetched from, '*.name' for all below one; None: any public one."
    )
    allowed_media_networks: tuple[str, ...] = flag(
        (),
        "Networks that are not public, as 10.1.0.0/16, that media may be fetched from.",
    )
    media_url_allow_redirects: bool = flag(True, "Follow redirects, each checked like the first.")
    image_fetch_timeout: float = flag(5.0, "Time to fetch an image.", unit="s", least=0.01)
    audio_fetch_timeout: float = flag(10.0, "Time to fetch a sound.", unit="s", least=0.01)
    video_fetch_timeout: float = flag(30.0, "Time to fetch a video.", unit="s", least=0.01)
    max_media_download_size_mb: int = flag(
        256, "Most megabytes of one file of media.", unit="MB", least=1
    )
    max_media_request_download_size_mb: int = flag(
        256, "Most megabytes of all files of media of one request.", unit="MB", least=1
    )
    max_image_pixels: int = flag(64 << 20, "Most pixels of an image or a frame.", least=1)
    max_audio_decode_duration_s: float = flag(
        600.0, "Longest sound in a prompt.", unit="s", least=0.1
    )
    max_video_frames: int = flag(1024, "Most frames that are taken of a video.", least=1)
    media_decode_timeout: float = flag(30.0, "Time to decode a file.", unit="s", least=0.01)
    media_decode_processes: int = flag(
        0, "Processes that decode files; 0: half the processors, four at most.", least=0
    )

    def __attrs_post_init__(self) -> None:
        for kind, given in self.limit_mm_per_prompt.items():
            _check_kind("limit_mm_per_prompt", kind)
            count = given.get("count") if isinstance(given, Mapping) else given
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ConfigError("limit_mm_per_prompt", f"{kind}: a number of items is expected")
        for kind, given in self.media_io_kwargs.items():
            _check_kind("media_io_kwargs", kind)
            if not isinstance(given, Mapping):
                raise ConfigError("media_io_kwargs", f"{kind}: a table is expected")
        for network in self.allowed_media_networks:
            try:
                ip_network(network)
            except ValueError as error:
                raise ConfigError("allowed_media_networks", str(error)) from error


def _check_kind(name: str, kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(name, f"{kind!r} is none of {', '.join(KINDS)}")
