"""The server's flags for adapters."""

from collections.abc import Mapping

from modulm.contracts.flags import FlagGroup, flag, flag_group
from modulm.errors import ConfigError

__all__ = ["ServedAdaptersConfig"]


@flag_group
class ServedAdaptersConfig(FlagGroup):
    """LoRA adapters of the server."""

    title = "Served adapters"
    server = True

    lora_modules: tuple[str, ...] | None = flag(
        None,
        'Adapters to load at start: name=path, or {"name": ..., "path": ..., '
        '"base_model_name": ...}. A path is a folder or a Hub repository. Requires '
        "--enable-lora.",
        common=True,
    )
    default_mm_loras: Mapping[str, str] | None = flag(
        None,
        "Adapters of requests for the model itself that have media: {image, audio or video: path}. "
        "Requires --enable-lora.",
    )
    allow_runtime_lora_updating: bool = flag(
        False, "Serve /v1/load_lora_adapter and /v1/unload_lora_adapter."
    )
    allowed_lora_path: tuple[str, ...] | None = flag(
        None, "Folders that /v1/load_lora_adapter may load from. Default: none.", unit="path"
    )
    share_adapters_between_keys: bool = flag(
        False, "Let every API key use, replace and unload the adapters that others have loaded."
    )
    max_adapters_per_key: int = flag(
        32, "Maximum adapters that an API key may have loaded at a time.", least=1
    )

    def __attrs_post_init__(self) -> None:
        if unknown := (self.default_mm_loras or {}).keys() - {"image", "audio", "video"}:
            raise ConfigError("default_mm_loras", f"{min(unknown)!r} must be image, audio or video")
