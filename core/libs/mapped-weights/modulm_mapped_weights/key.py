"""Keys of packed weights: equal if loading would give the same values."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from modulm.errors import ConfigError
from modulm_mapped_weights.file import VERSION

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.kernels import Ops
    from modulm.loading.weights import WeightPlan
    from modulm.nn.weight_slots import Unit

__all__ = ["weights_key"]

#: Samples of a file, their bytes.
_SAMPLES, _SIZE = 16, 4096


def weights_key(plan: WeightPlan, path: Path, config: EngineConfig) -> str:
    """Return the key of a model's weights on this rank.

    It covers the checkpoint's files (names, sizes, times, headers and samples), its configuration,
    the shares and formats of all layers, the code that loads them and the kernels that pack them.
    path: the checkpoint's folder or file. Raises ConfigError if the weights are not in files of
    this machine.
    """
    digest = sha256()

    def put(*values: Any) -> None:
        digest.update(repr(values).encode())

    put(VERSION, torch.__version__, sys.byteorder)
    for ops in _tables(plan.units):
        form = ops.find("packed_form")
        put(sorted(ops.providers.items()), None if form is None else form())
    settings = path / "config.json"
    put(settings.read_bytes() if settings.is_file() else b"", dict(config.model.hf_overrides))
    for stored in sorted(plan.read.values(), key=lambda each: each.name):
        put(stored.name, stored.shape, stored.dtype, stored.file, stored.bytes)
    for file in sorted({stored.file for stored in plan.read.values()}):
        put(file, *_file_facts(path, file))
    for unit in plan.units:
        put(*_unit_facts(unit))
    for source in sorted(_sources(plan.units)):
        put(source, _source_digest(source))
    return digest.hexdigest()[:40]


def _tables(units: Iterable[Unit]) -> list[Ops]:
    """The op tables of quantization methods, each once."""
    methods = (getattr(unit.module, "method", None) for unit in units)
    tables = (method.ops for method in methods if method is not None)
    return list({id(ops): ops for ops in tables}.values())


def _file_facts(path: Path, name: str) -> list[Any]:
    file = path / name if path.is_dir() else path
    try:
        with open(file, "rb") as opened:
            status = os.fstat(opened.fileno())
            step = max(1, status.st_size // _SAMPLES)
            samples = sha256()
            for offset in range(0, status.st_size, step):
                samples.update(os.pread(opened.fileno(), _SIZE, offset))
    except OSError as error:
        raise ConfigError(
            "weights_memory",
            f"mmap: the weights must be in files, but {file} cannot be read ({error.strerror}); "
            "use private",
        ) from error
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, samples.hexdigest()]


def _unit_facts(unit: Unit) -> list[Any]:
    module: Any = unit.module
    method = getattr(module, "method", None)
    facts: list[Any] = [unit.path, type(module).__qualname__, getattr(module, "spec", None)]
    facts += [type(method).__qualname__, getattr(method, "config", None)]
    for slot in unit.slots:
        facts += [slot.attribute, slot.shape, slot.dtype, slot.optional]
        facts += [
            (part.name, part.shape, part.source, part.target, part.shared)
            for way in slot.ways
            for part in way
        ]
    return facts


def _sources(units: Iterable[Unit]) -> set[str]:
    """The files of the classes that create and apply the values of modules."""
    files = set()
    for unit in units:
        for value in (unit.module, getattr(unit.module, "method", None)):
            for kind in type(value).__mro__:
                module = sys.modules.get(kind.__module__)
                file = getattr(module, "__file__", None)
                if file and not kind.__module__.startswith(("torch", "builtins", "abc")):
                    files.add(file)
    return files


@cache
def _source_digest(file: str) -> str:
    return sha256(Path(file).read_bytes()).hexdigest()
