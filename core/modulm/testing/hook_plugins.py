"""The contract kit for hook plugins.

    import my_package
    from modulm.testing.hook_plugins import check_hooks

    def test_contract():
        check_hooks(my_package)

The plugin is registered and its hooks are called as an engine and a server without a model call
them. Hooks that need a model, a checkpoint or a device are only checked for their form.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

from modulm.config import EngineConfig
from modulm.contracts.requests import StepStats
from modulm.contracts.sampling import SamplingParams
from modulm.plugins import PluginManager, Proposal, hookspecs

__all__ = ["check_hooks"]


def _stats() -> Any:
    return StepStats(step=1, running=1, waiting=0, usage=0.5)


#: Hook -> makers of arguments to call it with; several where a caller may pass several things.
_CALLS: Mapping[str, tuple[Callable[[], Mapping[str, Any]], ...]] = MappingProxyType(
    {
        "modulm_report_header": (lambda: {"config": None}, lambda: {"config": EngineConfig()}),
        "modulm_doctor_checks": (dict,),
        "modulm_config_proposals": (lambda: {"config": EngineConfig()},),
        "modulm_logits_steps": (lambda: {"config": EngineConfig(), "vocabulary": 64},),
        "modulm_request_listeners": (lambda: {"config": EngineConfig()},),
        "modulm_engine_started": (lambda: {"config": EngineConfig()},),
        "modulm_request_admitted": tuple(
            partial(dict, request=f"r{n}", params=SamplingParams()) for n in (1, 2, 1)
        ),
        "modulm_step_finished": (lambda: {"stats": _stats()}, lambda: {"stats": _stats()}),
        "modulm_request_finished": tuple(
            partial(dict, request=f"r{n}", reason=why)
            for n, why in ((1, "stop"), (2, "abort"), (3, "error"))
        ),
        "modulm_engine_failed": (lambda: {"error": RuntimeError("a failure")},),
        "modulm_engine_stopping": (dict, dict),
    }
)
#: Hooks whose answers must be the same when they are asked again.
_STEADY = ("modulm_report_header", "modulm_config_proposals")


def check_hooks(plugin: object) -> str:
    """Run the kit; return which hooks were not called, or "".

    Raises AssertionError with what was expected, and PluginBroken for a plugin that cannot be
    registered.
    """
    manager = PluginManager()
    manager._hooks_loaded = True  # no other plugin takes part
    manager.add(plugin)
    implemented = _implemented(manager)
    assert implemented, "the plugin answers no hook"
    declared = [d for d in manager._added.values() if d.source == "hook"]
    for declaration in declared:
        manager.load_declared(declaration)
    called = []
    with _failures() as failures:
        if "modulm_config_final" in implemented:
            manager.config_final(EngineConfig())
            called.append("modulm_config_final")
        for hook, calls in _CALLS.items():
            if hook in implemented:
                called.append(hook)
                for arguments in calls:
                    _call(manager, hook, arguments(), failures)
        for hook in set(_STEADY) & implemented:
            arguments = _CALLS[hook][-1]
            first, second = (repr(manager.gather(hook, **arguments())) for _ in range(2))
            assert first == second, f"{hook} gives other answers the second time"
    left = sorted(implemented - set(called) - _declaring())
    return f"not called, as they need a model or an application: {', '.join(left)}" if left else ""


def _declaring() -> set[str]:
    return {"modulm_models", "modulm_attention", "modulm_quantization", "modulm_platforms",
            "modulm_parsers"}  # fmt: skip


def _implemented(manager: PluginManager) -> set[str]:
    names = (name for name in hookspecs.__all__ if name.startswith("modulm_"))
    return {name for name in names if getattr(manager.hook, name).get_hookimpls()}


def _call(
    manager: PluginManager, hook: str, arguments: Mapping[str, Any], failures: list[str]
) -> None:
    answers = getattr(manager.hook, hook)(**arguments)
    assert not failures, failures[0]
    if hook not in ("modulm_report_header", "modulm_config_proposals", "modulm_doctor_checks"):
        return
    for answer in (item for items in answers or () for item in items or ()):
        if hook == "modulm_report_header":
            assert isinstance(answer, str), f"{hook} gave {answer!r}, which is no line of text"
            assert "\n" not in answer, f"{hook} gave a line with a line break: {answer!r}"
        elif hook == "modulm_config_proposals":
            assert isinstance(answer, Proposal), f"{hook} gave {answer!r}, which is no Proposal"
            assert answer.reason.strip(), f"{hook} proposes {answer.field} without a reason"
        else:
            assert answer.subject.strip(), f"{hook} gave a Check without a subject"
            assert answer.ok or answer.message.strip(), f"{hook}: {answer.subject} fails silently"


@contextmanager
def _failures() -> Iterator[list[str]]:
    """Collect what is logged of implementations that raised or gave the wrong type."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            error = record.exc_info[1] if record.exc_info else None
            messages.append(f"{record.getMessage()}: {type(error).__name__}: {error}")

    logger, handler = logging.getLogger("modulm.plugins"), Handler(logging.ERROR)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
