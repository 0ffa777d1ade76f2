"""The flag `--isolate`."""

from __future__ import annotations

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["IsolationConfig"]


@flag_group
class IsolationConfig(FlagGroup):
    """Plugins that run in processes of their own."""

    title = "IsolationConfig"

    isolate: tuple[str, ...] = flag(
        (),
        "Packages of hooks, parsers, logits processors or routes that run in processes of their "
        "own: `NAME[:timeout=SECONDS][:memory=SIZE]`. A call may take `timeout` seconds (default "
        "5); "
        "`memory`, such as 512MiB, is what the process may allocate. Repeatable.",
    )
