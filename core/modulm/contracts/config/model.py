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
        "Turn a generating model into a pooling one.",
        choices=("auto", "none", "embed", "classify", "reward", "mm_encoder_only"),
    )
    tokenizer: str | None = flag(
        None, "Tokenizer folder or id; None: the model's own.", common=True
    )
    tokenizer_mode: str = flag(
        "auto",
        "Which tokenizer implementation to load; hf is transformers'.",
        kind="tokenizers",
        choices=("auto", "hf"),
    )
    tokenizer_revision: str | None = flag(None, "Revision of the tokenizer on the hub.")
    trust_remote_code: bool = flag(False, "Allow Python code that comes with a checkpoint to run.")
    dtype: str = flag(
        "auto",
        "Number format of weights and activations; auto takes the checkpoint's where the "
        "platform has it.",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
        common=True,
    )
    seed: int = flag(
        0,
        "Seed of everything random that no request seeds itself.",
        parse=lambda value: 0 if value is None else parse_int(value),
        common=True,
    )
    hf_config_path: str | None = flag(None, "Take config.json from this folder or id instead.")
    revision: str | None = flag(None, "Branch, tag or commit of the model on the hub.")
    max_model_len: int | None = flag(
        None,
        "Longest prompt and answer together; None or auto: the checkpoint's.",
        unit="tokens",
        least=1,
        parse=_length,
        common=True,
    )
    quantization: str | None = flag(
        None,
        "Method that holds the weights; None: what the checkpoint says.",
        kind="quantization",
        aliases=("-q",),
        common=True,
    )
    quantization_config: Mapping[str, Any] | None = flag(
        None, "Options of the quantization method, checked by it."
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
    enable_prompt_embeds: bool = flag(
        False, "Take prompts that are embeddings instead of tokens (`prompt_embeds`)."
    )
    skip_tokenizer_init: bool = flag(
        False, "Load no tokenizer: prompts are token ids and answers are token ids."
    )
    served_model_name: tuple[str, ...] | None = flag(
        None,
        "Name or names of the model in the API; the first one is shown in answers.",
        common=True,
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
    model_impl: str = flag(
        "auto",
        "Which implementation of the model: a plugin's, or transformers'.",
        choices=("auto", "modulm", "vllm", "transformers", "terratorch"),
    )
    logits_processors: tuple[Any, ...] | None = flag(
        None, "Logits processors: names of plugins, pkg.mod:Class, or classes."
    )
