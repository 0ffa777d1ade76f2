"""Entry point to the contract kits: check that a driver satisfies the contract of its kind.

    from modulm.testing import kit

    def test_contract():
        kit.check("attention", MyBackend)

Pass the class itself. `kit_of` names the kit of a kind, which can also be called directly, for
example as `modulm.testing.platform.check_platform(MyPlatform)`, where it accepts more arguments. A
kit raises AssertionError with what was expected, and KitNotRun if it could try nothing: a kit that
ran nothing is no pass. Kinds that packages add name their kit in `Kind.kit`. For kinds without a
kit, `check` verifies what every driver must have: the contract's class, no abstract methods, a
contract version, methods that can be called as the contract says.

Some kits need something to try the driver with, such as a file in its format. They take it as
`sample=`, or from the driver's static method `kit_sample`, which `modulm plugins doctor` uses too.

`modulm plugins doctor` runs the same kits over everything that is installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

from modulm.plugins.declaration import Declaration
from modulm.plugins.kinds import find_kind
from modulm.plugins.manager import check_driver

__all__ = ["KITS", "KitNotRun", "check", "has_kit", "kit_of", "sample_of"]


class KitNotRun(Exception):
    """Raised by a kit that could try nothing on this machine, with the reason."""


#: Kind -> function that checks a driver, for the kinds of the core and for hook plugins.
KITS: Mapping[str, str] = MappingProxyType(
    {
        "models": "modulm.testing.models:check_model",
        "attention": "modulm.testing.attention:check_attention",
        "quantization": "modulm.testing.quantization:check_quantization",
        "adapters": "modulm.testing.adapters:check_bank",
        "platforms": "modulm.testing.platform:check_platform",
        "tool_parsers": "modulm_parsing.testing:check_parser",
        "reasoning_parsers": "modulm_parsing.testing:check_parser",
        "loaders": "modulm.testing.loaders:check_loader",
        "tokenizers": "modulm.testing.tokenizer_loaders:check_tokenizer_loader",
        "executors": "modulm.testing.executors:check_executor",
        "schedulers": "modulm.testing.policies:check_policy",
        "grammars": "modulm_structured_output.testing:check_grammar",
        "speculators": "modulm.testing.speculators:check_speculator",
        "kv_connectors": "modulm.testing.kv_connectors:check_kv_connector",
        "step_parts": "modulm.testing.step_parts:check_step_part",
        "logits_processors": "modulm.testing.logits:check_logits_processor",
        "commands": "modulm.testing.commands:check_command",
        "kernels": "modulm.testing.ops:check_kernels",
        "ops": "modulm.testing.ops:check_op",
        "poolers": "modulm.testing.poolers:check_pooler",
        "checkpoints": "modulm.testing.named_checkpoints:check_named_checkpoint",
        "flags": "modulm.testing.flag_groups:check_flag_group",
        "worker_functions": "modulm_distributed.worker_function_kit:check_worker_function",
        "hooks": "modulm.testing.hook_plugins:check_hooks",
    }
)


def kit_of(kind: str) -> str | None:
    """Return the path of the kit of a kind, or None."""
    return KITS.get(kind) or (None if kind == "hooks" else find_kind(kind).kit or None)


def has_kit(kind: str) -> bool:
    """Whether drivers of the kind can be checked: it has a kit, or at least a contract."""
    return kit_of(kind) is not None or find_kind(kind).contract is not None


def check(kind: str, driver: Any, **more: Any) -> str:
    """Run the kit of `kind` on a driver class; `more` are arguments of the kit (models: `oracle=`).

    Returns what was left out and why, "" if nothing was. Raises KitNotRun if nothing could be
    tried or asserted, AssertionError for a broken contract, PluginIncompatible for a wrong
    contract version, PluginBroken for something that is not a driver of the kind.
    """
    if not __debug__:
        raise KitNotRun("Python's option -O leaves out what kits assert: run it without")
    if kind != "hooks" and find_kind(kind).contract is not None:
        _check_class(kind, driver)
    if (path := kit_of(kind)) is None:
        return "of which this kind has only class, version and signatures"
    return resolve_name(path)(driver, **more) or ""


def sample_of(driver: Any, sample: Any, what: str) -> Any:
    """Return `sample`, or else the driver's `kit_sample`. Raises KitNotRun if there is neither.

    what: describes the sample, for the message.
    """
    sample = getattr(driver, "kit_sample", None) if sample is None else sample
    if sample is None:
        raise KitNotRun(f"it needs {what}: pass sample=, or define kit_sample on the class")
    return sample


def _check_class(kind: str, driver: type) -> None:
    target = f"{driver.__module__}:{driver.__qualname__}"
    declaration = Declaration(driver.__name__, target, kind=kind)
    check_driver(declaration, driver, find_kind(kind))
    missing = sorted(getattr(driver, "__abstractmethods__", ()))
    assert not inspect.isabstract(driver), f"{target} does not implement {', '.join(missing)}"
    contract = find_kind(kind).contract_class()
    for name in dir(contract):
        if not name.startswith("_") and name in vars(contract):
            _check_signature(target, name, driver, contract)


def _check_signature(target: str, name: str, driver: type, contract: Any) -> None:
    """Check that an overridden method can be called as the contract's is."""
    stated, written = (inspect.getattr_static(cls, name) for cls in (contract, driver))
    kinds = classmethod, staticmethod
    stated, written = (m.__func__ if isinstance(m, kinds) else m for m in (stated, written))
    if stated is written or not (inspect.isfunction(stated) and inspect.isfunction(written)):
        return
    parameters = list(inspect.signature(stated).parameters.values())
    by_name = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    plain = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    signature = inspect.signature(written)
    for arguments in (plain, [p for p in plain if p.default is p.empty]):
        try:
            signature.bind(*arguments, **by_name)
        except TypeError as error:
            raise AssertionError(
                f"{target}.{name}{signature} cannot be called as "
                f"{contract.__name__}.{name}{inspect.signature(stated)} is: {error}"
            ) from error
