"""The flags of recorded and compiled steps, by vLLM's names."""

from __future__ import annotations

from typing import Any

from modulm.contracts.flags import FlagGroup, flag, flag_group

__all__ = ["MODES", "CompilationConfig"]

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
_COMPILE = ("NONE", "STOCK_TORCH_COMPILE", "DYNAMO_TRACE_ONCE", "VLLM_COMPILE")


def _mode(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a name is expected")
    return value.upper()


def _compile_mode(value: Any) -> str | None:
    """By name or by number."""
    if value in (None, "None"):
        return None
    if str(value).isdigit() and int(value) < len(_COMPILE):
        return _COMPILE[int(value)]
    return _mode(value)


@flag_group
class CompilationConfig(FlagGroup):
    """Steps that GPUs repeat as graphs, and compiled ones."""

    title = "CompilationConfig"
    table = "compilation_config"
    table_aliases = ("-cc",)

    optimization_level: int = flag(
        2,
        "0: every step operation by operation. 1: graphs of pieces between attention. 2: decode "
        "steps as whole graphs too. 3: what is recorded is compiled by torch.compile before.",
        aliases=("-O",),
        key="level",
        least=0,
        most=3,
    )
    cudagraph_mode: str | None = flag(
        None,
        "Which steps are recorded as graphs; PIECEWISE: the pieces between attention layers. None: "
        "what the optimization level says.",
        choices=MODES,
        key="cudagraph_mode",
        parse=_mode,
    )
    cudagraph_capture_sizes: tuple[int, ...] | None = flag(
        None,
        "Tokens of the steps that are recorded; others are padded to the next. None: up to "
        "--max-cudagraph-capture-size.",
        key="cudagraph_capture_sizes",
    )
    max_cudagraph_capture_size: int | None = flag(
        None,
        "Most tokens of a step that is recorded; None: twice --max-num-seqs, 512 at most.",
        key="max_cudagraph_capture_size",
        unit="tokens",
        least=0,
    )
    compile_mode: str | None = flag(
        None,
        "Whether recorded steps are compiled by torch.compile, from -O2 on: any mode but NONE.",
        choices=_COMPILE,
        key="mode",
        parse=_compile_mode,
        own=False,
    )
    compile_backend: str = flag("inductor", "Backend of torch.compile.", key="backend", own=False)
