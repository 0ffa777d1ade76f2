"""Formats that models are published in: what transformers computes with its own format of them."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from samples import parametrize_sample
from tests.plugins.models.test_images import INTERNVL, QWEN, internvl, qwen

import modulm
from modulm.errors import CheckpointError
from modulm.nn import read_config
from modulm.plugins import manager
from modulm_media.reader import load_processor
from modulm_towers.testing import ImageFamily, images, processor_of, write_family

CPU = {"device": "cpu", "dtype": "float32"}


def driver(name):
    return manager.current().load("models", name)


def rewrite(folder, config, rename):
    """Give the checkpoint of a folder another config.json, and its weights other names."""
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {
        name: tensor
        for old, stored in load_file(folder / "model.safetensors").items()
        for name, tensor in rename(old, stored)
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    load_processor.cache_clear()


def replaced(name, pairs):
    for pattern, text in pairs:
        name = re.sub(pattern, text, name)
    return name


#: transformers' names of InternVL's weights, and OpenGVLab's.
INTERN = (
    (r"^model\.(?=vision_tower|multi_modal|language_model)", ""),
    (r"^language_model\.(?!model\.|lm_head)", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^vision_tower\.", "vision_model."),
    (r"\.cls_token$", ".class_embedding"),
    (r"\.patch_embeddings\.projection\.", ".patch_embedding."),
    (r"\.position_embeddings$", ".position_embedding"),
    (r"\.encoder\.layer\.", ".encoder.layers."),
    (r"\.attention\.projection_layer\.", ".attn.proj."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.lambda_", ".ls"),
    (r"^multi_modal_projector\.layer_norm\.", "mlp1.0."),
    (r"^multi_modal_projector\.linear_1\.", "mlp1.1."),
    (r"^multi_modal_projector\.linear_2\.", "mlp1.3."),
)


def test_internvl_as_opengvlab_publishes_it(tmp_path):
    """Without the processor's files, which name code."""
    architecture = "InternVLForConditionalGeneration"
    bias = {**driver(architecture).tiny()["vision_config"], "attention_bias": True}
    family = ImageFamily(driver(architecture), INTERNVL, internvl, changes={"vision_config": bias})
    write_family(family, tmp_path)
    theirs = getattr(hf, architecture).from_pretrained(tmp_path, attn_implementation="eager").eval()
    pictures, text = images(((56, 42), (28, 28))), "The <IMG_CONTEXT> of <IMG_CONTEXT> is"
    reader = processor_of(architecture, tmp_path)
    reader.image_processor = internvl(None).image  # OpenGVLab's code resizes with Pillow
    inputs = reader(
        text=[text], images=pictures, add_special_tokens=False, return_tensors="pt",
        image_mean=(0.485, 0.456, 0.406), image_std=(0.229, 0.224, 0.225),
    )  # fmt: skip
    with torch.inference_mode():
        expected = theirs(**inputs).logits[0].log_softmax(-1)
    held = {}

    def rename(name, tensor):
        part = re.search(r"vision_tower\.(.*)\.attention\.([qkv])_proj\.(.*)$", name)
        if part is None:
            return [(replaced(name, INTERN), tensor)]
        held[part[1], part[3], part[2]] = tensor
        three = [held.get((part[1], part[3], letter)) for letter in "qkv"]
        if any(one is None for one in three):
            return []
        layer = part[1].replace("encoder.layer.", "encoder.layers.")
        return [(f"vision_model.{layer}.attn.qkv.{part[3]}", torch.cat(three))]

    rewrite(tmp_path, driver("InternVLChatModel").tiny(), rename)
    for file in ("processor_config.json", "preprocessor_config.json"):
        (tmp_path / file).unlink()
    with modulm.LLM(str(tmp_path), max_logprobs=-1, **CPU) as llm:
        prompt = {"prompt": text, "multi_modal_data": {"image": pictures}}
        params = modulm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1)
        (answer,) = llm.generate([prompt], params, use_tqdm=False)
    assert answer.prompt_token_ids == inputs["input_ids"][0].tolist()
    rows = [[entry[i].logprob for i in range(512)] for entry in answer.prompt_logprobs[1:]]
    assert (torch.tensor(rows) - expected[:-1]).abs().max() < 1e-3


