"""Settings of checkpoints list layers by their names in files; models call them otherwise.

Models that read images nest their text model and name encoders in their own way: `ignore` says
`model.visual.merger`, the layer is `visual.merger`. The patterns are compared with the names in the
files, and the layers that only match there are added under the model's names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from modulm.contracts.quantization import CheckpointInfo
from modulm.contracts.weight_names import WeightNames
from modulm.errors import CheckpointError, ModulmError
from modulm.nn import read_config
from modulm.plugins import manager
from modulm_tensor_files.safetensors import read_header

__all__ = ["Covers", "native_lists", "native_patterns", "renamed_layers"]

#: Whether a list of patterns has one for a layer: `below` or `matches`.
Covers = Callable[[str, Iterable[str]], bool]


def native_lists(
    checkpoint: CheckpointInfo, settings: Mapping[str, Any], lists: Mapping[str, Covers]
) -> dict[str, Any]:
    """Return the settings with the model's names added to `lists`, which are keys of theirs.

    Unchanged without safetensors files, and for models whose names are those in the files.
    """
    wanted = {key: covers for key, covers in lists.items() if _texts(settings.get(key))}
    layers = renamed_layers(checkpoint) if wanted else {}
    more = {key: native_patterns(settings[key], covers, layers) for key, covers in wanted.items()}
    return {**settings, **{key: [*settings[key], *names] for key, names in more.items()}}


def _texts(value: Any) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return listed and all(isinstance(one, str) for one in value) and len(value) > 0


def native_patterns(
    patterns: Sequence[str], covers: Covers, layers: Mapping[str, str]
) -> list[str]:
    """Return patterns for the layers that match only by their names in files.

    layers: see `renamed_layers`. Each module whose layers all match has two patterns: its path, and
    a regular expression after "re:".
    """
    matching = {name for name, stored in layers.items() if not stored or covers(stored, patterns)}
    sizes = Counter(module for name in layers for module in _modules(name))
    counts = Counter(module for name in matching for module in _modules(name))
    whole: dict[str, None] = {}
    for name in layers:
        if name in matching and not covers(name, patterns):
            modules = (module for module in _modules(name) if counts[module] == sizes[module])
            # Without one, it is a parameter of a module that also has layers.
            if (module := next(modules, None)) is not None:
                whole[module] = None
    return [entry for name in whole for entry in (name, rf"re:{re.escape(name)}(\.|$)")]


def _modules(name: str) -> Iterator[str]:
    """A layer's name and those of the modules around it, the outermost first."""
    return accumulate(name.split("."), "{}.{}".format)


def renamed_layers(checkpoint: CheckpointInfo) -> dict[str, str]:
    """Return the model's name -> the name in files, of all layers; empty if none is renamed.

    Convolutions are layers of the model, too. Formats never hold them as codes, so that lists do
    not name them: their name in files is empty here.
    """
    names = _weight_names(checkpoint)
    renames = names is not None and (names.rename or names.rewrite)
    if names is None or not renames or checkpoint.folder is None:
        return {}
    layers: dict[str, str] = {}
    try:
        for file in sorted(checkpoint.folder.glob("*.safetensors")):
            for stored in read_header(file):
                if len(stored.shape) > 1:
                    module = stored.name.rpartition(".")[0] if len(stored.shape) < 4 else ""
                    layers |= dict.fromkeys(_names(names, stored.name, stored.shape), module)
    except CheckpointError:  # the loader says what is wrong
        return {}
    return layers if any(name != stored for name, stored in layers.items()) else {}


def _names(names: WeightNames, stored: str, shape: Sequence[int]) -> Iterator[str]:
    """The model's layers that a stored tensor belongs to."""
    try:
        pieces = [name for name, _ in names.apply(stored, torch.empty(shape, device="meta"))]
    except (RuntimeError, ValueError, IndexError, TypeError):  # codes have other shapes
        pieces = [name for name in [names.name(stored)] if name is not None]
    return (name.rpartition(".")[0] for name in pieces)


def _weight_names(checkpoint: CheckpointInfo) -> WeightNames | None:
    """Return the table of names of the checkpoint's model; None without a driver of its own."""
    architectures = checkpoint.config.get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        try:
            driver: Any = manager.current().load("models", name)
            config = read_config(checkpoint.config, driver.config_type, "config.json")
            names: WeightNames = driver.weights(config)
        except ModulmError:
            continue
        return names
    return None
