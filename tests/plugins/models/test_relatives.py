"""Families that are parts of others under names of their own: what those parts compute."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from attrs import field, frozen
from safetensors.torch import save_file
from samples import parametrize_sample
from tests.plugins.models.test_image_vectors import IDEFICS, colmodernvbert
from tests.plugins.models.test_images import (
    IMAGE,
    INTERNVL,
    ONEVISION,
    PHI,
    QWEN,
    clip,
    internvl,
    onevision,
    paddle,
    phi,
    qwen,
)
from tests.plugins.models.test_published import CPU, INTERN, driver, rewrite
from tests.plugins.models.test_published import replaced as published
from transformers.models.deepseek_ocr2 import image_processing_pil_deepseek_ocr2 as pil_ocr2

import modulm
from modulm.errors import CheckpointError, UnsupportedError
from modulm.nn import read_config
from modulm_media.reader import load_processor
from modulm_towers import tiny_text
from modulm_towers.testing import ImageFamily, images, processor_of, write_family


def replaced(name, pairs):
    """The name with the first pair that begins it replaced, for each pair."""
    for old, new in pairs:
        if old in name:
            name = name.replace(old, new, 1)
    return name


@frozen(eq=False)
class Relative:
    """An architecture that another one's class of transformers computes.

    base: that class. text: a prompt with placeholders. rename: parts of names and what files have.
    adapt: changes transformers' model. reader: the architecture whose media family makes the
    inputs, empty for `base`.
    """

    base: str
    tokens: Mapping[str, str]
    processor: Callable[[Any], Any]
    text: str
    rename: tuple[tuple[str, str], ...] = ()
    adapt: Callable[[Any], None] | None = None
    changes: Mapping[str, Any] = field(factory=dict)
    sizes: tuple[tuple[int, int], ...] = ((56, 42), (30, 60))
    reader: str = ""
    stored: Callable[[str, torch.Tensor], list[tuple[str, torch.Tensor]]] | None = None
    inputs: Callable[[Any, str, Any], Mapping[str, Any]] | None = None


class Made:
    """What `ImageFamily` asks of a driver."""

    media = ("image",)

    def __init__(self, architecture):
        self.architecture = architecture

    def tiny(self):
        return {"architectures": [self.architecture]}


def pre_norm(inner):
    """What replaces LLaVA-OneVision's projector."""

    class Projector(torch.nn.Module):
        def __init__(self, inputs, hidden):
            super().__init__()
            self.pre_norm = torch.nn.LayerNorm(inputs, eps=1e-6)
            self.linear_1 = torch.nn.Linear(inputs, hidden * inner)
            self.linear_2 = torch.nn.Linear(hidden * inner, hidden)

        def forward(self, x):
            x = self.linear_1(self.pre_norm(x))
            return self.linear_2(torch.nn.functional.gelu(x))

    def adapt(model):
        old = model.model.multi_modal_projector
        new = Projector(old.linear_1.in_features, old.linear_2.out_features)
        model.model.multi_modal_projector = new

    return adapt


def keye(whole):
    """Puts Qwen 3 with three axes behind PaddleOCR-VL's encoder; `whole` squares have a norm."""

    def adapt(model):
        config = hf.Qwen3VLTextConfig(**driver("KeyeForConditionalGeneration").tiny())
        config._attn_implementation = "eager"
        text = model.model.language_model = hf.Qwen3VLTextModel(config)
        # Sections of the axes follow one another, as in Qwen2-VL.
        sections = list(config.rope_parameters["mrope_section"])
        text.rotary_emb.recomposition_frequencies = lambda waves: torch.cat(
            [part[i] for i, part in enumerate(waves.split(sections, dim=-1))] * 2, dim=-1
        )
        if whole:
            model.model.projector = Whole(model.model.projector)

    return adapt


