"""The command `vllm`: modulm's commands under the name that scripts use."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, distribution
from typing import Any, NoReturn

__all__ = ["main", "run_batch", "serve"]

#: Commands that start an engine.
_ENGINES = ("bench", "run-batch", "serve")


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; delegates to vLLM's own if vLLM is installed."""
    from modulm_vllm.modules import vllm_is_installed

    command_line = list(sys.argv[1:] if arguments is None else arguments)
    if vllm_is_installed():
        sys.argv[1:] = command_line
        sys.exit(_theirs().load()())
    if command_line[:1] in (["-v"], ["--version"]):
        from modulm_vllm.version import __version__

        sys.stdout.write(f"{__version__}\n")
        sys.exit()
    from modulm.cli.main import main as run
    from modulm.config.environ import variables_for_library
    from modulm.errors import ConfigError
    from modulm_vllm.environment import notes, rewritten

    if command_line[:1] and command_line[0] in _ENGINES and "--help" not in command_line:
        sys.stderr.writelines(f"note: {line}\n" for line in notes(server=True))
    try:
        values = rewritten()
    except ConfigError as error:
        raise SystemExit(f"vllm: {error}") from None
    with variables_for_library(values):
        run(command_line, name="vllm")


def serve(arguments: Sequence[str] | None = None) -> NoReturn:
    """`python -m vllm.entrypoints.openai.api_server`."""
    main(["serve", *(sys.argv[1:] if arguments is None else arguments)])


def run_batch(arguments: Sequence[str] | None = None) -> NoReturn:
    """`python -m vllm.entrypoints.openai.run_batch`."""
    main(["run-batch", *(sys.argv[1:] if arguments is None else arguments)])


def _theirs() -> EntryPoint | Any:
    """Return the command of the distribution vllm."""
    points = distribution("vllm").entry_points.select(group="console_scripts", name="vllm")
    for point in points:
        return point
    raise SystemExit("vllm: vLLM is installed but brings no command; `modulm` is modulm's")
