"""The worker's half: taps the routers of the rank's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import define

from modulm.contracts.platform import Transfer
from modulm.contracts.step_part import DIRECT, BuiltModel, PartRunner, RunnerContext
from modulm.errors import ConfigError, RequestError
from modulm_expert_routes.requests import FIELD
from modulm_layers import ExpertChoice

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from modulm.contracts.executor import Plan, RowStart
    from modulm.contracts.model import Batch

__all__ = ["RoutesRunner"]

_FLAG = "enable_return_routed_experts"


@define(eq=False)
class _Step:
    """Routes of the running step: chosen [tokens, layers, top_k] int16, of the current pass.

    given: the same shape, -1 where the router chooses; None if it chooses everywhere.
    """

    chosen: Tensor
    given: Tensor | None = None


@define(eq=False)
class _Tap:
    """Taps one layer's router; it is recorded along with a step that a device records."""

    layer: int
    step: _Step

    def __call__(
        self,
        logits: Tensor,
        weights: Tensor,
        ids: Tensor,
        weigh: Callable[[Tensor, Tensor], Tensor],
    ) -> tuple[Tensor, Tensor]:
        step, count = self.step, min(len(ids), len(self.step.chosen))
        if step.given is not None:
            given = step.given[:, self.layer].to(ids.dtype)
            used = torch.where(given < 0, ids, given)
            same = (used == ids).all(-1, keepdim=True)
            weights, ids = torch.where(same, weights, weigh(logits, used)), used
        step.chosen[:count, self.layer].copy_(ids[:count])
        return weights, ids


