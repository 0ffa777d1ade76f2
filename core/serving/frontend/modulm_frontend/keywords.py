"""The keywords of `LLM(...)`, for editors and type checkers.

Written by `python tests/frontend/test_keywords.py` from the flags of the core and of the libraries
beside it that an engine of one's own has. Flags of other packages are keywords too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

__all__ = ["LLMFlags"]


class LLMFlags(TypedDict, total=False):
    """Every keyword is optional; what it means is in docs/config.md."""

    additional_config: Mapping[str, Any] | str
    allowed_local_media_path: str | None
    allowed_media_domains: Sequence[str] | str | None
    allowed_media_networks: Sequence[str] | str
    async_scheduling: bool | None
    attention_backend: str | None
    attention_options: Mapping[str, Any] | str
    audio_fetch_timeout: float
    batch_invariant: bool
    block_size: int | None
    calculate_kv_scales: bool
    convert: Literal["auto", "none", "embed", "classify", "reward", "mm_encoder_only"]
    cp_kv_cache_interleave_size: int
    cpu_threads: int | None
    data_parallel_group: str | None
    data_parallel_rank_local: int
    data_parallel_size: int
    data_parallel_size_local: int | None
    decode_context_parallel_size: int
    device: str
    disable_chunked_mm_input: bool
    disable_frontend_multiprocessing: bool
    disable_log_stats: bool
    disable_sliding_window: bool
    distributed_executor_backend: str | None
    download_dir: str | None
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
    enable_chunked_prefill: bool | None
    enable_expert_parallel: bool
    enable_log_requests: bool
    enable_lora: bool
    enable_mm_embeds: bool
    enable_prefix_caching: bool | None
    enable_prompt_embeds: bool
    enable_sleep_mode: bool
    enforce_eager: bool
    fail_on_environ_validation: bool
    fully_sharded_loras: bool
    generation_config: str
    gpu_memory_utilization: float
    hf_config_path: str | None
    hf_overrides: Mapping[str, Any] | str
    hf_token: str | bool | None
    ignore_patterns: Sequence[str] | str
    image_fetch_timeout: float
    interleave_mm_strings: bool
    kernels: Sequence[str] | str | None
    kv_cache_dtype: str
    kv_cache_dtype_skip_layers: Sequence[str] | str
    kv_cache_memory_bytes: int | None
    language_model_only: bool
    limit_mm_per_prompt: Mapping[str, Any] | str
    load_format: str
    log_config_file: str | None
    log_format: Literal["text", "json"]
    log_level: Literal["trace", "debug", "info", "warning", "error", "critical"]
    logging_config: Mapping[str, Any] | str | None
    logits_processors: Sequence[Any] | str | None
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
    long_prefill_token_threshold: int
    lora_dtype: Literal["auto", "bfloat16", "float16", "float32"]
    lora_target_modules: Sequence[str] | str | None
    mamba_block_size: int | None
    mamba_cache_mode: Literal["none", "all", "align"] | None
    max_audio_decode_duration_s: float
    max_cpu_loras: int | None
    max_image_pixels: int
    max_inflight_media_bytes: int | None
    max_logprobs: int
    max_long_partial_prefills: int
    max_lora_rank: int
    max_loras: int
    max_media_download_size_mb: int
    max_media_request_download_size_mb: int
    max_model_len: int | str | None
    max_num_batched_tokens: int | None
    max_num_partial_prefills: int
    max_num_queued_reqs: int | None
    max_num_queued_tokens: int | None
    max_num_scheduled_tokens: int | None
    max_num_seqs: int | None
    max_video_frames: int
    media_decode_processes: int
    media_decode_timeout: float
    media_io_kwargs: Mapping[str, Any] | str
    media_url_allow_redirects: bool
    mm_encoder_chunk: int
    mm_encoder_only: bool
    mm_encoder_tp_mode: Literal["weights", "data"]
    mm_processor_cache_gb: float
    mm_processor_kwargs: Mapping[str, Any] | str
    model_class_overrides: Mapping[str, Any] | str
    model_impl: Literal["auto", "modulm", "vllm", "transformers", "terratorch"]
    model_loader_extra_config: Mapping[str, Any] | str
    num_gpu_blocks_override: int | None
    numa_bind: bool
    numa_bind_cpus: Sequence[str] | str | None
    numa_bind_nodes: Sequence[int] | str | None
    override_generation_config: Mapping[str, Any] | str
    pipeline_layer_partition: Sequence[int] | str
    pipeline_parallel_size: int
    plugin_config: Mapping[str, Any] | str
    plugins: Sequence[str] | str | None
    pooler_config: Mapping[str, Any] | str | None
    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor", "builtin"]
    quantization: str | None
    quantization_config: Mapping[str, Any] | str | None
    reasoning_parser: str | None
    reasoning_parser_plugin: str
    revision: str | None
    runner: Literal["auto", "generate", "pooling", "draft"]
    scheduler_cls: str | None
    scheduler_reserve_full_isl: bool
    scheduling_policy: str
    seed: int | str
    served_model_name: Sequence[str] | str | None
    skip_tokenizer_init: bool
    spec_method: str | None
    spec_model: str | None
    spec_tokens: int | None
    speculative: Literal["off", "auto"] | None
    speculative_config: Mapping[str, Any] | str
    stream_interval: int
    tensor_parallel_size: int
    tokenizer: str | None
    tokenizer_mode: str
    tokenizer_revision: str | None
    trust_remote_code: bool
    trust_request_mm_kwargs: bool
    use_tqdm_on_load: bool
    video_fetch_timeout: float
    video_pruning_rate: float | None
    watermark: float
    worker_cls: str
    worker_extension_cls: str | None
