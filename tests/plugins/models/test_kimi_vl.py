"""Kimi-VL and Kimi K2.5 in files of Moonshot AI's own code, which is not run."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

import modulm
from modulm.errors import CheckpointError, RequestError
from modulm.nn import read_config
from modulm.plugins import manager
from modulm_media import Media
from modulm_media.values import fingerprint
from modulm_quantized import pack_words
from modulm_towers.testing import ImageFamily, films, images, processor_of, write_family

NAME = "Kimi_K25ForConditionalGeneration"
TEXT = "Once <|media_pad|> and <|media_pad|> of"
TOKENS = {
    "image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>",
    "0": "<|media_begin|>", "1": "<|media_content|>", "2": "<|media_end|>",
}  # fmt: skip
#: Of the vision encoder: transformers' words, and those of Kimi-VL.
WORDS = {"pos_emb_height": "init_pos_emb_height", "pos_emb_width": "init_pos_emb_width"}
COLOURS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


class Files:
    """Of a processor, as transformers has them."""

    def save_pretrained(self, folder):
        shared = {"patch_size": 4, "merge_size": 2}
        parts = {
            "image_processor": {**shared, "max_patches": 60},
            "video_processor": {**shared, "max_patches": 36},
        }
        (folder / "processor_config.json").write_text(json.dumps(parts))


def driver():
    return manager.current().load("models", NAME)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    family = ImageFamily(driver(), TOKENS, lambda tokenizer: Files())
    return write_family(family, tmp_path_factory.mktemp("kimi"))


def theirs(folder, target, name):
    """The checkpoint as files of Moonshot's: Kimi-VL's or Kimi K2.5's."""
    shutil.copytree(folder, target)
    table = json.loads((folder / "config.json").read_text())
    vision_table = {WORDS.get(key, key): value for key, value in table["vision_config"].items()}
    for key in ("rope_parameters", "hidden_act", "model_type", "pos_emb_time"):
        vision_table.pop(key)
    settings = {"patch_size": 4, **COLOURS}
    if name == "KimiVLForConditionalGeneration":
        kind, tower = "kimi_vl", {**vision_table, "model_type": "moonvit"}
        settings |= {"in_token_limit": 60, "merge_kernel_size": [2, 2], "pad_input": True}
        projector = {"mm_projector.proj.0": "multi_modal_projector.linear_1",
                     "mm_projector.proj.2": "multi_modal_projector.linear_2",
                     "model.mm_projector": "multi_modal_projector"}  # fmt: skip
    else:
        kind, sizes = "kimi_k25", ("hidden_size", "intermediate_size", "num_hidden_layers",
                                   "num_attention_heads")  # fmt: skip
        tower = {f"vt_{key}" if key in sizes else key: value for key, value in vision_table.items()}
        tower |= {"mm_hidden_size": vision_table["hidden_size"], "projector_ln_eps": 1e-5,
                  "init_pos_emb_time": 4, "merge_type": "sd2_tpool"}  # fmt: skip
        limits = {"in_patch_limit": 60, "in_patch_limit_each_frame": 36, "merge_kernel_size": 2}
        settings = {"media_proc_cfg": {**settings, **limits, "temporal_merge_kernel_size": 4}}
        projector = {"model.mm_projector": "mm_projector"}
    keys = {"architectures": [name], "model_type": kind, "media_placeholder_token_id": 480}
    text = {
        **table["text_config"],
        "model_type": "kimi_k2" if kind == "kimi_k25" else "deepseek_v3",
    }
    written = {**keys, "text_config": text, "vision_config": tower, "tie_word_embeddings": False}
    (target / "config.json").write_text(json.dumps(written))
    (target / "processor_config.json").unlink()
    (target / "preprocessor_config.json").write_text(json.dumps(settings))
    projector |= {"vision_tower.encoder.patch_embed": "vision_tower.patch_embed",
                  "language_model.model.blocks": "language_model.model.layers"}  # fmt: skip
    weights = {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        for old, new in projector.items():
            key = re.sub(rf"^{re.escape(old)}\b", new, key)
        weights[key] = tensor
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture(scope="module")
def expected(folder):
    """Log probabilities of what follows the text with its images, by transformers."""
    reference = getattr(hf, NAME).from_pretrained(folder, attn_implementation="eager").eval()
    processor = processor_of(NAME, folder)
    inputs = processor(text=[TEXT], images=pictures(), return_tensors="pt")
    # Its counts are right for images.
    with torch.inference_mode():
        return inputs["input_ids"][0].tolist(), reference(**inputs).logits[0, -1].log_softmax(-1)


def pictures():
    return images(((56, 42), (30, 31)))


@pytest.mark.parametrize(
    "name", ["KimiVLForConditionalGeneration", "KimiK25ForConditionalGeneration"]
)
def test_files_of_moonshot_s_own(folder, expected, tmp_path, name):
    copy, (ids, logprobs) = theirs(folder, tmp_path / "theirs", name), expected
    assert (logprobs_of(copy, ids) - logprobs).abs().max() < 1e-3


def logprobs_of(folder, ids=None):
    """Log probabilities of what follows the text with its images; ids: what it is to become."""
    params = modulm.SamplingParams(max_tokens=1, temperature=0, logprobs=-1)
    with modulm.LLM(str(folder), device="cpu", dtype="float32", max_logprobs=-1) as llm:
        prompt = {"prompt": TEXT, "multi_modal_data": {"image": pictures()}}
        (answer,) = llm.generate([prompt], params, use_tqdm=False)
    assert ids is None or answer.prompt_token_ids == ids
    (entry,) = answer.outputs[0].logprobs
    return torch.tensor([entry[i].logprob for i in range(512)])


def test_limits_of_moonshot_s_files_are_those_of_videos(folder, tmp_path):
    copy = theirs(folder, tmp_path / "theirs", "KimiK25ForConditionalGeneration")
    one, other = (processor_of(NAME, path) for path in (folder, copy))
    (film,) = films(((6, 50, 40),))
    arguments = {
        "text": [TOKENS["video_token"]],
        "videos": [film.frames],
        "do_sample_frames": False,
    }
    outputs = [part(**arguments, video_metadata=[film.metadata()]) for part in (one, other)]
    assert outputs[0]["video_grid_thw"].tolist() == [[4, 6, 8], [2, 6, 8]]
    assert torch.equal(*(each["pixel_values_videos"] for each in outputs))
    assert np.array_equal(outputs[0]["input_ids"], outputs[1]["input_ids"])


def test_images_that_would_be_cut_are_refused(folder, tmp_path):
    copy = theirs(folder, tmp_path / "theirs", "KimiVLForConditionalGeneration")
    file = copy / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pad_input": False}))
    with pytest.raises(CheckpointError, match="pad_input"):
        processor_of(NAME, copy)


def test_other_encoders_are_refused():
    tiny = driver().tiny()
    changed = {**tiny, "vision_config": {**tiny["vision_config"], "merge_type": "other"}}
    with pytest.raises(CheckpointError, match="merge_type"):
        read_config(changed, driver().config_type)


def test_a_video_s_token_may_lie_beyond_the_vocabulary(folder):
    family = manager.current().load("media_families", NAME)
    processor = processor_of(NAME, folder)
    (film,) = films(((4, 44, 30),))
    media = Media("video", film, hash=fingerprint("film", film.frames))
    config = json.loads((folder / "config.json").read_text())
    inside = family(processor, config).process(media, {})
    beyond = family(processor, {**config, "text_config": {"vocab_size": 481}}).process(media, {})
    assert set(inside.tokens[inside.embedded]) == {481}
    assert set(beyond.tokens[beyond.embedded]) == {480}
    assert np.array_equal(inside.embedded, beyond.embedded)
    assert np.array_equal(inside.tokens[~inside.embedded], beyond.tokens[~beyond.embedded])


def test_a_tokenizer_without_a_token_for_videos_takes_none(folder, monkeypatch):
    processor = processor_of(NAME, folder)
    monkeypatch.setattr(processor, "video_token_id", None)
    (film,) = films(((4, 44, 30),))
    family = manager.current().load("media_families", NAME)(processor, {"video_token_id": 481})
    with pytest.raises(RequestError, match="has no token"):
        family.process(Media("video", film, hash=b""), {})


def test_experts_in_four_bits_and_an_encoder_as_it_is(folder, tmp_path):
    """Kimi K2.5's files say of the text model alone how it is quantized."""
    group, quantized = 16, theirs(folder, tmp_path / "four", "KimiK25ForConditionalGeneration")
    rounded = shutil.copytree(quantized, tmp_path / "rounded")
    packed, plain = {}, {}
    for name, tensor in load_file(quantized / "model.safetensors").items():
        packed[name] = plain[name] = tensor
        if ".experts." not in name:
            continue
        rows = tensor.unflatten(1, (-1, group))
        scales = rows.abs().amax(-1) / 7
        codes = (rows / scales[..., None]).round()
        plain[name] = (codes * scales[..., None]).flatten(1)
        del packed[name]
        packed_words = pack_words((codes + 8).to(torch.uint8).flatten(1), 4, 1)
        shape = torch.tensor(tensor.shape)
        parts = {"packed": packed_words, "scale": scales, "shape": shape}
        packed |= {f"{name}_{part}": tensors for part, tensors in parts.items()}
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    targets = {"targets": ["Linear"], "weights": {**weights, "symmetric": True}}
    table = json.loads((quantized / "config.json").read_text())
    table["text_config"]["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": targets},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
                   r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
    }  # fmt: skip
    (quantized / "config.json").write_text(json.dumps(table))
    for path, tensors in ((quantized, packed), (rounded, plain)):
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    one, other = logprobs_of(quantized), logprobs_of(rounded)
    assert (one - other).abs().max() < 1e-2
    assert (other - logprobs_of(folder)).abs().max() > 0.05
