"""The modules under `vllm`: their names, and the modulm modules that implement them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module, metadata
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any

from modulm_vllm.elsewhere import instead

__all__ = ["MODULES", "find", "vllm_is_installed"]

_PARAMS, _OUTPUTS = "modulm_vllm.params", "modulm.contracts.outputs"
_ARGUMENTS, _PROMPTS = "modulm_vllm.arguments", "modulm_vllm.prompts"
_POOLED = ("PoolingOutput", "PoolingRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput",
           "ClassificationOutput", "ClassificationRequestOutput", "ScoringOutput",
           "ScoringRequestOutput")  # fmt: skip


def _all(home: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, home)


_LLM = _all("modulm_vllm.llm", "LLM")
_ENGINE = _all("modulm_vllm.engine", "LLMEngine")
_ASYNC = _all("modulm_vllm.async_engine", "AsyncLLMEngine")
_TOKENIZER = _all("modulm_vllm.tokenizers", "AnyTokenizer", "get_tokenizer")
_COMPLETION = _all("modulm_vllm.outputs", "CompletionOutput")
_PARSER = _all(_ARGUMENTS, "FlexibleArgumentParser")
_LORA = _all(_PARAMS, "LoRARequest")
_VERSION = _all("modulm_vllm.version", "__version__", "__version_tuple__")
_INPUTS = _all(_PROMPTS, "EmbedsPrompt", "PromptType", "SingletonPrompt", "TextPrompt",
               "TokensPrompt")  # fmt: skip
_LOGPROBS = {
    **_all(_OUTPUTS, "Logprob"),
    **_all(_PROMPTS, "PromptLogprobs", "SampleLogprobs"),
}
_COMMAND = _all("modulm_vllm.command", "main")
_TRAINER = "modulm_vllm.weight_broadcast"

#: Module -> its names -> the module that implements them.
MODULES: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        **_LLM, **_ENGINE, **_ASYNC, **_VERSION,
        **_all(_ARGUMENTS, "AsyncEngineArgs", "EngineArgs"),
        **_COMPLETION, **_all(_OUTPUTS, "RequestOutput", *_POOLED),
        **_all(_PARAMS, "PoolingParams", "SamplingParams"),
        **_all(_PROMPTS, "PromptType", "TextPrompt", "TokensPrompt"),
    },
    "vllm.beam_search": _all(
        "modulm_frontend.beam_search", "BeamSearchOutput", "BeamSearchSequence"
    ),
    "vllm.collect_env": _COMMAND,
    "vllm.config": _all("modulm_vllm.tables", "AttentionConfig", "CompilationConfig",
                        "KVEventsConfig", "KVTransferConfig", "PoolerConfig", "ProfilerConfig",
                        "SpeculativeConfig", "StructuredOutputsConfig"),
    "vllm.distributed": _all("modulm_vllm.cleanup", "cleanup_dist_env_and_memory"),
    "vllm.distributed.parallel_state": _all(
        "modulm_vllm.cleanup", "cleanup_dist_env_and_memory", "destroy_distributed_environment",
        "destroy_model_parallel",
    ),
    "vllm.distributed.weight_transfer": {},
    "vllm.distributed.weight_transfer.nccl_engine": _all(
        _TRAINER, "NCCLTrainerSendWeightsArgs", "NCCLWeightTransferEngine"
    ),
    "vllm.engine": {},
    "vllm.engine.arg_utils": _all(_ARGUMENTS, "AsyncEngineArgs", "EngineArgs"),
    "vllm.engine.async_llm_engine": _ASYNC,
    "vllm.engine.llm_engine": _ENGINE,
    "vllm.entrypoints": {},
    "vllm.entrypoints.chat_utils": _all("modulm_chat.conversation", "load_chat_template"),
    "vllm.entrypoints.cli": {},
    "vllm.entrypoints.cli.main": _COMMAND,
    "vllm.entrypoints.llm": _LLM,
    "vllm.entrypoints.openai": {},
    "vllm.entrypoints.openai.api_server": _all("modulm_vllm.command", "serve"),
    "vllm.entrypoints.openai.run_batch": _all("modulm_vllm.command", "run_batch"),
    "vllm.inputs": _INPUTS,
    "vllm.inputs.data": _INPUTS,
    "vllm.logger": _all("modulm_vllm.logger", "init_logger"),
    "vllm.logprobs": _LOGPROBS,
    "vllm.lora": {},
    "vllm.lora.request": _LORA,
    "vllm.outputs": {
        **_COMPLETION, **_all(_OUTPUTS, "RequestOutput", *_POOLED),
    },
    "vllm.pooling_params": _all(_PARAMS, "PoolingParams"),
    "vllm.sampling_params": _all(
        _PARAMS, "BeamSearchParams", "GuidedDecodingParams", "RepetitionDetectionParams",
        "RequestOutputKind", "SamplingParams",
        "SamplingType", "StructuredOutputsParams",
    ),
    "vllm.sequence": _LOGPROBS,
    "vllm.tokenizers": _TOKENIZER,
    "vllm.transformers_utils": {},
    "vllm.transformers_utils.tokenizer": _TOKENIZER,
    "vllm.usage": {},
    "vllm.usage.usage_lib": _all("modulm_vllm.async_engine", "UsageContext"),
    "vllm.utils": {
        **_PARSER,
        **_all("modulm_vllm.cleanup", "random_uuid"),
    },
    "vllm.utils.argparse_utils": _PARSER,
    "vllm.utils.network_utils": _all(_TRAINER, "get_ip", "get_open_port"),
    "vllm.v1": {},
    "vllm.v1.engine": {},
    "vllm.v1.engine.async_llm": _all("modulm_vllm.async_engine", "AsyncLLM"),
    "vllm.v1.engine.exceptions": _all("modulm_vllm.failures", "EngineDeadError"),
    "vllm.v1.engine.llm_engine": _ENGINE,
    "vllm.v1.metrics": {},
    "vllm.v1.metrics.reader": _all("modulm_vllm.metrics", "Counter", "Gauge", "Histogram", "Metric",
                                   "Vector"),
    "vllm.version": _VERSION,
}  # fmt: skip

#: Names that differ in modulm.
_OURS = {"AsyncLLM": "AsyncLLMEngine", "load_chat_template": "load_template"}
#: Functions of modulm_vllm.command that `python -m` runs.
_MAINS = {
    "vllm.collect_env.__main__": "main(['collect-env'])",
    "vllm.entrypoints.cli.main.__main__": "main()",
    "vllm.entrypoints.openai.api_server.__main__": "serve()",
    "vllm.entrypoints.openai.run_batch.__main__": "run_batch()",
}


def vllm_is_installed() -> bool:
    """Whether the distribution `vllm` is installed, which then provides the name."""
    try:
        metadata.distribution("vllm")
    except metadata.PackageNotFoundError:
        return False
    return True


def find(name: str) -> ModuleSpec | None:
    """Return the spec of a module under `vllm`; None if vLLM itself is installed.

    Raises ModuleNotFoundError that names modulm's replacement.
    """
    loaded = sys.modules.get("vllm")
    ours = loaded is not None and isinstance(getattr(loaded, "__loader__", None), _Loader)
    if (loaded is not None and not ours) or (loaded is None and vllm_is_installed()):
        return None
    if name in MODULES:
        # All are packages, so that imports of missing submodules also come here.
        return ModuleSpec(name, _Loader(), origin=__file__, is_package=True)
    if name in _MAINS:
        return ModuleSpec(name, _Loader(), origin=__file__)
    raise ModuleNotFoundError(instead(name))


class _Loader(InspectLoader):
    """Creates a module whose names are resolved on first use."""

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        table, name = MODULES[module.__name__], module.__name__

        def get(wanted: str) -> Any:
            if wanted not in table:
                raise AttributeError(instead(f"{name}.{wanted}"))
            value = module.__dict__[wanted] = _value(table[wanted], _OURS.get(wanted, wanted))
            return value

        module.__dict__.update(
            __doc__=f"What modulm has under vLLM's name {name}.",
            __file__=__file__,
            __all__=sorted(table),
            __getattr__=get,
            __dir__=lambda: sorted({*module.__dict__, *table}),
        )

    def is_package(self, fullname: str) -> bool:
        return fullname not in _MAINS

    def get_source(self, fullname: str) -> str | None:
        if fullname not in _MAINS:
            return None
        return f"from modulm_vllm.command import *\n{_MAINS[fullname]}\n"

    def get_code(self, fullname: str) -> CodeType:
        """Return the code that runpy runs."""
        return self.source_to_code(self.get_source(fullname) or "", f"<{fullname}>")


def _value(home: str, name: str) -> Any:
    return getattr(import_module(home), name)
