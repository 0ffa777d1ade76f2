"""Which speculator `--speculative auto` uses for a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modulm.contracts.decision import Decision, Verdict
from modulm.errors import PluginError
from modulm_speculation.speculator import Speculator

if TYPE_CHECKING:
    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.model import Model
    from modulm.plugins.manager import PluginManager

__all__ = ["SUBJECT", "choose_speculator"]

SUBJECT = "speculative decoding"


def choose_speculator(
    config: EngineConfig,
    checkpoint: Checkpoint,
    family: type[Model],
    plugins: PluginManager,
    *,
    recurrent: bool = False,
) -> tuple[Decision, Mapping[str, Any]]:
    """Return the decision, whose winner may be None, and the options of the winner.

    config: resolved. family: class of the model. recurrent: whether the model has recurrent states,
    which is known once it is loaded.
    """
    reason = _unsuitable(config, family)
    if reason is not None:
        return Decision(SUBJECT, (), None, f"--speculative auto: {reason}"), {}
    verdicts, suitable = [], []
    for declared in plugins.names("speculators"):
        try:
            driver = plugins.load("speculators", declared.name)
        except PluginError as error:
            verdicts.append(Verdict(declared.name, str(error)))
            continue
        if driver.name != declared.name:
            continue  # another name of a driver, such as vLLM's of `mtp`
        options: Mapping[str, Any] | str = "used only if it is named"
        if issubclass(driver, Speculator):
            options = driver.automatic(config, checkpoint, family)
            if recurrent and driver.cheap and not isinstance(options, str):
                options = "each draft would need a copy of the recurrent states"
        if isinstance(options, str):
            verdicts.append(Verdict(declared.name, options))
        else:
            verdicts.append(Verdict(declared.name))
            suitable.append((driver.preference, declared.name, options))
    if not suitable:
        return Decision(SUBJECT, tuple(verdicts), None, "--speculative auto: none suits"), {}
    _, name, options = max(suitable, key=lambda each: each[:2])
    return Decision(SUBJECT, tuple(verdicts), name, "--speculative auto"), options


def _unsuitable(config: EngineConfig, family: type[Model]) -> str | None:
    """Return why nothing is drafted for the model, or None."""
    if config.model.runner == "pooling" or "generate" not in family.tasks:
        return "a pooling model generates no tokens"
    if config.parallel.pipeline_parallel_size > 1:
        return "not with pipeline stages"
    if config.model.batch_invariant:
        return "--batch-invariant computes tokens one by one"
    return None
