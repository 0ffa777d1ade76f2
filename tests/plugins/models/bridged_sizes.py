"""Tiny checkpoints of every architecture that transformers lists for generation."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

import modulm
from modulm import SamplingParams
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny, save_tiny

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
#: Every spelling of the sizes of windows and experts; a model takes those that it knows.
SIZES = {
    "head_dim": 16,
    "sliding_window": 12,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "num_shared_experts": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
LATENT = {**SIZES, "num_key_value_heads": 4, "head_dim": 8}
#: Sizes of encoder-decoders, and of the first decoders.
TWO_SIDES = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 256,
    "max_encoder_position_embeddings": 256,
    "max_decoder_position_embeddings": 256,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "n_positions": 256,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
}
_BERT = {"model_type": "bert", "vocab_size": 512, **SMALL}
_BLT = {"vocab_size": 512, **SMALL}
_GEMMA = {**SMALL, "head_dim": 16, "sliding_window": 12, "vocab_size": 512}
_PROPHET = {
    "hidden_size": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_encoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4,
    "max_position_embeddings": 256,
}  # fmt: skip
#: All sizes of architectures that reject some of those above.
BARE: dict[str, dict[str, Any]] = {
    "EncoderDecoderModel": {
        "encoder": _BERT,
        "decoder": {**_BERT, "is_decoder": True, "add_cross_attention": True},
    },
    "BltForCausalLM": {
        **{f"{part}_config": _BLT for part in ("patcher", "encoder", "decoder", "global")},
        "max_position_embeddings": 256,
    },
    "T5GemmaForConditionalGeneration": {"encoder": _GEMMA, "decoder": _GEMMA},
    "ProphetNetForCausalLM": _PROPHET,
    "ProphetNetForConditionalGeneration": _PROPHET,
    "XLNetLMHeadModel": {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96},
}
#: Encoders that are decoders if their settings say so.
DECODERS = (
    "BertLMHeadModel", "BertGenerationDecoder", "BigBirdForCausalLM", "CamembertForCausalLM",
    "Data2VecTextForCausalLM", "ElectraForCausalLM", "ErnieForCausalLM", "MegatronBertForCausalLM",
    "RemBertForCausalLM", "RoCBertForCausalLM", "RobertaForCausalLM",
    "RobertaPreLayerNormForCausalLM", "XLMRobertaForCausalLM", "XLMRobertaXLForCausalLM",
)  # fmt: skip
#: transformers bounds the time steps of several tokens from below, and those of single tokens not:
#: its own numbers for a text depend on how it is cut, unless no time step is as small as the bound.
UNBOUNDED = {"time_step_min": 1e-9}
#: Sizes that only one architecture has.
OWN: dict[str, dict[str, Any]] = {
    "AXK1ForCausalLM": LATENT,
    "AXK2ForCausalLM": LATENT,
    "MiniCPM3ForCausalLM": LATENT,
    "Dots3NoteForCausalLM": LATENT,
    **{name: {"is_decoder": True} for name in DECODERS},
    "CTRLLMHeadModel": {"tie_word_embeddings": False},
    "LEDForConditionalGeneration": {"attention_window": 8},
    "Lfm3ForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "CohereCompassForCausalLM": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "NemotronHForCausalLM": UNBOUNDED,
    "Zamba2ForCausalLM": UNBOUNDED,
    "Qwen4ExpForCausalLM": {
        **SMALL, **SIZES, "num_hidden_layers": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1,
        "indexer_head_dim": 16, "indexer_budget": 16, "indexer_compress_ratio": 4,
    },
    "RecurrentGemmaForCausalLM": {
        "block_types": ["recurrent", "attention"], "tie_word_embeddings": False,
    },
    "RoFormerForCausalLM": {"is_decoder": True, "tie_word_embeddings": False},
    "XLMWithLMHeadModel": {"causal": True, "emb_dim": 64, "n_layers": 2, "n_heads": 4},
    "XmodForCausalLM": {"is_decoder": True, "default_language": "en_XX"},
    "ZambaForCausalLM": {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid"] * 2},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "xLSTMForCausalLM": {
        "num_heads": 4, "embedding_dim": 64, "num_blocks": 2, "chunk_size": 16,
        "qk_dim_factor": 1.0, "v_dim_factor": 1.0,
    },
}  # fmt: skip


def names(mapping: Any) -> list[str]:
    """Architectures of one of transformers' mappings, in their order."""
    values = [v if isinstance(v, tuple | list) else (v,) for v in mapping.values()]
    return list(dict.fromkeys(name for group in values for name in group))


def causal() -> list[str]:
    """Decoders."""
    return names(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def crossed() -> list[str]:
    """Encoder-decoders."""
    return names(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)


def write(path, architecture):
    """Write a tiny checkpoint."""
    native = {declared.name for declared in manager.current().names("models")}
    own = OWN.get(architecture, {})
    if architecture in native:
        return make_tiny(path, architecture, **own)
    kind = getattr(transformers, architecture).config_class
    both = TWO_SIDES if architecture in crossed() or hasattr(kind, "decoder_layers") else {}
    known = {*getattr(kind, "__dataclass_fields__", {}), *(kind.attribute_map or {})}
    sizes = {key: value for key, value in {**SMALL, **SIZES, **both}.items() if key in known}
    if architecture in BARE:
        return _bare(path, architecture)
    return make_tiny(path, architecture, **{**sizes, **own})


def _bare(path, architecture):
    """Write a checkpoint of an architecture whose class rejects sizes that others have."""
    model_type = getattr(transformers, architecture)
    ids = {"bos_token_id": 0, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = model_type.config_class(vocab_size=512, **ids, **BARE[architecture])
    config.architectures = [architecture]
    torch.manual_seed(0)
    model = model_type(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3 if parameter.dim() > 1 else 0.1)
    return save_tiny(model, path)


def check_crossed(folder, architecture):
    """Compare answers with transformers, of prompts of several lengths in one batch."""
    model = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()
    texts = (list(range(20, 37)), [40, 41], list(range(50, 90)))
    begun = ([1, 5, 6, 7], [1], [1, 9, 300])
    flags = {"device": "cpu", "dtype": "float32", "max_logprobs": -1, "block_size": 16,
             "max_model_len": 96, "use_tqdm_on_load": False}  # fmt: skip
    prompts = [
        {"encoder_prompt": {"prompt_token_ids": text}, "decoder_prompt": first}
        for text, first in zip(texts, begun, strict=True)
    ]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=-1)
    with modulm.LLM(str(folder), model_impl="transformers", **flags) as llm:
        answers = llm.generate(prompts, params, use_tqdm=False)
    for text, answer in zip(texts, answers, strict=True):
        (choice,) = answer.outputs
        whole = [*answer.prompt_token_ids, *choice.token_ids]
        with torch.inference_mode():
            logits = (
                model(input_ids=torch.tensor([text]), decoder_input_ids=torch.tensor([whole]))
                .logits[0]
                .log_softmax(-1)
            )
        first = len(answer.prompt_token_ids) - 1
        for index, entries in enumerate(choice.logprobs):
            worst = max(
                abs(entry.logprob - float(logits[first + index, token]))
                for token, entry in entries.items()
            )
            assert worst < 1e-3, f"log probabilities differ by {worst:.2g}"
            assert choice.token_ids[index] == int(logits[first + index].argmax())
