"""Tiny checkpoints as GGUF files, written by the library `gguf` with its own names of tensors.

What llama.cpp's converter does beside naming (rows put in another order, gates and up apart, norms
plus one) is done here again, by architecture.
"""

import json
import math
import re
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import quants
from safetensors.torch import load_file, save_file

TYPES = gguf.GGMLQuantizationType
#: Where blocks that the library does not make have their floats.
FLOATS = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,), "IQ1_M": (),
}  # fmt: skip
DEVIATION = 0.08


def encode(weight, name):
    """[.., K] fp32 -> rows of blocks; random ones of types that the library only reads."""
    if name in ("F32", "F16"):
        return weight.astype({"F32": np.float32, "F16": np.float16}[name])
    try:
        if name != "NVFP4":
            return quants.quantize(weight, TYPES[name])
    except NotImplementedError:
        pass
    return random_blocks(name, weight.shape)


def random_blocks(name, shape, seed=0):
    block, size = gguf.GGML_QUANT_SIZES[TYPES[name]]
    count = int(np.prod(shape)) // block
    raw = np.random.default_rng(seed + count).integers(0, 256, (count, size), dtype=np.uint8)

    if name == "MXFP4":  # an exponent
        raw[:, 0] = 122 + raw[:, 0] % 4
        return raw.reshape(*shape[:-1], -1)
    if name == "NVFP4":  # its scales have eight bits
        raw[:, :4] = 16 + raw[:, :4] % 8
        return raw.reshape(*shape[:-1], -1)

    def put(scale):
        half = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        for at in FLOATS.get(name, (0,)):
            raw[:, at : at + 2] = half
        if name == "IQ1_M":  # four pieces, in the high bits of its scales
            bits = int(np.float16(scale).view(np.uint16))
            for i in range(4):
                raw[:, 49 + 2 * i] = raw[:, 49 + 2 * i] & 15 | (bits >> 4 * i & 15) << 4

    put(1.0)
    put(DEVIATION / quants.dequantize(raw, TYPES[name]).std())
    return raw.reshape(*shape[:-1], -1)


def decode(raw, name):
    return raw.astype(np.float32) if name in ("F32", "F16") else quants.dequantize(raw, TYPES[name])


