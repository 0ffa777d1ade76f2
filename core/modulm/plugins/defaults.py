"""Automatic choices of drivers, each with the reason.

Drivers that cannot be imported, or were written for another contract version, are rejected
candidates; they are errors only if the user names them. Choosing hooks are called first; the driver
that they choose must still be suitable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from attrs import frozen

from modulm.contracts.decision import Decision, Verdict
from modulm.contracts.platform import Probe
from modulm.errors import (
    CheckpointError,
    ConfigError,
    ModulmError,
    PluginConflict,
    PluginNotFound,
    UnsupportedError,
)
from modulm.plugins.calls import ask
from modulm.plugins.declaration import Choice
from modulm.plugins.index import install_hint, is_first_party
from modulm.plugins.kinds import find_kind

if TYPE_CHECKING:
    from pathlib import Path

    from modulm.contracts.attention import AttentionBackend, AttentionSpec
    from modulm.contracts.kernels import KernelProvider, Ops
    from modulm.contracts.loader import WeightLoader
    from modulm.contracts.model import Model
    from modulm.contracts.platform import Platform
    from modulm.contracts.quantization import CheckpointInfo, QuantizationMethod
    from modulm.plugins.manager import PluginManager

__all__ = [
    "Chosen",
    "choose_attention",
    "choose_files",
    "choose_kernels",
    "choose_loader",
    "choose_model",
    "choose_platform",
    "choose_quantization",
    "choose_tokenizer",
]

T = TypeVar("T")
#: A method, what it answers, and its arguments.
Question: TypeAlias = tuple[Any, ...]


@frozen
class Chosen(Generic[T]):
    """The driver that was chosen, and the decision."""

    driver: T
    decision: Decision


def choose_platform(plugins: PluginManager, requested: str | None = None) -> Chosen[type[Platform]]:
    """Return the requested platform, or the one with the highest probe score.

    Raises UnsupportedError if it, or no platform at all, runs on this machine.
    """
    if requested is not None:
        platform, probe = _ask_one(plugins, "platforms", requested, ("probe", Probe))
        return _requested(plugins, "device", "platforms", requested, platform, _unfit(probe))
    names = _names(plugins, "platforms")
    drivers, probes, failed = _ask_all(plugins, "platforms", names, ("probe", Probe))
    verdicts = (*failed, *(Verdict(name, _unfit(probe)) for name, probe in probes.items()))
    hook_choice = plugins.hook.modulm_choose_platform(probes=probes)
    choice = _unless_off(plugins, "platforms", hook_choice) or _highest(plugins, probes)
    return _settle(plugins, "device", "platforms", drivers, verdicts, choice)


def _unfit(probe: Probe) -> str | None:
    return None if probe.score > 0 else probe.reason


def _highest(plugins: PluginManager, probes: Mapping[str, Probe]) -> Choice | None:
    """Return the platform with the best score; on ties first-party ones first, then by name."""
    fit = [name for name, probe in probes.items() if probe.score > 0]
    if not fit:
        return None
    ours = {d.name for d in plugins.names("platforms") if is_first_party(d.distribution)}
    name = max(fit, key=lambda name: (probes[name].score, name in ours))
    return Choice(name, f"highest score, {probes[name].score}: {probes[name].reason}")


def choose_model(
    plugins: PluginManager, architectures: Sequence[str], config: Mapping[str, Any]
) -> Chosen[type[Model]]:
    """Return the driver of the first architecture in config.json that is installed.

    Raises ArchitectureNotFound if none is; errors of loading the driver propagate.
    """
    hook_choice = plugins.hook.modulm_choose_model(architectures=architectures, config=config)
    choice = _unless_off(plugins, "models", hook_choice)
    installed = {declaration.name for declaration in plugins.names("models")}
    first = next((name for name in architectures if name in installed), architectures[0])
    name, reason = (choice.name, str(choice)) if choice else (first, "named by config.json")
    offer = plugins.find("models", name)
    names = dict.fromkeys([*architectures, name])
    verdicts = tuple(Verdict(n, None if n in installed else "not installed") for n in names)
    reason += plugins.stand_in(offer) or f"; {offer.origin}"
    decision = Decision("model", verdicts, name, reason)
    return Chosen(plugins.load_declared(offer), decision)


def choose_attention(
    plugins: PluginManager,
    spec: AttentionSpec,
    platform: Platform,
    ops: Ops,
    requested: str | None = None,
    *,
    subject: str = "attention",
) -> Chosen[type[AttentionBackend]]:
    """Return the requested attention backend, or the first one that does not reject the spec.

    Candidates are the platform's in order, then other installed ones by name. ops: the model's.
    subject: describes the layers. Raises UnsupportedError with the reason of each backend.
    """
    question = ("refuses", str | None, spec, platform, ops)
    if requested is not None:
        backend, refusal = _ask_one(plugins, "attention", requested, question)
        return _requested(plugins, subject, "attention", requested, backend, refusal)
    installed = _names(plugins, "attention")
    order = [*platform.attention, *(name for name in installed if name not in platform.attention)]
    drivers, rejections, failed = _ask_all(plugins, "attention", order, question)
    hook_choice = plugins.hook.modulm_choose_attention(spec=spec, platform=platform, ops=ops)
    choice = _unless_off(plugins, "attention", hook_choice)
    if choice is None:
        first = next((name for name in order if rejections.get(name, "") is None), None)
        reason = f"first in the order of platform {platform.name}"
        choice = None if first is None else Choice(first, reason)
    verdicts = (*failed, *(Verdict(name, reason) for name, reason in rejections.items()))
    return _settle(plugins, subject, "attention", drivers, verdicts, choice)


def choose_quantization(
    plugins: PluginManager,
    checkpoint: CheckpointInfo,
    platform: Platform,
    requested: str | None = None,
    *,
    plain: str = "none",
) -> Chosen[type[QuantizationMethod]]:
    """Return the requested quantization method, or the one that claims the checkpoint.

    Of several claimants the one named like the checkpoint's `quant_method` wins; `plain`, the
    method for unquantized weights, has the lowest precedence. Raises UnsupportedError if no method
    claims the checkpoint, ConfigError if the choice is ambiguous.
    """
    subject = "quantization"
    if requested is not None:
        method = plugins.load("quantization", requested)
        return _requested(plugins, subject, "quantization", requested, method)
    names, question = _names(plugins, "quantization"), ("claims", str | None, checkpoint)
    drivers, claims, failed = _ask_all(plugins, "quantization", names, question)
    hook_choice = plugins.hook.modulm_choose_quantization(checkpoint=checkpoint, platform=platform)
    choice = _unless_off(plugins, "quantization", hook_choice) or _claimant(
        claims, checkpoint, plain
    )
    unclaimed = "does not claim the checkpoint"
    verdicts = [Verdict(name, None if claim else unclaimed) for name, claim in claims.items()]
    if choice is None and checkpoint.quantization:
        stored = checkpoint.quantization.get("quant_method", "an unnamed method")
        why = "; ".join(map(str, (*failed, _absent("quantization", str(stored)))))
        raise UnsupportedError(
            f"quantization: the checkpoint is stored as {stored!r}, which no installed method "
            f"supports; an unquantized one would run ({why})"
        )
    return _settle(plugins, subject, "quantization", drivers, (*failed, *verdicts), choice)


def _claimant(
    claims: Mapping[str, str | None], checkpoint: CheckpointInfo, plain: str
) -> Choice | None:
    claiming = {name: reason for name, reason in claims.items() if reason}
    if len(claiming) > 1:
        claiming.pop(plain, None)
    stored = (checkpoint.quantization or {}).get("quant_method")
    if stored in claiming:
        return Choice(str(stored), claiming[str(stored)])
    if len(claiming) > 1:
        raise ConfigError(
            "quantization", f"{' and '.join(claiming)} match the checkpoint; choose one of them"
        )
    return next((Choice(name, reason) for name, reason in claiming.items()), None)


def choose_kernels(
    plugins: PluginManager, platform: Platform, names: Sequence[str] | None = None
) -> Chosen[tuple[type[KernelProvider], ...]]:
    """Return the kernel providers that run on this machine, best first.

    names: replaces the platform's order.
    """
    order = platform.kernels if names is None else names
    drivers, probes, failed = _ask_all(plugins, "kernels", order, ("probe", Probe, platform))
    unfit = {name: _unfit(probe) for name, probe in probes.items()}
    verdicts = (*failed, *(Verdict(name, reason) for name, reason in unfit.items()))
    chosen = {name: driver for name, driver in drivers.items() if unfit[name] is None}
    source = f"the order of platform {platform.name}" if names is None else "asked for by name"
    winner = ", ".join(chosen) or "torch"
    reason = "; ".join([*(probes[name].reason for name in chosen), source])
    reason += "".join(plugins.stand_in(plugins.find("kernels", name)) for name in chosen)
    return Chosen(tuple(chosen.values()), Decision("kernels", verdicts, winner, reason))


def choose_loader(
    plugins: PluginManager, path: Path, requested: str | None = None
) -> Chosen[type[WeightLoader]]:
    """Return the requested weight loader, or the first one by name that opens `path`.

    Raises CheckpointError if none does.
    """
    if requested is not None:
        loader = plugins.load("loaders", requested)
        return _requested(plugins, "loader", "loaders", requested, loader)
    names = _names(plugins, "loaders")
    drivers, opens, failed = _ask_all(plugins, "loaders", names, ("opens", str | None, path))
    verdicts = [Verdict(name, None if opens[name] else "does not open it") for name in opens]
    for name, reason in opens.items():
        if reason:
            verdicts = [*failed, *verdicts]
            return _settle(plugins, "loader", "loaders", drivers, verdicts, Choice(name, reason))
    known = [", ".join(opens) or "none is installed", *map(str, failed)]
    raise CheckpointError(f"{path}: no weights that an installed loader reads ({'; '.join(known)})")


def choose_files(
    plugins: PluginManager, repository: str, part: str, names: Sequence[str]
) -> Sequence[str]:
    """Return the files of a hub repository chosen by the first loader that recognizes `part`.

    Raises CheckpointError if none does.
    """
    question = ("choose_files", Sequence | None, part, names)
    _, offers, failed = _ask_all(plugins, "loaders", _names(plugins, "loaders"), question)
    answers: list[Sequence[str]] = [files for files in offers.values() if files]
    if answers:
        return answers[0]
    why = "; ".join(map(str, failed)) or "no installed loader knows of parts of this repository"
    raise CheckpointError(f"{repository}:{part}: {why}")


def choose_tokenizer(plugins: PluginManager, folder: Path, mode: str) -> Chosen[Any]:
    """Return the tokenizer loader of `--tokenizer-mode`; None to load with transformers.

    With "auto" this is the first one by name that claims the folder. Raises PluginNotFound for an
    unknown mode.
    """
    if mode != "auto":
        loader = plugins.load("tokenizers", mode)
        return _requested(plugins, "tokenizer", "tokenizers", mode, loader)
    names, question = _names(plugins, "tokenizers"), ("claims", str | None, folder)
    drivers, claims, failed = _ask_all(plugins, "tokenizers", names, question)
    verdicts = (*failed, *(Verdict(n, None if claims[n] else "does not claim it") for n in claims))
    name = next((name for name, reason in claims.items() if reason), None)
    if name is None:
        return Chosen(None, Decision("tokenizer", verdicts, "hf", "no loader claims the folder"))
    choice = Choice(name, str(claims[name]))
    return _settle(plugins, "tokenizer", "tokenizers", drivers, verdicts, choice)


def _unless_off(plugins: PluginManager, kind: str, choice: Choice | None) -> Choice | None:
    """Return a hook's choice, or None if `--plugins` excludes the chosen driver."""
    return choice if choice and plugins.switched_off(kind, choice.name) is None else None


