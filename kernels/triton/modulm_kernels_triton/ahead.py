"""Compile a model's kernels ahead of time, with or without a GPU.

    python -m modulm_kernels_triton.ahead MODEL/config.json --target cuda:90

Kernels are compiled for the target with the sizes of this model, and stored where the server looks
for them (kept.py). A target is a backend and an architecture: cuda:90 for Hopper, hip:gfx942 for
MI300. Other kernels are compiled on first use.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

import modulm_kernels_triton
from modulm_kernels_triton import device
from modulm_kernels_triton.cache import LATENT_BYTES
from modulm_kernels_triton.kept import folder, keep_compiled
from modulm_kernels_triton.launch import compiling_only
from modulm_kernels_triton.tuning import tuned

__all__ = ["KINDS", "Sizes", "compile_all", "compiling_for"]

_WAVES = {"cuda": 32, "xpu": 32, "hip": 64}


@frozen
class Sizes:
    """A model's sizes; `latent` and `turned` are those of latent attention, 0 without. picks:
    tokens that an indexer of `index_heads` heads selects, 0 without. kept: the cache's format, if
    its dtype does not tell it.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    normed: bool = False
    window: int = 0
    latent: int = 0
    turned: int = 0
    picks: int = 0
    index_heads: int = 0
    index_size: int = 0
    kept: str = ""

    def form(self) -> Any:
        """Return the cache's form."""
        from modulm_kernels_triton import paged

        values = self.latent or self.head_dim
        return paged.CacheForm(
            self.kv_heads, self.block_size, self.head_dim, values, self.kv_dtype,
            bool(self.latent), self.kept,
        )  # fmt: skip

    @classmethod
    def of(cls, config: Mapping[str, Any], kv_dtype: str | None = None) -> Sizes:
        """Read the sizes in a config.json. Raises KeyError for missing keys."""
        text = config.get("text_config") or config
        heads, hidden = text["num_attention_heads"], text["hidden_size"]
        stored = text.get("torch_dtype") or text.get("dtype") or "bfloat16"
        latent = text.get("kv_lora_rank") or 0
        turned = text.get("qk_rope_head_dim") or 0
        return cls(
            hidden,
            text["intermediate_size"],
            heads,
            1 if latent else text.get("num_key_value_heads") or heads,
            latent + turned if latent else text.get("head_dim") or hidden // heads,
            getattr(torch, stored),
            torch.uint8 if kv_dtype in LATENT_BYTES else getattr(torch, kv_dtype or stored),
            normed=str(text.get("model_type", "")).startswith("qwen3"),
            window=text.get("sliding_window") or 0 if text.get("use_sliding_window", True) else 0,
            latent=latent,
            turned=turned,
            picks=text.get("index_topk") or 0,
            index_heads=text.get("index_n_heads") or 0,
            index_size=text.get("index_head_dim") or 0,
            kept=kv_dtype if kv_dtype in LATENT_BYTES else "",
        )


def elementwise(sizes: Sizes) -> None:
    """Norms, the activation of the MLP, lookup."""
    ops = modulm_kernels_triton.ops()
    x = torch.zeros(2, sizes.hidden, dtype=sizes.dtype)
    ops["rms_norm"](x, x[0], 1e-6)
    ops["add_rms_norm"](x, x.clone(), x[0], 1e-6)
    ops["act_and_mul"](torch.zeros(2, 2 * sizes.intermediate, dtype=sizes.dtype), "silu")
    ops["embedding"](torch.zeros(2, dtype=torch.int64), x)


def attention(sizes: Sizes) -> None:
    """Cache writes and attention, for a prompt and for a decode."""
    from modulm_kernels_triton import paged

    tokens = paged.FEW + 2
    values, form = sizes.latent or sizes.head_dim, sizes.form()
    cache = torch.zeros(form.shape(2), dtype=sizes.kv_dtype)
    slots, positions = torch.arange(tokens), torch.arange(tokens)
    if sizes.latent:
        k = torch.zeros(tokens, 1, sizes.head_dim, dtype=sizes.dtype)
        paged.write_kv(k, k, cache, form, slots)
        q = torch.zeros(tokens, sizes.heads, sizes.head_dim, dtype=sizes.dtype)
    else:
        width = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        qkv = torch.zeros(tokens, width, dtype=sizes.dtype)
        norm = qkv[0, : sizes.head_dim] if sizes.normed else None
        table = torch.zeros(tokens, sizes.head_dim)
        q = paged.qkv_prepare(
            qkv, norm, norm, 1e-6, table, positions, slots, cache, form, sizes.heads
        )
    numbers = [[0, 1, tokens], [1, tokens], [1, tokens], [[1, 1, 0]], [[0, 0, 0]], [0]]
    table = torch.zeros(2, 8, dtype=torch.int32)
    work = paged.Work(table, *(torch.tensor(each, dtype=torch.int32) for each in numbers))
    out = torch.zeros(tokens, sizes.heads, values, dtype=sizes.dtype)
    look = paged.Look(window=sizes.window)
    paged.paged_attention(q, cache, form, work, 1.0, out, look)


