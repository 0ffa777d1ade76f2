"""Reads a PEFT folder: its configuration, and its tensors grouped by the module that they change.

The format is that of `PeftModel.save_pretrained` (https://github.com/huggingface/peft).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen, mutable
from torch import Tensor

from modulm.errors import CheckpointError

__all__ = ["AdapterFiles", "Change", "Settings", "read_adapter", "stamp_of"]

CONFIG, WEIGHTS = "adapter_config.json", ("adapter_model.safetensors", "adapter_model.bin")


def stamp_of(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """A fingerprint that changes when a file of the adapter is written or replaced."""
    path, _ = _part_of(path)
    files = [(name, path / name) for name in (CONFIG, *WEIGHTS)]
    stats = [(name, file.stat()) for name, file in files if file.is_file()]
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns) for name, s in stats)


#: Configuration keys that change the computation in unsupported ways.
_NOT_YET = (
    "arrow_config", "kasa_config", "layer_replication", "megatron_config", "monteclora_config",
    "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config",
)  # fmt: skip
#: Initializations that subtract something from the base model's weights.
_RESIDUAL = ("pissa", "corda", "olora", "loftq", "lora_ga")

_KEY = re.compile(
    r"(?P<module>.+?)\.(?P<kind>"
    r"lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"(?:\.(?P<part>[^.]+))??(?:\.(?P<what>weight|bias))?"
)


@frozen
class Settings:
    """The settings of adapter_config.json that affect the computation."""

    rank: int
    alpha: float
    rank_pattern: Mapping[str, int] = field(factory=dict)
    alpha_pattern: Mapping[str, float] = field(factory=dict)
    rslora: bool = False
    dora: bool = False
    tied: bool = False

    def rank_of(self, module: str) -> int:
        """The rank of a module."""
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def scaling(self, module: str) -> float:
        """The factor of up(down(x)); with rslora as in Kalajdzievski, arXiv 2312.03732."""
        rank = self.rank_of(module)
        alpha = float(_by_pattern(self.alpha_pattern, module, self.alpha))
        return alpha / (sqrt(rank) if self.rslora else rank)


@mutable
class Change:
    """The tensors of an adapter for one module, with their names in the file.

    down: [rank, inputs]; up: [outputs, rank]; added: [outputs], a bias of `up`; magnitude:
    [outputs]. table: down is [rank, entries] of an embedding. weight, bias: replace the base
    model's.
    """

    module: str
    name: str = ""
    down: Tensor | None = None
    up: Tensor | None = None
    added: Tensor | None = None
    magnitude: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    table: bool = False


@frozen(eq=False)
class AdapterFiles:
    """The contents of an adapter folder.

    file: of the tensors. changes: by module name in the base checkpoint and the number of wrappers
    for the module's other parameters around it.
    """

    file: Path
    settings: Settings
    changes: Mapping[tuple[str, int], Change]


def read_adapter(folder: Path) -> AdapterFiles:
    """Read an adapter. If the file holds several, which share all but their tensors, `folder` /
    NAME selects one by name.

    Raises CheckpointError naming the file and the problem.
    """
    folder, part = _part_of(folder)
    settings = read_settings(folder)
    file = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if file is None:
        raise CheckpointError(f"{folder}: there is no {' or '.join(WEIGHTS)}")
    return sort_tensors(file, settings, _only(_read_tensors(file), part, file))


def sort_tensors(file: Path, settings: Settings, tensors: Mapping[str, Tensor]) -> AdapterFiles:
    """Sort an adapter's tensors by module. file: for messages. Raises CheckpointError."""
    changes: dict[tuple[str, int], Change] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise CheckpointError(f"{file}: {name} is {tensor.dtype}, not a float dtype")
        if not bool(tensor.isfinite().all()):
            raise CheckpointError(f"{file}: {name} contains NaN or infinity")
        _sort(changes, name, tensor, file)
    if not changes:
        raise CheckpointError(f"{file}: contains no tensors")
    for change in changes.values():
        if (change.down is None) != (change.up is None):
            lacks = "lora_A" if change.down is None else "lora_B"
            raise CheckpointError(f"{file}: {change.module} has no {lacks}")
        if change.down is None and change.magnitude is not None:
            raise CheckpointError(f"{file}: {change.module} has a magnitude and no lora_A")
    return AdapterFiles(file, settings, changes)


def _part_of(folder: Path) -> tuple[Path, str | None]:
    """Return the folder with the files, and the name of the adapter if it holds several."""
    if folder.is_dir() or not (folder.parent / CONFIG).is_file():
        return folder, None
    return folder.parent, folder.name


