"""Folders of the sentence-transformers library: what follows the model, by modules.json."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from modulm.errors import CheckpointError, UnsupportedError
from modulm.plugins.defaults import choose_loader

if TYPE_CHECKING:
    from modulm.plugins.manager import PluginManager

__all__ = ["Dense", "dense_layers", "sentence_table"]

_FILE = "modules.json"
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")

#: Keys of 1_Pooling/config.json and what they mean to us.
_MODES = {
    "pooling_mode_cls_token": "CLS",
    "pooling_mode_mean_tokens": "MEAN",
    "pooling_mode_max_tokens": "MAX",
    "pooling_mode_lasttoken": "LAST",
}
_NEW_MODES = {"cls": "CLS", "mean": "MEAN", "max": "MAX", "lasttoken": "LAST"}
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": F.gelu,
    "Sigmoid": torch.sigmoid,
}


@frozen(eq=False)
class Dense:
    """A layer that pooled vectors pass, in fp32. weight: [outputs, inputs]."""

    weight: Tensor
    bias: Tensor | None
    act: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, inputs] -> [n, outputs]."""
        return self.act(F.linear(x.float(), self.weight, self.bias))


def sentence_table(folder: Path) -> dict[str, Any]:
    """Pooling and normalisation by their names in `--pooler-config`; empty without modules.json.

    Raises CheckpointError, UnsupportedError for a module or an order that is not known.
    """
    modules = _modules(folder)
    if not modules:
        return {}
    kinds = [kind for kind, _ in modules]
    if any(kind not in _ORDER for kind in kinds) or kinds != sorted(kinds, key=_ORDER.index):
        raise UnsupportedError(f"{folder / _FILE}: modules {', '.join(kinds)}: not yet")
    table: dict[str, Any] = {"normalize": "Normalize" in kinds}
    for kind, path in modules:
        if kind == "Pooling":
            table["pooling_type"] = _mode(path / "config.json")
    settings = folder / "config_sentence_transformers.json"
    cut = _read(settings, dict).get("truncate_dim") if settings.exists() else None
    return table if cut is None else {**table, "dimensions": cut}


def dense_layers(folder: Path, plugins: PluginManager, device: torch.device) -> tuple[Dense, ...]:
    """The layers between pooling and normalisation, with their weights.

    Raises CheckpointError, UnsupportedError naming the file.
    """
    return tuple(
        _dense(path, plugins, device) for kind, path in _modules(folder) if kind == "Dense"
    )


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """(kind, folder) of each module in order."""
    file = folder / _FILE
    if not file.exists():
        return []
    return [
        (str(module.get("type", "")).rpartition(".")[2], folder / str(module.get("path", "")))
        for module in _read(file, list)
    ]


def _dense(folder: Path, plugins: PluginManager, device: torch.device) -> Dense:
    file = folder / "config.json"
    table = _read(file, dict)
    name = str(table.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise UnsupportedError(f"{file}: activation_function {name}: not yet")
    found = dict(choose_loader(plugins, folder, None).driver(folder).read())
    weight, bias = found.get("linear.weight"), found.get("linear.bias")
    shape = (table.get("out_features"), table.get("in_features"))
    if weight is None or tuple(weight.shape) != shape:
        raise CheckpointError(f"{folder}: linear.weight of shape {list(shape)} is needed")
    return Dense(
        weight.to(device, torch.float32),
        None if bias is None else bias.to(device, torch.float32),
        _ACTIVATIONS[name],
    )


def _mode(file: Path) -> str:
    table = _read(file, dict)
    if "pooling_mode" in table:
        chosen, known = [table["pooling_mode"]], _NEW_MODES
    else:
        chosen = [k for k, v in table.items() if k.startswith("pooling_mode_") and v is True]
        known = _MODES
    if len(chosen) != 1 or chosen[0] not in known:
        raise UnsupportedError(f"{file}: pooling by {chosen}: not yet; known are {list(known)}")
    return known[chosen[0]]


def _read(file: Path, kind: type) -> Any:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: {error}") from error
    if not isinstance(found, kind):
        raise CheckpointError(f"{file}: a JSON {kind.__name__} is needed")
    return found
