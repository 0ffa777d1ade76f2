"""Writes a Qwen3 checkpoint as a GGUF file for llama.cpp (needs gguf; reads safetensors without
torch).

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import json
from pathlib import Path

import gguf
import numpy as np

#: Checkpoint tensor names -> llama.cpp's, within a layer.
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def name_of(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in TOP:
        return f"{TOP[stem]}.weight"
    layer, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{LAYER[rest]}.weight"


def bf16_tensors(path: Path):
    """Yield (name, uint16 array) of each tensor; numpy has no bfloat16."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    raw = np.memmap(path, np.uint8, "r", offset=8 + size)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        yield name, raw[begin:end].view(np.uint16).reshape(entry["shape"])


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocabulary: int) -> None:
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = [f"<unused{i}>" for i in range(vocabulary)]
    for token, at in model["vocab"].items():
        tokens[at] = token
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * vocabulary)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(2)


def write(folder: Path, path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    rope = config.get("rope_parameters") or {}
    writer = gguf.GGUFWriter(str(path), "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(float(rope.get("rope_theta") or config["rope_theta"]))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    add_tokenizer(writer, folder, config["vocab_size"])
    for name, bits in bf16_tensors(folder / "model.safetensors"):
        if bits.ndim == 1:
            wide = (bits.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(name_of(name), wide)
        else:
            writer.add_tensor(
                name_of(name), bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