def permuted(tensor, heads):
    """Rows that rotate together side by side."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def gathered(stored):
    """Experts as stacks; singletons are dropped from shapes."""
    tensors, stacks = {}, {}
    for name, tensor in stored.items():
        one = re.fullmatch(r"(.*)\.experts\.(\d+)\.(\w+)\.weight", name)
        if one:
            stacks.setdefault((one[1], one[3]), {})[int(one[2])] = tensor
        else:
            tensors[name] = tensor
    for (path, part), each in stacks.items():
        if path.endswith("block_sparse_moe"):
            path = f"layers.{path.split('.')[2]}.feed_forward"
        tensors[f"{path}.experts.{part}.weight"] = torch.stack([each[i] for i in range(len(each))])
    return {name: tensor.squeeze() for name, tensor in tensors.items()}


def llama(name, tensor, c):
    if re.search(r"[qk]_proj\.(weight|bias)$", name):
        heads = c["num_attention_heads"] if "q_proj" in name else c["num_key_value_heads"]
        tensor = permuted(tensor, heads)
    yield name, tensor


def granite(name, tensor, c):
    if ".input_linear" not in name:
        yield from llama(name, tensor, c)
        return
    stack = "block_sparse_moe" in name
    layer = f"model.layers.{name.split('.')[2]}.mlp." + ("experts" if stack else "shared_experts")
    for part, half in zip(("gate", "up"), tensor.chunk(2, -2), strict=True):
        yield f"{layer}.{part}_proj.weight", half


def gpt2(name, tensor, c):
    if not name.endswith(".attn.bias"):
        turned = re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name)
        yield name, tensor.T if turned else tensor


def falcon(name, tensor, c):
    if "query_key_value" in name:
        heads, shared = c["num_attention_heads"], c["num_kv_heads"]
        grouped = tensor.reshape(shared, heads // shared + 2, -1, tensor.shape[-1])
        parts = grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:]
        tensor = torch.cat([part.reshape(-1, tensor.shape[-1]) for part in parts])
    yield name, tensor


def deepseek(name, tensor, c):
    if "kv_b_proj" not in name:
        yield name, tensor
        return
    nope, value = c["qk_nope_head_dim"], c["v_head_dim"]
    keys, values = tensor.unflatten(0, (-1, nope + value)).split([nope, value], 1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values


def gpt_oss(name, tensor, c):
    if "gate_up_proj" in name:
        bias = name.endswith("_bias")
        paired = tensor if bias else tensor.transpose(-1, -2)
        for i, part in enumerate(("gate", "up")):
            half = paired[:, i::2]
            stem = name.split("experts")[0] + f"experts.{part}_proj"
            yield f"{stem}.{'bias' if bias else 'weight'}", half
    elif "experts.down_proj" in name:
        bias = name.endswith("_bias")
        stem = name.removesuffix("_bias")
        yield f"{stem}.{'bias' if bias else 'weight'}", tensor if bias else tensor.transpose(-1, -2)
    else:
        yield name, tensor


def stablelm(name, tensor, c):
    match = re.fullmatch(r"(.*layernorm)\.norms\.(\d+)\.weight", name)
    yield (f"{match[1]}.{int(match[2]):03d}", tensor) if match else (name, tensor)


def bert(name, tensor, c):
    if not name.startswith("pooler"):
        yield name, tensor


CHANGES = {
    "llama": llama, "granite": granite, "granitemoe": granite, "gpt2": gpt2, "falcon": falcon,
    "deepseek2": deepseek, "gpt-oss": gpt_oss, "stablelm": stablelm, "bert": bert,
}  # fmt: skip


def renamed(stored, c, arch):
    """The checkpoint's tensors by their names in the file, in the file's order of elements."""
    changed = {}
    for name, tensor in gathered(stored).items():
        changed |= dict(CHANGES.get(arch, lambda n, t, c: [(n, t)])(name, tensor, c))
    if arch == "stablelm":
        heads = sorted(name for name in changed if re.search(r"layernorm\.\d+$", name))
        for stem in {name.rpartition(".")[0] for name in heads}:
            name_in_file = [changed.pop(name) for name in heads if name.startswith(f"{stem}.")]
            changed[f"{stem}.weight"] = torch.stack(name_in_file)
    number = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch)
    table = gguf.get_tensor_name_map(number, c["num_hidden_layers"])
    by_name = {}
    for name, tensor in changed.items():
        name = re.sub(r"gate\.e_score_correction_bias$", "gate.e_score_correction.bias", name)
        name_in_file = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if name_in_file is None:
            raise KeyError(name)
        by_name[name_in_file] = tensor
    return by_name


def changed(name, tensor, arch):
    """What the converter computes."""
    if arch.startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    return -tensor.exp() if name.endswith("ssm_a") else tensor


def write_gguf(folder, file, arch, choose, plain=None, vocabulary=None, parts=1):
    """The checkpoint in `folder` as a file of architecture `arch`.

    choose: (the file's name of a matrix, its shape) -> the type it is stored in. plain: a folder of
    the same checkpoint that gets the dequantized weights. vocabulary: adds the tokenizer.
    """
    config = json.loads((folder / "config.json").read_text())
    c = common_names(config)
    stored = load_file(folder / "model.safetensors")
    ends = np.cumsum([0] + [t.numel() for t in stored.values()])
    pairs = list(zip(stored.items(), ends, strict=False))
    indices = {n: torch.arange(t.numel()).reshape(t.shape) + int(e) for (n, t), e in pairs}
    dequantized_all = torch.cat([tensor.float().flatten() for tensor in stored.values()])
    writer = gguf.GGUFWriter(
        str(file), arch, split_max_tensors=-(-len(stored) // parts) * (parts > 1)
    )
    METADATA[arch](writer, c)
    writer.add_block_count(c["num_hidden_layers"])
    if vocabulary is not None:
        vocabulary(writer)
    by_place = renamed(indices, c, arch)
    for name, tensor in renamed({n: t.float() for n, t in stored.items()}, c, arch).items():
        values = changed(name, tensor, arch).contiguous().numpy()
        matrix = tensor.dim() > 1 and name.endswith("weight") and "ssm_conv1d" not in name
        kind = choose(name, values.shape) if matrix else "F32"
        if kind != "F32" and values.shape[-1] % gguf.GGML_QUANT_SIZES[TYPES[kind]][0]:
            kind = "F32"
        raw = encode(values, kind)
        if kind != "F32":
            dequantized = torch.from_numpy(decode(raw, kind).astype(np.float32))
            dequantized_all[by_place[name].flatten()] = dequantized.flatten()
        writer.add_tensor(name, raw, raw_dtype=TYPES[kind])
    for name, values in factors(c).items():
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if plain is not None:
        tensors = {
            n: dequantized_all[indices[n]].to(t.dtype).contiguous() for n, t in stored.items()
        }
        save_file(tensors, plain / "model.safetensors", {"format": "pt"})


def common_names(config):
    """config.json with the keys that most families have."""
    c = dict(config)
    for key_of_ours, name in {
        "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps",
        "num_experts": "num_local_experts", "ffn_hidden_size": "intermediate_size",
    }.items():  # fmt: skip
        if key_of_ours in c:
            c[name] = c[key_of_ours]
    c.setdefault("num_key_value_heads", c.get("num_attention_heads"))
    if not c.get("head_dim") and "num_attention_heads" in c:
        c["head_dim"] = c["hidden_size"] // c["num_attention_heads"]
    return c


def rope_of(c):
    table = c.get("rope_parameters") or {}
    return table.get("full_attention", table)


def factors(c):
    """Rotary factors, which the converter puts into tensors."""
    rope = rope_of(c)
    if rope.get("rope_type") == "longrope":
        both = (rope["long_factor"], rope["short_factor"])
        names = ("rope_factors_long.weight", "rope_factors_short.weight")
        return {n: np.array(f) for n, f in zip(names, both, strict=True)}
    if rope.get("rope_type") != "llama3":
        return {}
    size, values = c["head_dim"], []
    for i in range(0, size, 2):
        length = 2 * math.pi * rope["rope_theta"] ** (i / size)
        original, factor = rope["original_max_position_embeddings"], rope["factor"]
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        blend = min(max((original / length - low) / (high - low), 0), 1)
        values.append(1 / ((1 - blend) / factor + blend))
    return {"rope_freqs.weight": np.array(values)}


# What the converter writes of each architecture.


def decoder(w, c):
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c.get("intermediate_size") or 4 * c["hidden_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_key_length(c["head_dim"])
    w.add_value_length(c["head_dim"])
    rope = rope_of(c)
    w.add_rope_freq_base(float(rope.get("rope_theta") or c.get("rope_theta") or 10000.0))
    part = rope.get("partial_rotary_factor", c.get("partial_rotary_factor", 1.0))
    w.add_rope_dimension_count(int(part * c["head_dim"]))
    if rope.get("rope_type") in ("linear", "yarn"):
        kind = {"linear": gguf.RopeScalingType.LINEAR, "yarn": gguf.RopeScalingType.YARN}
        w.add_rope_scaling_type(kind[rope["rope_type"]])
        w.add_rope_scaling_factor(rope["factor"])
        w.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", 256))
    if c.get("rms_norm_eps") is not None:
        w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    if c.get("layer_norm_eps") is not None:
        w.add_layer_norm_eps(c["layer_norm_eps"])


def experts(w, c, inner="intermediate_size"):
    decoder(w, c)
    w.add_expert_count(c.get("n_routed_experts") or c["num_local_experts"])
    w.add_expert_used_count(c["num_experts_per_tok"])
    if inner != "intermediate_size":
        w.add_expert_feed_forward_length(c[inner])


def small_experts(w, c):
    experts(w, c, "moe_intermediate_size")


def gemma(w, c):
    decoder(w, c)
    if c.get("sliding_window"):
        w.add_sliding_window(c["sliding_window"])
    for key, add in (
        ("attn_logit_softcapping", w.add_attn_logit_softcapping),
        ("final_logit_softcapping", w.add_final_logit_softcapping),
    ):
        if c.get(key):
            add(c[key])


def phi3(w, c):
    decoder(w, c)
    w.add_sliding_window(c["sliding_window"])
    w.add_rope_scaling_orig_ctx_len(c["original_max_position_embeddings"])
    stretched = c["max_position_embeddings"] / c["original_max_position_embeddings"]
    grown = math.log(stretched) / math.log(c["original_max_position_embeddings"])
    w.add_rope_scaling_attn_factors(math.sqrt(1 + grown) if stretched > 1 else 1.0)


def routed(w, c):
    small_experts(w, c)
    w.add_leading_dense_block_count(c["first_k_dense_replace"])
    w.add_expert_shared_count(c["n_shared_experts"])
    w.add_expert_weights_scale(c["routed_scaling_factor"])
    w.add_expert_weights_norm(c["norm_topk_prob"])
    w.add_expert_group_count(c["n_group"])
    w.add_expert_group_used_count(c["topk_group"])


def deepseek2(w, c):
    size = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
    latent = {**c, "num_key_value_heads": 1, "head_dim": c["kv_lora_rank"] + c["qk_rope_head_dim"]}
    routed(w, {**latent, "partial_rotary_factor": c["qk_rope_head_dim"] / latent["head_dim"]})
    w.add_kv_lora_rank(c["kv_lora_rank"])
    if c["q_lora_rank"]:
        w.add_q_lora_rank(c["q_lora_rank"])
    if "mscale_all_dim" in rope_of(c):
        w.add_rope_scaling_yarn_log_mul(0.1 * rope_of(c)["mscale_all_dim"])
    w.add_key_length_mla(size)
    w.add_value_length_mla(c["v_head_dim"])
    third = c["model_type"] == "deepseek_v3"
    kind = gguf.ExpertGatingFuncType
    w.add_expert_gating_func(kind.SIGMOID if third else kind.SOFTMAX)


def oss(w, c):
    experts(w, c)
    w.add_expert_feed_forward_length(c["intermediate_size"])
    w.add_sliding_window(c["sliding_window"])


def multiplied(w, c):
    (experts if c.get("num_local_experts") else decoder)(w, c)
    w.add_embedding_scale(c["embedding_multiplier"])
    w.add_residual_scale(c["residual_multiplier"])
    w.add_attention_scale(c["attention_multiplier"])
    w.add_logit_scale(c["logits_scaling"])


def shared_kv(w, c):
    decoder(w, {**c, "num_key_value_heads": c["num_kv_heads"]})


def state_space(w, c):
    w.add_context_length(2**20)
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(0)
    w.add_head_count(0)
    w.add_ssm_conv_kernel(c["conv_kernel"])
    w.add_ssm_inner_size(c["expand"] * c["hidden_size"])
    w.add_ssm_state_size(c["state_size"])
    w.add_ssm_time_step_rank(c["time_step_rank"])
    w.add_layer_norm_rms_eps(c["layer_norm_eps"])


def encoder(w, c):
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_layer_norm_eps(c["layer_norm_eps"])
    w.add_causal_attention(False)


def llama_or_mixtral(w, c):
    (experts if c.get("num_local_experts") else decoder)(w, c)


METADATA = {
    "llama": llama_or_mixtral, "qwen2": decoder, "qwen3": decoder, "qwen2moe": small_experts,
    "qwen3moe": small_experts, "gemma": gemma, "gemma2": gemma, "gemma3": gemma, "phi3": phi3,
    "deepseek2": deepseek2, "gpt-oss": oss, "chatglm": decoder, "glm4": decoder, "glm4moe": routed,
    "granite": multiplied, "granitemoe": multiplied, "stablelm": decoder, "falcon": shared_kv,
    "gpt2": decoder, "mamba": state_space, "bert": encoder,
}  # fmt: skip


def byte_pairs(folder: Path, pre: str, *, begins: bool | None = None):
    """Adds the tokenizer of a folder, of byte pairs."""
    table = json.loads((folder / "tokenizer.json").read_text())
    settings = json.loads((folder / "tokenizer_config.json").read_text())

    def add(writer):
        ids = dict(table["model"]["vocab"])
        kinds = dict.fromkeys(ids.values(), gguf.TokenType.NORMAL)
        for token in table["added_tokens"]:
            ids[token["content"]] = token["id"]
            special = token["special"]
            kinds[token["id"]] = gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
        tokens = sorted(ids, key=ids.get)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([kinds[i] for i in range(len(tokens))])
        merges = [m if isinstance(m, str) else " ".join(m) for m in table["model"]["merges"]]
        writer.add_token_merges(merges)
        for name, key in (("bos", "bos_token"), ("eos", "eos_token"), ("pad", "pad_token")):
            if settings.get(key):
                getattr(writer, f"add_{name}_token_id")(ids[settings[key]])
        if begins is not None:
            writer.add_add_bos_token(begins)
        template = folder / "chat_template.jinja"
        if template.exists():
            writer.add_chat_template(template.read_text())

    return add
