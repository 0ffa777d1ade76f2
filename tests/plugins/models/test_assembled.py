"""Families that transformers has no class for, against its parts and the published equations."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from PIL import ImageOps
from safetensors.torch import load_file, save_file
from samples import parametrize_sample
from tests.plugins.models.test_published import driver
from tests.plugins.models.test_relatives import answered
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen25

from modulm.errors import CheckpointError
from modulm.nn import read_config
from modulm.testing.checkpoints import make_tokenizer
from modulm_media.reader import load_processor
from modulm_towers.testing import images, processor_of

#: One set of sizes for a prompt with two images.
SIZES = ((56, 42), (30, 60))


def write_tokenizer(folder, table, tokens):
    """Write config.json, and a tokenizer whose added tokens have ids from 480."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(table))
    make_tokenizer(folder, vocab=480)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.save_pretrained(folder)
    load_processor.cache_clear()
    return tokenizer


def random_weights(shapes):
    """Weights of the given shapes; norms are near one."""
    torch.manual_seed(0)
    weights = {}
    for name, shape in shapes.items():
        scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
        is_norm = len(shape) == 1 and name.endswith("weight")
        weights[name] = torch.randn(shape) * scale * 0.5 + float(is_norm)
    return weights


def block_shapes(prefix, hidden, inner):
    """Names and shapes of a layer of SigLIP."""
    shapes = {}
    for name in ("q", "k", "v", "out"):
        shapes[f"{prefix}self_attn.{name}_proj.weight"] = (hidden, hidden)
        shapes[f"{prefix}self_attn.{name}_proj.bias"] = (hidden,)
    for name in ("layer_norm1", "layer_norm2"):
        shapes |= {f"{prefix}{name}.weight": (hidden,), f"{prefix}{name}.bias": (hidden,)}
    shapes |= {f"{prefix}mlp.fc1.weight": (inner, hidden), f"{prefix}mlp.fc1.bias": (inner,)}
    return shapes | {f"{prefix}mlp.fc2.weight": (hidden, inner), f"{prefix}mlp.fc2.bias": (hidden,)}


