"""Step part of speculative decoding: drafts of one step are verified in the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from attrs import evolve

from modulm.contracts.drafter import Drafter
from modulm.contracts.step_part import BuiltModel, PlannerContext, StepPart
from modulm.errors import ConfigError

if TYPE_CHECKING:
    from modulm.contracts.decision import Decision
    from modulm_speculation.step.planner import DraftPlanner
    from modulm_speculation.step.runner import DraftRunner

__all__ = ["DraftsPart"]


class DraftsPart(StepPart):
    """Step part of speculative decoding.

    drafter: by default the one in `--plugin-config`, or the one a plugin creates
    (`modulm_drafter`).
    """

    name = "drafts"
    api = 1

    def __init__(self, drafter: Drafter | None = None) -> None:
        self._configured = drafter
        self._made: tuple[Any, Drafter | None] = (None, None)
        self._opened: tuple[Any, Any] | None = None

    @classmethod
    def opened(cls, config: Any, plugins: Any) -> Self:
        part = cls()
        part._opened = config, plugins
        return part

    @property
    def masks(self) -> bool:  # type: ignore[override]
        """Whether drafts may be trees, which is known before the model is built."""
        if self._opened is None:
            return bool(getattr(self._configured, "trees", False))
        from modulm_speculation.flags import SpeculationConfig
        from modulm_speculation.hooks import requested_method

        requested = requested_method(self._opened[0].group(SpeculationConfig))
        return requested is not None and bool(requested[1].get("trees"))

    def decision(self) -> Decision | None:
        """Return the drafter's name and what chose it; None without speculative decoding."""
        from modulm_speculation.flags import SpeculationConfig
        from modulm_speculation.hooks import requested_method

        if self._opened is None:
            return None
        config, plugins = self._opened
        flags = config.group(SpeculationConfig)
        requested = requested_method(flags)
        if requested is not None:
            from modulm.contracts.decision import Decision

            flag = "--spec-method" if flags.spec_method else "--speculative-config"
            return Decision("speculative decoding", (), requested[0], f"set by {flag}")
        if flags.speculative == "off":
            return None
        from modulm.loading import open_checkpoint
        from modulm.plugins.defaults import choose_model, choose_platform
        from modulm_speculation.automatic import AT_LOAD, choose_speculator, stored_bytes

        checkpoint = open_checkpoint(config, plugins)
        device = config.device.device
        decision, _ = choose_speculator(
            config,
            checkpoint,
            choose_model(plugins, checkpoint.architectures, checkpoint.config).driver,
            plugins,
            platform=choose_platform(plugins, None if device == "auto" else device).driver,
            weight_bytes=stored_bytes(checkpoint.path),
        )
        if flags.speculative is None and decision.winner is not None:
            return evolve(decision, reason=f"{decision.reason}, {AT_LOAD}")
        return decision

    def planner(self, context: PlannerContext) -> DraftPlanner | None:
        from modulm_speculation.step.planner import DraftPlanner

        return DraftPlanner(context) if context.values.get("drafts") else None

    def runner(self, built: BuiltModel) -> DraftRunner | None:
        from modulm_speculation.adaptive import Adaptive
        from modulm_speculation.speculator import Speculator
        from modulm_speculation.step.runner import DraftRunner
        from modulm_speculation.step.shared import SharedDrafter

        drafter = self._drafter(built)
        if drafter is None:
            return None
        inner = drafter.speculator if isinstance(drafter, Adaptive) else drafter
        shared = inner if isinstance(inner, SharedDrafter) else None
        if reason := _unsupported(built.config.parallel, built.mesh, inner, shared):
            raise ConfigError("speculative_config", f"not supported yet: {reason}")
        if isinstance(drafter, Adaptive | Speculator) and drafter.trees:
            from modulm_speculation.step.tree import TreeRunner

            return TreeRunner(drafter)
        if not (built.mesh.gives or shared):
            return None
        flags = built.config.scheduler
        sizes = built.platform.step_sizes(flags.max_num_seqs, flags.max_num_batched_tokens)
        most = sizes.tokens[-1] if sizes else 0
        reach = max(built.loaded.max_model_len + drafter.most, most)
        return DraftRunner(drafter, shared, sizes, reach)

    def _drafter(self, built: BuiltModel) -> Drafter | None:
        """Return the model's drafter, created once per loaded model."""
        if self._configured is None:
            tables = built.config.device.plugin_config
            configured = built.plugins.configured("speculators", tables)
            if configured is not None:
                driver, options = configured
                self._configured = driver(options)
        if self._configured is not None:
            return self._configured
        model, drafter = self._made
        if model is not built.loaded:
            drafter = built.plugins.hook.modulm_drafter(
                config=built.config,
                model=built.loaded.model,
                platform=built.platform,
                loaded=built.loaded,
                mesh=built.mesh,
            )
            self._made = built.loaded, drafter
        return drafter

    def unload(self) -> None:
        self._made = None, None

    def pack_report(self, value: dict[int, Any]) -> Any:
        return value


def _unsupported(parallel: Any, mesh: Any, drafter: Drafter, shared: Any) -> str | None:
    """Return what the ranks of a model prevent, and what to use instead; or None."""
    if parallel.pipeline_parallel_size > 1:
        return "drafters with pipeline stages: use --tensor-parallel-size alone"
    if (
        getattr(drafter if shared is None else shared.drafter, "trees", False)
        and parallel.ranks > 1
    ):
        return "trees of drafts on several ranks: leave out `trees`"
    if drafter.caches and parallel.shared_experts:
        return (
            "a drafter with its own caches on replicas that share experts: use an ngram or suffix "
            "drafter"
        )
    if drafter.caches and mesh.context.size > 1:
        return "a drafter with its own caches and --decode-context-parallel-size"
    if drafter.caches and mesh.tensor.size > 1 and shared is None:
        return "a drafter of --plugin-config with its own caches on several ranks"
    return None
