"""The KV cache: size, number format, prefix caching."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["CacheConfig"]


@flag_group
class CacheConfig(FlagGroup):
    """The KV cache: size, number format, prefix caching."""

    title = "CacheConfig"

    block_size: int | None = flag(
        None, "Tokens in one block of cache; None: the platform's.", unit="tokens", least=1,
        most=4096,
    )  # fmt: skip
    gpu_memory_utilization: float = flag(
        0.92,
        "Share of the device's memory that weights and cache may take together.",
        unit="fraction",
        least=0.0,
        most=1.0,
        aliases=("--device-memory-utilization",),
        common=True,
    )
    kv_cache_memory_bytes: int | None = flag(
        None,
        "Size of the cache; replaces --gpu-memory-utilization.",
        unit="bytes",
        least=1,
        common=True,
    )
    kv_cache_dtype: str = flag(
        "auto",
        "Number format of the cache; auto: the model's; fp8: fp8_e4m3, by the checkpoint's scales; "
        "int8 and int4: with a scale per token and head.",
        choices=("auto", "bfloat16", "float16", "float32", "int8", "fp8", "fp8_e4m3", "fp8_e5m2",
                 "fp8_inc", "int4_per_token_head", "int8_per_token_head"),
    )  # fmt: skip
    kv_cache_dtype_skip_layers: tuple[str, ...] = flag(
        (), "Layers that keep the model's format: numbers, or sliding_window."
    )
    calculate_kv_scales: bool = flag(
        False,
        "Find the scales of a cache in fp8 in the first step, in place of the checkpoint's.",
    )
    num_gpu_blocks_override: int | None = flag(
        None, "Number of cache blocks, whatever the memory allows.", unit="blocks", least=1
    )
    enable_prefix_caching: bool | None = flag(
        None,
        "Reuse blocks of prompts that begin alike; None: yes where the model allows it.",
        common=True,
    )
    prefix_caching_hash_algo: str = flag(
        "sha256",
        "Hash that names a block's content.",
        choices=("sha256", "sha256_cbor", "xxhash", "xxhash_cbor", "builtin"),
    )
    mamba_block_size: int | None = flag(
        None, "Tokens between two kept states; None: 512.", unit="tokens", least=64
    )
    mamba_cache_mode: str | None = flag(
        None,
        "Which recurrent states are kept, so that prompts that begin alike share them: all, at "
        "every block of --mamba-block-size tokens of a prompt, or none.",
        choices=("none", "all", "align"),
    )
