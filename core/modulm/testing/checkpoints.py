"""Tiny random checkpoints: real Hugging Face folders that transformers and modulm both open."""

from __future__ import annotations

import json
import math
import random
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["CHAT_TEMPLATE", "make_tiny", "make_tokenizer", "save_tiny", "split", "tiny_model"]

#: ChatML with Hermes tool calls and a think block that `enable_thinking=False` closes immediately.
CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
{{- '# Tools\\n<tools>\\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
{{- '</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (tools and loop.first and message.role == 'system') -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function or call -%}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
{{- call.arguments if call.arguments is string else call.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}
{%- endif -%}
"""

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

_FINAL_NORMS = (
    "model.norm.weight",
    "final_layernorm.weight",
    "final_layer_norm.weight",
    ".layer_norm.weight",
    "embedding_norm.weight",
    "ln_f.weight",
    "norm_f.weight",
)

#: Buffers of routers, which are zero in an untrained model.
_CHOICE_BIASES = ("e_score_correction_bias", "expert_bias")

#: Default configuration for architectures without an installed driver.
_SMALL: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def make_tiny(
    path: str | Path,
    architecture: str = "LlamaForCausalLM",
    *,
    seed: int = 0,
    vocab: int = 512,
    dtype: str = "float32",
    shards: int = 1,
    **config_overrides: Any,
) -> Path:
    """Write a random checkpoint of a transformers architecture to the folder `path`.

    The configuration comes from the driver's `tiny()` if one is installed, then from the overrides
    (config.json keys). Weights are scaled so that greedy decoding visits many tokens; norms and
    biases are random too, since a bug would not show in an all-ones norm. `dtype` is that of
    parameters; buffers stay fp32.

    The folder holds config.json, model.safetensors (or `shards` files with an index), a trained
    byte-level BPE tokenizer of `vocab` entries with a ChatML template, and generation_config.json.
    """
    model = tiny_model(architecture, seed=seed, vocab=vocab, **config_overrides)
    return save_tiny(model, path, vocab=vocab, dtype=dtype, shards=shards)


def tiny_model(
    architecture: str,
    *,
    seed: int = 0,
    vocab: int = 512,
    attn_implementation: str = "",
    **config_overrides: Any,
) -> Any:
    """Return the transformers model that `make_tiny` writes, in fp32; see there."""
    import torch
    import transformers

    model_type = getattr(transformers, architecture)
    keys = {"vocab_size": vocab, "bos_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}
    keys |= {**_shape(architecture), **config_overrides}
    for derived in ("architectures", "model_type", "torch_dtype", "dtype"):
        keys.pop(derived, None)
    config = model_type.config_class(**keys)
    config.architectures = [architecture]
    chosen = {"attn_implementation": attn_implementation} if attn_implementation else {}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_type._from_config(config, dtype=torch.float32, **chosen).eval()
        _randomise(model)
    if model.can_generate():
        model.generation_config.eos_token_id = [2, 0]
        model.generation_config.do_sample = False
    return model


def save_tiny(
    model: Any, path: str | Path, *, vocab: int = 512, dtype: str = "float32", shards: int = 1
) -> Path:
    """Write a model of `tiny_model` with a tokenizer to the folder `path`.

    The model stays in fp32; its parameters are rounded to what is written.
    """
    import torch
    import transformers

    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder, max_shard_size="100GB")
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    if shards > 1:
        split(folder, shards)
    make_tokenizer(folder, vocab=vocab)
    return folder


def make_tokenizer(path: str | Path, *, vocab: int = 512) -> Path:
    """Write a byte-level BPE tokenizer of exactly `vocab` entries (at least 270) to `path`.

    Ids 0, 1 and 2 are <|endoftext|>, <|im_start|> and <|im_end|> (which ends a turn). The last four
    ids are the think and tool-call markers, which are not special, since parsers read them as text.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(vocab)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    wrapped.save_pretrained(str(path))
    return Path(path)


@cache
def _trained(vocab: int) -> str:
    """Return the tokenizer of that size, as JSON; trained once per process."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(_MARKERS),
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(vocab), trainer)
    tokenizer.add_tokens([AddedToken(marker, special=False) for marker in _MARKERS])
    if tokenizer.get_vocab_size() != vocab:
        raise ValueError(f"vocab: trained {tokenizer.get_vocab_size()} entries, not {vocab}")
    return str(tokenizer.to_str())


def _shape(architecture: str) -> Mapping[str, Any]:
    """Return the driver's tiny config, or that of a generic decoder."""
    from modulm.errors import PluginNotFound
    from modulm.plugins import manager

    try:
        driver = manager.current().load("models", architecture)
    except PluginNotFound:
        return _SMALL
    tiny: Mapping[str, Any] = driver.tiny()
    return tiny


def _randomise(model: torch.nn.Module) -> None:
    """Set weights with about unit gain per layer and logits with a spread of about 3.

    With tied embeddings, the residual stream points at the token it came from, and greedy decoding
    would repeat it forever; a final norm of mixed signs removes that correlation.
    """
    import torch

    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    tied = head is not None and id(head.weight) in tables
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            parameter.add_(torch.randn_like(parameter) * 0.1)
            if tied and name.endswith(_FINAL_NORMS):
                parameter.normal_(mean=-1.0, std=2.0)
        elif head is not None and parameter is head.weight:
            parameter.normal_(std=(1.5 if tied else 3.0) / math.sqrt(parameter.shape[-1]))
        else:
            parameter.normal_(std=1.0 if id(parameter) in tables else parameter.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith(_CHOICE_BIASES):
            buffer.normal_(std=0.2)


def split(folder: Path, shards: int) -> None:
    """Split model.safetensors into `shards` files with an index, in name order."""
    from safetensors.torch import load_file, save_file

    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    names = sorted(tensors)
    where: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({n: tensors[n] for n in part}, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(part, file))
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    whole.unlink()


def _corpus(vocab: int) -> list[str]:
    """Return English-like lines with enough distinct words for `vocab` entries."""
    plain = [
        "The capital of France is Paris, and the capital of Japan is Tokyo.",
        "Hello! How are you today? I am fine, thank you very much.",
        'What is the weather in Berlin? {"name": "get_weather", "arguments": {"city": "Berlin"}}',
        "def add(a, b):\n    return a + b\n",
        "Once upon a time there was a small cat that lived in a big house by the sea.",
        "1 + 2 = 3, 12 + 30 = 42, 100 - 1 = 99; user system assistant tool think",
    ]
    rng = random.Random(0)
    sounds = [c + v for c in "bcdfghklmnprstvwz" for v in ("a", "e", "i", "o", "u", "an", "er")]
    lines = [
        " ".join("".join(rng.choices(sounds, k=rng.randint(1, 4))) for _ in range(12))
        for _ in range(max(100, vocab // 4))
    ]
    return plain * 8 + lines
