"""Which model, in which precision and length, and how its files are understood."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.contracts.flags import FlagGroup, flag, flag_group, parse_int

__all__ = ["ModelConfig"]


def _length(value: Any) -> int | None:
    """Parse a length; `auto` and -1 mean None: the checkpoint's."""
    if value is None or value in ("auto", "none", "None", -1, "-1"):
        return None
    return parse_int(value)


def _token(value: Any) -> str | bool | None:
    """Parse a hub token; true: the one stored by `hf auth login`."""
    if value is None or isinstance(value, bool):
        return value
    return True if str(value).lower() == "true" else str(value)


@flag_group
class ModelConfig(FlagGroup):
    """Which model, in which precision and length, and how its files are understood."""

    title = "ModelConfig"

    model: str = flag(
        "demo",
        "Model to run: a folder, a Hugging Face id, or a short name.",
        aliases=("--model-tag",),
        common=True,
    )
    runner: str = flag(
        "auto",
        "What the engine does with the model.",
        choices=("auto", "generate", "pooling", "draft"),
    )
    convert: str = flag(
        "auto",
        "How to turn a generative model into a pooling model.",
        choices=("auto", "none", "embed", "classify", "reward", "mm_encoder_only"),
    )
    tokenizer: str | None = flag(
        None, "Folder or Hugging Face id of the tokenizer. Default: the model's.", common=True
    )
    tokenizer_mode: str = flag(
        "auto",
        "Tokenizer implementation; hf is the one of transformers.",
        kind="tokenizers",
        choices=("auto", "hf"),
    )
    tokenizer_revision: str | None = flag(None, "Revision of the tokenizer on the hub.")
    trust_remote_code: bool = flag(False, "Allow Python code from the checkpoint to run.")
    dtype: str = flag(
        "auto",
        "Data type of weights and activations. auto: the checkpoint's, if supported.",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
        common=True,
    )
    seed: int = flag(
        0,
        "Seed for requests without one, and for everything else that is random.",
        parse=lambda value: 0 if value is None else parse_int(value),
        common=True,
    )
    hf_config_path: str | None = flag(None, "Folder or id to read config.json from instead.")
    revision: str | None = flag(None, "Branch, tag or commit of the model on the hub.")
    max_model_len: int | None = flag(
        None,
        "Maximum length of prompt and output together. Default (auto): the checkpoint's.",
        unit="tokens",
        least=1,
        parse=_length,
        common=True,
    )
    quantization: str | None = flag(
        None,
        "Quantization method of the weights. Default: the one that the checkpoint names. auto: if "
        "the weights do not fit, they are rounded while they load.",
        kind="quantization",
        choices=("auto",),
        aliases=("-q",),
        common=True,
    )
    quantization_config: Mapping[str, Any] | None = flag(
        None, "Options of the quantization method."
    )
    enforce_eager: bool = flag(
        False, "Run eagerly, without recording steps for replay (such as CUDA graphs)."
    )
    max_logprobs: int = flag(
        20, "Maximum log probabilities per token in a request; -1: the vocabulary size.", least=-1
    )
    logprobs_mode: str = flag(
        "raw_logprobs",
        "Return log probabilities or logits, before or after penalties and temperature.",
        choices=("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"),
    )
    batch_invariant: bool = flag(
        False,
        "Compute each token in a separate forward pass, so that no result depends on other "
        "requests. Slow, and not needed with the compiled CPU kernels.",
    )
    disable_sliding_window: bool = flag(
        False, "Use full attention in every layer; limits the context to the window."
    )
    enable_prompt_embeds: bool = flag(
        False, "Accept prompts as embeddings instead of tokens (`prompt_embeds`)."
    )
    skip_tokenizer_init: bool = flag(
        False, "Do not load a tokenizer: prompts and outputs are token ids."
    )
    served_model_name: tuple[str, ...] | None = flag(
        None, "Names of the model in the API; responses show the first one.", common=True
    )
    hf_token: str | bool | None = flag(
        None,
        "Hugging Face token; true, or no value, uses the stored one.",
        secret=True,
        parse=_token,
    )
    hf_overrides: Mapping[str, Any] = flag({}, "Overrides for keys of config.json.")
    model_class_overrides: Mapping[str, Any] = flag(
        {}, "Class to use for an architecture: {name: pkg.mod:Class}."
    )
    pooler_config: Mapping[str, Any] | None = flag(
        None, "Options of the pooler; docs/embeddings.md lists the keys."
    )
    generation_config: str = flag(
        "auto",
        "Folder with default sampling parameters; auto: the checkpoint; vllm or modulm: none.",
    )
    override_generation_config: Mapping[str, Any] = flag(
        {}, "Default sampling parameters; they override those of --generation-config."
    )
    enable_sleep_mode: bool = flag(
        False, "Let requests release the engine's memory (/sleep) and restore it (/wake_up)."
    )
    model_impl: str = flag(
        "auto",
        "Implementation of the model: that of a plugin, or of transformers.",
        choices=("auto", "modulm", "vllm", "transformers", "terratorch"),
    )
    logits_processors: tuple[Any, ...] | None = flag(
        None, "Logits processors to load: names of plugins, pkg.mod:Class, or classes."
    )
