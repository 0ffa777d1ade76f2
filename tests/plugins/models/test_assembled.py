"""Families that transformers has no class for, against its parts and the published equations."""

from __future__ import annotations

import json

import numpy as np
import pytest
import samples
import torch
import torch.nn.functional as F
import transformers as hf
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file
from samples import parametrize_sample
from tests.plugins.models.test_published import driver
from tests.plugins.models.test_relatives import answered
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen25

from modulm.errors import CheckpointError
from modulm.nn import read_config
from modulm.testing.checkpoints import make_tokenizer
from modulm_media.reader import load_processor
from modulm_towers.testing import (
    Prompt,
    check_execution,
    check_weights,
    images,
    processor_of,
)

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


def siglip_layer(x, w, prefix, heads, angles, tanh=True, eps=1e-6):
    """A layer of SigLIP for one image, x: [patches, hidden], with rotated queries and keys.

    tanh: whether GELU is approximated.
    """

    def linear(name, value):
        return F.linear(value, w[f"{prefix}{name}.weight"], w[f"{prefix}{name}.bias"])

    def norm(name, value):
        weight, bias = w[f"{prefix}{name}.weight"], w[f"{prefix}{name}.bias"]
        return F.layer_norm(value, weight.shape, weight, bias, eps)

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


def execute(folder, text, items, kind="image", sample=False, mixed=(), **options):
    """With `--everything`, run the kit's checks; the sample of `make test` are those of weights.

    text has as many placeholders as there are items, the first before " of ", if there are several.
    mixed: further requests. options: those of `check_execution`.
    """
    if not (samples.everything or sample):
        return
    prompts = [Prompt(text, items), Prompt(text, items[::-1])]
    if " of " in text:
        prompts.append(Prompt(text.partition(" of ")[0], items[:1]))
    prompts.append(Prompt("Once upon a time there was a small cat"))
    requests = [prompt.request(kind) for prompt in prompts] + list(mixed)
    if samples.everything:
        check_execution(folder, requests, **options)
    check_weights(folder, requests, chunk=options.get("chunk", 7))


def check(folder, text, pictures, model, embeddings, token, **options):
    """Compare log probabilities with those of the text model, whose placeholders have the given
    embeddings. embeddings: [tokens, hidden] per image. options: those of `execute`.
    """
    ids, ours = answered(folder, text, pictures)
    ids = torch.tensor(ids)
    assert int((ids == token).sum()) == sum(len(part) for part in embeddings)
    with torch.inference_mode():
        inputs = model.get_input_embeddings()(ids[None]).clone()
        inputs[0, ids == token] = torch.cat(embeddings)
        expected = model(inputs_embeds=inputs).logits[0].log_softmax(-1)
    assert (ours - expected[:-1]).abs().max() < 1e-3
    execute(folder, text, pictures, **options)


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
    check(tmp_path, f"The {token} of {token} is", pictures, model, [tokens], 480, sample=True)


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


