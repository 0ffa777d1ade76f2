"""Flags for media in prompts, with vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_network
from typing import Any, Literal, TypeAlias

from modulm.contracts.flags import FlagGroup, flag, flag_group
from modulm.errors import ConfigError

__all__ = ["KINDS", "MediaConfig", "MediaKind"]

MediaKind: TypeAlias = Literal["image", "audio", "video"]

#: Kinds of media, with the names that vLLM's flags and prompts use.
KINDS: tuple[MediaKind, ...] = ("image", "audio", "video")


@flag_group
class MediaConfig(FlagGroup):
    """Images, audio and video in prompts, for models that support them."""

    title = "MediaConfig"

    limit_mm_per_prompt: Mapping[str, Any] = flag(
        {}, 'Maximum number of items per kind in a prompt, e.g. {"image": 4}. Default: 999.'
    )
    mm_processor_kwargs: Mapping[str, Any] = flag(
        {}, "Arguments for the checkpoint's processor, such as image sizes."
    )
    trust_request_mm_kwargs: bool = flag(
        False, "Accept any mm_processor_kwargs in requests, not only sizes within bounds."
    )
    media_io_kwargs: Mapping[str, Any] = flag(
        {}, 'Decoding options by kind, e.g. {"video": {"num_frames": 32, "fps": 2}}.'
    )
    mm_processor_cache_gb: float = flag(
        4.0, "Size of the cache of processor outputs; 0 disables it.",
        unit="GiB", least=0,
    )  # fmt: skip
    interleave_mm_strings: bool = flag(
        False,
        "Leave media where they are among a message's texts for chat templates that take contents "
        "as strings. By default they come before the text, as in vLLM.",
    )
    video_pruning_rate: float | None = flag(
        None,
        "Share of a video's tokens to leave out, from 0 to below 1: those that differ least from "
        "the frame before. For Qwen2-VL and Qwen2.5-VL.",
        least=0,
    )
    language_model_only: bool = flag(
        False, "Accept no media; the same as a limit of 0 for every kind in --limit-mm-per-prompt."
    )
    mm_encoder_only: bool = flag(
        False, "Load only the encoders; requests return the embeddings of their media."
    )
    mm_encoder_tp_mode: str = flag(
        "weights",
        "How ranks run encoders: `weights` splits the weights, `data` replicates them and splits "
        "the items.",
        choices=("weights", "data"),
    )
    enable_mm_embeds: bool = flag(
        False, "Accept images as precomputed embeddings (`image_embeds`)."
    )
    allowed_local_media_path: str | None = flag(
        None, "Folder from which requests may read file:// URLs. Default: none.",
        unit="path",
    )  # fmt: skip
    allowed_media_domains: tuple[str, ...] | None = flag(
        None, "Hosts to fetch media from; '*.name' includes subdomains. Default: any public host."
    )
    allowed_media_networks: tuple[str, ...] = flag(
        (),
        "Private networks to fetch media from, e.g. 10.1.0.0/16.",
    )
    media_url_allow_redirects: bool = flag(
        True, "Follow redirects; each URL is checked like the first."
    )
    image_fetch_timeout: float = flag(5.0, "Timeout for fetching an image.", unit="s", least=0.01)
    audio_fetch_timeout: float = flag(10.0, "Timeout for fetching audio.", unit="s", least=0.01)
    video_fetch_timeout: float = flag(30.0, "Timeout for fetching a video.", unit="s", least=0.01)
    max_media_download_size_mb: int = flag(
        256, "Maximum size of one media file.", unit="MB", least=1
    )
    max_media_request_download_size_mb: int = flag(
        256, "Maximum total size of a request's media files.", unit="MB", least=1
    )
    max_inflight_media_bytes: int | None = flag(
        None,
        "Maximum total size of the media of all requests in progress, encoded and decoded. "
        "Default: a quarter of the available memory.",
        unit="bytes",
        least=1,
    )
    max_image_pixels: int = flag(64 << 20, "Maximum pixels of an image or a frame.", least=1)
    max_audio_decode_duration_s: float = flag(
        600.0, "Maximum length of audio in a prompt.", unit="s", least=0.1
    )
    max_video_frames: int = flag(1024, "Maximum frames taken from a video.", least=1)
    media_decode_timeout: float = flag(30.0, "Timeout for decoding a file.", unit="s", least=0.01)
    media_decode_processes: int = flag(
        0, "Processes that decode files; 0 means half the CPUs, at most four.", least=0
    )

    def __attrs_post_init__(self) -> None:
        if (self.video_pruning_rate or 0) >= 1:
            raise ConfigError("video_pruning_rate", "must be less than 1")
        for kind, value in self.limit_mm_per_prompt.items():
            _check_kind("limit_mm_per_prompt", kind)
            count = value.get("count") if isinstance(value, Mapping) else value
            if not isinstance(count, int) or isinstance(count, bool) or count < 0:
                raise ConfigError("limit_mm_per_prompt", f"{kind}: must be a number of items")
        for kind, value in self.media_io_kwargs.items():
            _check_kind("media_io_kwargs", kind)
            if not isinstance(value, Mapping):
                raise ConfigError("media_io_kwargs", f"{kind}: must be a table")
        for network in self.allowed_media_networks:
            try:
                ip_network(network)
            except ValueError as error:
                raise ConfigError("allowed_media_networks", str(error)) from error


def _check_kind(name: str, kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(name, f"{kind!r} is none of {', '.join(KINDS)}")
