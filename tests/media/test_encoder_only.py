"""Engines that encode media and load no text model."""

from __future__ import annotations

import numpy as np
import pytest
from samples import parametrize_sample
from tests.plugins.models.test_images import FAMILIES, driver

import modulm
from modulm.errors import ConfigError, RequestError
from modulm.testing.checkpoints import make_tiny
from modulm_media.step.runner import MediaRunner
from modulm_towers.testing import ImageFamily, images, write_family

SETTINGS = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 256}


#: One row of patches; tokens between those of an image; columns for deeper layers.
@parametrize_sample(
    "architecture",
    [
        "LlavaForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
    ],
    every=3,
)
def test_media_are_answered_with_their_embeddings(architecture, tmp_path, monkeypatch):
    tokens, processor, more = FAMILIES[architecture]
    family = ImageFamily(driver(architecture), tokens, processor, **more)
    write_family(family, tmp_path)
    mark = family.mark or tokens["image_token"]
    text, pictures = f"A {mark} or {mark} here", images(family.sizes[:2])
    prompt = {"prompt": text, "multi_modal_data": {"image": pictures}}
    outputs, begin = {}, MediaRunner.begin

    def noted(self, plan, value):
        done = begin(self, plan, value)
        if value is not None and value.items:
            items = [self._rows[row].media[index] for row, index in value.items]
            outputs["all"] = [self._outputs[item.hash].numpy() for item in items]
        return done

    monkeypatch.setattr(MediaRunner, "begin", noted)
    with modulm.LLM(str(tmp_path), **SETTINGS) as llm:
        llm.generate(prompt, modulm.SamplingParams(max_tokens=1), use_tqdm=False)
        whole, expected = llm.info.description.weight_bytes, np.concatenate(outputs["all"])
    with modulm.LLM(str(tmp_path), **SETTINGS, mm_encoder_only=True) as llm:
        assert llm.info.tasks == ("token_embed",)
        assert not llm.info.cache_tokens
        assert llm.info.description.weight_bytes < whole
        encoded, none = llm.encode(
            [prompt, "No image."], pooling_task="token_embed", use_tqdm=False
        )
        np.testing.assert_array_equal(np.asarray(encoded.outputs.data), expected)
        assert len(none.outputs.data) == 0
        with pytest.raises(RequestError, match="only token_embed"):
            llm.generate(prompt, modulm.SamplingParams(max_tokens=1), use_tqdm=False)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("ColQwen2ForRetrieval", "is not a generative model"),
        ("LlamaForCausalLM", "no encoder of media"),
    ],
)
def test_other_models_do_not_encode_only(architecture, message, tmp_path):
    make_tiny(tmp_path, architecture)
    with pytest.raises(ConfigError, match=message):
        modulm.LLM(str(tmp_path), **SETTINGS, mm_encoder_only=True)
