"""The report of `modulm fit` and `modulm serve --dry-run`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from modulm.plugins import manager
from modulm_memory.advice import changes_for
from modulm_memory.estimate import estimate
from modulm_memory.hub_headers import headers_only
from modulm_memory.text import as_data, render

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.platform import Memory

__all__ = ["report"]


def report(
    config: EngineConfig,
    explicit: Iterable[str],
    memory: Memory | None = None,
    *,
    as_json: bool = False,
) -> tuple[str, bool]:
    """Return the estimate as text, and whether the model fits.

    explicit: flags that the user set. memory: free memory of each device, not the platform's.
    A length that the user set must fit; otherwise a shorter one suffices. Raises the errors that
    loading would raise before it reads weights.
    """
    flags, plugins, name = frozenset(explicit), manager.current(), config.model.model
    with redirect_stdout(sys.stderr), headers_only(config) as opened:
        found = estimate(opened, plugins, flags, memory)
        changes = changes_for(found, plugins, flags, opened, memory, name=name)
    if as_json:
        text = json.dumps(as_data(found, changes, name), indent=2)
    else:
        text = render(found, changes, name)
    return text, not found.problem and (found.fits or "max_model_len" not in flags)
