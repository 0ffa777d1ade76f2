"""Flags of recorded and compiled steps, with vLLM's names."""

from __future__ import annotations

from typing import Any

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["MODES", "CompilationConfig"]

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
_COMPILE = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")


def _mode(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("must be a name")
    return value.upper()


def _compile_mode(value: Any) -> str | None:
    """Parse a mode given by name or number."""
    if value in (None, "None"):
        return None
    if str(value).isdigit() and int(value) < len(_COMPILE):
        return _COMPILE[int(value)]
    return _mode(value)


@flag_group
class CompilationConfig(FlagGroup):
    """CUDA graphs and compilation of steps."""

    title = "CompilationConfig"
    table = "compilation_config"
    table_aliases = ("-cc",)

    optimization_level: int = flag(
        2,
        "0: eager. 1: piecewise graphs between attention layers. 2: also full graphs of decode "
        "steps. 3: also compile recorded steps with torch.compile.",
        aliases=("-O",),
        key="level",
        least=0,
        most=3,
    )
    cudagraph_mode: str | None = flag(
        None,
        "Which steps are recorded as graphs. PIECEWISE: the pieces between attention layers. "
        "Default: set by the optimization level.",
        choices=MODES,
        key="cudagraph_mode",
        parse=_mode,
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = flag(
        None,
        "Step sizes in tokens to record; other steps are padded to the next size. Default: up to "
        "--max-cudagraph-capture-size.",
        key="cudagraph_capture_sizes",
    )
    max_cudagraph_capture_size: int | None = flag(
        None,
        "Maximum tokens of a recorded step. Default: twice --max-num-seqs, at most 512.",
        key="max_cudagraph_capture_size",
        unit="tokens",
        least=0,
    )
    compile_mode: str | None = flag(
        None,
        "Compile recorded steps with torch.compile, from -O2 on: any mode but NONE.",
        choices=_COMPILE,
        key="mode",
        parse=_compile_mode,
        nested=True,
    )
    compile_backend: str = flag("inductor", "Backend of torch.compile.", key="backend", nested=True)
