"""Settings that fit the memory: a format of the weights, and the size of steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen

from modulm.config.binding import share_of
from modulm.config.resolve import choose_platform
from modulm.errors import CheckpointError, ModulmError
from modulm.loading import open_checkpoint
from modulm.plugins import Proposal, manager
from modulm_memory.planning import assumed_memory, making_proposals, refusal
from modulm_memory.sizes import size

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.platform import Memory, Platform
    from modulm.plugins.manager import PluginManager
    from modulm_memory.estimate import Estimate

__all__ = ["proposals", "stored_bytes"]

log = logging.getLogger("modulm.engine")

#: Endings of files that are weights.
_WEIGHTS = frozenset({".safetensors", ".gguf", ".bin", ".pt", ".pth"})
#: Memory that is ample: this many times the stored weights, and these bytes.
_AMPLE, _MARGIN = 3, 2 << 30
#: Part of the memory beside the weights that a step may use: where the platform does not measure
#: steps, what the caches leave for it; else half.
_UNMEASURED, _MEASURED = 0.1, 0.5
#: Fewest tokens of a step that are proposed.
_TOKENS = 64


def stored_bytes(checkpoint: Path) -> int:
    """Return the sizes of a checkpoint's weight files. checkpoint: a folder, or one file."""
    files = [checkpoint] if checkpoint.is_file() else checkpoint.rglob("*")
    weights = [file for file in files if file.suffix in _WEIGHTS and file.is_file()]
    tensors = [file for file in weights if file.suffix == ".safetensors"]
    return sum(file.stat().st_size for file in tensors or weights)


def proposals(config: EngineConfig) -> list[Proposal]:
    """Return settings for flags that the user left open, with the sizes as their reasons.

    Makes no estimate where memory is ample, unless `--quantization auto` asks for one. Weights that
    do not fit are noted in `refusal`.
    """
    plugins = manager.current()
    refusal.set(None)
    guard = making_proposals.set(True)
    try:
        made = [*_Fitting.of(config, plugins).proposals()]
    except ModulmError as error:  # which loading will raise
        log.debug("no settings are proposed: %s", error)
        made = []
    finally:
        making_proposals.reset(guard)
    if config.model.quantization == "auto" and not any(p.field == "quantization" for p in made):
        made.append(Proposal("quantization", None, "as stored"))
    for proposal in made:
        if proposal.value is not None:
            log.info("%s is %s: %s", proposal.field, proposal.value, proposal.reason)
    return made


def _refused(
    config: EngineConfig, plugins: PluginManager, found: Estimate, memory: Memory
) -> CheckpointError:
    """Return the error about weights that do not fit, with commands that do."""
    from modulm_memory.advice import changes_for

    rank = found.tightest
    changes = changes_for(found, plugins, config.changed(), config, memory)
    commands = [f"{change.reason}: {change.command}" for change in changes]
    return CheckpointError(
        f"the weights need {size(rank.loading)} while they are loaded, and {found.platform} has "
        f"{size(rank.memory.free)} free of {size(rank.memory.total)}; "
        + ("; ".join(commands) or "no format or length fits: use a smaller model, more devices "
           "(--tensor-parallel-size), or a machine with more memory")
    )  # fmt: skip


@frozen
class _Fitting:
    """memory: of each device. measures: whether the platform measures steps."""

    config: EngineConfig
    plugins: PluginManager
    memory: Memory
    measures: bool
    stored: int

    @classmethod
    def of(cls, config: EngineConfig, plugins: PluginManager) -> _Fitting:
        platform: Platform = choose_platform(config, plugins)[0]
        _, workers = share_of(config.parallel, 0)
        stored = stored_bytes(open_checkpoint(config, plugins).path)
        memory = assumed_memory.get() or platform.memory_per_worker(workers)
        measures = platform.reset_peak_memory() is not None
        return cls(config, plugins, memory, measures, stored)

    @property
    def ample(self) -> bool:
        """Whether the model fits in any case."""
        return self.memory.free > _AMPLE * self.stored + _MARGIN

    def proposals(self) -> Iterator[Proposal]:
        """Yield the settings to change."""
        automatic = self.config.model.quantization == "auto"
        if self.ample:
            if automatic:
                reason = f"as stored: {size(self.memory.free)} are ample"
                yield Proposal("quantization", None, reason)
            return
        name = None
        if automatic:
            found, name, reason = self._best_format()
            yield Proposal("quantization", name, reason)
        else:
            found = self._estimate(None)
        if not found.problem:
            yield from self._steps(found)
        elif not found.tightest.holds_weights and "weights_memory" not in self.config.changed():
            refusal.set(partial(_refused, self.config, self.plugins, found, self.memory))

    def _estimate(self, quantization: str | None) -> Estimate:
        from modulm_memory.estimate import estimate

        flags = {"quantization": quantization} if self.config.model.quantization == "auto" else {}
        return estimate(self.config.with_parts(flags), self.plugins, memory=self.memory)

    def _best_format(self) -> tuple[Estimate, str | None, str]:
        """Return the format with the most bits in which the whole context fits; else the one with
        the longest context.
        """
        from modulm_memory.advice import at_load

        first = self._estimate(None)
        if first.fits:
            return first, None, "as stored, which fits"
        tried: list[tuple[Estimate, str | None]] = [(first, None)]
        for method in at_load(self.config.with_parts({"quantization": None}), self.plugins):
            try:
                tried.append((self._estimate(method), method))
            except ModulmError:
                continue
            if tried[-1][0].fits:
                break
        found, name = max(tried, key=lambda each: each[0].context)
        weights = size(found.tightest.weights.bytes)
        stored = size(first.tightest.weights.bytes)
        if name is None:
            return found, None, f"as stored: no format has a longer context than {found.context}"
        reason = (
            f"weights of {weights} instead of {stored}, rounded while they load, since "
            f"{size(self.memory.free)} are free; the context is {found.context} tokens"
        )
        return found, name, reason

    def _steps(self, found: Estimate) -> Iterator[Proposal]:
        """Yield smaller steps if the activations of the default ones do not fit."""
        scheduler = found.config.scheduler
        tokens = default_tokens = int(scheduler.max_num_batched_tokens or 1)
        rows = default_rows = int(scheduler.max_num_seqs or 1)
        own = self.config.scheduler
        rank = min(found.ranks, key=lambda rank: rank.memory.free - rank.fixed)
        left = rank.memory.free - rank.fixed
        limit = int(left * (_MEASURED if self.measures else _UNMEASURED))
        while rank.widths.step(tokens, rows, found.length) > limit:
            fewer_rows = own.max_num_seqs is None and rows > 1
            fewer_tokens = own.max_num_batched_tokens is None and tokens > max(rows, _TOKENS)
            if fewer_rows and (rank.widths.logits(rows) > limit // 2 or not fewer_tokens):
                rows //= 2
            elif fewer_tokens:
                tokens = max(tokens // 2, rows, _TOKENS)
            else:
                break
        before, after = (
            rank.widths.step(default_tokens, default_rows, found.length),
            rank.widths.step(tokens, rows, found.length),
        )
        reason = (
            f"{size(left)} are free beside the weights; a step of {default_tokens} tokens and "
            f"{default_rows} requests would use {size(before)}, this one {size(after)}"
        )
        if rows != default_rows:
            yield Proposal("max_num_seqs", rows, reason)
        if tokens != default_tokens:
            yield Proposal("max_num_batched_tokens", tokens, reason)