class Whole(torch.nn.Module):
    """PaddleOCR-VL's projector with its norm behind the squares."""

    def __init__(self, old):
        super().__init__()
        self.linear_1, self.linear_2 = old.linear_1, old.linear_2
        self.pre_norm = torch.nn.LayerNorm(old.linear_1.in_features, eps=1e-5)

    def forward(self, x, grids):
        squares = []
        parts = x.split([t * h * w for t, h, w in grids.tolist()])
        for part, (t, h, w) in zip(parts, grids.tolist(), strict=True):
            square = part.reshape(t, h // 2, 2, w // 2, 2, -1).transpose(2, 3)
            squares.append(square.reshape(t * h * w // 4, -1))
        x = self.linear_1(self.pre_norm(torch.cat(squares)))
        return self.linear_2(torch.nn.functional.gelu(x))


def cosmos3(name, tensor):
    """Files without prefixes, with a tensor of what generates beside each of attention."""
    name = name.replace("model.language_model.", "").replace("model.visual.", "")
    if ".self_attn." not in name:
        return [(name, tensor)]
    parts = {"o_proj": "to_out", "q_norm": "norm_q", "k_norm": "norm_k"}
    parts |= {f"{letter}_proj": f"to_{letter}" for letter in "qkv"}
    for old, new in parts.items():
        name = name.replace(f".{old}.", f".{new}.")
    return [(name, tensor), (name.replace(".self_attn.", ".self_attn_moe_gen."), tensor.clone())]


def mobius(model):
    """Lets layers take turns with two sets of experts, and scales their branches."""

    def scaled(scale):
        def hook(module, inputs, output):
            if isinstance(output, tuple):
                return (output[0] * (1 + scale[0]), *output[1:])
            return output * (1 + scale[0])

        return hook

    layers = model.model.language_model.layers
    for index, layer in enumerate(layers):
        layer.mlp.experts, layer.mlp.gate = (
            layers[index % 2].mlp.experts,
            layers[index % 2].mlp.gate,
        )
        mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
        for name, part in (("attn_layer_scale", mixer), ("ffn_layer_scale", layer.mlp)):
            scale = torch.nn.Parameter(torch.randn(1, 1, 64) / 4)
            layer.register_parameter(name, scale)
            part.register_forward_hook(scaled(scale))


def fourier(model):
    """Mixes rotary angles for each head of keys, and chooses one expert of each of two groups."""
    text = model.model.language_model
    mixtures = torch.nn.Module()
    for name in ("cos_coef", "sin_coef"):
        mixtures.register_parameter(
            name, torch.nn.Parameter(torch.randn(2, 6, 6) / 2 + torch.eye(6))
        )
    text.register_module("fourier", mixtures)
    for layer in text.layers:
        layer.self_attn.forward = partial(attended, layer.self_attn, mixtures)
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.forward = partial(chosen, layer.mlp.gate)


def attended(layer, mixtures, hidden_states, **arguments):
    """Attention of one sequence, [1, tokens, hidden], whose positions turn halves of heads."""
    (x,), tokens = hidden_states, hidden_states.shape[1]
    angles = torch.arange(tokens)[:, None] / 10000 ** (torch.arange(0, 12, 2) / 16)
    parts = []
    for values, name in ((angles.cos(), "cos_coef"), (angles.sin(), "sin_coef")):
        mixed = torch.stack([values @ mixture for mixture in getattr(mixtures, name)])
        parts.append(torch.cat([mixed, torch.ones(2, tokens, 2)], dim=-1))
    cosines, sines = parts

    def turned(vectors, name):
        vectors = getattr(layer, name)(vectors.view(tokens, -1, 16)).transpose(0, 1)
        turns = [part.repeat_interleave(len(vectors) // 2, 0) for part in (cosines, sines)]
        one, two = vectors.chunk(2, dim=-1)
        halves = [one * turns[0] - two * turns[1], two * turns[0] + one * turns[1]]
        return torch.cat(halves, dim=-1)

    q, k = turned(layer.q_proj(x), "q_norm"), turned(layer.k_proj(x), "k_norm")
    v = layer.v_proj(x).view(tokens, -1, 16).transpose(0, 1)
    k, v = (part.repeat_interleave(len(q) // 2, 0) for part in (k, v))
    scores = (q @ k.transpose(1, 2) / 4).masked_fill(
        torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf
    )
    seen = (scores.softmax(-1) @ v).transpose(0, 1).reshape(1, tokens, -1)
    return layer.o_proj(seen), None


def chosen(gate, hidden_states):
    """The best of experts 0 and 1, and of 2 and 3."""
    logits = torch.nn.functional.linear(hidden_states.reshape(-1, 64), gate.weight)
    weights, ids = logits.softmax(-1).view(-1, 2, 2).max(-1)
    weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, ids + torch.tensor([0, 2])


def meta(name, tensor):
    """Mobius's names of a weight; the first two layers have the sets of experts."""
    part = re.match(r"(.*)\.layers\.(\d+)\.mlp\.((?:experts|gate)\..*)", name)
    if part is None:
        return [(name, tensor)]
    return [(f"{part[1]}.meta_mlp.{part[2]}.{part[3]}", tensor)] if int(part[2]) < 2 else []


#: transformers' names of Phi-4 multimodal's weights, and Microsoft's.
MICROSOFT = (
    ("img_projection_up.", "img_projection.0."), ("img_projection_down.", "img_projection.2."),
    ("global_img_feature_extensor", "glb_GN"), ("sub_img_feature_extensor", "sub_GN"),
    ("up_proj_for_speech.", "audio_projection.speech.0."),
    ("down_proj_for_speech.", "audio_projection.speech.2."),
    ("up_proj_for_vision_speech.", "audio_projection.vision.0."),
    ("down_proj_for_vision_speech.", "audio_projection.vision.2."),
)  # fmt: skip


def microsoft(name, tensor):
    """A weight of Phi-4 multimodal under Microsoft's name, with one of an adapter beside it."""
    name = replaced(name, MICROSOFT)
    if ".audio_embed.encoder.encoders." in name:
        name = re.sub(r"(feed_forward_\w+)\.gate_up_proj\.", r"\1.net.0.linear.", name)
        name = re.sub(r"(feed_forward_\w+)\.down_proj\.", r"\1.net.2.", name)
        name = re.sub(r"self_attn\.([qkv])_proj\.", r"self_attn.linear_\1.", name)
        return [(name.replace("self_attn.o_proj.", "self_attn.linear_out."), tensor)]
    if not name.endswith("layers.0.self_attn.o_proj.weight"):
        return [(name, tensor)]
    at = name.removesuffix("weight")
    lora = f"{at}lora_A.vision.weight"
    return [(f"{at}base_layer.weight", tensor), (lora, torch.ones(2, 2))]


def numberless(reader, text, pictures):
    """What transformers' processor makes of a prompt with its own placeholders."""
    return called(reader, text.replace("<|image_1|>", reader.image_token), pictures)


def eagle(model):
    """Puts SigLIP before InternVL's projector."""
    vision = driver("Eagle2_5_VLForConditionalGeneration").tiny()["vision_config"]
    model.model.vision_tower = hf.SiglipVisionModel(
        hf.SiglipVisionConfig(**vision, vision_use_head=False, attn_implementation="eager")
    )
    model.config.vision_feature_select_strategy = "full"


def nvlm(model):
    """Makes InternVL's projector wide, without biases."""
    projector, width = model.model.multi_modal_projector, model.config.text_config.intermediate_size
    one, two = projector.linear_1, projector.linear_2
    projector.linear_1 = torch.nn.Linear(one.in_features, width, bias=False)
    projector.linear_2 = torch.nn.Linear(width, two.out_features, bias=False)


def opengvlab(name, tensor):
    """A weight under OpenGVLab's name, queries, keys and values together."""
    name = re.sub(r"^model\.(?=vision_tower|multi_modal)", "", name)
    name = re.sub(r"^model\.language_model\.", "language_model.model.", name)
    if "vision_tower.vision_model." in name or "vision_tower.encoder.layers." in name:
        inner = name.removeprefix("vision_tower.").removeprefix("vision_model.")
        return [(f"vision_model.vision_model.{inner}", tensor)]
    return [(published(name, INTERN), tensor)]


def intern_inputs(form):
    """Makes inputs of InternVL's model; form: what stands around the tokens of the tiles."""

    def inputs(reader, text, pictures):
        seen = reader.image_processor(images=pictures, return_tensors="pt")["pixel_values"]
        token = reader.tokenizer.context_image_token
        tags = [f"<tile_{i + 1}>" for i in range(len(seen) - 1)] + ["<tile_global_thumbnail>"]
        tiles = "".join((tag if "Image" in form else "") + token * 4 for tag in tags)
        mark = "<image>" if "Image" in form else token
        filled = text.replace(mark, form.format(tiles))
        ids = reader.tokenizer(filled, add_special_tokens=False, return_tensors="pt")
        return {"pixel_values": seen, "input_ids": ids["input_ids"]}

    return inputs


class Nothing:
    """No files of a processor."""

    def save_pretrained(self, folder): ...


class DeepseekOcr(Nothing):
    """What its published files have, and the sizes of small images."""

    def save_pretrained(self, folder):
        sizes = {"size": {"height": 48, "width": 48}, "tile_size": 64, "max_patches": 3}
        (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
        (folder / "processor_config.json").write_text(json.dumps({"patch_size": 1}))


SAM = (
    ("model.vision_tower.sam_encoder.", "model.sam_model."), (".layer_norm1.", ".norm1."),
    (".layer_norm2.", ".norm2."), ("sam_model.layers.", "sam_model.blocks."),
    (".projection.", ".proj."), ("neck.conv1.", "neck.0."), ("neck.norm1.", "neck.1."),
    ("neck.conv2.", "neck.2."), ("neck.norm2.", "neck.3."), (".proj.conv1.", ".net_2."),
    (".proj.conv2.", ".net_3."), ("view_separator", "view_seperator"),
    ("multi_modal_projector.", "projector.layers."), ("model.language_model.", "model."),
)  # fmt: skip


def ocr(vision):
    """Changes of transformers' tiny models of DeepSeek-OCR's kind."""
    text = {
        **driver("DeepseekOcr2ForConditionalGeneration").tiny()["text_config"],
        "model_type": "unlimited_ocr_text", "sliding_window": 4096,
    }  # fmt: skip
    return {"text_config": text, "vision_config": vision, "image_token_id": 480}


FUSED: dict[str, torch.Tensor] = {}


def published_ocr(name, tensor):
    """Names of DeepSeek-OCR's files, in which CLIP has its own and one of q, k and v."""
    if "vision_encoder" not in name:
        return [(replaced(name, SAM), tensor)]
    own = replaced(
        name,
        (
            ("model.vision_tower.vision_encoder.", "model.vision_model."),
            (".encoder.layers.", ".transformer.layers."),
        ),
    )
    at, _, part = own.rpartition("self_attn.")
    if part[:1] not in "qkv" or not at:
        return [(own, tensor)]
    FUSED[own] = tensor
    kind = part.rpartition(".")[2]
    three = [FUSED.get(f"{at}self_attn.{letter}_proj.{kind}") for letter in "qkv"]
    if any(one is None for one in three):
        return []
    return [(f"{at}self_attn.qkv_proj.{kind}", torch.cat(three))]


def ocr_inputs(reader, text, pictures):
    """What Unlimited-OCR's processor, which needs torchvision, makes of small images."""
    canvas = pil_ocr2.get_optimal_tiled_canvas
    seen = dict(reader.image_processor(images=pictures, return_tensors="pt"))
    tiles = seen["num_local_patches"].tolist()
    sizes = [(picture.height, picture.width) for picture in pictures]
    grids = [
        canvas(size, (64, 64), 2, 3) if n else (1, 1) for size, n in zip(sizes, tiles, strict=True)
    ]
    counts = [
        12 * 13 + 1 + (rows * 16 * (columns * 16 + 1) if n else 0)
        for (columns, rows), n in zip(grids, tiles, strict=True)
    ]
    for count in counts:
        text = text.replace("<image>", "<mark>" * count, 1)
    ids = reader.tokenizer(
        text.replace("<mark>", "<image>"), add_special_tokens=False, return_tensors="pt"
    )
    more = {"num_local_patches": tiles, "patches_grid": [list(grid) for grid in grids]}
    return {**seen, "input_ids": ids["input_ids"], **more}


def rows_of_text(reader, text, pictures):
    """Inputs of LLaVA, with Tarsier's token after each row of four patches and after the last."""
    row = "<image>" * 4 + "<newline>"
    filled = text.replace("<image>", row * 4 + "<new>")
    return with_pixels(reader, filled, pictures)


def numbered(reader, text, pictures):
    """Inputs of LLaVA with Mantis's numbers around images. Each part is a text of its own."""
    first, *rest = text.split("<image>")
    parts = [first]
    for index, part in enumerate(rest):
        parts += [f"(image {index + 1}: <Image>", "<image>" * 16, "</Image>)", part]
    ids = [
        i for part in parts for i in reader.tokenizer(part, add_special_tokens=False)["input_ids"]
    ]
    return {**with_pixels(reader, "", pictures), "input_ids": torch.tensor([ids])}


def with_pixels(reader, text, pictures):
    ids = reader.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return {**reader.image_processor(images=pictures, return_tensors="pt"), "input_ids": ids}


#: Text models of these have a head of their own.
NVLM_SEES = {
    "vision_config": {
        **driver("InternVLForConditionalGeneration").tiny()["vision_config"],
        "attention_bias": True,
    }
}  # fmt: skip
QWEN3 = {"text_config": tiny_text("qwen3", head_dim=16)}
RELATIVES = {
    "TarsierForConditionalGeneration": Relative(
        "LlavaForConditionalGeneration", {**IMAGE, "0": "<newline>", "1": "<new>"}, clip,
        "The <image> of <image> is", inputs=rows_of_text, reader="TarsierForConditionalGeneration",
    ),
    "MantisForConditionalGeneration": Relative(
        "LlavaForConditionalGeneration", IMAGE, clip, "The <image> of <image> is", inputs=numbered,
        reader="MantisForConditionalGeneration",
    ),
    "Tarsier2ForConditionalGeneration": Relative(
        "Qwen2VLForConditionalGeneration", QWEN, qwen("Qwen2VLProcessor"),
        "The <|vision_start|><|image_pad|><|vision_end|> is",
        rename=(("model.visual.", "vision_tower."), ("lm_head.", "language_model.lm_head."),
                ("model.language_model.", "language_model.model.")),
        reader="Tarsier2ForConditionalGeneration",
    ),
    "RForConditionalGeneration": Relative(
        "LlavaOnevisionForConditionalGeneration", ONEVISION, onevision,
        "The <image> of <image> is", adapt=pre_norm(1), changes=QWEN3,
    ),
    "BeeForConditionalGeneration": Relative(
        "LlavaOnevisionForConditionalGeneration", ONEVISION, onevision,
        "The <image> of <image> is", adapt=pre_norm(4), changes=QWEN3,
    ),
    "InternS2PreviewForConditionalGeneration": Relative(
        "Qwen3_5MoeForConditionalGeneration", QWEN, qwen("Qwen3VLProcessor"),
        "The <|vision_start|><|image_pad|><|vision_end|> is",
    ),
    **{
        name: Relative(
            "PaddleOCRVLForConditionalGeneration", {"image_token": "<|image_pad|>"}, paddle,
            "The <|vision_start|><|image_pad|><|vision_end|> is", adapt=keye(whole), reader=name,
            rename=(("model.language_model.", "model."), ("model.projector.", "mlp_AR."),
                    ("model.visual.", "visual.")),
        )
        for name, whole in (("KeyeForConditionalGeneration", False),
                            ("KeyeVL1_5ForConditionalGeneration", True))
    },
    "InternS1ProForConditionalGeneration": Relative(
        "Qwen3VLMoeForConditionalGeneration", QWEN, qwen("Qwen3VLProcessor"),
        "The <|vision_start|><|image_pad|><|vision_end|> is", adapt=fourier,
        rename=(("language_model.fourier.", "language_model.rotary_emb."),),
        reader="InternS1ProForConditionalGeneration",
    ),
    "InternS2MobiusForConditionalGeneration": Relative(
        "Qwen3_5MoeForConditionalGeneration", QWEN, qwen("Qwen3VLProcessor"),
        "The <|vision_start|><|image_pad|><|vision_end|> is", adapt=mobius, stored=meta,
        reader="InternS2MobiusForConditionalGeneration",
    ),
    "Phi4MMForCausalLM": Relative(
        "Phi4MultimodalForCausalLM", PHI, phi, "The <|image_1|> is", stored=microsoft,
        inputs=numberless, reader="Phi4MMForCausalLM",
    ),
    "Eagle2_5_VLForConditionalGeneration": Relative(
        "InternVLForConditionalGeneration", INTERNVL, internvl,
        "The <IMG_CONTEXT> is", adapt=eagle, stored=opengvlab, sizes=((56, 42),),
        inputs=intern_inputs("<img>{}</img>"), reader="Eagle2_5_VLForConditionalGeneration",
    ),
    "H2OVLChatModel": Relative(
        "InternVLForConditionalGeneration", INTERNVL, internvl, "The <IMG_CONTEXT> is",
        stored=opengvlab, sizes=((140, 28),), changes=NVLM_SEES,
        inputs=intern_inputs("<img>{}</img>"), reader="H2OVLChatModel",
    ),
    "NVLM_D": Relative(
        "InternVLForConditionalGeneration",
        {"0": "<|vision_pad|>", "1": "<Image>", "2": "</Image>", "3": "<tile_1>"},
        internvl, "The <image> is", adapt=nvlm, stored=opengvlab, sizes=((56, 42),),
        changes=NVLM_SEES, inputs=intern_inputs("<Image>{}</Image>"), reader="NVLM_D",
    ),
    "Cosmos3ForConditionalGeneration": Relative(
        "Cosmos3OmniForConditionalGeneration", QWEN, qwen("Qwen3VLProcessor"),
        "The <|image_pad|> is",
        changes=driver("Cosmos3ForConditionalGeneration").tiny(), stored=cosmos3,
    ),
    "DeepseekOCR2ForCausalLM": Relative(
        "DeepseekOcr2ForConditionalGeneration", IMAGE, lambda tokenizer: DeepseekOcr(),
        "The <image> of <image> is", reader="DeepseekOCR2ForCausalLM",
        rename=(
            ("model.vision_tower.vision_encoder.", "model.qwen2_model.model.model."),
            ("model.vision_tower.query_768_resolution.", "model.qwen2_model.query_768."),
            ("model.vision_tower.query_1024_resolution.", "model.qwen2_model.query_1024."),
        ),
        stored=lambda name, t: [(name if "qwen2_model" in name else replaced(name, SAM), t)],
        sizes=((44, 40), (80, 40)),
    ),
    "DeepseekOCRForCausalLM": Relative(
        "UnlimitedOcrForConditionalGeneration", IMAGE, lambda tokenizer: DeepseekOcr(),
        "The <image> of <image> is", reader="DeepseekOCRForCausalLM",
        changes=ocr(
            {
                **driver("DeepseekOCRForCausalLM").tiny()["vision_config"],
                "model_type": "unlimited_ocr_vision",
            }
        ),
        stored=published_ocr, sizes=((44, 40), (80, 40)), inputs=ocr_inputs,
    ),
}  # fmt: skip


@parametrize_sample("name", RELATIVES, every=24)
def test_relatives_compute_what_their_parts_do(name, tmp_path):
    relative, table = RELATIVES[name], driver(name).tiny()
    family = ImageFamily(
        Made(relative.base), relative.tokens, relative.processor, changes=relative.changes
    )
    write_family(family, tmp_path)
    model = getattr(hf, relative.base).from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    )
    if relative.adapt is not None:
        torch.manual_seed(0)
        relative.adapt(model)
    model.eval()
    pictures = images(relative.sizes[: relative.text.count("<image>") or 1])
    if relative.reader:
        (tmp_path / "config.json").write_text(json.dumps(table))
    reader = processor_of(relative.reader or relative.base, tmp_path)
    inputs = (relative.inputs or called)(reader, relative.text, pictures)
    expected = theirs(model, inputs)
    weights = {old: tensor.clone() for old, tensor in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    stored = relative.stored or (lambda old, tensor: [(old, tensor)])
    rewrite(tmp_path, table, lambda old, t: stored(replaced(old, relative.rename), t))
    ids, ours = answered(tmp_path, relative.text, pictures)
    assert ids == inputs["input_ids"][0].tolist()
    assert (ours - expected[:-1]).abs().max() < 1e-3


def called(reader, text, pictures):
    """What a processor makes of a prompt."""
    return reader(text=[text], images=pictures, add_special_tokens=False, return_tensors="pt")


def theirs(model, inputs):
    """[tokens, vocabulary] log probabilities by transformers."""
    with torch.inference_mode():
        return model(**inputs).logits[0].log_softmax(-1)


def answered(folder, text, pictures):
    """(ids of the prompt, log probabilities of the vocabulary after each but the last)"""
    load_processor.cache_clear()
    with modulm.LLM(str(folder), max_logprobs=-1, **CPU) as llm:
        prompt = {"prompt": text, "multi_modal_data": {"image": pictures}}
        params = modulm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1)
        (answer,) = llm.generate([prompt], params, use_tqdm=False)
    rows = [[entry[i].logprob for i in range(512)] for entry in answer.prompt_logprobs[1:]]
    return answer.prompt_token_ids, torch.tensor(rows)


@pytest.mark.exhaustive
def test_merged_files_of_colmodernvbert_have_its_vectors(tmp_path):
    name = "ColModernVBertForRetrieval"
    write_family(ImageFamily(driver(name), IDEFICS, colmodernvbert), tmp_path)
    model = getattr(hf, name).from_pretrained(tmp_path, dtype=torch.float32).eval()
    (page,) = images([(56, 42)])
    inputs = processor_of(name, tmp_path).process_images(images=[page])
    with torch.inference_mode():
        expected = model(**inputs).embeddings[0]
    table = json.loads((tmp_path / "config.json").read_text())
    merged = {**table["vlm_config"], "embedding_dim": 24, "architectures": ["ModernVBertModel"]}
    names = (("embedding_proj_layer.", "model.custom_text_proj."), ("vlm.model.", "model."),
             ("vlm.", "model."))  # fmt: skip
    rewrite(tmp_path, merged, lambda old, t: [(replaced(old, names), t)])
    file = tmp_path / "processor_config.json"
    settings = {**json.loads(file.read_text()), "processor_class": "Idefics3Processor"}
    file.write_text(json.dumps(settings))
    text = processor_of("ModernVBertModel", tmp_path).visual_prompt_prefix
    with modulm.LLM(str(tmp_path), **CPU) as llm:
        request = {"prompt": text, "multi_modal_data": {"image": page}}
        (output,) = llm.encode(request, pooling_task="token_embed", use_tqdm=False)
    assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
    assert (torch.from_numpy(output.outputs.data) - expected).abs().max() < 1e-4


@pytest.mark.exhaustive
def test_ultravberts_hidden_states_are_vectors(tmp_path):
    """Of a page and a question; pages have at most as many tiles as the file says."""
    table, name = driver("ColUltraVBertForRetrieval").tiny(), "UltraVBertModel"
    keys = {key: value for key, value in table.items() if key != "architectures"}
    family = ImageFamily(Made(name), IDEFICS, lambda tokenizer: Nothing(), changes=keys)
    write_family(family, tmp_path)
    model = (
        getattr(hf, name)
        .from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )
    weights = {old: tensor.clone() for old, tensor in model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(table))
    sizes = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 28}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**sizes, "max_image_tiles": 2}))
    load_processor.cache_clear()
    (page,), text = images([(56, 28)]), "A <image> of Paris"
    inputs = processor_of("ColUltraVBertForRetrieval", tmp_path)(
        text=[text], images=[page], add_special_tokens=False, return_tensors="pt",
        size={"longest_edge": 56},
    )  # fmt: skip
    inputs.pop("rows", None), inputs.pop("cols", None)
    with torch.inference_mode():
        hidden = model(**inputs).last_hidden_state[0]
    with modulm.LLM(str(tmp_path), **CPU) as llm:
        request = {"prompt": text, "multi_modal_data": {"image": page}}
        (output,) = llm.encode(request, pooling_task="token_embed", use_tqdm=False)
    assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
    expected = torch.nn.functional.normalize(hidden, dim=-1)
    assert (torch.from_numpy(output.outputs.data) - expected).abs().max() < 1e-4


def test_what_published_ocr_models_cannot_be_is_refused():
    for name, wrong in (
        ("DeepseekOCRForCausalLM", {"language_config": None}),
        ("DeepseekOCR2ForCausalLM", {"language_config": {"use_mla": True}}),
        ("Qwen3VLNemotronEmbedModel", {"embed_dim": 24}),
        ("H2OVLChatModel", {"use_msac": True}),
    ):
        table, config = driver(name).tiny(), driver(name).config_type
        with pytest.raises((CheckpointError, UnsupportedError), match=next(iter(wrong))):
            read_config({**table, **wrong}, config, "config.json")
