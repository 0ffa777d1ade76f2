"""Offers the bridge for architectures that no installed plugin provides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from modulm.plugins import Choice, current, hookimpl
from modulm_transformers.names import class_name
from modulm_transformers.unsupported import reasons

__all__ = ["modulm_choose_model"]


@hookimpl(trylast=True)
def modulm_choose_model(architectures: Sequence[str], config: Mapping[str, Any]) -> Choice | None:
    """Choose transformers' code if it has the architecture and no native plugin does.

    Known architectures that nothing runs are chosen, too: the driver refuses them with a reason.
    """
    installed = {declared.name for declared in current().names("models")}
    if installed & set(architectures):
        return None
    import transformers

    if not any(hasattr(transformers, class_name(name)) for name in architectures):
        code = config.get("auto_map")
        remote = isinstance(code, Mapping) and "AutoModelForCausalLM" in code
        if remote:
            reason = "no plugin provides it; runs with the checkpoint's own code, slower"
            return Choice("transformers_remote", reason)
        known = architectures[0] in reasons()
        return Choice("transformers", "refused with a reason") if known else None
    reason = f"no plugin provides {architectures[0]}; runs with transformers' own code, slower"
    return Choice("transformers", reason)