def test_what_internvl_says_that_is_not_read_so_is_refused():
    table, config = driver("InternVLChatModel").tiny(), driver("InternVLChatModel").config_type
    for wrong in ({"select_layer": -4}, {"ps_version": "v1"}, {"llm_config": None}):
        with pytest.raises(CheckpointError, match=next(iter(wrong))):
            read_config({**table, **wrong}, config, "config.json")


#: Architecture -> (what is around it, the width's name, the new layer's, other renamed weights).
RETRIEVERS = {
    "ColQwen3": (
        "Qwen3VLForConditionalGeneration", "embed_dim", "embedding_proj_layer",
        ((r"^(?=model\.|lm_head\.)", "vlm."),),
    ),
    "OpsColQwen3Model": (
        "Qwen3VLForConditionalGeneration", "dims", "custom_text_proj", ((r"^model\.", ""),),
    ),
    "ColQwen3_5": ("Qwen3_5ForConditionalGeneration", "dim", "custom_text_proj", ()),
    "Qwen3VLNemotronEmbedModel": ("Qwen3VLForConditionalGeneration", "", "", ()),
}  # fmt: skip


@parametrize_sample("name", RETRIEVERS, every=4)
def test_colqwens_have_vectors_of_the_model_inside(name, tmp_path):
    """Of a page between texts, whatever the files call the parts."""
    inside, width, layer, names = RETRIEVERS[name]
    write_family(ImageFamily(driver(inside), QWEN, qwen("Qwen3VLProcessor")), tmp_path)
    model = getattr(hf, inside).from_pretrained(tmp_path, dtype=torch.float32).eval()
    torch.manual_seed(0)
    weight, bias = torch.randn(24, model.config.text_config.hidden_size) / 8, torch.randn(24)
    (page,) = images([(56, 42)])
    text = "A <|vision_start|><|image_pad|><|vision_end|> of Paris"
    inputs = processor_of(inside, tmp_path)(text=[text], images=[page], return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**inputs, output_hidden_states=True).hidden_states[-1][0]
    vectors = hidden @ weight.T + bias if width else hidden
    expected = torch.nn.functional.normalize(vectors, dim=-1)
    table = json.loads((tmp_path / "config.json").read_text())
    changes = {"architectures": [name], "model_type": name.lower()}
    changes |= {width: 24} if width else {}
    rewrite(tmp_path, {**table, **changes}, lambda old, t: [(replaced(old, names), t)])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {f"{layer}.weight": weight, f"{layer}.bias": bias} if width else {}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "processor_config.json").write_text('{"processor_class": "ColQwen3Processor"}')
    with modulm.LLM(str(tmp_path), **CPU) as llm:
        request = {"prompt": text, "multi_modal_data": {"image": page}}
        (output,) = llm.encode(request, pooling_task="token_embed", use_tqdm=False)
    assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
    assert (torch.from_numpy(output.outputs.data) - expected).abs().max() < 1e-4


def turned(x, coordinates):
    """Rotate heads [patches, heads, size]: rows turn the first half of the angles."""
    size = x.shape[-1] // 2
    waves = 10000.0 ** -(torch.arange(0, size, 2).float() / size)
    angles = (coordinates[:, :, None] * waves).flatten(1)
    cos, sin = (t.repeat(1, 2)[:, None] for t in (angles.cos(), angles.sin()))
    return x * cos + torch.cat([-x[..., size:], x[..., :size]], dim=-1) * sin


def dots_features(tensors, pixels, grid):
    """The tokens of one image, by the tensors of the encoder alone."""
    functional, (_, rows, columns) = torch.nn.functional, grid
    square = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    order = square.view(2, rows // 2, 2, columns // 2, 2).transpose(2, 3).flatten(1).T
    x = pixels @ tensors["patch_embed.patchifier.proj.weight"].flatten(1).T
    x = x + tensors["patch_embed.patchifier.proj.bias"]

    def norm(x, name):
        return functional.rms_norm(x, (32,), tensors[f"{name}.weight"], 1e-5)

    x = norm(x, "patch_embed.patchifier.norm")
    for at in ("blocks.0", "blocks.1"):
        qkv = norm(x, f"{at}.norm1") @ tensors[f"{at}.attn.qkv.weight"].T
        q, k, v = qkv.view(len(x), 3, 2, 16).unbind(1)
        q, k, v = (t.transpose(0, 1) for t in (turned(q, order), turned(k, order), v))
        seen = functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1)
        x = x + seen @ tensors[f"{at}.attn.proj.weight"].T
        one, two, three = (tensors[f"{at}.mlp.fc{i}.weight"].T for i in (1, 2, 3))
        inner = norm(x, f"{at}.norm2")
        x = x + (functional.silu(inner @ one) * (inner @ three)) @ two
    x = norm(x, "post_trunk_norm")
    x = functional.layer_norm(
        x, (32,), tensors["merger.ln_q.weight"], tensors["merger.ln_q.bias"], 1e-6
    )
    for index, act in ((0, functional.gelu), (2, lambda t: t)):
        weight, bias = (tensors[f"merger.mlp.{index}.{part}"] for part in ("weight", "bias"))
        x = act(x.reshape(-1, 128) @ weight.T + bias)
    return x


