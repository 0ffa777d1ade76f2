"""How the weights get from disk into memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.config.schema.flags import equip, flag, no_effect

__all__ = ["LoadConfig"]

_MAPPED = "weights are memory-mapped and read once, in file order"


@frozen(kw_only=True, field_transformer=equip)
class LoadConfig:
    """How the weights get from disk into memory."""

    TITLE: ClassVar[str] = "LoadConfig"
    TABLE: ClassVar[str | None] = None

    load_format: str = flag(
        "auto", "Format of the weights; auto asks each loader.", kind="loaders", choices=("auto",)
    )
    download_dir: str | None = flag(
        None, "Folder for downloads; None: the Hugging Face cache.", unit="path"
    )
    safetensors_load_strategy: str | None = flag(
        None,
        "How safetensors files are read.",
        choices=("lazy", "eager", "prefetch", "torchao"),
        state=no_effect(_MAPPED),
    )
    safetensors_prefetch_num_threads: int | None = flag(
        None, "Threads that read ahead.", least=1, state=no_effect(_MAPPED)
    )
    safetensors_prefetch_block_size: int | None = flag(
        None, "Bytes read ahead at a time.", unit="bytes", least=1, state=no_effect(_MAPPED)
    )
    model_loader_extra_config: Mapping[str, Any] = flag({}, "Options of the loader, checked by it.")
    ignore_patterns: tuple[str, ...] = flag(
        ("original/**/*",), "Files that are neither downloaded nor read."
    )
    use_tqdm_on_load: bool = flag(True, "Show a progress bar while weights are read.")
    pt_load_map_location: str = flag(
        "cpu",
        "Where pickled checkpoints are unpacked.",
        state=no_effect("pickled checkpoints are unpacked on the processor, tensor by tensor"),
    )
