"""Runs contract kits from a test."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["KitRunner"]


class KitRunner:
    """Runs the contract kit of a kind: `modulm_kit("schedulers", MyPolicy)`."""

    def __call__(
        self, kind: str, driver: Any, *, may_be_left_out: bool = False, **more: Any
    ) -> str:
        """Run the kit; `more` are its arguments, such as `sample=`.

        Returns what was left out, "" if nothing was. A broken contract fails the test, and so does
        a kit that could try nothing, unless `may_be_left_out`: then the test is skipped, with the
        reason, for example because this machine lacks the device.
        """
        from modulm.testing import kit

        try:
            return kit.check(kind, driver, **more)
        except kit.KitNotRun as reason:
            if may_be_left_out:
                pytest.skip(f"the contract kit of {kind} was not run: {reason}")
            pytest.fail(f"the contract kit of {kind} tried nothing: {reason}", pytrace=False)

    def installed(self, kind: str, name: str, **more: Any) -> str:
        """Run the kit on an installed driver, by its name, as `modulm plugins doctor` does."""
        from modulm import plugins

        return self(kind, plugins.current().load(kind, name), **more)
