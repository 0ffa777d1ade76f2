"""Names of vLLM that modulm-vllm does not have, and what to use instead."""

from __future__ import annotations

__all__ = ["INSTEAD", "instead"]

#: Name of vLLM -> what to use. The longest matching prefix counts.
INSTEAD = {
    "vllm.ModelRegistry": "write a model package (docs/plugins-model.md), or register a class that "
    'is written for modulm: modulm.register("models", "MyForCausalLM", "package.module:Class")',
    "vllm.assets": "sample images and sounds are not part of modulm",
    "vllm.attention": "write an attention backend (docs/plugins-attention.md)",
    "vllm.benchmarks": "use the commands `vllm bench latency`, `throughput` and `serve`",
    "vllm.config": "pass flags as keywords of LLM or EngineArgs, tables as plain dicts; "
    "modulm.EngineConfig is the whole configuration",
    "vllm.device_allocator": "use LLM(enable_sleep_mode=True).sleep() to release memory",
    "vllm.distributed": "pass tensor_parallel_size or pipeline_parallel_size to LLM; "
    "modulm.parallel has the process groups (docs/parallel.md)",
    "vllm.engine.protocol": "use modulm_server.engine.client.EngineClient",
    "vllm.entrypoints.api_server": "start the server with `vllm serve MODEL` or "
    "`python -m vllm.entrypoints.openai.api_server --model MODEL`",
    "vllm.entrypoints.chat_utils": "use modulm_chat for conversations and chat templates",
    "vllm.entrypoints.openai": "start the server with `vllm serve MODEL`, or create its "
    "application with modulm_server.app.create_app; routes are packages (docs/plugins-route.md)",
    "vllm.entrypoints": "start the server with `vllm serve MODEL`",
    "vllm.envs": "use flags, keywords or MODULM_* variables (docs/config.md); "
    "docs/vllm-scripts.md lists the VLLM_* variables that are read",
    "vllm.initialize_ray_cluster": 'pass distributed_executor_backend="ray" to LLM, which joins or '
    "starts a cluster (docs/parallel.md)",
    "vllm.model_executor.models": "write a model package (docs/plugins-model.md)",
    "vllm.model_executor.layers.quantization": "write a quantization method "
    "(docs/plugins-quantization.md)",
    "vllm.model_executor": "write a model with modulm_layers (docs/plugins-model.md)",
    "vllm.multimodal": "pass media as `multi_modal_data` of a prompt (docs/media.md)",
    "vllm.platforms": "`modulm explain MODEL` shows the device that a model would run on, and why",
    "vllm.plugins": "packages are found by entry points (docs/write-a-plugin.md)",
    "vllm.reasoning": "write a reasoning parser (docs/plugins-parser.md); "
    "--reasoning-parser-plugin loads a file",
    "vllm.scalar_type": "use modulm_quantized for quantized layouts",
    "vllm.tool_parsers": "write a tool parser (docs/plugins-parser.md); --tool-parser-plugin loads "
    "a file",
    "vllm.tracing": "use --otlp-traces-endpoint",
    "vllm.v1.executor": "write an executor, a driver under the entry points `modulm.executors` "
    "(docs/drivers.md)",
    "vllm.v1.metrics": "use LLM.get_metrics(), or /metrics of the server",
    "vllm.v1.sample": "write a modulm.contracts.sampling.LogitsProcessor "
    "(docs/plugins-logits-processor.md)",
    "vllm.v1": "see modulm.engine (docs/architecture.md)",
    "vllm.worker": "see modulm.engine (docs/architecture.md)",
}
_OTHERWISE = "docs/vllm-scripts.md lists the supported names"


def instead(name: str) -> str:
    """The message of an import of `vllm.a.b` that is not supported: what to use instead."""
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 1, -1))
    replacement = next((INSTEAD[prefix] for prefix in prefixes if prefix in INSTEAD), _OTHERWISE)
    return f"{name} is not supported by modulm-vllm, which stands in for vLLM here: {replacement}"
