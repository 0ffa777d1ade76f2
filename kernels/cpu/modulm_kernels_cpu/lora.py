"""LoRA: low-rank additions to the output of a layer, with an adapter per group of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from modulm_adapters.lora_ops import LoraTable, SlotGroups
from modulm_kernels_cpu.check import CODES, contiguous, dense_rows, dtype_code, need
from modulm_kernels_cpu.library import Library

__all__ = ["lora_ops"]

_IDS = -1


def lora_ops(library: Library) -> dict[str, Callable[..., Any]]:
    """Return the op of this module for one level."""
    call = library.call("add_lora", "pnipninpppni")

    def add_lora(out: Tensor, x: Tensor, groups: SlotGroups, table: LoraTable) -> None:
        stride, code = dense_rows("out", out), dtype_code("out", out)
        need(len(x) == len(out), f"x must have {len(out)} rows, not {len(x)}")
        need(len(x) == groups.tokens, "x must have as many rows as there are slots")
        if x.dtype == torch.int64:
            contiguous("x", x)
            x_stride, x_code = 1, _IDS
        else:
            x_stride, x_code = dense_rows("x", x), dtype_code("x", x)
            need(
                x.shape[1] == table.inputs, f"x must have {table.inputs} numbers, not {x.shape[1]}"
            )
        addresses = table.addresses
        call(
            out.data_ptr(), stride, code, x.data_ptr(), x_stride, x_code, table.inputs,
            groups.spans.data_ptr(), groups.order.data_ptr(), addresses.data_ptr(),
            addresses.shape[1], CODES[table.dtype],
        )  # fmt: skip

    return {"add_lora": add_lora}