class RoutesRunner(PartRunner):
    """Reports [tokens, layers, top_k] of each step from the rank that samples.

    Pipeline stages pass their layers on to the next stage after each step. Raises ConfigError for
    models and platforms whose routers cannot be tapped.
    """

    def __init__(self, built: BuiltModel) -> None:
        self._blocks = [m for m in built.loaded.model.modules() if isinstance(m, ExpertChoice)]
        self._platform, self._mesh = built.platform, built.mesh
        rows, tokens = _step_limits(built)
        if built.platform.step_sizes(rows, tokens) is not None:
            message = f"not supported yet on {built.platform.name}, which compiles steps: use a GPU"
            raise ConfigError(_FLAG, message)
        stages = built.mesh.pipeline
        if stages.size > 1 and built.platform.queued:
            message = "not supported yet with stages on GPUs: use --tensor-parallel-size"
            raise ConfigError("pipeline_parallel_size", message)
        shapes = {(block.routing["top_k"], block.router.spec.outputs) for block in self._blocks}
        self._before, self._layers, (self._top_k, self._experts) = self._agree(shapes)
        self._tokens = tokens
        self._rows: dict[int, tuple[int, Tensor]] = {}
        self._step: _Step | None = None
        self._passes: list[Tensor] = []
        #: Tokens of the pass that runs, and whether the step has run any.
        self._count, self._ran = 0, False

    def _agree(self, shapes: set[tuple[int, int]]) -> tuple[int, int, tuple[int, int]]:
        """Return the layers before this stage and up to its end, and (top_k, experts).

        Stages without experts learn the numbers of those before them.
        """
        stages, before = self._mesh.pipeline, 0
        if not stages.first:
            before, *shape = stages.take_over()[0].tolist()
            shapes |= {(shape[0], shape[1])} if before else set()
        if len(shapes) > 1:
            message = f"the model's routers differ: experts per token, experts: {sorted(shapes)}"
            raise ConfigError(_FLAG, message)
        top_k, experts = next(iter(shapes), (0, 0))
        layers = before + len(self._blocks)
        if not stages.last:
            numbers = torch.tensor([layers, top_k, experts], device=self._platform.device)
            stages.pass_on([numbers])
        elif not layers:
            message = "the model has no routers that can be tapped: leave out the flag"
            raise ConfigError(_FLAG, message)
        return before, layers, (top_k, experts)

    def capacity(self) -> Mapping[str, Any]:
        return {"layers": self._layers, "top_k": self._top_k, "experts": self._experts}

    def open(self, context: RunnerContext) -> None:
        shape = self._tokens, len(self._blocks), self._top_k
        chosen = torch.zeros(shape, dtype=torch.int16, device=self._platform.device)
        self._step = _Step(chosen)
        for layer, block in enumerate(self._blocks):
            block.tap = _Tap(layer, self._step)

    def close(self) -> None:
        for block in self._blocks:
            block.tap = None

    def admit(self, start: RowStart, value: list[Any] | None) -> None:
        """Start a row. value: the first token whose experts are given, and the experts."""
        if value is None:
            return
        first, experts = value
        if experts is None:
            raise RequestError("the experts of a cached prompt were lost: send it again", FIELD)
        own = np.asarray(experts)[:, self._before : self._before + len(self._blocks)]
        self._rows[start.row] = first, torch.from_numpy(own.astype(np.int16))

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def begin(self, plan: Plan, value: Any) -> None:
        """Forget what a failed step has left."""
        self._passes, self._count, self._ran = [], 0, False

    def recording(self, plan: Plan) -> str | None:
        """Run steps with given experts as they are: recordings have no inputs for them."""
        return DIRECT if self._rows and self._given(plan) is not None else None

    def amend_batch(self, plan: Plan, batch: Batch) -> Batch:
        """Prepare a pass. plan: maybe padded, and one of several of a step."""
        self._end_pass()
        self._count, self._ran = int(plan.counts[plan.rows >= 0].sum()), True
        if self._step is not None:
            given = self._given(plan) if self._rows else None
            self._step.given = None if given is None else given.to(self._platform.device)
        return batch

    def _given(self, plan: Plan) -> Tensor | None:
        """Return [tokens, layers, top_k] int16 for a pass, or None if no experts are given."""
        given: Tensor | None = None
        end = 0
        for row, start, count in zip(
            plan.rows.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True
        ):
            begin, end = end, end + count
            if row not in self._rows:
                continue
            first, experts = self._rows[row]
            low, high = max(start, first), min(start + count, first + len(experts))
            if low < high:
                if given is None:
                    given = experts.new_full((len(plan.tokens), *experts.shape[1:]), -1)
                place = begin + low - start
                given[place : place + high - low] = experts[low - first : high - first]
        return given

    def _end_pass(self) -> None:
        """Keep what the pass has chosen; the next one overwrites it."""
        if self._count and self._step is not None:
            self._passes.append(self._step.chosen[: self._count].clone())
            self._count, self._step.given = 0, None

    def _routes(self) -> Tensor:
        """Return [tokens, layers, top_k] int16 of the step, with the layers of earlier stages."""
        self._end_pass()
        routes = torch.cat(self._passes) if len(self._passes) != 1 else self._passes[0]
        stages = self._mesh.pipeline
        return routes if stages.first else torch.cat([stages.take_over()[0], routes], dim=1)

    def collect(self, plan: Plan, hidden: Tensor) -> Transfer | None:
        """Start copying the step's routes to the host."""
        if not self._ran or not (self._passes or self._count):
            return None
        routes, self._ran = self._routes(), False
        return self._platform.fetch((routes,)) if self._mesh.gives else None

    def report(self) -> None:
        """Pass the step's routes on, in all stages but the last."""
        if self._mesh.pipeline.last or not self._ran or not (self._passes or self._count):
            return
        self._mesh.pipeline.pass_on([self._routes().int()])  # groups send no int16
        self._ran = False


def _step_limits(built: BuiltModel) -> tuple[int, int]:
    """Return the maximum rows and tokens of a step."""
    scheduler = built.config.scheduler
    return scheduler.max_num_seqs, scheduler.max_num_batched_tokens