def _only(tensors: Mapping[str, Tensor], part: str | None, file: Path) -> Mapping[str, Tensor]:
    """Select the tensors of one adapter in a file. Raises CheckpointError."""
    matches = {name: _KEY.fullmatch(name) for name in tensors}
    parts = {name: match["part"] for name, match in matches.items() if match and match["part"]}
    named = sorted(set(parts.values()))
    if part is None and len(named) > 1:
        raise CheckpointError(
            f"{file}: contains several adapters: append one of {', '.join(named)} behind the "
            "folder, "
            f"as {file.parent / named[0]}"
        )
    if part is not None and part not in named:
        known = ", ".join(named) or "none that has a name"
        raise CheckpointError(f"{file}: contains no adapter {part!r:.60}, but {known}")
    return {name: t for name, t in tensors.items() if part is None or parts.get(name) == part}


def read_settings(folder: Path) -> Settings:
    """Read adapter_config.json. Raises CheckpointError if it is missing, invalid or unsupported."""
    file = folder / CONFIG
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: there is no {CONFIG}, which a PEFT folder must have"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    if not isinstance(config, Mapping):
        raise CheckpointError(f"{file}: must be a table")
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise CheckpointError(f"{file}: peft_type is {kind!r}, not LORA")
    for key in _NOT_YET:
        if config.get(key):
            raise CheckpointError(f"{file}: {key} is {config[key]!r}: not supported yet")
    began = str(config.get("init_lora_weights", "")).lower()
    if began.startswith(_RESIDUAL):
        raise CheckpointError(
            f"{file}: init_lora_weights is {began!r}, which changes the base model; save it with "
            "path_initial_model_for_weight_conversion"
        )
    try:
        settings = Settings(
            rank=int(config["r"]),
            alpha=float(config.get("lora_alpha", 8)),
            rank_pattern={str(k): int(v) for k, v in (config.get("rank_pattern") or {}).items()},
            alpha_pattern={
                str(k): float(v) for k, v in (config.get("alpha_pattern") or {}).items()
            },
            rslora=bool(config.get("use_rslora")),
            dora=bool(config.get("use_dora")),
            tied=bool(config.get("ensure_weight_tying")),
        )
        for pattern in (*settings.rank_pattern, *settings.alpha_pattern):
            re.compile(pattern)
    except (KeyError, TypeError, ValueError, AttributeError, re.error) as error:
        raise CheckpointError(
            f"{file}: r, lora_alpha or a pattern is missing or not a number: {error!r}"
        ) from error
    if not math.isfinite(settings.alpha):
        raise CheckpointError(f"{file}: lora_alpha is not finite")
    if not all(map(math.isfinite, settings.alpha_pattern.values())):
        raise CheckpointError(f"{file}: alpha_pattern is not finite")
    if min(settings.rank, *settings.rank_pattern.values(), settings.rank) < 1:
        raise CheckpointError(f"{file}: r must be at least 1")
    return settings


def _by_pattern(table: Mapping[str, Any], module: str, other: Any) -> Any:
    """Return the value of the first pattern that matches the end of a module's name."""
    for pattern, value in table.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return other


def _read_tensors(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            from modulm_tensor_files import read_header

            for _ in read_header(file):  # limits the number of tensors
                pass
            return load_file(file)
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        message = str(error).split("\n", 1)[0][:200]
        raise CheckpointError(f"{file}: truncated, or not what its name says: {message}") from error
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise CheckpointError(f"{file}: must be a table of tensors")
    return {str(name): tensor for name, tensor in tensors.items()}


def _sort(changes: dict[tuple[str, int], Change], name: str, tensor: Tensor, file: Path) -> None:
    """Add a tensor to the change of its module. Raises CheckpointError for an unknown name."""
    path = name.removeprefix("base_model.model.")
    match = _KEY.fullmatch(path)
    if match is None:
        _sort_whole(changes, name, path, tensor, file)
        return
    wrappers = len(re.findall(r"\.base_layer(?=\.|$)", match["module"]))
    module = match["module"].replace(".base_layer", "")
    change = changes.setdefault((module, wrappers), Change(module))
    kind, bias = match["kind"], match["what"] == "bias"
    change.table |= kind.startswith("lora_embedding")
    if kind == "lora_magnitude_vector":
        change.magnitude = tensor.flatten()
    elif kind.endswith("A"):
        change.down, change.name = tensor, name
    elif bias:
        change.added = tensor
    else:
        change.up, change.name = tensor, change.name or name


def _sort_whole(
    changes: dict[tuple[str, int], Change], name: str, path: str, tensor: Tensor, file: Path
) -> None:
    """Add a weight or bias that replaces the base model's."""
    module, _, what = path.rpartition(".")
    if ".original_module" in module or (what == "weight" and module.endswith(".base_layer")):
        return  # the base model's own, saved with the trained ones
    if what not in ("weight", "bias") or "token_adapter" in module:
        raise CheckpointError(f"{file}: {name} is not a known part of a LoRA adapter")
    module = re.sub(r"\.(base_layer|modules_to_save(\.default)?)(?=\.|$)", "", module)
    change = changes.setdefault((module, 0), Change(module))
    change.name = change.name or name
    if what == "weight":
        change.weight = tensor
    else:
        change.bias = tensor