@pytest.mark.exhaustive
@parametrize_sample("marks", ("<|image|> {}", "<|image_1|> <|image_2|>"), every=2)
def test_phi_3_vision_has_lines_of_padded_tiles(marks, tmp_path):
    name = "Phi3VForCausalLM"
    table = driver(name).tiny()
    write_tokenizer(tmp_path, table, ["<|image|>"])
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"num_crops": 4}))
    keys = {k: v for k, v in table.items() if k not in ("img_processor", "embd_layer")}
    model = text_model("Phi3", {**keys, "model_type": "phi3"})
    torch.manual_seed(2)
    config = hf.CLIPVisionConfig(**table["img_processor"], attn_implementation="eager")
    tower = hf.CLIPVisionModel(config).float().eval()
    stem = "model.vision_embed_tokens."
    w = random_weights({
        "glb_GN": (1, 1, 128), "sub_GN": (1, 1, 1, 128), "img_projection.0.weight": (64, 128),
        "img_projection.0.bias": (64,), "img_projection.2.weight": (64, 64),
        "img_projection.2.bias": (64,),
    })  # fmt: skip
    weights = {
        f"{stem}img_processor." + ("" if part.startswith("vision_model.") else "vision_model.")
        + part: t.clone() for part, t in tower.state_dict().items()
    }  # fmt: skip
    weights |= {f"{stem}{part}": t for part, t in w.items()}
    weights |= {part: t.clone() for part, t in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    pictures, embeddings = images(((30, 30), (16, 40))), []
    mean, std = (
        torch.tensor(part).view(-1, 1, 1)
        for part in (hf.image_utils.OPENAI_CLIP_MEAN, hf.image_utils.OPENAI_CLIP_STD)
    )
    # Four tiles hold 32 * 32 pixels of a square; of 16 * 40 two, which is turned and padded.
    for picture, (columns, height) in zip(pictures, ((2, 32), (2, 12)), strict=True):
        turned = picture.width < picture.height
        lying = picture.transpose(Image.Transpose.ROTATE_90) if turned else picture
        resized = lying.resize((16 * columns, height), Image.Resampling.BILINEAR)
        rows = -(-height // 16)
        white = Image.new("RGB", (16 * columns, 16 * rows), (255, 255, 255))
        white.paste(resized, (0, (16 * rows - height) // 2))
        if turned:
            white, rows, columns = white.transpose(Image.Transpose.ROTATE_270), columns, rows
        pixels = (torch.from_numpy(np.array(white)).permute(2, 0, 1).float() / 255 - mean) / std
        views = [F.interpolate(pixels[None], (16, 16), mode="bicubic")[0]]
        views += [
            pixels[:, 16 * r : 16 * r + 16, 16 * c : 16 * c + 16]
            for r in range(rows) for c in range(columns)
        ]  # fmt: skip
        with torch.inference_mode():
            states = tower(torch.stack(views), output_hidden_states=True).hidden_states[-2][:, 1:]
        grids = states.view(-1, 2, 2, 2, 2, 32).transpose(2, 3).reshape(-1, 2, 2, 128)
        wide = torch.cat(
            [torch.cat(list(grids[1:][r * columns : (r + 1) * columns]), 1) for r in range(rows)]
        )
        lines = [
            torch.cat([part, w["sub_GN"][0].expand(len(part), 1, 128)], 1).flatten(0, 1)
            for part in (wide, grids[0])
        ]
        x = torch.cat([lines[0], w["glb_GN"][0], lines[1]])
        x = F.gelu(F.linear(x, w["img_projection.0.weight"], w["img_projection.0.bias"]))
        embeddings.append(F.linear(x, w["img_projection.2.weight"], w["img_projection.2.bias"]))
    check(tmp_path, f"The {marks.format('<|image|>')} are", pictures, model, embeddings, 480)


STEP = ("<im_patch>", "<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>")


@pytest.mark.exhaustive
def test_step_3_vl_reads_windows_before_the_whole_image(tmp_path):
    name = "StepVLForConditionalGeneration"
    table = driver(name).tiny()
    write_tokenizer(tmp_path, table, STEP)
    model = text_model("Qwen3", table["text_config"])
    torch.manual_seed(2)
    sizes = table["vision_config"]
    config = hf.Step3p7VisionConfig(
        hidden_size=sizes["width"], num_hidden_layers=sizes["layers"], mlp_ratio=1.5,
        num_attention_heads=sizes["heads"], image_size=64, patch_size=4,
        attn_implementation="eager",
    )  # fmt: skip
    tower = hf.models.step3p7.modeling_step3p7.Step3p7VisionModel(config).float().eval()
    for parameter in tower.parameters():
        scale = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.1
        torch.nn.init.normal_(parameter, float(parameter.dim() == 1), scale)
    tower.save_pretrained(tmp_path / "vision")
    projector = torch.nn.Linear(128, 64, bias=False)
    weights = load_file(tmp_path / "vision/model.safetensors")
    weights = {f"vision_model.{part}": tensor for part, tensor in weights.items()}
    weights["vit_large_projector.weight"] = projector.weight.detach()
    weights |= {part: tensor.clone() for part, tensor in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    pictures, embeddings = images(((60, 60), (30, 62))), []
    reader = processor_of(name, tmp_path).image_processor
    for picture, count in zip(pictures, (0, 2), strict=True):
        seen = reader(images=[picture], return_tensors="pt")
        assert int(seen["num_local_patches"][0]) == count
        views = [seen["pixel_values_local"]] if count else []
        with torch.inference_mode():
            states = [tower(view).last_hidden_state for view in (*views, seen["pixel_values"])]
            embeddings.append(torch.cat([projector(part).flatten(0, 1) for part in states]))
    check(tmp_path, "The <im_patch> of <im_patch> is", pictures, model, embeddings, 480)


@pytest.mark.exhaustive
def test_step_3_reads_windows_before_the_whole_image(tmp_path):
    """Behind any text model: Step 3's own is compared in `test_contract.py`."""
    name = "Step3VLForConditionalGeneration"
    text = driver("StepVLForConditionalGeneration").tiny()["text_config"]
    table = {**driver(name).tiny(), "text_config": text}
    write_tokenizer(tmp_path, table, STEP)
    model = text_model("Qwen3", text)
    at = "vision_model.embeddings."
    shapes = {
        f"{at}patch_embedding.weight": (32, 3, 4, 4), f"{at}patch_embedding.bias": (32,),
        f"{at}position_embedding.weight": (257, 32), f"{at}class_embedding": (1, 32),
        **block_shapes("vision_model.transformer.layers.0.", 32, 48),
        **block_shapes("vision_model.transformer.layers.1.", 32, 48),
        "vit_downsampler.weight": (40, 32, 2, 2), "vit_downsampler.bias": (40,),
        "vit_downsampler2.weight": (80, 40, 3, 3), "vit_downsampler2.bias": (80,),
        "vit_large_projector.weight": (64, 80),
    }  # fmt: skip
    w = random_weights(shapes)
    stored = {part: tensor.clone() for part, tensor in model.state_dict().items()}
    save_file({**w, **stored}, tmp_path / "model.safetensors", {"format": "pt"})

    def linear(part, value):
        return F.linear(value, w[f"{part}.weight"], w[f"{part}.bias"])

    def seen_by(pixels):
        side = pixels.shape[-1] // 4
        x = F.conv2d(pixels, w[f"{at}patch_embedding.weight"], w[f"{at}patch_embedding.bias"],
                     stride=4).flatten(2).transpose(1, 2)  # fmt: skip
        places = w[f"{at}position_embedding.weight"]
        square = places[1:].view(1, 16, 16, 32).permute(0, 3, 1, 2)
        if side != 16:
            square = F.interpolate(square, (side, side), mode="bicubic", antialias=True)
        first = (w[f"{at}class_embedding"] + places[:1]).expand(len(x), 4, 32)
        x = torch.cat([first, x + square.flatten(2).transpose(1, 2)], dim=1)
        for layer in (0, 1):
            stem = f"vision_model.transformer.layers.{layer}."
            q, k, v = (
                linear(f"{stem}self_attn.{n}_proj", x).unflatten(-1, (2, 16)).transpose(1, 2)
                for n in "qkv"
            )
            out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            norms = [(w[f"{stem}layer_norm{n}.weight"], w[f"{stem}layer_norm{n}.bias"]) for n in
                     (1, 2)]  # fmt: skip
            x = x + F.layer_norm(linear(f"{stem}self_attn.out_proj", out), (32,), *norms[0], 1e-5)
            inner = linear(f"{stem}mlp.fc1", x)
            inner = linear(f"{stem}mlp.fc2", inner * torch.sigmoid(1.702 * inner))
            x = x + F.layer_norm(inner, (32,), *norms[1], 1e-5)
        x = x[:, 4:].transpose(1, 2).unflatten(2, (side, side))
        x = F.conv2d(x, w["vit_downsampler.weight"], w["vit_downsampler.bias"], stride=2)
        x = F.conv2d(x, w["vit_downsampler2.weight"], w["vit_downsampler2.bias"], 2, 1)
        return (x.flatten(2).transpose(1, 2) @ w["vit_large_projector.weight"].T).flatten(0, 1)

    pictures, embeddings = images(((60, 60), (30, 62))), []
    reader = processor_of(name, tmp_path).image_processor
    for picture in pictures:
        seen = reader(images=[picture], return_tensors="pt")
        names = [name for name in ("pixel_values_local", "pixel_values") if name in seen]
        embeddings.append(torch.cat([seen_by(seen[name]) for name in names]))
    check(tmp_path, "The <im_patch> of <im_patch> is", pictures, model, embeddings, 480)


MINICPM = ("<unk>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")


def sine_places(rows, columns, width):
    """[patches, width]: sines and cosines of the column, then of the row."""
    waves = 1 / 10000 ** (torch.arange(width // 4) / (width // 4))
    places = []
    for row in range(rows):
        for column in range(columns):
            angles = [waves * column, waves * row]
            places.append(torch.cat([f(a) for a in angles for f in (torch.sin, torch.cos)]))
    return torch.stack(places)


def minicpm_shapes():
    """Of what sees in MiniCPM-V."""
    shapes = {
        "vpm.embeddings.patch_embedding.weight": (32, 3, 4, 4),
        "vpm.embeddings.patch_embedding.bias": (32,),
        "vpm.embeddings.position_embedding.weight": (49, 32),
        "vpm.post_layernorm.weight": (32,), "vpm.post_layernorm.bias": (32,),
        **block_shapes("vpm.encoder.layers.0.", 32, 48),
        **block_shapes("vpm.encoder.layers.1.", 32, 48),
        "resampler.query": (4, 64), "resampler.kv_proj.weight": (64, 32),
        "resampler.attn.in_proj_weight": (192, 64), "resampler.attn.in_proj_bias": (192,),
        "resampler.attn.out_proj.weight": (64, 64), "resampler.attn.out_proj.bias": (64,),
        "resampler.proj": (64, 64),
    }  # fmt: skip
    for part in ("ln_q", "ln_kv", "ln_post"):
        shapes |= {f"resampler.{part}.weight": (64,), f"resampler.{part}.bias": (64,)}
    return shapes


@pytest.mark.exhaustive
def test_minicpm_v_has_queries_for_each_slice(tmp_path):
    name = "MiniCPMV"
    table = driver(name).tiny()
    tokenizer = write_tokenizer(tmp_path, table, MINICPM)
    settings = {"norm_mean": [0.5] * 3, "norm_std": [0.5] * 3, **table["slice_config"]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    keys = {k: v for k, v in table.items() if k not in ("vision_config", "slice_config")}
    model = text_model("Qwen2", {**keys, "model_type": "qwen2"})
    w = random_weights(minicpm_shapes())
    stored = {f"llm.{part}": t.clone() for part, t in model.state_dict().items()}
    save_file({**w, **stored}, tmp_path / "model.safetensors", {"format": "pt"})
    attention = torch.nn.MultiheadAttention(64, 2, batch_first=True).eval()
    attention.load_state_dict(
        {part.removeprefix("resampler.attn."): t for part, t in w.items() if ".attn." in part
         and part.startswith("resampler.")}
    )  # fmt: skip

    def norm(part, value):
        stem = f"resampler.{part}"
        return F.layer_norm(value, (64,), w[f"{stem}.weight"], w[f"{stem}.bias"], 1e-6)

    pictures, embeddings = images(((40, 60), (20, 24))), []
    reader = processor_of(name, tmp_path).images
    grids_of = ([[10, 6], [7, 9], [7, 9]], [[9, 7]])
    for picture, grids in zip(pictures, grids_of, strict=True):
        seen = reader(images=[picture], return_tensors="pt")
        assert seen["target_sizes"].tolist() == grids
        patches = seen["pixel_values"][0].unflatten(2, (-1, 4)).permute(2, 0, 1, 3).flatten(1)
        parts = patches.split([rows * columns for rows, columns in grids])
        for part, (rows, columns) in zip(parts, grids, strict=True):
            edges = torch.arange(1 / 7, 1, 1 / 7)
            row, column = (
                torch.bucketize(torch.arange(n) / n, edges, right=True) for n in (rows, columns)
            )
            stem = "vpm.embeddings.patch_embedding"
            x = F.linear(part, w[f"{stem}.weight"].flatten(1), w[f"{stem}.bias"])
            places = (row[:, None] * 7 + column).flatten()
            x = x + w["vpm.embeddings.position_embedding.weight"][places]
            for layer in (0, 1):
                x = siglip_layer(x, w, f"vpm.encoder.layers.{layer}.", 2, torch.zeros(1, 8))
            post = (w["vpm.post_layernorm.weight"], w["vpm.post_layernorm.bias"])
            x = norm("ln_kv", F.layer_norm(x, (32,), *post, 1e-6) @ w["resampler.kv_proj.weight"].T)
            query, key = norm("ln_q", w["resampler.query"]), x + sine_places(rows, columns, 64)
            with torch.inference_mode():
                out, _ = attention(query[None], key[None], x[None])
            embeddings.append(norm("ln_post", out[0]) @ w["resampler.proj"])
    text = "The (<image>./</image>) of (<image>./</image>) is"
    check(tmp_path, text, pictures, model, embeddings, 480)
    ids, _ = answered(tmp_path, text, pictures)
    whole = "<image>" + "<unk>" * 4 + "</image>"
    line = "<slice>" + "<unk>" * 4 + "</slice>"
    filled = f"The <image_id>0</image_id>{whole}{line}\n{line} of <image_id>1</image_id>{whole} is"
    assert ids == tokenizer(filled, add_special_tokens=False)["input_ids"]


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


NANO = {"NemotronH_Nano_VL_V2": "NemotronH", "Llama_Nemotron_Nano_VL": "Llama"}
RADIO = (
    ("embeddings.patch_projection", "patch_generator.embedder"),
    ("embeddings.position_embedding", "patch_generator.pos_embed"),
    ("embeddings.cls_register_token", "patch_generator.cls_token.token"),
    ("encoder.layer.", "blocks."),
    (".attention.o_proj.", ".attn.proj."),
)


def published_radio(weights):
    """RADIO's tensors under the names of published files."""
    stored = {}
    for name, tensor in weights.items():
        unknown = ("embeddings.video", "input_conditioner", "summary_idxs")
        part = any(one in name for one in ("layer_scale", ".k_proj.", ".v_proj."))
        if part or name.startswith(unknown):
            continue
        if ".q_proj." in name:
            three = [weights[name.replace(".q_proj.", f".{letter}_proj.")] for letter in "qkv"]
            name, tensor = name.replace(".attention.q_proj.", ".attn.qkv."), torch.cat(three)
        for old, new in RADIO:
            name = name.replace(old, new)
        stored[f"vision_model.radio_model.model.{name}"] = tensor.clone()
    return stored


@parametrize_sample("name", NANO, every=2)
def test_nemotron_nano_vl_has_tiles_and_a_thumbnail(name, tmp_path):
    table, llama = driver(name).tiny(), name.startswith("Llama")
    write_tokenizer(tmp_path, table, ["<image>", "<img>", "</img>"])
    model = text_model(NANO[name], table["llm_config"])
    model.save_pretrained(tmp_path / "text")
    torch.manual_seed(2)
    vision = {"summary_idxs": [0], "attn_implementation": "eager", **table["vision_config"]}
    radio = hf.RadioModel(hf.RadioConfig(**vision)).float().eval()
    for parameter in radio.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    w = random_weights({"mlp1.0.weight": (128,), "mlp1.1.weight": (48, 128),
                        "mlp1.3.weight": (64, 48)})  # fmt: skip
    if llama:
        w |= random_weights({"mlp1.0.bias": (128,), "mlp1.1.bias": (48,), "mlp1.3.bias": (64,)})
    stored = {**w, **published_radio(radio.state_dict())}
    text = load_file(tmp_path / "text/model.safetensors")
    stored |= {f"language_model.{part}": tensor for part, tensor in text.items()}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    pictures, embeddings = images(((56, 20), (30, 30))), []
    for picture, (columns, rows) in zip(pictures, ((3, 1), (2, 2)), strict=True):
        views = []
        for across, down in ((columns, rows), (1, 1)):
            size = (16 * across, 16 * down)
            pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float()
            if llama:
                resized = np.array(picture.resize(size))
                whole = torch.from_numpy(resized).permute(2, 0, 1).float()
            else:
                whole = F.interpolate(pixels, size[::-1], mode="bicubic", antialias=True)[0]
            views += [
                whole[:, 16 * r : 16 * r + 16, 16 * c : 16 * c + 16]
                for r in range(down) for c in range(across)
            ]  # fmt: skip
        pixels = torch.stack(views) / 255
        with torch.inference_mode():
            x = radio(pixels).features.view(-1, 2, 2, 2, 2, 32).transpose(2, 3).reshape(-1, 128)
            if llama:
                x = F.layer_norm(x, (128,), w["mlp1.0.weight"], w["mlp1.0.bias"])
            else:
                x = x * x.pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt() * w["mlp1.0.weight"]
            x = F.linear(x, w["mlp1.1.weight"], w.get("mlp1.1.bias"))
            x = F.gelu(x) if llama else x.relu().square()
            embeddings.append(F.linear(x, w["mlp1.3.weight"], w.get("mlp1.3.bias")))
    states = {"reuses": False} if name != "Llama_Nemotron_Nano_VL" else {}
    check(tmp_path, "The <image> of <image> is", pictures, model, embeddings, 480, **states)


@pytest.mark.parametrize(
    ("name", "wrong", "field"),
    [
        ("OpenCUAForConditionalGeneration", {"vision_config": None}, "vision_config"),
        ("DeepseekVLV2ForCausalLM", {"language_config": None}, "language_config"),
        ("DeepseekVLV2ForCausalLM", {"tile_tag": "1D"}, "tile_tag"),
        ("Ovis2_5", {"vit_config": None}, "vit_config"),
        ("Ovis2_5", {"visual_vocab_size": 4}, "visual_vocab_size"),
        ("MiniCPMV", {"vision_config": None}, "vision_config"),
        ("Phi3VForCausalLM", {"embd_layer": None}, "embd_layer"),
        ("Phi4ForCausalLMV", {"mm_hidden_size": 31}, "mm_hidden_size"),
    ],
)
def test_what_these_models_cannot_be_is_refused(name, wrong, field):
    table, config = driver(name).tiny(), driver(name).config_type
    with pytest.raises(CheckpointError, match=field):
        read_config({**table, **wrong}, config, "config.json")
