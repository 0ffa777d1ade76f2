"""Images, audio and video in prompts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.config.schema.flags import equip, flag, later, no_effect

__all__ = ["MultiModalConfig"]

_LATER = later("multimodal models")
_NO_MEDIA = no_effect("no installed model takes images, audio or video")


@frozen(kw_only=True, field_transformer=equip)
class MultiModalConfig:
    """Images, audio and video in prompts."""

    TITLE: ClassVar[str] = "MultiModalConfig"
    TABLE: ClassVar[str | None] = None

    language_model_only: bool = flag(False, "Leave out the parts that read media.", state=_NO_MEDIA)
    limit_mm_per_prompt: Mapping[str, Any] = flag(
        {}, "Most items per prompt, for each kind of media.", state=_NO_MEDIA
    )
    enable_mm_embeds: bool = flag(False, "Accept media as embeddings.", state=_LATER)
    media_io_kwargs: Mapping[str, Any] = flag({}, "Options for reading media.", state=_NO_MEDIA)
    mm_processor_kwargs: Mapping[str, Any] | None = flag(
        None, "Options of the model's processor.", state=_NO_MEDIA
    )
    mm_processor_cache_gb: float = flag(
        4, "Memory for processed media.", unit="GiB", least=0, state=_NO_MEDIA
    )
    mm_processor_cache_type: str = flag(
        "lru", "Kind of that memory.", choices=("lru", "shm"), state=_NO_MEDIA
    )
    mm_hasher_algorithm: str = flag("blake3", "Hash that names an item.", state=_NO_MEDIA)
    mm_shm_cache_max_object_size_mb: int = flag(
        128, "Largest item kept.", unit="MiB", least=1, state=_NO_MEDIA
    )
    mm_encoder_only: bool = flag(False, "Run nothing but the encoder.", state=_LATER)
    mm_encoder_tp_mode: str = flag(
        "weights", "How devices share the encoder.", choices=("weights", "data"), state=_NO_MEDIA
    )
    mm_encoder_attn_backend: str | None = flag(
        None, "Attention backend of the encoder.", state=_NO_MEDIA
    )
    mm_encoder_attn_dtype: str | None = flag(
        None, "Number format of the encoder's attention.", state=_NO_MEDIA
    )
    mm_encoder_fp8_scale_path: str | None = flag(None, "Scales to read.", state=_NO_MEDIA)
    mm_encoder_fp8_scale_save_path: str | None = flag(None, "Scales to write.", state=_NO_MEDIA)
    mm_encoder_fp8_scale_save_margin: float = flag(1.5, "Room above them.", state=_NO_MEDIA)
    interleave_mm_strings: bool = flag(
        False, "Keep media where they stand in text.", state=_NO_MEDIA
    )
    skip_mm_profiling: bool = flag(False, "Measure memory without the encoder.", state=_NO_MEDIA)
    video_pruning_rate: float | None = flag(
        None, "Share of video tokens left out.", unit="fraction", least=0, most=1, state=_NO_MEDIA
    )
    video_pruning_method: str = flag("evs", "Which tokens are left out.", state=_NO_MEDIA)
    mm_tensor_ipc: str = flag("direct_rpc", "How media reach the engine.", state=_NO_MEDIA)
    mm_processor_device: str = flag("auto", "Where media are processed.", state=_NO_MEDIA)
    mm_ipc_gpu_memory_gb: float = flag(
        0, "Device memory for passing media.", unit="GiB", least=0, state=_NO_MEDIA
    )
    mm_device_do_normalize: bool | None = flag(
        None, "Normalize media on the device.", state=_NO_MEDIA
    )
    disable_mm_preprocessor_cache: bool = flag(
        False, "Keep no processed media.", deprecated="use --mm-processor-cache-gb 0",
        state=_NO_MEDIA,
    )  # fmt: skip
    enable_multimodal_encoder_data_parallel: bool = flag(
        False, "Share the encoder's batch out.", deprecated="use --mm-encoder-tp-mode data",
        state=_NO_MEDIA,
    )  # fmt: skip
