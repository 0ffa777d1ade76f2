"""What of vLLM is not here, and what modulm has instead."""

from __future__ import annotations

__all__ = ["instead"]

#: The longest prefix counts.
_INSTEAD = {
    "vllm.ModelRegistry": "a model is a package of its own (docs/plugins-model.md), or "
    'modulm.register("models", "MyForCausalLM", "package.module:MyForCausalLM") registers a class '
    "written for modulm",
    "vllm.assets": "pictures and sounds to try things with are no part of modulm",
    "vllm.attention": "attention backends are packages (docs/plugins-attention.md)",
    "vllm.benchmarks": "the commands `vllm bench latency`, `throughput` and `serve` are there",
    "vllm.config": "flags are keywords of LLM and EngineArgs, tables among them plain dicts; "
    "modulm.EngineConfig is the whole configuration",
    "vllm.device_allocator": "LLM(enable_sleep_mode=True).sleep() gives memory back",
    "vllm.distributed": "one device runs a model here; several are not yet supported",
    "vllm.engine.protocol": "modulm_server.engine.client.EngineClient is what an engine is",
    "vllm.entrypoints.api_server": "`vllm serve MODEL`, or "
    "`python -m vllm.entrypoints.openai.api_server --model MODEL`, is the server",
    "vllm.entrypoints.chat_utils": "modulm_chat has conversations and chat templates",
    "vllm.entrypoints.openai": "`vllm serve MODEL` is the server; it begins "
    "modulm_server.app.create_app, and routes of one's own are packages (docs/plugins-route.md)",
    "vllm.entrypoints": "`vllm serve MODEL` is the server",
    "vllm.envs": "settings are flags, keywords and MODULM_* variables (docs/config.md); the page "
    "docs/vllm-scripts.md lists the VLLM_* variables that are read",
    "vllm.initialize_ray_cluster": "one machine runs a model here; Ray is not yet supported",
    "vllm.model_executor.models": "models are packages (docs/plugins-model.md)",
    "vllm.model_executor.layers.quantization": "quantization methods are packages "
    "(docs/plugins-quantization.md)",
    "vllm.model_executor": "a model states its mathematics with modulm_layers "
    "(docs/plugins-model.md)",
    "vllm.multimodal": "a prompt's media are given as `multi_modal_data` of the prompt",
    "vllm.platforms": "`modulm explain MODEL` says on which device a model would run, and why",
    "vllm.plugins": "packages are found by their entry points (docs/write-a-plugin.md)",
    "vllm.reasoning": "reasoning parsers are packages (docs/plugins-parser.md); "
    "--reasoning-parser-plugin takes a file",
    "vllm.scalar_type": "quantized layouts are in modulm_quantized",
    "vllm.tool_parsers": "tool parsers are packages (docs/plugins-parser.md); "
    "--tool-parser-plugin takes a file",
    "vllm.tracing": "--otlp-traces-endpoint sends traces",
    "vllm.v1.executor": "executors are drivers of the group modulm.executors",
    "vllm.v1.metrics": "LLM.get_metrics(), and /metrics of the server",
    "vllm.v1.sample": "processors of logits are written for "
    "modulm.contracts.sampling.LogitsProcessor (docs/plugins-logits-processor.md)",
    "vllm.v1": "the engine's parts are under modulm.engine (docs/architecture.md)",
    "vllm.worker": "the engine's parts are under modulm.engine (docs/architecture.md)",
}
_OTHERWISE = "docs/vllm-scripts.md lists what is there"


def instead(name: str) -> str:
    """Why `vllm.a.b` is not there, and what to use."""
    parts = name.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 1, -1))
    found = next((_INSTEAD[prefix] for prefix in prefixes if prefix in _INSTEAD), _OTHERWISE)
    return f"{name} is not in modulm-vllm, which stands in for vLLM here: {found}"
