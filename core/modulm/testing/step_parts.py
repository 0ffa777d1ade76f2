"""The contract kit for step parts.

    from modulm.testing.step_parts import check_step_part

    def test_contract():
        check_step_part(MyPart, flags={"my_flag": True})

An engine with a tiny checkpoint runs with and without the part, whose values go through bytes on
their way. Requests must get the same tokens, unless `changes_tokens`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.contracts.step_part import PartPlanner, PartRunner, StepPart
from modulm.engine.parts import open_parts
from modulm.plugins import manager
from modulm.testing.executors import WorkerExecutor, generate, tiny_config
from modulm.testing.kit import KitNotRun

__all__ = ["check_step_part"]


def check_step_part(
    driver: type[StepPart], *, flags: Mapping[str, Any] | None = None, changes_tokens: bool = False
) -> None:
    """Run the kit. flags: of an engine that uses the part.

    Raises AssertionError with what was expected, KitNotRun for a part that these flags leave off.
    """
    plugins = manager.current()
    plain = tiny_config()
    config = tiny_config(**flags) if flags else plain
    part = driver.opened(config, plugins)
    if part is None:
        raise KitNotRun("it is off in a plain configuration: pass flags=")
    assert isinstance(part, StepPart), f"opened() gave {part!r}"
    assert part.name, "the part has no name"
    with_part: list[Any] = [p for p in open_parts(config, plugins) if p.name != driver.name]
    expected, _ = generate(plain, WorkerExecutor(), with_part)
    watched = _watch(part)
    before = [d for d in plugins.names("step_parts") if d.name == part.name]
    before = [d for d in before if d.source == "registered"]
    if before:
        plugins.unregister("step_parts", part.name)
    opened = {"opened": classmethod(lambda cls, config, plugins: watched)}
    plugins.register("step_parts", part.name, type(driver.__name__, (driver,), opened))
    try:
        tokens, _ = generate(config, WorkerExecutor(part), [*with_part, watched])
    finally:
        plugins.unregister("step_parts", part.name)
        for declared in before:
            plugins.register("step_parts", part.name, declared.driver or declared.target)
    if not changes_tokens:
        assert tokens == expected, "requests get other tokens with the part than without it"
    part.close()
    part.close()


def _watch(part: StepPart) -> StepPart:
    """Check the halves that the part builds."""
    planner_of, runner_of = part.planner, part.runner

    def planner(context: Any) -> PartPlanner | None:
        half = planner_of(context)
        assert half is None or isinstance(half, PartPlanner), f"planner() gave {half!r}"
        if half is not None:
            _balance(half)
        return half

    def runner(built: Any) -> PartRunner | None:
        half = runner_of(built)
        assert half is None or isinstance(half, PartRunner), f"runner() gave {half!r}"
        return half

    part.planner, part.runner = planner, runner  # type: ignore[method-assign]
    return part


def _balance(half: PartPlanner) -> None:
    """Check that steps never get more tokens than the scheduler planned."""
    claim, cut = half.claim, half.cut

    def checked(method: Any) -> Any:
        def call(rows: Any, starts: Any, counts: Any) -> None:
            most = counts.copy()
            method(rows, starts, counts)
            assert (counts <= most).all(), "the planner raises a row's number of tokens"
            assert (counts >= 0).all(), "the planner gives a row a negative number of tokens"

        return call

    if type(half).claim is not PartPlanner.claim:
        half.claim = checked(claim)  # type: ignore[method-assign]
    if type(half).cut is not PartPlanner.cut:
        half.cut = checked(cut)  # type: ignore[method-assign]