def selection(sizes: Sizes) -> None:
    """Selecting tokens and attention to them, for a prompt and for a decode."""
    from modulm_kernels_triton import paged

    if not sizes.picks:
        return
    tokens = paged.FEW + 2

    def zeros(heads: int, size: int) -> torch.Tensor:
        return torch.zeros(tokens, heads, size, dtype=sizes.dtype)

    index_dtype = sizes.dtype if sizes.kept else sizes.kv_dtype
    blocks = -(-2 * sizes.picks // sizes.block_size)
    numbers = [[[0] * blocks] * 2, [0] + [1] * (tokens - 1), range(tokens), [0], range(1, tokens)]
    work = paged.SparseWork(*(torch.tensor(each, dtype=torch.int32) for each in numbers))
    form = paged.CacheForm(
        1, sizes.block_size, sizes.index_size, sizes.index_size, index_dtype, True
    )
    cache = torch.zeros(form.shape(1), dtype=index_dtype)
    out = torch.zeros(tokens, 1, sizes.picks, dtype=torch.int32)
    weights = torch.zeros(tokens, sizes.index_heads)
    q = zeros(sizes.index_heads, sizes.index_size)
    paged.pick_tokens(q, cache, form, work, 1.0, weights, out)
    form = sizes.form()
    cache = torch.zeros(form.shape(1), dtype=sizes.kv_dtype)
    q, result = zeros(sizes.heads, sizes.head_dim), zeros(sizes.heads, sizes.latent)
    paged.selected_attention(q, cache, form, work, 1.0, out, result)


#: Kernels that models need by their sizes; each function calls ops on small tensors. kinds.py has
#: optional ones.
KINDS: tuple[Callable[[Sizes], None], ...] = (elementwise, attention, selection)


class _Absent:
    """The part of Triton's driver that compiling needs, for a device that may be absent."""

    def __init__(self, backend: str, architecture: str) -> None:
        from triton.backends.compiler import GPUTarget

        number = int(architecture) if architecture.isdigit() else architecture
        self._target = GPUTarget(backend, number, _WAVES.get(backend, 32))

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


@contextmanager
def compiling_for(backend: str, architecture: str) -> Iterator[list[Any]]:
    """Compile kernels for this target, inside the context, without starting them.

    Yields the list of compiled kernels. Raises RuntimeError if kernels are interpreted.
    """
    from triton.runtime import driver

    if device.interpreting():
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted, not compiled")
    before = driver._active
    driver.set_active(_Absent(backend, architecture))
    _forget()
    try:
        with compiling_only() as compiled:
            yield compiled
    finally:
        driver.set_active(before)
        _forget()


def _forget() -> None:
    device.target.cache_clear()
    device.fp8_products.cache_clear()
    device.scaled_products.cache_clear()
    tuned.cache_clear()


def compile_all(
    sizes: Sizes, backend: str, architecture: str, also: Collection[str] = ()
) -> list[Any]:
    """Compile all KINDS and the named ones of kinds.py for these sizes; return the kernels."""
    with compiling_for(backend, architecture) as compiled:
        from modulm_kernels_triton import kinds

        for kind in KINDS:
            kind(sizes)
        for more in kinds.KINDS:
            if more.__name__ in also:
                more(sizes)
    return compiled


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m modulm_kernels_triton.ahead")
    parser.add_argument("config", type=Path, help="a model's config.json")
    parser.add_argument("--target", default="cuda:90", help="backend:architecture")
    parser.add_argument(
        "--kv-cache-dtype",
        help="torch dtype of the cache, or fp8_ds_mla or nvfp4_ds_mla; default: the model's",
    )
    parser.add_argument(
        "--also",
        nargs="*",
        default=["sampling"],
        choices=(
            "sampling",
            "coded_layers",
            "experts",
            "adapters",
            "recurrence",
            "low_precision",
        ),
        help="what the model needs besides norms, lookup and attention; default: sampling",
    )
    arguments = parser.parse_args()
    sizes = Sizes.of(json.loads(arguments.config.read_text()), arguments.kv_cache_dtype)
    keep_compiled()
    compiled = compile_all(sizes, *arguments.target.split(":", 1), also=arguments.also)
    lines = [
        f"{kernel.name}: {kernel.metadata.shared} bytes of shared memory" for kernel in compiled
    ]
    print(*lines, f"{len(compiled)} kernels for {arguments.target} in {folder()}", sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
