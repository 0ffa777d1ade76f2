"""Loads models of transformers, and replaces their linear layers by modulm's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from modulm.errors import CheckpointError, ModulmError, UnsupportedError
from modulm.nn import Builder
from modulm_layers.kv_scales import is_kv_scale
from modulm_transformers.config import TransformersConfig
from modulm_transformers.layers import BridgedLinear

__all__ = ["explained", "replace_linears", "whole_model"]


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Convert errors of the library into UnsupportedError that begins with `what`."""
    try:
        yield
    except ModulmError:
        raise
    except Exception as error:
        raise UnsupportedError(f"{what}: {type(error).__name__}: {error}") from error


def whole_model(
    config: TransformersConfig,
    checkpoint: Path,
    shared: Any,
    *,
    headless: bool = False,
    attention: str | None = None,
) -> Any:
    """The library's model, loaded by the library.

    headless: the file may contain an unused head, or lack an unused pooler. Raises CheckpointError
    for names or shapes that do not fit.
    """
    with explained(f"{config.model.__name__}: transformers cannot load {checkpoint}"):
        model, report = config.model.from_pretrained(
            checkpoint,
            config=deepcopy(config.settings),
            dtype=shared.dtype,
            attn_implementation=attention,
            output_loading_info=True,
            local_files_only=True,
        )
    for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = [str(key) for key in report[what]]
        names = [name for name in names if not is_kv_scale(name)]
        if headless and what == "missing_keys":
            names = [name for name in names if not name.startswith("pooler.")]
        if names and not (headless and what == "unexpected_keys"):
            listed = ", ".join(names[:5])
            raise CheckpointError(f"{checkpoint}: {what.replace('_', ' ')}: {listed}")
    return model.eval().requires_grad_(False).to(shared.device)


def replace_linears(model: Module, build: Builder) -> None:
    """Replace plain linear layers one by one, moving their weights."""
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear:
                setattr(parent, name, _bridge(build.at(path), name, child))


def _bridge(build: Builder, name: str, linear: torch.nn.Linear) -> BridgedLinear:
    layer = build.linear(
        name, linear.in_features, linear.out_features, bias=linear.bias is not None, split=False
    )
    if set(layer.method.create(layer.spec)) != {"weight"}:
        raise UnsupportedError(
            f"not supported yet in models run by transformers: {layer.method.name} weights"
        )
    layer.register_parameter("weight", linear.weight)
    if linear.bias is not None:
        layer.register_parameter("bias", linear.bias)
    layer.method.finish(layer, layer.spec)
    return BridgedLinear(layer, linear.out_features)
