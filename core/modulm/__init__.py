"""modulm: an LLM inference and serving engine in which every replaceable part is a plugin.

Public names are loaded on first use, so that `import modulm` costs nothing and the command line
starts at once.
"""

from __future__ import annotations

import sys

# `python -m modulm` puts the working directory first on the path: a file json.py there would be
# imported in place of Python's. While the package of `-m` is imported, argv[0] is "-m".
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    _words = zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    if next((b for a, b in _words if a[0] == "-" and a[-1] == "m"), "").startswith("modulm"):
        del sys.path[0]

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modulm.config import EngineConfig
    from modulm.contracts.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
    from modulm.contracts.sampling import PoolingParams, SamplingParams, StructuredOutputs
    from modulm.plugins import register, unregister
    from modulm_frontend.beam_search import BeamSearchParams
    from modulm_frontend.llm import LLM
    from modulm_frontend.lora import LoRARequest
    from modulm_server.engine.async_llm import AsyncLLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineConfig",
    "LoRARequest",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
    "register",
    "unregister",
]

__version__ = "0.1.0"

_HOMES = {
    "LLM": "modulm_frontend.llm",
    "AsyncLLM": "modulm_server.engine.async_llm",
    "BeamSearchParams": "modulm_frontend.beam_search",
    "CompletionOutput": "modulm.contracts.outputs",
    "EngineConfig": "modulm.config",
    "LoRARequest": "modulm_frontend.lora",
    "PoolingParams": "modulm.contracts.sampling",
    "PoolingRequestOutput": "modulm.contracts.outputs",
    "RequestOutput": "modulm.contracts.outputs",
    "SamplingParams": "modulm.contracts.sampling",
    "StructuredOutputs": "modulm.contracts.sampling",
    "register": "modulm.plugins",
    "unregister": "modulm.plugins",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'modulm' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in ("modulm_frontend", "modulm_server"):
            raise
        package = error.name.replace("_", "-")
        from modulm.plugins.index import to_install

        raise ImportError(f"{name} needs {package}{to_install(package)}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