def _names(plugins: PluginManager, kind: str) -> list[str]:
    plugins.load_hooks()
    return list(dict.fromkeys(declaration.name for declaration in plugins.names(kind)))


def _ask_one(plugins: PluginManager, kind: str, name: str, question: Question) -> tuple[Any, Any]:
    """Load a driver and call `question` on it. Errors of either propagate."""
    declaration = plugins.find(kind, name)
    driver = plugins.load_declared(declaration)
    return driver, ask(declaration, driver, *question)


def _ask_all(
    plugins: PluginManager, kind: str, names: Iterable[str], question: Question
) -> tuple[dict[str, Any], dict[str, Any], tuple[Verdict, ...]]:
    """Call `question` on drivers; return answers by name, and verdicts for unusable drivers.

    Raises PluginConflict for a name that two packages offer.
    """
    answers, failed = {}, []
    for name in names:
        try:
            answers[name] = _ask_one(plugins, kind, name, question)
        except PluginConflict:
            raise
        except PluginNotFound:
            failed.append(_absent(kind, name))
        except ModulmError as error:
            failed.append(Verdict(name, str(error)))
    drivers = {name: driver for name, (driver, _) in answers.items()}
    return drivers, {name: answer for name, (_, answer) in answers.items()}, tuple(failed)


