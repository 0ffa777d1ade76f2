"""Compile a model's forward pass and head: one program for each shape and kind of step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from attrs import evolve

from modulm.contracts.kernels import RecordedForward
from modulm.contracts.state import StatePlan
from modulm.errors import UnsupportedError
from modulm_kernels_pallas.bridge import array_of, is_array, numpy_of, tensor_of
from modulm_kernels_pallas.lora import using_slots
from modulm_kernels_pallas.recurrence import ScanPlan
from modulm_kernels_pallas.spread import using_mesh
from modulm_kernels_pallas.torchax_import import torchax
from modulm_platform_tpu.adapters import DeviceAdapters
from modulm_platform_tpu.compilations import COMPILATIONS
from modulm_platform_tpu.sizes import steps_of
from modulm_platform_tpu.tensors import DeviceTensor, Hidden, Logits
from modulm_platform_tpu.weights import MovedWeights

if TYPE_CHECKING:
    from modulm.contracts.media import MediaItem
    from modulm.contracts.model import Batch
    from modulm.contracts.platform import StepSizes
    from modulm_platform_tpu.placement import Placement
    from modulm_platform_tpu.settings import Settings

__all__ = ["CompiledForward", "model_of"]

log = logging.getLogger("modulm.tpu")

#: Levels of `--optimization-level` from which steps, and rarer kinds of them, compile at start.
_STEPS_LEVEL, _KINDS_LEVEL = 1, 2


class CompiledForward(RecordedForward):
    """A model's forward pass as programs. Replaces the model's `logits` by programs as well, and
    runs its encoders of images and audio on the host.

    forward: the model's `forward`, or a partial of its `states`. sizes: the sizes of steps, all of
    which `record` compiles.
    """

    def __init__(
        self, forward: Any, sizes: StepSizes, placement: Placement, settings: Settings
    ) -> None:
        self._forward, self._sizes = forward, sizes
        self._placement, self._settings = placement, settings
        self._model = model_of(forward)
        self._media = bool(self._model.media)
        self._moved = MovedWeights(self._model, placement, keep=self._media)
        self._whole = not self._model.caches
        self._adapters = DeviceAdapters(self._moved.adapted, settings.rank, placement)
        self._pruned = not self._media
        self._logits_of = self._model.logits
        self._model.logits = self._logits
        if self._media:
            self._encode, self._pieces = self._model.encode, self._model.encode_in_pieces
            self._model.encode = self._encode_on_host
            self._model.encode_in_pieces = self._encode_pieces_on_host
        self.clear()

    @property
    def steps(self) -> Sequence[np.ndarray]:
        return steps_of(self._sizes) if self._settings.level >= _STEPS_LEVEL else ()

    def padded(self, counts: np.ndarray) -> np.ndarray:
        return counts

    @property
    def memory(self) -> int:
        return 0

    def clear(self) -> None:
        self._programs: dict[Hashable, Callable[..., Any]] = {}

    def record(self, batch: Batch) -> None:
        """Compile the forward pass for this batch's shape, and what reads its result."""
        began, before = time.perf_counter(), COMPILATIONS.count
        hidden = self(batch)
        states = hidden if isinstance(hidden, torch.Tensor) else hidden[0]
        for size in self._samples():
            logits = self._logits(states[torch.zeros(size, dtype=torch.int64)])
            if isinstance(logits, Logits):
                logits.argmax_on_device()
                logits.compile_sampling()
            if self._adapters and self._settings.level >= _KINDS_LEVEL:
                with self._adapters.pretending(size):
                    self._logits(states[torch.zeros(size, dtype=torch.int64)])
        if self._settings.level >= _KINDS_LEVEL:
            for kind in self._kinds(batch, states.shape[-1]):
                self._record_kind(batch, kind)
        log.info(
            "compiled a step of %d rows and %d tokens: %d programs in %.1f s",
            len(batch.query_starts) - 1, len(batch.tokens), COMPILATIONS.count - before,
            time.perf_counter() - began,
        )  # fmt: skip

    def _samples(self) -> Iterator[int]:
        """The numbers of samples that steps may have."""
        for size in self._sizes.samples:
            yield size
            if self._settings.samples is not None and size >= self._settings.samples:
                return

    def _kinds(self, batch: Batch, width: int) -> Iterator[Mapping[str, torch.Tensor]]:
        """Yield what steps may have beside tokens, in all combinations but none of it."""
        count, dtype = len(batch.tokens), self._dtype()
        inputs: list[dict[str, torch.Tensor]] = []
        if self._media or self._settings.embeds:
            mask = torch.zeros(count, dtype=torch.bool)
            inputs.append({"embeds": torch.zeros(count, width, dtype=dtype), "embeds_mask": mask})
        if self._media and self._model.axes > 1:
            axes = torch.zeros(self._model.axes, count, dtype=torch.int64)
            inputs.append({"axis_positions": axes})
        if self._adapters:
            inputs.append({"adapters": torch.zeros(count, dtype=torch.int32)})
        for chosen in product((False, True), repeat=len(inputs)):
            if any(chosen):
                parts = (part for part, on in zip(inputs, chosen, strict=True) if on)
                yield {name: tensor for part in parts for name, tensor in part.items()}

    def _record_kind(self, batch: Batch, kind: Mapping[str, Any]) -> None:
        if "adapters" in kind:
            with self._adapters.pretending(len(batch.tokens)):
                self(evolve(batch, **kind))
        else:
            self(evolve(batch, **kind))

    def _dtype(self) -> torch.dtype:
        floats = (t.dtype for t in self._moved.tensors if t.dtype.is_floating_point)
        return next((d for d in floats if d.itemsize in (2, 4)), torch.float32)

    def __call__(self, batch: Batch) -> Any:
        batch = self._prepared(batch)
        keys = tuple(plan.key() for plan in batch.plans)
        own = tuple(batch._own())
        if None in keys or batch.encoded is not None or batch.carried:
            raise UnsupportedError(
                f"device tpu: {type(self._model).__name__}: steps with encoder inputs or plans "
                "that differ in shape are not supported yet"
            )
        tensors = [_numbers(tensor, len(batch.tokens)) for tensor in batch.tensors()]
        tables = [numpy_of(table) for table in batch.tables()]
        adapted = batch.adapters is not None
        if adapted:
            self._adapters.refresh()
        arguments = (self._arrays(), self._adapters.arrays(adapted))
        caches = jax.tree.leaves(batch.caches)
        arrays = [cache.array for cache in caches]
        shapes = tuple(array.shape for array in (*tensors, *tables))
        key = (keys, own, shapes)
        program = self._programs.get(key)
        if program is None:
            traced = self._traced(batch)
            if not self._pruned:
                self._prune(traced, arguments[1], arrays, tensors, tables)
                arguments = (self._arrays(), arguments[1])
            where = self._placement.sharding()
            out = where, [self._placement.cache_sharding(array.shape) for array in arrays]
            every = (*arguments, arrays, tensors, tables)
            program = self._programs[key] = self._program(traced, out, every, donate=(2,))
        hidden, changed = program(*arguments, arrays, tensors, tables)
        for cache, array in zip(caches, changed, strict=True):
            cache.array = array
        states = tuple(Hidden.of(array, self._sizes.samples) for array in hidden)
        return states[0] if len(states) == 1 else states

    def _prepared(self, batch: Batch) -> Batch:
        """Replace what a program cannot read: lengths of rows are not known while it is traced."""
        plans = (ScanPlan.of(p) if isinstance(p, StatePlan) else p for p in batch.plans)
        none_sampled = torch.zeros(0, dtype=torch.int64)
        batch = evolve(batch, plans=tuple(plans), only_sampled=False, sample=none_sampled)
        if not self._whole:
            return batch
        counts = np.diff(numpy_of(batch.query_starts))
        owners = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
        none = torch.zeros(len(batch.tokens), dtype=torch.int64)
        extras = {"token_types": none, **batch.extras, "token_rows": owners}
        return evolve(batch, extras=extras)

    def _traced(self, batch: Batch) -> Callable[..., Any]:
        """Return the function of arrays that the forward pass of such batches is."""
        structure = jax.tree.structure(batch.caches)

        def run(weights: Any, adapters: Any, caches: Any, tensors: Any, tables: Any) -> Any:
            with torch.inference_mode(False):  # layers may change them in place
                held = list(map(tensor_of, caches))
                step = batch.over(list(map(tensor_of, tensors)), list(map(tensor_of, tables)))
            step = evolve(step, caches=jax.tree.unflatten(structure, held))
            slots = None if step.adapters is None else array_of(step.adapters)
            hidden = self._with_weights(weights, adapters, slots, lambda: self._forward(step))
            states = (hidden,) if isinstance(hidden, torch.Tensor) else hidden
            return tuple(map(array_of, states)), [array_of(cache) for cache in held]

        return run

    def _prune(self, traced: Callable[..., Any], *arguments: Any) -> None:
        """Free weights on the device that neither the forward pass nor the head read."""
        weights = self._arrays()
        used: set[int] = set()
        hidden = jax.eval_shape(traced, weights, *arguments)[0][0]
        states = jax.ShapeDtypeStruct((1, hidden.shape[-1]), hidden.dtype)
        for function, more in ((traced, arguments), (self._run_head, ([], states, None))):
            graph = jax.make_jaxpr(function)(weights, *more).jaxpr
            read = {id(x) for equation in graph.eqns for x in equation.invars}
            read |= {id(x) for x in graph.outvars}
            used |= {i for i, x in enumerate(graph.invars[: len(weights)]) if id(x) in read}
        self._moved.retain(used)
        self._pruned = True

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits with a program, or as a part of a drafter's program."""
        if is_array(hidden):
            with self._adapters.off():
                logits: torch.Tensor = self._logits_of(hidden)
            return logits
        count = len(hidden)
        size = next((size for size in self._sizes.samples if size >= count), count)
        if isinstance(hidden, DeviceTensor):
            states: Any = hidden.array
            if len(states) != size:
                states = numpy_of(hidden.host())
        else:
            states = numpy_of(hidden)
        if len(states) != size:
            states = np.pad(states, ((0, size - count), (0, 0)))
        slots = self._adapters.current(count)
        if slots is None:
            return Logits(self._head((self._arrays(), [], states, None)), count)
        self._adapters.refresh()
        padded = np.pad(slots, (0, size - count))
        arrays = self._adapters.arrays(True)
        with self._adapters.pretending(size):
            return Logits(self._head((self._arrays(), arrays, states, padded), True), count)

    def _head(self, arguments: tuple[Any, ...], adapted: bool = False) -> jax.Array:
        """Compute logits with the program of this number of rows."""
        key = "head", adapted, arguments[2].shape
        if key not in self._programs:
            run = partial(self._run_head, adapted=adapted)
            self._programs[key] = self._program(run, self._placement.sharding(), arguments)
        logits: jax.Array = self._programs[key](*arguments)
        return logits

    def _program(
        self, run: Callable[..., Any], out: Any, arguments: tuple[Any, ...],
        donate: tuple[int, ...] = (),
    ) -> Callable[..., Any]:  # fmt: skip
        """Return the program of a function. Weights of other models that it reads, as those of
        drafters do, become arguments: as constants, a program would have copies of them.
        """
        if not self._settings.drafts:
            return jax.jit(run, donate_argnums=donate, out_shardings=out)
        graph, result = jax.make_jaxpr(run, return_shape=True)(*arguments)
        structure = jax.tree.structure(result)

        def borrowing(others: Any, *arguments: Any) -> Any:
            leaves = jax.core.eval_jaxpr(graph.jaxpr, others, *jax.tree.leaves(arguments))
            return jax.tree.unflatten(structure, leaves)

        donated = tuple(at + 1 for at in donate)
        program = jax.jit(borrowing, donate_argnums=donated, out_shardings=out)
        return partial(program, graph.consts)

    def _run_head(
        self, weights: Any, adapters: Any, hidden: Any, slots: Any, adapted: bool = False
    ) -> Any:
        states = tensor_of(hidden)
        with nullcontext() if adapted else self._adapters.off():
            head = partial(self._logits_of, states)
            logits = self._with_weights(weights, adapters, slots, head)
        return array_of(logits).astype(jnp.float32)

    def _arrays(self) -> list[jax.Array]:
        return [tensor._elem for tensor in self._moved.tensors]

    def _with_weights(
        self, weights: Sequence[Any], adapters: Sequence[Any], slots: Any, call: Callable[[], Any]
    ) -> Any:
        """Call with the weights that a program takes as arguments."""
        tensors = (*self._moved.tensors, *self._adapters.tensors(bool(adapters)))
        before = [tensor._elem for tensor in tensors]
        try:
            for tensor, array in zip(tensors, (*weights, *adapters), strict=True):
                tensor._elem = array
            with ExitStack() as stack:
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
                stack.enter_context(using_slots(slots))
                stack.enter_context(using_mesh(self._placement.mesh))
                stack.enter_context(torchax.default_env())
                return call()
        except (torchax.tensor.OperatorNotFound, jax.errors.JAXTypeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise UnsupportedError(
                f"device tpu: {type(self._model).__name__} is not supported yet: {reason}"
            ) from error
        finally:
            for tensor, array in zip(tensors, before, strict=True):
                tensor._elem = array

    # Encoders of images and audio, whose shapes are those of the items.

    def _encode_on_host(self, items: Sequence[MediaItem]) -> Sequence[torch.Tensor]:
        with self._moved.on_host():
            outputs: Sequence[torch.Tensor] = self._encode(items)
            return outputs

    def _encode_pieces_on_host(
        self, items: Sequence[MediaItem]
    ) -> Generator[int, None, Sequence[torch.Tensor]]:
        with self._moved.on_host():
            pieces = self._pieces(items)
        while True:
            try:
                with self._moved.on_host():
                    ran = next(pieces)
            except StopIteration as end:
                outputs: Sequence[torch.Tensor] = end.value
                return outputs
            yield ran


def _numbers(tensor: torch.Tensor, tokens: int) -> Any:
    """Return the numbers of an input; those of the device have a row for each of `tokens`."""
    if not isinstance(tensor, DeviceTensor):
        return numpy_of(tensor)
    if len(tensor.array) == tokens:
        return tensor.array
    rows = numpy_of(tensor.host())[:tokens]
    return np.pad(rows, ((0, tokens - len(rows)), (0, 0)))


def model_of(forward: Any) -> Any:
    """Return the model of a forward pass. Raises UnsupportedError for other functions."""
    owner = getattr(getattr(forward, "func", forward), "__self__", None)
    if not isinstance(owner, torch.nn.Module):
        raise UnsupportedError("device tpu: this forward pass is not a method of a model")
    return owner
