"""The scheduler's half: decides which blocks a connector loads and saves in the background.

A request whose prefix is stored gets a row and blocks, and waits until the blocks are filled;
tokens that could not be loaded are computed. Full blocks are saved. The blocks of a transfer are
pinned until it has ended on all ranks.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen

from modulm.contracts.connector import BlockTransfer, KVIndex, TransferPlan, TransferResult
from modulm.contracts.executor import PartReport, Plan
from modulm.contracts.requests import Request
from modulm.contracts.step_part import PartPlanner, PlannerContext, StepDraft, WaitingRequest
from modulm.errors import ConfigError
from modulm_kv_transfer.holds import PrefixHolds
from modulm_kv_transfer.units import BlockUnits
from modulm_kv_transfer.unsaved import UnsavedBlocks

__all__ = ["Load", "TransferPlanner"]

log = logging.getLogger("modulm.engine")

#: The null block, which pads block tables.
_NULL = 0
#: vLLM's stages of requests that wait for a load.
_STAGES = ("waiting_to_start", "in_progress", "completed_waiting")
#: Larger than any row's number of full blocks.
_NEVER = 1 << 60


@frozen(eq=False)
class Load:
    """A row that waits for the blocks of its first `tokens` tokens; `cached` were on the device."""

    transfer: BlockTransfer
    row: int
    epoch: int
    cached: int
    tokens: int


class _Outcome:
    """The reports of ranks on a transfer so far."""

    def __init__(self) -> None:
        self.ranks: set[int] = set()
        self.faults: list[str] = []


class TransferPlanner(PartPlanner):
    """Plans loads and saves.

    A transfer ends when all ranks have reported it, and succeeds if it succeeded on all of them.
    late: whether blocks are saved before they are evicted, instead of when they are computed.
    """

    def __init__(self, index: KVIndex, context: PlannerContext, *, late: bool = False) -> None:
        self.index = index
        self._cache = context.cache
        self._table = context.rows
        self._names = context.prefixes
        self._ranks = context.capacity.ranks
        if not self._names.enabled:
            raise ConfigError(
                "kv_transfer_config",
                "a KV connector requires prefix caching, which this model lacks, or "
                "--no-enable-prefix-caching turns off",
            )
        self._units = BlockUnits(context.capacity.groups)
        self._holds = PrefixHolds(self._units.size)
        if late and not self._cache.uniform:
            raise ConfigError(
                "kv_offloading_policy",
                "evicted is for models whose layers all have blocks of one size: use all",
            )
        groups = context.capacity.groups
        self._unsaved = UnsavedBlocks(self._cache.groups, groups) if late else None
        #: Saves of blocks that are next to be evicted.
        self._leaving: set[int] = set()
        #: Row -> tokens that need not be computed, of rows whose load ended but have not run yet.
        self._loaded: dict[int, int] = {}
        self._loading: set[int] = set()
        self._loads: dict[int, Load] = {}
        self._saves: dict[int, BlockTransfer] = {}
        self._outcomes: dict[int, _Outcome] = {}
        self._new: tuple[list[BlockTransfer], list[BlockTransfer]] = ([], [])
        #: Row -> names of its blocks, by block size.
        self._chains: dict[int, Any] = {}
        #: Row -> full blocks that are saved, or need not be.
        self._saved: dict[int, int] = {}
        #: Request -> leading blocks that are stored.
        self._stored: dict[str, int] = {}
        self._saving: set[bytes] = set()
        self._count = 0
        #: Metric -> what to add with the next committed step.
        self._counts: defaultdict[str, float] = defaultdict(float)
        #: Request -> tokens that were loaded for it, for the next committed step.
        self._arrivals: dict[str, int] = {}
        #: Stage of loads -> waiting requests, as last reported.
        self._stages = dict.fromkeys(_STAGES, 0)
        self._begun: dict[int, float] = {}
        self._undecided = False
        #: Requests whose blocks may come, but cannot be loaded yet.
        self._waiting: set[str] = set()

    @property
    def busy(self) -> bool:
        """Whether transfers are under way."""
        return bool(self._loads or self._saves)

    def external(self, waiting: WaitingRequest, cached: int) -> int | None:
        request = waiting.request
        if not request.reads_prefix or self._left_out(request):
            return cached
        size = self._units.size
        names = self._units.names(waiting.chains[0].names)[: (waiting.tokens - 1) // size]
        stored = self.index.match(request.id, names, cached // size)
        if stored is None:
            self._undecided = True
            self._waiting.add(request.id)
            return None
        self._waiting.discard(request.id)
        if request.id not in self._stored:
            self._counts["external_prefix_cache_queries"] += waiting.tokens - cached
        self._stored[request.id] = stored
        return max(cached, min(stored, len(names)) * size)

    def admit(self, waiting: WaitingRequest, row: int) -> None:
        # Blocks that are already stored are not saved again.
        request = waiting.request
        stored = self._stored.get(request.id, 0)
        self._saved[row] = _NEVER if self._left_out(request) else stored
        self._chains[row] = waiting.chains
        if request.reads_prefix and not self._left_out(request):
            names = self._units.names(waiting.chains[0].names)
            self._holds.admit(request, row, names)
            if self._unsaved is not None:
                self._unsaved.use(names)

    def _left_out(self, request: Request) -> bool:
        """Whether the request's blocks are never loaded or saved: see `KVIndex.durable`."""
        return self.index.durable and request.adapter is not None

    def load(self, waiting: WaitingRequest, row: int, cached: int, tokens: int) -> None:
        size = self._units.size
        first, last = cached // size, tokens // size
        names = tuple(self._units.names(waiting.chains[0].names)[first:last])
        request = waiting.request.id
        blocks = tuple(
            tuple(self._blocks(row, part, range(first, last)))
            for part in range(len(self._units.parts))
        )
        transfer = self._transfer(request, names, blocks, self.source(request))
        epoch = int(self._table.epoch[row])
        self._loads[transfer.id] = Load(transfer, row, epoch, cached, tokens)
        self._new[0].append(transfer)
        self._loading.add(row)
        self._table.pause(row)

    def source(self, request: str) -> Any:
        """Return `BlockTransfer.source` of the request's load."""
        return None

    def loaded(self, rows: Sequence[int]) -> dict[int, int]:
        return {row: self._loaded.pop(row) for row in rows if row in self._loaded}

    def settle(self, rows: np.ndarray, ends: np.ndarray, owners: np.ndarray) -> None:
        """Save full blocks that the connector requests, and hold what requests have marked."""
        size = self._units.size
        for row, end, full in zip(
            rows.tolist(), ends.tolist(), (ends // size).tolist(), strict=True
        ):
            done = self._saved.get(row, 0)
            if full > done:
                request = str(self._table.names[row])
                names = self._units.names(self._names.names(row))[:full]
                wanted = self.index.blocks_to_save(request, names)
                self._saved[row] = full if wanted >= full else done
                self._save(request, row, names, range(done, min(wanted, full)))
            self._holds.settle(row, end)
        if self._unsaved is not None:
            self._unsaved.settled()

    def _save(self, request: str, row: int, names: Sequence[bytes], indices: range) -> None:
        if self._units.states:
            units = self._stateful(row, indices)
        else:
            columns = [self._blocks(row, part, indices) for part in range(len(self._units.parts))]
            whole = np.all(np.array(columns) != _NULL, axis=0)
            units = {i: [ids[n] for ids in columns] for n, i in enumerate(indices) if whole[n]}
        if len(units) < len(indices):
            self.skip(request)
        if self._unsaved is not None and not self._holds.waits(row):
            for index, ids in units.items():
                self._unsaved.add(request, names[index], ids)
            return
        unsaved = [index for index in units if names[index] not in self._saving]
        if unsaved:
            chosen = tuple(names[index] for index in unsaved)
            self._start_save(request, chosen, [units[index] for index in unsaved])

    def _start_save(
        self, request: str, names: tuple[bytes, ...], blocks: Sequence[Sequence[int]]
    ) -> int:
        """Start a save; return its id. blocks: ids of each name, one for each part."""
        transfer = self._transfer(request, names, tuple(zip(*blocks, strict=True)))
        self._saving.update(names)
        self._saves[transfer.id] = transfer
        self._new[1].append(transfer)
        return transfer.id

    def _save_oldest(self, unsaved: UnsavedBlocks) -> None:
        """Save blocks that will be evicted soon."""
        running = sum(len(self._saves[identity].names) for identity in self._leaving)
        oldest = unsaved.take(unsaved.together - running)
        chosen = [each for each in oldest if each[1] not in self._saving]
        if chosen:
            requests, names, blocks = zip(*chosen, strict=True)
            self._leaving.add(self._start_save(requests[0], names, blocks))

    def _stateful(self, row: int, indices: range) -> dict[int, list[int]]:
        """Return the blocks of units whose recurrent states are kept, up to the first other one.

        Only states in the prefix cache are the same in all runs; a row may have others.
        """
        units, size = {}, self._units.size
        parts = range(len(self._units.parts))
        names = {chain.size: chain.names for chain in self._chains[row]}
        for index in indices:
            end = (index + 1) * size
            hit = self._cache.lookup(names, end)
            if hit.tokens != end:
                self._saved[row] = _NEVER
                break
            columns = [int(self._units.columns(part, [index])[0]) for part in parts]
            tables = [
                hit.blocks[group] if group in self._units.states
                else self._cache.groups[group].tables[row]
                for group, _ in self._units.parts
            ]  # fmt: skip
            ids = [int(table[at]) for table, at in zip(tables, columns, strict=True)]
            if _NULL in ids:
                break
            units[index] = ids
        return units

    def skip(self, request: str) -> None:
        """Called if some of the request's blocks cannot be saved: they had left the window of a
        cached prefix.
        """

    def _blocks(self, row: int, part: int, units: Sequence[int]) -> list[int]:
        """Return the ids of a part's blocks of these units."""
        table = self._cache.groups[self._units.parts[part][0]].tables[row]
        ids: list[int] = table[self._units.columns(part, units)].tolist()
        return ids

    def _transfer(
        self,
        request: str,
        names: tuple[bytes, ...],
        blocks: tuple[tuple[int, ...], ...],
        source: Any = None,
    ) -> BlockTransfer:
        """Create a transfer, and pin its blocks until it has ended."""
        self._count += 1
        for (group, _), ids in zip(self._units.parts, blocks, strict=True):
            self._cache.groups[group].pin(ids)
        self._begun[self._count] = time.monotonic()
        return BlockTransfer(self._count, request, names, blocks, source)

    def plan(self, step: StepDraft, left: int) -> TransferPlan | None:
        """Return the transfers to start.

        A step without rows gets an empty plan while transfers are running, so that workers report.
        """
        if self._unsaved is not None:
            self._save_oldest(self._unsaved)
        loads, saves = self._new
        holds = self._holds.take()
        undecided, self._undecided = self._undecided, False
        reports = not len(step.rows) and (self.busy or undecided)
        if not (loads or saves or holds or reports):
            return None
        self._new = ([], [])
        return TransferPlan(tuple(loads), tuple(saves), holds)

    def receive(self, plan: Plan, report: PartReport) -> None:
        result: TransferResult = report.value
        for identity in result.done:
            self._note(identity, report.rank)
        for identity, reason in result.failed:
            self._note(identity, report.rank, f"rank {report.rank}: {reason}")
        if result.removed:
            self.index.remove(result.removed)

    def events(self, names: Mapping[int, str]) -> Mapping[str, Any]:
        stages = (len(self._waiting), len(self._loads), len(self._loaded))
        for stage, now in zip(_STAGES, stages, strict=True):
            if now != self._stages[stage]:
                self._counts[f"num_requests_kv_fetch_by_stage/{stage}"] += now - self._stages[stage]
                self._stages[stage] = now
        if not self._counts:
            return {}
        counts, self._counts = self._counts, defaultdict(float)
        loaded, self._arrivals = self._arrivals, {}
        return {"counts": dict(counts), "loaded": loaded}

    def fail(self, plan: Plan) -> None:
        """Mark the transfers of a failed step as failed."""
        started: TransferPlan | None = plan.parts.get("transfers")
        if started is not None:
            for transfer in (*started.loads, *started.saves):
                self._end(transfer.id, worked=False)

    def _note(self, identity: int, rank: int, fault: str | None = None) -> None:
        """Record that a rank has ended its part of a transfer. fault: why it failed, or None."""
        if identity not in self._loads and identity not in self._saves:
            return
        outcome = self._outcomes.setdefault(identity, _Outcome())
        outcome.ranks.add(rank)
        if fault is not None:
            outcome.faults.append(fault)
        if len(outcome.ranks) < self._ranks:
            return
        if outcome.faults:
            self._warn(identity, "; ".join(outcome.faults))
        self._end(identity, worked=not outcome.faults)

    def _warn(self, identity: int, faults: str) -> None:
        if (load := self._loads.get(identity)) is not None:
            log.warning(
                "request %s: %d blocks could not be loaded and are computed (%s)",
                load.transfer.request, len(load.transfer.names), faults,
            )  # fmt: skip
        elif (save := self._saves.get(identity)) is not None:
            log.warning(
                "request %s: %d blocks could not be saved (%s)",
                save.request, len(save.names), faults,
            )  # fmt: skip

    def _note_end(self, kind: str, transfer: BlockTransfer, *, worked: bool) -> None:
        """Count a transfer that has ended. kind: load or store."""
        self._counts[f"kv_offload_{kind}_failures"] += not worked
        self._counts[f"kv_offload_{kind}_blocks"] += len(transfer.names) if worked else 0
        self._counts[f"kv_offload_{kind}_time"] += time.monotonic() - self._begun.pop(transfer.id)

    def _end(self, identity: int, *, worked: bool) -> None:
        self._outcomes.pop(identity, None)
        save = self._saves.pop(identity, None)
        if save is not None:
            self._note_end("store", save, worked=worked)
            self._saving.difference_update(save.names)
            self._free(save, first=identity in self._leaving)
            self._leaving.discard(identity)
            if worked:
                self.index.store(save.names)
            return
        load = self._loads.pop(identity, None)
        if load is None:
            return
        self._note_end("load", load.transfer, worked=worked)
        if worked:
            tokens = load.tokens - load.cached
            self._counts["external_prefix_cache_hits"] += tokens
            self._counts[f"prompt_tokens_cached_by_source/{self.index.medium}"] += tokens
            self._arrivals[load.transfer.request] = tokens
        if self._table.epoch[load.row] == load.epoch:
            self._arrived(load, worked=worked)
        self._free(load.transfer)

    def _arrived(self, load: Load, *, worked: bool) -> None:
        row, tokens = load.row, load.tokens if worked else load.cached
        self._loading.discard(row)
        self._loaded[row] = tokens
        self._table.resume(row)
        self._table.computed[row] = tokens
        if worked:
            self._names.advance(np.array([row]), np.array([tokens]))
            if self._unsaved is not None:
                self._unsaved.settled()
        else:
            self._saved[row] = 0  # what failed to load may be gone
            for group in self._units.states:  # steps may end where it has no slots
                self._cache.groups[group].shorten(row, tokens)

    def _free(self, transfer: BlockTransfer, *, first: bool = False) -> None:
        """Unpin a transfer's blocks. first: they are the next to be evicted, the last one first."""
        for (group, _), ids in zip(self._units.parts, transfer.blocks, strict=True):
            self._cache.groups[group].unpin(ids[::-1] if first else ids, first=first)

    def forget(self, idle: bool) -> None:
        if self._unsaved is not None:
            self._unsaved.clear()

    def release(self, request: Request, row: int) -> None:
        self._loading.discard(row)
        self._loaded.pop(row, None)
        self._saved.pop(row, None)
        self._chains.pop(row, None)
        self._holds.release(row)

    def finished(self, request: str) -> None:
        self._stored.pop(request, None)
        self._waiting.discard(request)
        self.index.finish(request)
