"""More families that transformers has no class for: RADIO, perception encoders, CLIP in lines."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from PIL import Image
from safetensors.torch import save_file
from samples import parametrize_sample
from tests.plugins.models.test_assembled import (
    block_shapes,
    check,
    execute,
    random_weights,
    siglip_layer,
    text_model,
    write_tokenizer,
)
from tests.plugins.models.test_published import CPU, driver
from tests.plugins.models.test_relatives import answered
from torch import nn
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl

import modulm
from modulm.errors import CheckpointError, RequestError, UnsupportedError
from modulm.nn import read_config
from modulm_media.images import image_processor_class
from modulm_towers.testing import images

#: CLIP's mean and deviation.
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


def normal(image, statistics=CLIP):
    """[3, height, width] float32."""
    pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float() / 255
    mean, std = (torch.tensor(part)[:, None, None] for part in statistics)
    return (pixels - mean) / std


def linear(w, name, x):
    return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))


def layer_norm(w, name, x, eps):
    return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w.get(f"{name}.bias"), eps)


def squares(x):
    """[rows, columns, width] -> [rows / 2, columns / 2, 4 * width]"""
    rows, columns, width = x.shape
    x = x.view(rows // 2, 2, columns // 2, 2, width).transpose(1, 2)
    return x.reshape(rows // 2, columns // 2, 4 * width)


def attention(q, k, v, mask=None):
    """[tokens, heads, size] each -> [tokens, heads * size]"""
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def radio(table):
    """transformers' RADIO with random weights, and these under NVIDIA's names."""
    torch.manual_seed(2)
    config = hf.RadioConfig(**{**table["vision_config"], "attn_implementation": "eager"})
    model = hf.RadioModel(config).float().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    for name, parameter in model.named_parameters():
        if "layer_scale" in name:
            nn.init.ones_(parameter)
    return model, nvidia(model.state_dict())


#: transformers' names of RADIO's parts, and NVIDIA's.
NVIDIA = (
    ("embeddings.video_patch_projection", "model.patch_generator.video_embedder"),
    ("embeddings.patch_projection", "model.patch_generator.embedder"),
    ("embeddings.position_embedding", "model.patch_generator.pos_embed"),
    ("embeddings.cls_register_token", "model.patch_generator.cls_token.token"),
    ("encoder.layer.", "model.blocks."), (".attention.o_proj.", ".attn.proj."),
)  # fmt: skip


def nvidia(weights):
    stored = {}
    for name, tensor in weights.items():
        if "layer_scale" in name or ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            three = [weights[name.replace(".q_proj.", f".{letter}_proj.")] for letter in "qkv"]
            name, tensor = name.replace(".attention.q_proj.", ".attn.qkv."), torch.cat(three)
        for old, new in NVIDIA:
            name = name.replace(old, new)
        stored[f"vision_model.radio_model.{name}"] = tensor.clone()
    return stored


def ovis(folder):
    """Ovis 2 as published: words from states before the last norm, indicators without ids."""
    table = driver("Ovis").tiny()
    write_tokenizer(folder, table, ["<image>", "<|image_pad|>"])
    (folder / "preprocessor_config.json").write_text("{}")
    model = text_model("Qwen2", table["llm_config"])
    torch.manual_seed(2)
    vision = driver("Ovis2ForConditionalGeneration").tiny()["vision_config"]
    tower = hf.models.ovis2.modeling_ovis2.Ovis2VisionModel(
        hf.models.ovis2.configuration_ovis2.Ovis2VisionConfig(**vision)
    )
    tower.config._attn_implementation = "eager"
    tower.float().eval()
    for parameter in tower.parameters():
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    tower.transformer.rms_norm = nn.Identity()
    words = torch.randn(60, 64)
    weights, state = {"vte.weight": words}, tower.state_dict()
    for name, tensor in state.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            three = [state[name.replace(".q_proj.", f".{letter}_proj.")] for letter in "qkv"]
            name, tensor = name.replace(".q_proj.", ".qkv."), torch.cat(three)
        tensor = tensor[None] if "position_embedding" in name else tensor
        for old, new in AIDC:
            name = name.replace(old, new)
        weights[f"visual_tokenizer.{name}"] = tensor.clone()
    weights["visual_tokenizer.backbone.trunk.post_trunk_norm.weight"] = torch.randn(32)
    weights |= {f"llm.{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    pictures, embeddings = images(((56, 28), (20, 28))), []
    for picture, columns in zip(pictures, (2, 1), strict=True):
        views = [picture.crop((28 * i, 0, 28 * i + 28, 28)) for i in range(columns)]
        if columns > 1:
            views.insert(0, picture.resize((28, 14), Image.Resampling.BICUBIC))
        else:
            views = [picture]
        seen = []
        for view in views:
            square, pixels = torch.zeros(3, 28, 28), normal(view)
            top, left = (28 - view.height) // 2, (28 - view.width) // 2
            square[:, top : top + view.height, left : left + view.width] = pixels
            with torch.inference_mode():
                logits = tower(square[None])
                logits = getattr(logits, "pooler_output", logits)
                seen.append(logits[0] @ words[: logits.shape[-1]])
        start, prefix, column, _, end = (words[-i][None] for i in range(1, 6))
        parts = [start, seen[0], prefix]
        if columns > 1:
            parts += [seen[1], column, seen[2]]
        embeddings.append(torch.cat([*parts, end]))
    return "The <image> of <image> is", pictures, model, embeddings, 481


AIDC = (
    ("transformer.embeddings.patch_embedding.", "backbone.preprocessor.patchifier.proj."),
    ("transformer.embeddings.rms_norm.", "backbone.preprocessor.patchifier.norm."),
    ("transformer.embeddings.position_embedding.weight", "backbone.preprocessor.pos_embed"),
    ("transformer.encoder.layers.", "backbone.trunk.blocks."), (".rms_norm1.", ".norm_1."),
    (".rms_norm2.", ".norm_2."), (".attention.qkv.", ".attn.qkv."),
    (".attention.out_proj.", ".attn.proj."), (".ffn.gate_proj.", ".mlp.fc1."),
    (".ffn.up_proj.", ".mlp.fc3."), (".ffn.down_proj.", ".mlp.fc2."),
    ("head_linear.", "head.0."), ("head_norm.", "head.1."),
)  # fmt: skip


def bagel(folder):
    """BAGEL: normed queries and keys with biases; sines of columns and rows."""
    table = driver("BagelForConditionalGeneration").tiny()
    write_tokenizer(folder, table, ["<|image_pad|>"])
    (folder / "preprocessor_config.json").write_text("{}")
    text = {**table["llm_config"], "head_dim": 16, "attention_bias": True, "model_type": "qwen3"}
    model = text_model("Qwen3", text)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.bias)
    torch.manual_seed(2)
    vision = hf.SiglipVisionConfig(**table["vit_config"], vision_use_head=False)
    vision._attn_implementation = "eager"
    tower = hf.SiglipVisionModel(vision).float().eval()
    connector = nn.ModuleDict({"fc1": nn.Linear(32, 64), "fc2": nn.Linear(64, 64)})
    weights = {f"connector.{name}": t for name, t in connector.state_dict().items()}
    for name, tensor in tower.state_dict().items():
        name = name if name.startswith("vision_model.") else f"vision_model.{name}"
        if name.endswith("patch_embedding.weight"):
            tensor = tensor.permute(0, 2, 3, 1).flatten(1)
        weights[f"vit_model.{name}"] = tensor.clone()
    for name, tensor in model.state_dict().items():
        if not name.endswith("o_proj.bias"):
            weights[f"language_model.{name}"] = tensor.clone()
    weights["language_model.model.layers.0.mlp_moe_gen.up_proj.weight"] = torch.zeros(2, 2)
    weights["vit_pos_embed.pos_embed"] = torch.zeros(16, 64)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    pictures = images(((28, 28), (28, 28)))
    waves = 1 / 10000 ** (torch.arange(16).double() / 16)
    embeddings = []
    for picture in pictures:
        pixels = normal(picture, ((0.5,) * 3, (0.5,) * 3))[None]
        with torch.inference_mode():
            states = tower(pixels).last_hidden_state[0]
            hidden = F.gelu(connector["fc1"](states), approximate="tanh")
            tokens = connector["fc2"](hidden)
        cells = torch.arange(16)
        angles = [axis[:, None] * waves for axis in (cells % 4, cells // 4)]
        parts = [part for each in angles for part in (each.sin(), each.cos())]
        embeddings.append(tokens + torch.cat(parts, dim=1).float())
    return "The <|image_pad|> of <|image_pad|> is", pictures, model, embeddings, 480


def kanana(folder):
    """Kanana V: line feeds before rows; an abstractor on patches in the order of their squares."""
    table = driver("KananaVForConditionalGeneration").tiny()
    write_tokenizer(folder, table, ["<image>"])
    limits = {"patch_size": 4, "merge_size": 2, "min_pixels": 256, "max_pixels": 1024}
    (folder / "preprocessor_config.json").write_text(json.dumps(limits))
    model = text_model("Llama", table["text_config"])
    torch.manual_seed(2)
    config = qwen2_vl.Qwen2VLVisionConfig(**table["vision_config"], attn_implementation="eager")
    tower = qwen2_vl.Qwen2VisionTransformerPretrainedModel(config).float().eval()
    shapes = {
        "pos_emb": (1, 16, 32), "readout.0.weight": (64, 16), "readout.0.bias": (64,),
        "readout.2.weight": (64, 64), "readout.2.bias": (64,),
    }  # fmt: skip
    for at, inputs, inner in (("net.0.b1.", 32, 8), ("net.2.b1.", 64, 16)):
        parts = {
            "conv1": (16, inputs, 1, 1), "conv2": (16, 1, 3, 3), "conv3": (16, 16, 1, 1),
            "downsample": (16, inputs, 1, 1),
        }  # fmt: skip
        for name, shape in parts.items():
            shapes[f"{at}{name}.conv.weight"] = shape
            shapes |= {f"{at}{name}.bn.{kind}": (16,) for kind in ("weight", "bias")}
        shapes |= {f"{at}se.fc1.weight": (inner, 16, 1, 1), f"{at}se.fc1.bias": (inner,)}
        shapes |= {f"{at}se.fc2.weight": (16, inner, 1, 1), f"{at}se.fc2.bias": (16,)}
    w = random_weights(shapes)
    weights = {f"abstractor.{name}": tensor for name, tensor in w.items()}
    for name, tensor in tower.state_dict().items():
        if not name.startswith("merger."):
            weights[f"vision_model.{name}"] = tensor.clone()
    weights |= {f"language_model.{n}": t.clone() for n, t in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})

    def normed(x, name, **options):
        x = F.conv2d(x, w[f"{name}.conv.weight"], **options)
        return layer_norm(w, f"{name}.bn", x.permute(0, 2, 3, 1), 1e-5).permute(0, 3, 1, 2)

    def block(x, at):
        past = normed(x, f"{at}downsample")
        x = F.silu(normed(F.silu(normed(x, f"{at}conv1")), f"{at}conv2", padding=1, groups=16))
        gates = x.mean((2, 3), keepdim=True)
        gates = F.silu(F.conv2d(gates, w[f"{at}se.fc1.weight"], w[f"{at}se.fc1.bias"]))
        gates = F.conv2d(gates, w[f"{at}se.fc2.weight"], w[f"{at}se.fc2.bias"]).sigmoid()
        return F.silu(normed(x * gates, f"{at}conv3") + past)

    pictures, embeddings = images(((40, 24), (5, 30))), []
    reader = image_processor_class("Qwen2VLImageProcessor")(**limits, temporal_patch_size=2)
    # The second is enlarged before: its shorter side is less than a token's.
    for picture in (pictures[0], pictures[1].resize((8, 48), Image.Resampling.BICUBIC)):
        seen = reader(images=[picture], return_tensors="pt")
        _, rows, columns = seen["image_grid_thw"][0].tolist()
        with torch.inference_mode():
            states = tower(seen["pixel_values"], seen["image_grid_thw"]).last_hidden_state
        x = states.T.reshape(1, 32, rows, columns)
        square = w["pos_emb"].view(1, 4, 4, 32).permute(0, 3, 1, 2)
        x = x + F.interpolate(square, (rows, columns), mode="bicubic", antialias=True)
        x = block(x, "net.0.b1.")
        x = x.view(1, 16, rows // 2, 2, columns // 2, 2).permute(0, 1, 3, 5, 2, 4)
        x = block(x.reshape(1, 64, rows // 2, columns // 2), "net.2.b1.")
        x = linear(w, "readout.2", F.silu(linear(w, "readout.0", x[0].flatten(1).T)))
        embeddings.append(x)
    return "The <image> of <image> is", pictures, model, embeddings, 480


def onevision2(folder):
    """LLaVA-OneVision 2: each dimension of a head turns by an angle of its own."""
    table = driver("LlavaOnevision2ForConditionalGeneration").tiny()
    write_tokenizer(folder, table, ["<|image_pad|>"])
    limits = {"min_pixels": 256, "max_pixels": 1024}
    (folder / "preprocessor_config.json").write_text(json.dumps(limits))
    model, at = text_model("Qwen3", table["text_config"]), "model.visual."
    shapes = {
        f"{at}embeddings.patch_embedding.weight": (64, 3, 4, 4),
        f"{at}layernorm_pre.weight": (64,), f"{at}layernorm_pre.bias": (64,),
        f"{at}merger.ln_q.weight": (64,), f"{at}merger.ln_q.bias": (64,),
        f"{at}merger.mlp.0.weight": (256, 256), f"{at}merger.mlp.0.bias": (256,),
        f"{at}merger.mlp.2.weight": (64, 256), f"{at}merger.mlp.2.bias": (64,),
    }  # fmt: skip
    for i in (0, 1):
        p = f"{at}encoder.layers.{i}."
        shapes |= {f"{p}self_attn.qkv.weight": (192, 64), f"{p}self_attn.qkv.bias": (192,)}
        shapes |= {f"{p}self_attn.proj.weight": (64, 64), f"{p}self_attn.proj.bias": (64,)}
        shapes |= {f"{p}mlp.fc1.weight": (48, 64), f"{p}mlp.fc1.bias": (48,)}
        shapes |= {f"{p}mlp.fc2.weight": (64, 48), f"{p}mlp.fc2.bias": (64,)}
        for n in (1, 2):
            shapes |= {f"{p}layer_norm{n}.{kind}": (64,) for kind in ("weight", "bias")}
    w = random_weights(shapes)
    stored = {
        name.replace("model.", "model.language_model.", 1): tensor.clone()
        for name, tensor in model.state_dict().items()
    }
    save_file({**w, **stored}, folder / "model.safetensors", {"format": "pt"})
    pictures, embeddings = images(((40, 24), (20, 30))), []
    reader = image_processor_class("Qwen2VLImageProcessor")(
        **limits, patch_size=4, temporal_patch_size=1
    )
    for picture in pictures:
        seen = reader(images=[picture], return_tensors="pt")
        _, rows, columns = seen["image_grid_thw"][0].tolist()
        order = torch.arange(rows * columns).view(rows // 2, 2, columns // 2, 2)
        order = order.transpose(1, 2).flatten()
        waves = 1 / 10000 ** (torch.arange(6) / 6)
        # 16 angles: 4 of time, 6 of rows, 6 of columns, and the same again.
        sides = [(order // columns)[:, None] * waves, (order % columns)[:, None] * waves]
        angles = torch.cat([torch.zeros(len(order), 4), *sides] * 2, dim=1)[:, None]

        def turned(x, angles=angles):
            across = torch.empty_like(x)
            across[..., 0::2], across[..., 1::2] = -x[..., 1::2], x[..., 0::2]
            return x * angles.cos() + across * angles.sin()

        patch = w[f"{at}embeddings.patch_embedding.weight"].flatten(1)
        x = layer_norm(w, f"{at}layernorm_pre", F.linear(seen["pixel_values"], patch), 1e-6)
        for i in (0, 1):
            p = f"{at}encoder.layers.{i}."
            normed = layer_norm(w, f"{p}layer_norm1", x, 1e-6)
            qkv = linear(w, f"{p}self_attn.qkv", normed).chunk(3, dim=-1)
            q, k, v = (part.unflatten(-1, (2, 32)) for part in qkv)
            x = x + linear(w, f"{p}self_attn.proj", attention(turned(q), turned(k), v))
            inner = F.gelu(linear(w, f"{p}mlp.fc1", layer_norm(w, f"{p}layer_norm2", x, 1e-6)))
            x = x + linear(w, f"{p}mlp.fc2", inner)
        joined = layer_norm(w, f"{at}merger.ln_q", x, 1e-6).reshape(-1, 256)
        inner = F.gelu(linear(w, f"{at}merger.mlp.0", joined))
        embeddings.append(linear(w, f"{at}merger.mlp.2", inner))
    return "The <|image_pad|> of <|image_pad|> is", pictures, model, embeddings, 480


CASES = {
    "LlavaOnevision2ForConditionalGeneration": onevision2,
    "KananaVForConditionalGeneration": kanana,
    "Ovis": ovis,
    "BagelForConditionalGeneration": bagel,
}


@parametrize_sample("name", CASES, every=12)
def test_assembled_families_compute_what_their_parts_do(name, tmp_path):
    case = CASES[name](tmp_path)
    with torch.no_grad():
        check(tmp_path, *case)


@parametrize_sample("classes", (False, True), every=2)
def test_llama_nemotron_sees_pages_and_questions_whole(classes, tmp_path):
    """Its vectors, or scores, of a page of two tiles beside text."""
    name = "LlamaNemotronVLForSequenceClassification" if classes else "LlamaNemotronVLModel"
    table = driver(name).tiny()
    write_tokenizer(tmp_path, table, ["<IMG_CONTEXT>", "<img>", "</img>"])
    torch.manual_seed(1)
    config = hf.LlamaConfig(**{**table["llm_config"], "model_type": "llama"})
    config._attn_implementation = "eager"
    model = hf.LlamaModel(config).float().eval()
    vision = hf.SiglipVisionConfig(**table["vision_config"], vision_use_head=False)
    vision._attn_implementation = "eager"
    tower = hf.SiglipVisionModel(vision).float().eval()
    projector = nn.Sequential(nn.LayerNorm(128), nn.Linear(128, 64), nn.GELU(), nn.Linear(64, 64))
    score = torch.randn(3, 64) / 8
    weights = {f"mlp1.{name_}": t.clone() for name_, t in projector.state_dict().items()}
    for name_, tensor in tower.state_dict().items():
        weights["vision_model." + name_.removeprefix("vision_model.")] = tensor.clone()
    weights |= {f"language_model.{n}": t.clone() for n, t in model.state_dict().items()}
    if classes:
        weights = {f"model.{name_}": tensor for name_, tensor in weights.items()}
        weights["score.weight"] = score
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (page,), tokens = images(((70, 35),)), []
    whole = page.resize((56, 28))
    for view in (whole.crop((0, 0, 28, 28)), whole.crop((28, 0, 56, 28)), page.resize((28, 28))):
        with torch.inference_mode():
            seen = tower(normal(view, ((0.5,) * 3, (0.5,) * 3))[None]).last_hidden_state[0]
            tokens.append(projector(squares(seen.view(4, 4, 32)).flatten(0, 1)))
    request = {"prompt": "The page <image> shows", "multi_modal_data": {"image": page}}
    with modulm.LLM(str(tmp_path), **CPU) as llm:
        task = llm.classify if classes else llm.embed
        (output,) = task(request, use_tqdm=False)
    ids = torch.tensor(output.prompt_token_ids)
    assert int((ids == 480).sum()) == 12
    with torch.inference_mode():
        inputs = model.embed_tokens(ids[None]).clone()
        inputs[0, ids == 480] = torch.cat(tokens)
        mask = torch.zeros(1, 1, len(ids), len(ids))
        states = model(inputs_embeds=inputs, attention_mask=mask).last_hidden_state[0]
    pooled = states.mean(0)
    if classes:
        expected, ours = (score @ pooled).softmax(-1), output.outputs.probs
    else:
        expected, ours = F.normalize(pooled, dim=-1), output.outputs.embedding
    assert (torch.tensor(ours) - expected).abs().max() < 1e-4


def moondream_layer(x, w, prefix, mask, experts):
    """A layer of Moondream 3 for one prompt, x: [tokens, 64], with four heads."""
    normed = layer_norm(w, f"{prefix}ln", x, 1e-5)
    qkv = linear(w, f"{prefix}attn.qkv", normed)
    q, k, v = (part.unflatten(-1, (4, 16)) for part in qkv.chunk(3, dim=-1))
    positions = torch.arange(len(x))
    place = 0.5 + torch.sigmoid(w[f"{prefix}attn.tau.alpha"] * (positions + 1.0).log()[:, None])
    scales = [
        torch.tanh(F.gelu(qkv) @ w[f"{prefix}attn.tau.{part}"].T) + place for part in ("wq", "wv")
    ]
    angles = positions[:, None] / 1.5e6 ** (torch.arange(0, 16, 2) / 16)
    cosines, sines = angles.cos()[:, None], angles.sin()[:, None]

    def rotate(value):
        one, two = value.chunk(2, dim=-1)
        return torch.cat([one * cosines - two * sines, two * cosines + one * sines], dim=-1)

    seen = attention(rotate(q * scales[0][..., None]), rotate(k), v * scales[1][..., None], mask)
    attended = linear(w, f"{prefix}attn.proj", seen)
    if not experts:
        inner = F.gelu(linear(w, f"{prefix}mlp.fc1", normed), approximate="tanh")
        return x + attended + linear(w, f"{prefix}mlp.fc2", inner)
    best, chosen = linear(w, f"{prefix}mlp.router", normed).topk(2, dim=-1)
    mixed = torch.zeros_like(x)
    for token, (weights, indices) in enumerate(zip(best.softmax(-1), chosen, strict=True)):
        for weight, index in zip(weights, indices.tolist(), strict=True):
            gate, up = (w[f"{prefix}mlp.fc1.weight"][index] @ normed[token]).chunk(2)
            out = w[f"{prefix}mlp.fc2.weight"][index] @ (F.gelu(gate) * (up + 1))
            mixed[token] += weight * out
    return x + attended + mixed


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["Moondream3ForCausalLM", "HfMoondream"])
def test_moondream_scales_attention_by_token_and_position(name, tmp_path):
    """The first token and the image's see each other; a 2 by 2 grid of crops shares patches."""
    table = {**driver(name).tiny(), "architectures": [name]}
    write_tokenizer(tmp_path, table, ["<image>"])
    shapes = {
        "vision.patch_emb.weight": (32, 48), "vision.patch_emb.bias": (32,),
        "vision.pos_emb": (1, 16, 32), "vision.post_ln.weight": (32,), "vision.post_ln.bias": (32,),
        "vision.proj_mlp.fc1.weight": (48, 64), "vision.proj_mlp.fc1.bias": (48,),
        "vision.proj_mlp.fc2.weight": (64, 48), "vision.proj_mlp.fc2.bias": (64,),
        "text.post_ln.weight": (64,), "text.post_ln.bias": (64,), "text.wte": (512, 64),
        "text.lm_head.weight": (512, 64), "text.lm_head.bias": (512,),
        **block_shapes("blocks.0.", 32, 48), **block_shapes("blocks.1.", 32, 48),
    }  # fmt: skip
    for layer in range(3):
        p = f"text.blocks.{layer}."
        shapes |= {
            f"{p}ln.weight": (64,), f"{p}ln.bias": (64,),
            f"{p}attn.qkv.weight": (192, 64), f"{p}attn.qkv.bias": (192,),
            f"{p}attn.proj.weight": (64, 64), f"{p}attn.proj.bias": (64,),
            f"{p}attn.tau.alpha": (4,), f"{p}attn.tau.wq": (4, 192), f"{p}attn.tau.wv": (4, 192),
        }  # fmt: skip
        if layer:
            shapes |= {
                f"{p}mlp.router.weight": (4, 64), f"{p}mlp.router.bias": (4,),
                f"{p}mlp.fc1.weight": (4, 64, 64), f"{p}mlp.fc2.weight": (4, 64, 32),
            }  # fmt: skip
        else:
            shapes |= {f"{p}mlp.fc1.weight": (96, 64), f"{p}mlp.fc1.bias": (96,)}
            shapes |= {f"{p}mlp.fc2.weight": (64, 96), f"{p}mlp.fc2.bias": (64,)}
    w, stored = random_weights(shapes), {}
    names = {"layer_norm": "ln", "self_attn.out_proj": "attn.proj"}
    for part, tensor in w.items():
        if not part.startswith("blocks."):
            stored[f"model.{part}"] = tensor
        elif ".q_proj." in part:
            three = [w[part.replace(".q_proj.", f".{letter}_proj.")] for letter in "qkv"]
            part = part.replace("self_attn.q_proj", "attn.qkv")
            stored[f"model.vision.{part}"] = torch.cat(three)
        elif "k_proj" not in part and "v_proj" not in part:
            for old, new in names.items():
                part = part.replace(old, new)
            stored[f"model.vision.{part}"] = tensor
    stored["model.region.coord_encoder.weight"] = torch.zeros(2, 2)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    (picture,) = images(((24, 24),))
    half = ((0.5,) * 3, (0.5,) * 3)
    whole = picture.resize((24, 24), Image.Resampling.LANCZOS)
    views = [picture.resize((16, 16), Image.Resampling.LANCZOS)]
    views += [whole.crop((x, y, x + 16, y + 16)) for y in (0, 8) for x in (0, 8)]
    seen = []
    for view in views:
        cut = normal(view, half).view(3, 4, 4, 4, 4).permute(1, 3, 0, 2, 4).reshape(16, 48)
        x = linear(w, "vision.patch_emb", cut) + w["vision.pos_emb"][0]
        for layer in (0, 1):
            x = siglip_layer(x, w, f"blocks.{layer}.", 2, torch.zeros(1, 8), eps=1e-5)
        seen.append(layer_norm(w, "vision.post_ln", x, 1e-5).view(4, 4, 32))
    joined = torch.zeros(6, 6, 32)
    joined[:3, :3], joined[:3, 3:] = seen[1][:3, :3], seen[2][:3, 1:]
    joined[3:, :3], joined[3:, 3:] = seen[3][1:, :3], seen[4][1:, 1:]
    pooled = F.adaptive_avg_pool2d(joined.permute(2, 0, 1), (4, 4)).permute(1, 2, 0)
    both = torch.cat([seen[0], pooled], dim=-1).flatten(0, 1)
    hidden = F.gelu(linear(w, "vision.proj_mlp.fc1", both), approximate="tanh")
    image = linear(w, "vision.proj_mlp.fc2", hidden)
    ids, ours = answered(tmp_path, "<|endoftext|><image>What is it?", [picture])
    assert ids[:17] == [0] + [480] * 16
    x = w["text.wte"][torch.tensor(ids)].clone()
    x[1:17] = image
    mask = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    mask[:17, :17] = True
    for layer in range(3):
        x = moondream_layer(x, w, f"text.blocks.{layer}.", mask, layer > 0)
    logits = linear(w, "text.lm_head", layer_norm(w, "text.post_ln", x, 1e-5))
    logits[:, 3] = torch.finfo(torch.float32).min
    expected = logits.log_softmax(-1)
    kept = [i for i in range(512) if i != 3]
    assert (ours[:, kept] - expected[:-1, kept]).abs().max() < 1e-3
    with modulm.LLM(str(tmp_path), **CPU) as llm:
        two = {"prompt": "<|endoftext|><image>", "multi_modal_data": {"image": [picture] * 2}}
        with pytest.raises(RequestError, match="one in a prompt"):
            llm.generate([two], use_tqdm=False)
    prompt = "<|endoftext|><image>What is it?"
    execute(tmp_path, prompt, [picture], chunk=40, ranks=False)


