"""Fill a model with weights from a mapped file, or pack them into one first."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from modulm.errors import ConfigError, UnsupportedError
from modulm.loading.weights import fill
from modulm_mapped_weights.file import FileReader, FileWriter, InvalidFile
from modulm_mapped_weights.key import weights_key
from modulm_mapped_weights.values import Describer, Restorer, Undescribable
from modulm_weight_transfer.overwrite import first_unit
from modulm_weight_transfer.refill import Baseline, modules_of, set_value

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from modulm.contracts.config import EngineConfig
    from modulm.contracts.loader import WeightLoader
    from modulm.loading.weights import WeightPlan
    from modulm.nn.weight_slots import Unit
    from modulm_mapped_weights.folder import CacheFolder

__all__ = ["Filler"]

log = logging.getLogger("modulm.weights")


class Filler:
    """Fills models as `modulm.loading.weights.fill` does; their weights are a file's pages."""

    def __init__(self, folder: CacheFolder, config: EngineConfig) -> None:
        self.folder, self.config = folder, config

    def fill(
        self, plan: WeightPlan, loader: WeightLoader, *, device: torch.device, progress: bool
    ) -> None:
        """Map the file of these weights; if there is none, load the checkpoint and write it.

        Raises ConfigError if the folder cannot be written or is too small, UnsupportedError for
        layers whose values cannot be stored.
        """
        if not all(stored.file for stored in plan.read.values()):
            raise ConfigError(
                "weights_memory", "mmap: these weights are made up; only those of files are mapped"
            )
        key = weights_key(plan, loader.path, self.config)
        reader = self.folder.read(key)
        if reader is not None and _restore(plan, reader):
            return
        with self.folder.lock(key):
            reader = self.folder.read(key)
            if reader is not None and _restore(plan, reader):
                return
            with self.folder.write(key) as writer:
                packing = _Packing(plan, writer)
                try:
                    fill(plan, loader, device=device, progress=progress)
                finally:
                    packing.end()
                writer.finish({"key": key, **packing.description()})
            log.info("packed the weights into %s", self.folder.path / key)


def _modules(units: list[Unit]) -> list[Module]:
    """All modules that loading sets values in, in a fixed order."""
    modules = (each for unit in units for each in modules_of(unit.module, unit.finish))
    return list({id(each): each for each in modules}.values())


def _restore(plan: WeightPlan, reader: FileReader) -> bool:
    """Set all values from a file; False, with none of them set, if it does not fit."""
    modules = _modules(list(plan.units))
    restorer = Restorer(reader.description["values"], reader.mapped)
    try:
        values = [
            (modules[module], table, name, restorer.restore(described))
            for module, table, name, described in reader.description["modules"]
        ]
    except (InvalidFile, LookupError, TypeError, ValueError) as error:
        log.warning("the packed weights are ignored: the file %s", error)
        return False
    for each in values:
        set_value(*each)
    log.info("mapped %.2f GB of packed weights", reader.bytes / 1e9)
    return True


class _Packing:
    """Writes the modules of a plan into a file as they are finished, and maps them from it.

    Modules that wait for one another are written together.
    """

    def __init__(self, plan: WeightPlan, writer: FileWriter) -> None:
        self._plan, self._writer = plan, writer
        self._describer = Describer(writer.add)
        self._restorer = Restorer(self._describer.values)
        self._finishes = [unit.finish for unit in plan.units]
        modules = _modules(list(plan.units))
        self._baselines = {id(module): Baseline(module) for module in modules}
        self._places = {id(module): place for place, module in enumerate(modules)}
        #: (module, table, name) -> description.
        self._values: dict[tuple[int, str, str], Any] = {}
        #: By the unit that others wait for: how many are not finished, and their modules.
        self._remaining: dict[int, int] = {}
        self._families: dict[int, list[Module]] = {}
        #: Parameter -> the family that fills it.
        self._owners: dict[tuple[int, str], int] = {}
        for unit in plan.units:
            family = id(first_unit(unit))
            self._remaining[family] = self._remaining.get(family, 0) + 1
            self._families.setdefault(family, []).extend(modules_of(unit.module, unit.finish))
            for slot in unit.slots:
                self._owners[id(slot.module), slot.attribute] = family
            unit.finish = partial(self._finish, unit, unit.finish)

    def end(self) -> None:
        """Give the units their own functions back."""
        for unit, finish in zip(self._plan.units, self._finishes, strict=True):
            unit.finish = finish

    def description(self) -> dict[str, Any]:
        """Return the description of the file."""
        modules = [[*key, described] for key, described in self._values.items()]
        return {"modules": modules, "values": self._describer.values}

    def _finish(self, unit: Unit, finish: Callable[[], None] | None) -> None:
        if finish is not None:
            finish()
        family = id(first_unit(unit))
        self._remaining[family] -= 1
        if not self._remaining[family]:
            self._write(family, unit)

    def _write(self, family: int, unit: Unit) -> None:
        """Write the modules of a family, and replace their values by mapped ones."""
        values = []
        for module in {id(each): each for each in self._families.pop(family)}.values():
            for table, name, value in self._baselines[id(module)].changes():
                if self._owners.get((id(module), name), family) == family:
                    try:
                        described = self._describer.describe(value)
                    except Undescribable as error:
                        raise UnsupportedError(
                            f"--weights-memory mmap: {unit.path} keeps {error}, which cannot be "
                            "stored; use private"
                        ) from error
                    self._values[self._places[id(module)], table, name] = described
                    values.append((module, table, name, described))
        self._restorer.mapped = self._writer.mapped()
        for module, table, name, described in values:
            set_value(module, table, name, self._restorer.restore(described))
        self._describer.replace(self._restorer.made)