def _absent(kind: str, name: str) -> Verdict:
    hint = install_hint(kind, name)
    return Verdict(name, f"not installed; {hint}" if hint else "not installed")


def _requested(
    plugins: PluginManager, subject: str, kind: str, name: str, driver: Any, reason: Any = None
) -> Chosen[Any]:
    """Return the requested driver. reason: why it cannot be used, or None."""
    if reason is not None:
        raise UnsupportedError(f"{find_kind(kind).noun} {name!r} cannot be used: {reason}")
    choice = Choice(name, "asked for by name")
    return _settle(plugins, subject, kind, {name: driver}, (Verdict(name),), choice)


def _settle(
    plugins: PluginManager,
    subject: str,
    kind: str,
    drivers: Mapping[str, T],
    verdicts: Sequence[Verdict],
    choice: Choice | None,
) -> Chosen[T]:
    rejected = {verdict.name: verdict.reason for verdict in verdicts if verdict.reason}
    if choice is None or choice.name not in drivers or choice.name in rejected:
        listed = "; ".join(f"{name}: {reason}" for name, reason in rejected.items())
        wanted = f"; {choice.by or 'a plugin'} chose {choice.name}" if choice else ""
        raise UnsupportedError(f"{subject}: nothing installed fits{wanted} ({listed or 'none'})")
    reason = f"{choice}{plugins.stand_in(plugins.find(kind, choice.name))}"
    return Chosen(drivers[choice.name], Decision(subject, tuple(verdicts), choice.name, reason))