@pytest.mark.exhaustive
def test_isaac_counts_rows_and_columns_of_each_image_from_zero(tmp_path):
    table = driver("IsaacForConditionalGeneration").tiny()
    write_tokenizer(tmp_path, table, ["<image>", "<|image_pad|>"])
    (tmp_path / "preprocessor_config.json").write_text("{}")
    torch.manual_seed(1)
    text = {key: value for key, value in table.items()
            if key not in ("architectures", "vision_config", "model_type")}  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    config = hf.Qwen3VLTextConfig(**{**text, "rope_parameters": rope})
    config._attn_implementation = "eager"
    model = hf.Qwen3VLTextModel(config).float().eval()
    model.rotary_emb.recomposition_frequencies = lambda waves: torch.cat(
        [part[i] for i, part in enumerate(waves.split([4, 2, 2], dim=-1))] * 2, dim=-1
    )
    head = torch.randn(512, 64) / 8
    vision = {key: value for key, value in table["vision_config"].items()
              if key not in ("model_type", "pixel_shuffle_scale_factor")}  # fmt: skip
    tower = hf.Siglip2VisionModel(hf.Siglip2VisionConfig(**vision, vision_use_head=False))
    tower.float().eval()
    maps = nn.ModuleDict(
        {"1": nn.Linear(128, 512, bias=False), "3": nn.Linear(512, 64, bias=False)}
    )
    weights = {f"model.vision_embedding.{n}": t for n, t in maps.state_dict().items()}
    for name, tensor in tower.state_dict().items():
        if ".head." not in name and not name.startswith("head."):
            name = name.removeprefix("vision_model.")
            weights[f"model.vision_embedding.0.{name}"] = tensor.clone()
    weights |= {f"model.text_model.{n}": t.clone() for n, t in model.state_dict().items()}
    weights["lm_head.weight"] = head
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    pictures = images(((12, 20), (60, 40)))
    ids, ours = answered(tmp_path, "The <image> of <image> is", pictures)
    tokens = torch.tensor(ids)
    inputs = model.embed_tokens(tokens[None]).detach().clone()
    places = (tokens == 481).nonzero().flatten().tolist()
    positions, at, place, seen = torch.zeros(3, len(ids), dtype=torch.long), 0, 0, []
    # At least 16 patches, at most 60, even numbers along the sides.
    for picture, (rows, columns) in zip(pictures, ((6, 4), (6, 10)), strict=True):
        bytes_ = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]
        resized = F.interpolate(bytes_, (4 * rows, 4 * columns), mode="bilinear")[0]
        pixels = (resized.permute(1, 2, 0) / 255 - 0.5) / 0.5
        cut = pixels.reshape(rows, 4, columns, 4, 3).transpose(1, 2).reshape(1, -1, 48)
        with torch.inference_mode():
            states = tower(
                pixel_values=cut, spatial_shapes=torch.tensor([[rows, columns]]),
                pixel_attention_mask=torch.ones(1, rows * columns, dtype=torch.long),
            ).last_hidden_state[0]  # fmt: skip
            grid = squares(states.view(rows, columns, 32)).flatten(0, 1)
            seen.append(maps["3"](F.silu(maps["1"](grid))))
        first, count = places[len(torch.cat(seen)) - len(seen[-1])], len(seen[-1])
        positions[:, at:first] = place + torch.arange(first - at)
        place += first - at
        cells = torch.arange(count)
        positions[:, first : first + count] = torch.stack(
            [torch.full_like(cells, place), cells // (columns // 2), cells % (columns // 2)]
        )
        place, at = place + 1, first + count
    positions[:, at:] = place + torch.arange(len(ids) - at)
    inputs[0, tokens == 481] = torch.cat(seen)
    with torch.inference_mode():
        states = model(inputs_embeds=inputs, position_ids=positions[:, None]).last_hidden_state
        expected = (states[0] @ head.T).log_softmax(-1)
    assert (ours - expected[:-1]).abs().max() < 1e-3
    execute(tmp_path, "The <image> of <image> is", pictures)


@pytest.mark.exhaustive
def test_openpangu_adds_states_of_two_layers(tmp_path):
    """Windows of 16 pixels but in one layer; axes of positions take turns in their own order."""
    table = driver("OpenPanguVLForConditionalGeneration").tiny()
    write_tokenizer(tmp_path, table, ["[unused19]"])
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"min_pixels": 256, "max_pixels": 1024, "patch_size": 4})
    )
    dropped = ("vision_config", "rope_scaling", "bias", "image_token_id", "model_type")
    keys = {key: value for key, value in table.items() if key not in dropped}
    model = text_model("Llama", {**keys, "attention_bias": True})
    shapes = {
        "patch_embed.proj.weight": (32, 3, 2, 4, 4), "final_layernorm.weight": (32,),
        "vision_projection.fc1.weight": (64, 48), "vision_projection.fc1.bias": (64,),
    }  # fmt: skip
    for i in range(3):
        at = f"blocks.{i}."
        shapes |= {f"{at}norm{n}.weight": (32,) for n in (1, 2)}
        shapes |= {f"{at}attn.qkv.weight": (96, 32), f"{at}attn.qkv.bias": (96,)}
        shapes |= {f"{at}attn.proj.weight": (32, 32), f"{at}attn.proj.bias": (32,)}
        shapes |= {f"{at}mlp.up_proj.weight": (48, 32), f"{at}mlp.up_proj.bias": (48,)}
        shapes |= {f"{at}mlp.down_proj.weight": (32, 48), f"{at}mlp.down_proj.bias": (32,)}
    for i in (0, 1):
        at = f"merger.{i}."
        shapes |= {f"{at}ln_q.weight": (32,), f"{at}mlp.0.weight": (128, 128)}
        shapes |= {f"{at}mlp.0.bias": (128,), f"{at}mlp.2.weight": (48, 128)}
        shapes |= {f"{at}mlp.2.bias": (48,)}
    w = random_weights(shapes)
    weights = {f"visual.{name}": tensor for name, tensor in w.items()}
    weights |= {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})

    def normed(name, x):
        return F.rms_norm(x, (32,), w[f"{name}.weight"], 1e-6)

    pictures, embeddings, grids = images(((40, 24), (20, 30))), [], []
    reader = image_processor_class("Qwen2VLImageProcessor")(
        min_pixels=256, max_pixels=1024, patch_size=4
    )
    # The sides of the second are enlarged to 56 pixels at least.
    for picture in (pictures[0].resize((93, 56), 3), pictures[1].resize((56, 84), 3)):
        seen = reader(images=[picture], return_tensors="pt")
        _, rows, columns = seen["image_grid_thw"][0].tolist()
        order = torch.arange(rows * columns).view(rows // 2, 2, columns // 2, 2)
        order = order.transpose(1, 2).flatten()
        row, column = order // columns, order % columns
        waves = 1 / 10000 ** (torch.arange(0, 8, 2) / 8)
        angles = torch.cat([row[:, None] * waves, column[:, None] * waves], dim=1)[:, None]
        window = row // 4 * columns + column // 4
        near = window[:, None] == window
        x = F.linear(seen["pixel_values"], w["patch_embed.proj.weight"].flatten(1))
        states = []
        for i in range(3):
            at = f"blocks.{i}."
            qkv = linear(w, f"{at}attn.qkv", normed(f"{at}norm1", x)).chunk(3, dim=-1)
            q, k, v = (part.unflatten(-1, (2, 16)) for part in qkv)
            q, k = (
                torch.cat(
                    [a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1
                )
                for a, b in (part.chunk(2, dim=-1) for part in (q, k))
            )
            x = x + linear(w, f"{at}attn.proj", attention(q, k, v, None if i == 1 else near))
            inner = F.gelu(linear(w, f"{at}mlp.up_proj", normed(f"{at}norm2", x)))
            x = x + linear(w, f"{at}mlp.down_proj", inner)
            states.append(normed("final_layernorm", x))
        tokens = 0
        for i, layer in ((0, 2), (1, 0)):
            at = f"merger.{i}."
            joined = normed(f"{at}ln_q", states[layer]).reshape(-1, 128)
            tokens = tokens + linear(w, f"{at}mlp.2", F.gelu(linear(w, f"{at}mlp.0", joined)))
        embeddings.append(linear(w, "vision_projection.fc1", F.silu(tokens)))
        grids.append((rows // 2, columns // 2))
    ids, ours = answered(tmp_path, "The [unused19] of [unused19] is", pictures)
    tokens = torch.tensor(ids)
    positions, at, place = torch.zeros(3, len(ids), dtype=torch.long), 0, 0
    starts = [i for i in range(1, len(ids)) if ids[i] == 480 != ids[i - 1]]
    for first, (rows, columns) in zip(starts, grids, strict=True):
        positions[:, at:first] = place + torch.arange(first - at)
        place, at = place + first - at, first + rows * columns
        cells = torch.arange(rows * columns)
        grid = torch.stack([torch.zeros_like(cells), cells // columns, cells % columns])
        positions[:, first:at] = place + grid
        place += max(rows, columns)
    positions[:, at:] = place + torch.arange(len(ids) - at)
    # 3 angles of time, 3 of rows and 2 of columns; the last is of time.
    axes = torch.tensor([0, 1, 2, 1, 0, 2, 1, 0])
    angles = positions[axes].T / 10000 ** (torch.arange(0, 16, 2) / 16)
    turns = torch.cat([angles, angles], dim=1)[None]
    model.model.rotary_emb.forward = lambda x, position_ids: (turns.cos(), turns.sin())
    with torch.inference_mode():
        inputs = model.get_input_embeddings()(tokens[None]).clone()
        inputs[0, tokens == 480] = torch.cat(embeddings)
        expected = model(inputs_embeds=inputs).logits[0].log_softmax(-1)
    assert (ours - expected[:-1]).abs().max() < 1e-3
    execute(tmp_path, "The [unused19] of [unused19] is", pictures)


@pytest.mark.exhaustive
def test_nemotron_parse_writes_what_a_page_says(tmp_path):
    """A page wider than its place is shrunk and centered on white; a summary is the last token."""
    name = "NemotronParseForConditionalGeneration"
    table = driver(name).tiny()
    write_tokenizer(tmp_path, table, ["<page>"])
    tower, weights = radio({"vision_config": table["encoder"]})
    weights = {n.replace("vision_model.", "encoder.model_encoder."): t for n, t in weights.items()}
    tower.make_preprocessor_external()
    torch.manual_seed(1)
    keys = {**table["decoder"], "is_encoder_decoder": False, "is_decoder": True}
    config = hf.MBartConfig(**{**keys, "add_cross_attention": True, "max_position_embeddings": 200})
    config._attn_implementation = "eager"
    decoder = hf.models.mbart.modeling_mbart.MBartDecoder(config).float().eval()
    nn.init.zeros_(decoder.embed_positions.weight)
    shapes = {
        "conv1.weight": (64, 32, 1), "conv1.bias": (64,), "conv2.weight": (64, 64, 1, 4),
        "sum_proj.weight": (64, 64), "sum_proj.bias": (64,),
        **{f"layer_norm{i}.{part}": (64,) for i in (1, 2, 3) for part in ("weight", "bias")},
    }  # fmt: skip
    w, head = random_weights(shapes), torch.randn(512, 64) / 8
    weights |= {f"encoder.{part}": tensor for part, tensor in w.items()}
    weights |= {f"decoder.{part}": t.clone() for part, t in decoder.state_dict().items()}
    weights["lm_head.weight"] = head
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (page,) = images(((64, 20),))
    whole = torch.from_numpy(np.array(page)).permute(2, 0, 1)[None].float()
    shrunk = F.interpolate(whole, (10, 32), mode="bilinear", align_corners=False)[0].round()
    place = torch.full((3, 16, 32), 255.0)
    place[:, 3:13] = shrunk
    mean, std = (torch.tensor(part)[:, None, None] for part in CLIP)
    with torch.inference_mode():
        seen = tower(((place / 255 - mean) / std)[None])
        x = F.conv1d(seen.features.transpose(1, 2), w["conv1.weight"], w["conv1.bias"])
        x = layer_norm(w, "layer_norm1", x.transpose(1, 2), 1e-6)
        x = x.transpose(1, 2).unflatten(2, (4, 8))
        x = F.conv2d(x, w["conv2.weight"], stride=(1, 4)).flatten(2).transpose(1, 2)
        end = layer_norm(w, "layer_norm3", linear(w, "sum_proj", seen.summary), 1e-6)
        encoded = torch.cat([layer_norm(w, "layer_norm2", x, 1e-6), end[:, None]], dim=1)
    request = {"prompt": "<page>Once upon", "multi_modal_data": {"image": page}}
    with modulm.LLM(str(tmp_path), max_logprobs=-1, **CPU) as llm:
        params = modulm.SamplingParams(max_tokens=4, temperature=0, logprobs=-1, ignore_eos=True)
        (answer,) = llm.generate([request], params, use_tqdm=False)
        many = {"prompt": "<page>", "multi_modal_data": {"image": [page, page]}}
        with pytest.raises(RequestError, match="2 items"):
            llm.generate([many], use_tqdm=False)
    (choice,) = answer.outputs
    ids = torch.tensor([[*answer.prompt_token_ids, *choice.token_ids[:-1]]])
    with torch.inference_mode():
        states = decoder(input_ids=ids, encoder_hidden_states=encoded).last_hidden_state[0]
        expected = (states @ head.T).log_softmax(-1)[-4:]
    rows = [[entry[i].logprob for i in range(512)] for entry in choice.logprobs]
    assert (torch.tensor(rows) - expected).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("name", "wrong", "field"),
    [
        ("LlamaNemotronVLModel", {"llm_config": None}, "llm_config"),
        ("Ovis", {"visual_tokenizer_config": {"backbone_config": None}}, "backbone_config"),
        ("BagelForConditionalGeneration", {"vit_config": None}, "vit_config"),
        ("IsaacForConditionalGeneration", {"head_dim": 12}, "head_dim"),
        ("Moondream3ForCausalLM", {"model_type": "moondream1"}, "model_type"),
        ("NemotronParseForConditionalGeneration", {"image_size": [16, 20]}, "image_size"),
        ("Moondream3ForCausalLM", {"config": {"text": {"n_heads": 5}}}, "n_heads"),
    ],
)
def test_what_these_families_cannot_be_is_refused(name, wrong, field):
    table, config = driver(name).tiny(), driver(name).config_type
    with pytest.raises((CheckpointError, UnsupportedError), match=field):
        read_config({**table, **wrong}, config, "config.json")