def siglip_layer(x, w, prefix, heads, angles, tanh=True):
    """A layer of SigLIP for one image, x: [patches, hidden], with rotated queries and keys.

    tanh: whether GELU is approximated.
    """

    def linear(name, value):
        return F.linear(value, w[f"{prefix}{name}.weight"], w[f"{prefix}{name}.bias"])

    def norm(name, value):
        weight, bias = w[f"{prefix}{name}.weight"], w[f"{prefix}{name}.bias"]
        return F.layer_norm(value, weight.shape, weight, bias, 1e-6)

    def rotate(value):
        one, two = value.chunk(2, dim=-1)
        cosines, sines = angles.cos(), angles.sin()
        return torch.cat([one * cosines - two * sines, two * cosines + one * sines], dim=-1)

    normed = norm("layer_norm1", x)
    q, k, v = (
        linear(f"self_attn.{name}_proj", normed).unflatten(-1, (heads, -1)).transpose(0, 1)
        for name in "qkv"
    )
    scores = rotate(q) @ rotate(k).transpose(1, 2) / q.shape[-1] ** 0.5
    x = x + linear("self_attn.out_proj", (scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
    inner = F.gelu(
        linear("mlp.fc1", norm("layer_norm2", x)), approximate="tanh" if tanh else "none"
    )
    return x + linear("mlp.fc2", inner)


def text_model(kind, table):
    """A random text model of transformers."""
    torch.manual_seed(1)
    settings = {key: value for key, value in table.items() if key != "architectures"}
    settings = {"pad_token_id": None, "eos_token_id": 1, **settings}
    config = getattr(hf, f"{kind}Config")(**settings)
    config._attn_implementation = "eager"
    return getattr(hf, f"{kind}ForCausalLM")(config).float().eval()


def check(folder, text, pictures, model, embeddings, token):
    """Compare log probabilities with those of the text model, whose placeholders have the given
    embeddings. embeddings: [tokens, hidden] per image.
    """
    ids, ours = answered(folder, text, pictures)
    ids = torch.tensor(ids)
    assert int((ids == token).sum()) == sum(len(part) for part in embeddings)
    with torch.inference_mode():
        inputs = model.get_input_embeddings()(ids[None]).clone()
        inputs[0, ids == token] = torch.cat(embeddings)
        expected = model(inputs_embeds=inputs).logits[0].log_softmax(-1)
    assert (ours - expected[:-1]).abs().max() < 1e-3


def test_opencua_counts_tokens_on_one_axis(tmp_path):
    table, token = driver("OpenCUAForConditionalGeneration").tiny(), "<|media_placeholder|>"
    write_tokenizer(tmp_path, table, [token])
    settings = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2,
        "temporal_patch_size": 2, "min_pixels": 256, "max_pixels": 1024,
    }  # fmt: skip
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    model = text_model("Qwen2", table["text_config"])
    config = qwen25.Qwen2_5_VLVisionConfig(**table["vision_config"])
    config._attn_implementation = "eager"
    tower = qwen25.Qwen2_5_VisionTransformerPretrainedModel(config).float().eval()
    weights = {f"vision_tower.{name}": t.clone() for name, t in tower.state_dict().items()}
    weights |= {f"language_model.{name}": t.clone() for name, t in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    pictures = images(SIZES)
    reader = processor_of("OpenCUAForConditionalGeneration", tmp_path)
    seen = reader.image_processor(images=pictures, return_tensors="pt")
    with torch.inference_mode():
        tokens = tower(seen["pixel_values"], seen["image_grid_thw"]).pooler_output
    check(tmp_path, f"The {token} of {token} is", pictures, model, [tokens], 480)


OVIS = {"Ovis2_5": "Qwen3", "Ovis2_6ForCausalLM": "Qwen3", "Ovis2_6_MoeForCausalLM": "Qwen3Moe"}


@parametrize_sample("name", OVIS, every=3)
def test_ovis_2_5_has_probabilities_of_visual_words(name, tmp_path):
    table = {**driver(name).tiny(), "architectures": [name]}
    write_tokenizer(tmp_path, table, ["<image>", "<|image_pad|>"])
    limits = {"min_pixels": 256, "max_pixels": 1024}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(limits))
    model = text_model(OVIS[name], table["llm_config"])
    at, stem = "visual_tokenizer.vit.vision_model.", "visual_tokenizer.head."
    shapes = {
        f"{at}embeddings.patch_embedding.weight": (32, 3, 4, 4),
        f"{at}embeddings.patch_embedding.bias": (32,),
        f"{at}embeddings.position_embedding.weight": (16, 32),
        f"{at}post_layernorm.weight": (32,), f"{at}post_layernorm.bias": (32,),
        f"{stem}0.weight": (56, 128), f"{stem}1.weight": (56,), f"{stem}1.bias": (56,),
        "vte.weight": (60, 64),
        **block_shapes(f"{at}encoder.layers.0.", 32, 48),
        **block_shapes(f"{at}encoder.layers.1.", 32, 48),
    }  # fmt: skip
    w = random_weights(shapes)
    stored = {f"llm.{part}": t.clone() for part, t in model.state_dict().items()}
    save_file({**w, **stored}, tmp_path / "model.safetensors", {"format": "pt"})
    pictures = images(SIZES)
    reader = processor_of(name, tmp_path).image_processor
    embeddings = []
    for picture in pictures:
        seen = reader(images=[picture], return_tensors="pt")
        _, rows, columns = seen["image_grid_thw"][0].tolist()
        assert rows * columns > 4, "one square of patches tests no order"
        # Patches are ordered by squares of two by two.
        order = torch.arange(rows * columns).view(rows // 2, 2, columns // 2, 2)
        order = order.transpose(1, 2).flatten()
        square = w[f"{at}embeddings.position_embedding.weight"].view(1, 4, 4, 32)
        places = F.interpolate(square.permute(0, 3, 1, 2), (rows, columns), mode="bicubic")
        patch = w[f"{at}embeddings.patch_embedding.weight"].flatten(1)
        x = F.linear(seen["pixel_values"], patch, w[f"{at}embeddings.patch_embedding.bias"])
        x = x + places[0].flatten(1).T[order]
        waves = 1 / 10000 ** (torch.arange(0, 8, 2) / 8)
        row, column = order // columns, order % columns
        angles = torch.cat([row[:, None] * waves, column[:, None] * waves], dim=-1)
        for layer in (0, 1):
            x = siglip_layer(x, w, f"{at}encoder.layers.{layer}.", 2, angles)
        post = (w[f"{at}post_layernorm.weight"], w[f"{at}post_layernorm.bias"])
        x = F.layer_norm(x, (32,), *post, 1e-6).reshape(-1, 128)
        logits = F.linear(x, w[f"{stem}0.weight"])
        logits = F.layer_norm(logits, (56,), w[f"{stem}1.weight"], w[f"{stem}1.bias"])
        words = logits.softmax(-1) @ w["vte.weight"][:56]
        embeddings.append(torch.cat([w["vte.weight"][56:57], words, w["vte.weight"][57:58]]))
    check(tmp_path, "The <image> of <image> is", pictures, model, embeddings, 481)


def test_phi_4_reasoning_vision_has_a_token_for_each_patch(tmp_path):
    name, dummy = "Phi4ForCausalLMV", "<|dummy_0|>"
    table = driver(name).tiny()
    write_tokenizer(tmp_path, table, ["<image>", dummy])
    (tmp_path / "preprocessor_config.json").write_text("{}")
    keys = {key: value for key, value in table.items() if key != "vision_config"}
    model = text_model("Phi3", {**keys, "model_type": "phi3"})
    torch.manual_seed(2)
    config = hf.Siglip2VisionConfig(**table["vision_config"], attn_implementation="eager")
    tower = hf.Siglip2VisionModel(config).float().eval()
    projector = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)
    )
    stem = "model.vision_tower.vision_tower."
    weights = {
        stem + ("" if part.startswith("vision_model.") else "vision_model.") + part: t.clone()
        for part, t in tower.state_dict().items()
    }
    weights |= {f"model.mm_projector.{part}": t for part, t in projector.state_dict().items()}
    weights |= {part: t.clone() for part, t in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    pictures, embeddings = images(((20, 12), (40, 60))), []
    reader = processor_of(name, tmp_path).image_processor
    # 3 * 5 patches, between the limits, and 24 patches at most.
    for picture, most in zip(pictures, (15, 24), strict=True):
        seen = reader(images=[picture], return_tensors="pt", max_num_patches=most)
        with torch.inference_mode():
            states = tower(**seen, output_hidden_states=True).hidden_states[-2]
            embeddings.append(projector(states[0, seen["pixel_attention_mask"][0].bool()]))
    check(tmp_path, "The <image> of <image> is", pictures, model, embeddings, 481)


#: Names of a layer of SigLIP in transformers and in timm.
TIMM = {"layer_norm": "norm", "self_attn.out_proj": "attn.proj"}


@parametrize_sample("number", (2, 3), every=2)
def test_deepseek_vl2_has_lines_of_tiles(number, tmp_path):
    """Three images in a prompt have one tile each."""
    name = "DeepseekVLV2ForCausalLM"
    table = driver(name).tiny()
    write_tokenizer(tmp_path, table, ["<image>"])
    model = text_model("DeepseekV2", table["language_config"])
    model.save_pretrained(tmp_path / "text")
    shapes = {
        "vision.patch_embed.proj.weight": (32, 3, 4, 4), "vision.patch_embed.proj.bias": (32,),
        "vision.pos_embed": (1, 49, 32), "vision.norm.weight": (32,), "vision.norm.bias": (32,),
        "projector.layers.0.weight": (64, 128), "projector.layers.0.bias": (64,),
        "projector.layers.2.weight": (64, 64), "projector.layers.2.bias": (64,),
        "image_newline": (64,), "view_seperator": (64,),
        **block_shapes("blocks.0.", 32, 48), **block_shapes("blocks.1.", 32, 48),
    }  # fmt: skip
    w = random_weights(shapes)
    stored = {f"language.{n}": t for n, t in load_file(tmp_path / "text/model.safetensors").items()}
    for part, tensor in w.items():
        if not part.startswith("blocks."):
            stored[part] = tensor
        elif ".q_proj." in part:
            three = [w[part.replace(".q_proj.", f".{letter}_proj.")] for letter in "qkv"]
            stored["vision." + part.replace("self_attn.q_proj", "attn.qkv")] = torch.cat(three)
        elif "k_proj" not in part and "v_proj" not in part:
            for old, new in TIMM.items():
                part = part.replace(old, new)
            stored[f"vision.{part}"] = tensor
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    pictures, embeddings = images(((56, 20), (20, 50), (30, 30))[:number]), []
    for picture in pictures:
        cut = {(56, 20): (2, 1), (20, 50): (1, 2)}.get(picture.size, (1, 1))
        columns, rows = cut if number == 2 else (1, 1)
        whole = ImageOps.pad(picture, (28 * columns, 28 * rows), color=(127, 127, 127))
        views = [ImageOps.pad(picture, (28, 28), color=(127, 127, 127))]
        views += [
            whole.crop((28 * c, 28 * r, 28 * c + 28, 28 * r + 28))
            for r in range(rows) for c in range(columns)
        ]  # fmt: skip
        tokens = []
        for view in views:
            pixels = torch.from_numpy(np.array(view)).permute(2, 0, 1).float() / 255 * 2 - 1
            proj = "vision.patch_embed.proj"
            x = F.conv2d(pixels[None], w[f"{proj}.weight"], w[f"{proj}.bias"], stride=4)
            x = x[0].flatten(1).T + w["vision.pos_embed"][0]
            for layer in (0, 1):
                x = siglip_layer(x, w, f"blocks.{layer}.", 2, torch.zeros(1, 8), tanh=False)
            x = F.layer_norm(x, (32,), w["vision.norm.weight"], w["vision.norm.bias"], 1e-6)
            # Seven rows of patches become eight; a square of four is a token.
            x = F.pad(x.view(7, 7, 32), (0, 0, 0, 1, 0, 1)).view(4, 2, 4, 2, 32)
            x = x.permute(0, 2, 4, 1, 3).reshape(4, 4, 128)
            first, second = "projector.layers.0", "projector.layers.2"
            x = F.gelu(F.linear(x, w[f"{first}.weight"], w[f"{first}.bias"]))
            tokens.append(F.linear(x, w[f"{second}.weight"], w[f"{second}.bias"]))
        tiles = torch.stack(tokens[1:]).view(rows, columns, 4, 4, 64)
        local = torch.cat([torch.cat(list(row), dim=1) for row in tiles])
        lines = [
            torch.cat([part, w["image_newline"].expand(len(part), 1, 64)], dim=1).flatten(0, 1)
            for part in (tokens[0], local)
        ]
        embeddings.append(torch.cat([lines[0], w["view_seperator"][None], lines[1]]))
    text = " and ".join(["<image>"] * number)
    check(tmp_path, f"The {text} is", pictures, model, embeddings, 480)


@pytest.mark.parametrize(
    ("name", "wrong", "field"),
    [
        ("OpenCUAForConditionalGeneration", {"vision_config": None}, "vision_config"),
        ("DeepseekVLV2ForCausalLM", {"language_config": None}, "language_config"),
        ("DeepseekVLV2ForCausalLM", {"tile_tag": "1D"}, "tile_tag"),
        ("Ovis2_5", {"vit_config": None}, "vit_config"),
        ("Ovis2_5", {"visual_vocab_size": 4}, "visual_vocab_size"),
        ("Phi4ForCausalLMV", {"mm_hidden_size": 31}, "mm_hidden_size"),
    ],
)
def test_what_these_models_cannot_be_is_refused(name, wrong, field):
    table, config = driver(name).tiny(), driver(name).config_type
    with pytest.raises(CheckpointError, match=field):
        read_config({**table, **wrong}, config, "config.json")