def test_dots_ocr_is_qwen_2_behind_its_encoder(tmp_path):
    table = driver("DotsOCRForCausalLM").tiny()
    write_family(
        ImageFamily(
            driver("Qwen2VLForConditionalGeneration"), {"image_token": "<|imgpad|>"},
            qwen("Qwen2VLProcessor"),
        ),
        tmp_path,
    )  # fmt: skip
    torch.manual_seed(0)
    text = hf.Qwen2ForCausalLM(hf.Qwen2Config(**{**table, "model_type": "qwen2"})).eval()
    hidden = table["hidden_size"]
    shapes = {
        "patch_embed.patchifier.proj.weight": (32, 3, 4, 4),
        "patch_embed.patchifier.proj.bias": (32,),
        "patch_embed.patchifier.norm.weight": (32,), "post_trunk_norm.weight": (32,),
        "merger.ln_q.weight": (32,), "merger.ln_q.bias": (32,),
        "merger.mlp.0.weight": (128, 128), "merger.mlp.0.bias": (128,),
        "merger.mlp.2.weight": (hidden, 128), "merger.mlp.2.bias": (hidden,),
        **{f"blocks.{i}.norm{j}.weight": (32,) for i in (0, 1) for j in (1, 2)},
        **{f"blocks.{i}.attn.qkv.weight": (96, 32) for i in (0, 1)},
        **{f"blocks.{i}.attn.proj.weight": (32, 32) for i in (0, 1)},
        **{f"blocks.{i}.mlp.fc{j}.weight": (48, 32) for i in (0, 1) for j in (1, 3)},
        **{f"blocks.{i}.mlp.fc2.weight": (32, 48) for i in (0, 1)},
    }  # fmt: skip
    encoder = {name: torch.randn(shape) / 5 for name, shape in shapes.items()}
    (tmp_path / "config.json").write_text(json.dumps(table))
    settings = tmp_path / "preprocessor_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "temporal_patch_size": 1}))
    (tmp_path / "processor_config.json").write_text('{"processor_class": "DotsVLProcessor"}')
    stored = {f"vision_tower.{name}": tensor for name, tensor in encoder.items()}
    stored |= {name: t.clone().contiguous() for name, t in text.state_dict().items()}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    load_processor.cache_clear()
    (page,), prompt = images([(56, 42)]), "A <|imgpad|> of Paris"
    inputs = processor_of("DotsOCRForCausalLM", tmp_path)(
        text=[prompt], images=[page], add_special_tokens=False, return_tensors="pt"
    )
    ids, grid = inputs["input_ids"], inputs["image_grid_thw"][0].tolist()
    with torch.inference_mode():
        embeds = text.get_input_embeddings()(ids)
        embeds[ids == 480] = dots_features(encoder, inputs["pixel_values"], grid)
        expected = text(inputs_embeds=embeds).logits[0].log_softmax(-1)
    with modulm.LLM(str(tmp_path), max_logprobs=-1, **CPU) as llm:
        request = {"prompt": prompt, "multi_modal_data": {"image": page}}
        params = modulm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1)
        (answer,) = llm.generate([request], params, use_tqdm=False)
    assert answer.prompt_token_ids == ids[0].tolist()
    rows = [[entry[i].logprob for i in range(512)] for entry in answer.prompt_logprobs[1:]]
    assert (torch.tensor(rows) - expected[:-1]).abs().max() < 1e-3
