"""Which speculator `--speculative auto` uses for a model, and where that is the default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modulm.contracts.decision import Decision, Verdict
from modulm.errors import PluginError
from modulm_speculation.flags import SpeculationConfig
from modulm_speculation.speculator import Speculator

if TYPE_CHECKING:
    from modulm.contracts.checkpoint import Checkpoint
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.model import Model
    from modulm.contracts.platform import Platform
    from modulm.loading import Loaded
    from modulm.plugins.manager import PluginManager

__all__ = [
    "AT_LOAD", "LEAST", "SUBJECT", "choose_speculator", "off_by_default", "stored_bytes",
    "varying_results",
]  # fmt: skip

SUBJECT = "speculative decoding"
#: What is not known before a model is loaded; see `varying_results`.
AT_LOAD = "if the attention backend and the kernels that loading chooses keep the bits of results"
#: Weights from which on tokens are drafted by default: the steps of smaller models take so little
#: time that looking for drafts is noticeable.
LEAST = 256 << 20


def choose_speculator(
    config: EngineConfig,
    checkpoint: Checkpoint,
    family: type[Model],
    plugins: PluginManager,
    *,
    platform: type[Platform] | Platform,
    weight_bytes: int,
    recurrent: bool = False,
) -> tuple[Decision, Mapping[str, Any]]:
    """Return the decision, whose winner may be None, and the options of the winner.

    config: resolved. family: class of the model. weight_bytes: of the model, 0 if unknown.
    recurrent: whether the model has recurrent states, which is known once it is loaded.
    """
    flag = config.group(SpeculationConfig).speculative
    if flag == "off":
        return Decision(SUBJECT, (), None, "--speculative off"), {}
    why = f"--speculative {flag}" if flag else f"the default on {platform.name}"
    reason = _unsuitable(config, family)
    if reason is None and flag is None:
        reason = off_by_default(config, platform, weight_bytes)
    if reason is None and flag is None and not family.batch_invariant:
        reason = f"off with {family.__name__}, whose last bits depend on the tokens of a step"
    if reason is not None:
        return Decision(SUBJECT, (), None, f"{why}: {reason}"), {}
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
        return Decision(SUBJECT, tuple(verdicts), None, f"{why}: none suits"), {}
    _, name, options = max(suitable, key=lambda each: each[:2])
    return Decision(SUBJECT, tuple(verdicts), name, why), options


def stored_bytes(path: Path) -> int:
    """Return the size of a checkpoint's files, 0 if there are none yet or they cannot be read, of
    which the loader says why.
    """
    try:
        files = path.iterdir() if path.is_dir() else (path,)
        return sum(file.stat().st_size for file in files if file.is_file())
    except OSError:
        return 0


def off_by_default(
    config: EngineConfig, platform: type[Platform] | Platform, weight_bytes: int
) -> str | None:
    """Return why nothing is drafted without `--speculative auto`, or None."""
    if not platform.drafts:
        return "off until it is measured there"
    if config.scheduler.async_scheduling:
        return "off with --async-scheduling, since a row's next step waits for its drafts"
    if 0 < weight_bytes < LEAST:
        size = weight_bytes >> 20
        return f"off for weights of {size} MB, whose steps take about as long as looking for drafts"
    return None


def varying_results(loaded: Loaded) -> str | None:
    """Return why the last bits of a token's result depend on what else is in its step, so that
    drafts may change an answer; or None.
    """
    from torch.nn import Module

    backends = {
        backend
        for group in loaded.groups
        for backend in (group.backend, *(follower for follower, _ in group.followers))
        if backend is not None
    }
    names = sorted({each.name for each in backends if not each.batch_invariant})
    for model in loaded.model.modules() if isinstance(loaded.model, Module) else (loaded.model,):
        if not getattr(model, "batch_invariant", True):
            names.append(type(model).__name__)
    if loaded.ops.providers.get("linear") == "torch":
        names.append("torch's matrix products")
    if not names:
        return None
    return f"off with {' and '.join(names)}, whose last bits depend on the tokens of a step"


def _unsuitable(config: EngineConfig, family: type[Model]) -> str | None:
    """Return why nothing is drafted for the model, or None."""
    if config.model.runner == "pooling" or "generate" not in family.tasks:
        return "a pooling model generates no tokens"
    if (reason := getattr(family, "no_drafts", None)) is not None:
        return str(reason)
    if config.parallel.pipeline_parallel_size > 1:
        return "not with pipeline stages"
    if config.model.batch_invariant:
        return "--batch-invariant computes tokens one by one"
    return None
