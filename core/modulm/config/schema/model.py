"""Which model, in which precision and length, and how its files are understood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.config.schema.flags import equip, flag, later, no_effect, parse_int, refused

__all__ = ["ModelConfig"]


def _length(value: Any) -> int | None:
    """`auto` and -1 leave the choice to the checkpoint."""
    if value is None or value in ("auto", "none", "None", -1, "-1"):
        return None
    return parse_int(value)


def _token(value: Any) -> str | bool | None:
    """A token, or true for the one that `hf auth login` stored."""
    if value is None or isinstance(value, bool):
        return value
    return True if str(value).lower() == "true" else str(value)


@frozen(kw_only=True, field_transformer=equip)
class ModelConfig:
    """Which model, in which precision and length, and how its files are understood."""

    TITLE: ClassVar[str] = "ModelConfig"
    TABLE: ClassVar[str | None] = None

    model: str = flag(
        "demo",
        "Model to run: a folder, a Hugging Face id, or a short name.",
        aliases=("--model-tag",),
    )
    runner: str = flag(
        "auto",
        "What the engine does with the model.",
        choices=("auto", "generate", "pooling", "draft"),
    )
    convert: str = flag(
        "auto",
        "Turn a generating model into a pooling one.",
        choices=("auto", "none", "embed", "classify", "reward", "mm_encoder_only"),
    )
    task: str | None = flag(
        None,
        "What the model is used for.",
        deprecated="use --runner and --convert",
        choices=(
            "auto", "generate", "embedding", "embed", "classify", "score", "reward",
            "transcription", "draft",
        ),
        state=no_effect("the runner follows from the checkpoint; see --runner"),
    )  # fmt: skip
    tokenizer: str | None = flag(None, "Tokenizer folder or id; None: the model's own.")
    tokenizer_mode: str = flag(
        "auto",
        "Which tokenizer implementation to load.",
        choices=("auto", "hf", "slow", "mistral", "custom"),
    )
    tokenizer_revision: str | None = flag(None, "Revision of the tokenizer on the hub.")
    trust_remote_code: bool = flag(False, "Allow Python code that comes with a checkpoint to run.")
    dtype: str = flag(
        "auto",
        "Number format of weights and activations; auto takes the checkpoint's where the "
        "platform has it.",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
    )
    seed: int = flag(
        0,
        "Seed of everything random that no request seeds itself.",
        parse=lambda value: 0 if value is None else parse_int(value),
    )
    hf_config_path: str | None = flag(None, "Take config.json from this folder or id instead.")
    allowed_local_media_path: str = flag(
        "",
        "Folder whose images and videos requests may name.",
        state=later("multimodal models"),
    )
    allowed_media_domains: tuple[str, ...] | None = flag(
        None,
        "Hosts from which media may be fetched.",
        state=later("multimodal models"),
    )
    revision: str | None = flag(None, "Branch, tag or commit of the model on the hub.")
    code_revision: str | None = flag(
        None,
        "Revision of the model's remote code on the hub.",
        state=later("a revision of the code alone; --revision pins both"),
    )
    max_model_len: int | None = flag(
        None,
        "Longest prompt and answer together; None or auto: the checkpoint's.",
        unit="tokens",
        least=1,
        parse=_length,
    )
    quantization: str | None = flag(
        None,
        "Method that holds the weights; None: what the checkpoint says.",
        kind="quantization",
        aliases=("-q",),
    )
    quantization_config: Mapping[str, Any] | None = flag(
        None, "Options of the quantization method, checked by it."
    )
    allow_deprecated_quantization: bool = flag(
        False,
        "Allow methods marked deprecated.",
        state=no_effect("no installed method is marked deprecated"),
    )
    enforce_eager: bool = flag(
        False,
        "Run operation by operation, without recording steps to repeat them.",
    )
    max_logprobs: int = flag(
        20, "Most log probabilities a request may ask for; -1: the whole vocabulary.", least=-1
    )
    logprobs_mode: str = flag(
        "raw_logprobs",
        "Log probabilities or logits, before or after penalties and temperature.",
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )
    batch_invariant: bool = flag(
        False,
        "Every token in a forward pass of its own, so that no request's bits depend on the others "
        "whatever computes them. Slow; compiled CPU kernels keep rows apart without it.",
    )
    disable_sliding_window: bool = flag(
        False, "Let every layer see the whole context, capped to the window's length."
    )
    disable_cascade_attn: bool | None = flag(
        None,
        "Never split attention over a shared prefix.",
        state=no_effect("attention over a shared prefix is never split"),
    )
    skip_tokenizer_init: bool = flag(
        False, "Load no tokenizer: prompts are token ids and answers are token ids."
    )
    enable_prompt_embeds: bool = flag(
        False, "Accept prompts as embeddings.", state=later("prompts as embeddings")
    )
    served_model_name: tuple[str, ...] | None = flag(
        None, "Name or names of the model in the API; the first one is shown in answers."
    )
    config_format: str = flag(
        "auto",
        "Format of the model's configuration file.",
        choices=("auto", "hf"),
        state=no_effect("config.json is the one format that is read"),
    )
    hf_token: str | bool | None = flag(
        None,
        "Token for the hub; true or no value: the stored one.",
        secret=True,
        parse=_token,
    )
    hf_overrides: Mapping[str, Any] = flag({}, "Keys that replace those of config.json.")
    model_class_overrides: Mapping[str, Any] = flag(
        {}, "Another class for an architecture: {name: pkg.mod:Class}."
    )
    pooler_config: Mapping[str, Any] | None = flag(
        None, "How a pooling model pools; its keys are in embeddings.md."
    )
    override_pooler_config: Mapping[str, Any] | None = flag(
        None, "How a pooling model pools.", deprecated="use --pooler-config"
    )
    generation_config: str = flag(
        "auto",
        "Sampling defaults: auto from the checkpoint, vllm or modulm for none, or a folder.",
    )
    override_generation_config: Mapping[str, Any] = flag(
        {}, "Sampling defaults that replace those of --generation-config."
    )
    enable_sleep_mode: bool = flag(
        False, "Let the engine give its memory back on request and take it again: /sleep, /wake_up."
    )
    sleep_mode_backend: str = flag(
        "cumem",
        "How memory is given back.",
        state=no_effect("caches and weights are released and made again"),
    )
    sleep_mode_offload_cudagraph: bool = flag(
        False,
        "Give captured graphs back as well.",
        state=no_effect("recorded steps go with the caches that they belong to"),
    )
    sleep_preserve_parameter_names: tuple[str, ...] = flag(
        (), "Weights that stay while the engine sleeps.", state=later("parts of a model's weights")
    )
    enable_cumem_allocator: bool = flag(
        False,
        "Allocate so that memory can be given back.",
        state=no_effect("all memory can be given back"),
    )
    enable_nccl_comm_suspend: bool = flag(
        False, "Suspend communicators while asleep.", state=no_effect("one device takes part")
    )
    model_impl: str = flag(
        "auto",
        "Which implementation of the model: a plugin's, or transformers'.",
        choices=("auto", "modulm", "vllm", "transformers", "terratorch"),
    )
    logits_processors: tuple[Any, ...] | None = flag(
        None, "Logits processors: names of plugins, pkg.mod:Class, or classes."
    )
    io_processor_plugin: str | None = flag(
        None, "Plugin that reads and writes other than text.", state=later("io processors")
    )
    renderer_num_workers: int = flag(
        1,
        "Threads that render chat templates.",
        least=1,
        state=no_effect("templates are rendered by the server's own pool of threads"),
    )
    rope_scaling: Mapping[str, Any] = flag(
        {},
        "Scaling of rotary positions.",
        state=refused("--hf-overrides '{\"rope_scaling\": {...}}'"),
    )
    rope_theta: float | None = flag(
        None, "Base of rotary positions.", state=refused("--hf-overrides '{\"rope_theta\": ...}'")
    )
    override_attention_dtype: str | None = flag(
        None, "Number format of attention.", state=refused("attention runs in --dtype")
    )
    override_neuron_config: Mapping[str, Any] | None = flag(
        None, "Options of one device.", state=refused("use --additional-config")
    )
    logits_processor_pattern: str | None = flag(
        None,
        "Which logits processors a request may name.",
        state=refused("requests cannot name classes; load them with --logits-processors"),
    )
    qlora_adapter_name_or_path: str | None = flag(
        None, "A QLoRA adapter.", state=refused("use --lora-modules")
    )
    enable_return_routed_experts: bool = flag(
        False, "Return which experts each token took.", state=later("returning routed experts")
    )
    return_sampling_mask: bool = flag(
        False, "Return which tokens could be sampled.", state=later("returning sampling masks")
    )
    use_fp64_gumbel: bool = flag(
        False,
        "Sample with noise in double precision.",
        state=later("sampling noise in double precision"),
    )
    enable_trace_replay: bool = flag(
        False, "Replay recorded tokens.", state=later("replaying recorded traces")
    )
