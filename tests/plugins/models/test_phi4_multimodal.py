"""Phi-4 multimodal, beyond the kits: sounds beside images, other shapes of its encoders."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers as hf

import modulm
from modulm.contracts.media import MediaItem
from modulm.testing.checkpoints import make_tiny
from modulm.testing.session import Session
from modulm_phi.multimodal import Phi4MultimodalForCausalLM
from modulm_phi.tiles import Phi4MultimodalImageProcessorPil
from modulm_towers.testing import SoundFamily, images, processor_of, sounds, write_family

NAME = "Phi4MultimodalForCausalLM"
TOKENS = {"image_token": "<|image|>", "audio_token": "<|audio|>"}
SQUARE = {"height": 28, "width": 28}


class Files:
    """The processor's, for images of 28 pixels and 16 mels to a frame."""

    def save_pretrained(self, folder):
        Phi4MultimodalImageProcessorPil(size=SQUARE, patch_size=7, dynamic_hd=4).save_pretrained(
            folder
        )
        sound = {"feature_extractor_type": "Phi4MultimodalFeatureExtractor", "feature_size": 16}
        table = {"processor_class": "Phi4MultimodalProcessor", "audio_processor": sound}
        (folder / "processor_config.json").write_text(json.dumps(table))


def test_a_sound_beside_an_image_is_another_than_one_alone(tmp_path):
    """It is projected otherwise; neither is taken for the other where prompts begin alike."""
    family = SoundFamily(Phi4MultimodalForCausalLM, TOKENS, lambda tokenizer: Files())
    folder = write_family(family, tmp_path)
    theirs = getattr(hf, NAME).from_pretrained(folder, attn_implementation="eager").eval()
    reader = processor_of(NAME, folder)
    (picture,), (sound,) = images([(40, 44)]), sounds([1.6])
    prompts = {"The <|audio|> is": [], "The <|audio|> of <|image|> is": [picture]}
    settings = {"device": "cpu", "dtype": "float32", "max_logprobs": -1, "block_size": 16}
    with modulm.LLM(str(folder), **settings) as llm:
        for text, pictures in [*prompts.items()] * 2:
            media = {"images": pictures} if pictures else {}
            inputs = reader(
                text=[text], audio=[sound], add_special_tokens=False, return_tensors="pt", **media
            )
            with torch.inference_mode():
                expected = theirs(**inputs).logits[0, -1].log_softmax(-1)
            data = {"audio": (sound, 16000), **({"image": pictures} if pictures else {})}
            params = modulm.SamplingParams(max_tokens=1, temperature=0, logprobs=-1)
            (answer,) = llm.generate([{"prompt": text, "multi_modal_data": data}], params)
            assert answer.prompt_token_ids == inputs["input_ids"][0].tolist()
            (entry,) = answer.outputs[0].logprobs
            logprobs = torch.tensor([entry[i].logprob for i in range(512)])
            assert (logprobs - expected).abs().max() < 1e-3
        assert answer.num_cached_tokens >= 16


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """(our model, transformers') with an odd number of patches to a side, distances alike in both
    directions, and the numbers of a trained norm.
    """
    tiny = Phi4MultimodalForCausalLM.tiny()
    vision = {**tiny["vision_config"], "image_size": 35, "crop_size": 35, "feature_layer": 1}
    audio = {**tiny["audio_config"], "bias_symmetric": True, "bias_max_distance": 600}
    audio |= {"depthwise_multiplier": 2, "kernel_size": 5, "time_reduction": 4}
    folder = make_tiny(
        tmp_path_factory.mktemp("phi"), NAME, vision_config=vision, audio_config=audio
    )
    theirs = getattr(hf, NAME).from_pretrained(folder, attn_implementation="eager").eval()
    norm = theirs.model.embed_tokens_extend.audio_embed.encoder.encoder_embedding
    norm.global_mean.normal_()
    norm.global_invstd.uniform_(0.5, 2)
    theirs.save_pretrained(folder)
    return Session(folder, device="cpu", dtype="float32", rows=1).model, theirs


@torch.inference_mode()
@pytest.mark.parametrize(("width", "height"), [(35, 35), (70, 40), (33, 90), (150, 50)])
def test_an_odd_number_of_patches_to_a_side(other, width, height):
    ours, theirs = other
    outputs = Phi4MultimodalImageProcessorPil(
        size={"height": 35, "width": 35}, patch_size=7, dynamic_hd=4
    )(images([(width, height)]), return_tensors="np")
    (count,) = outputs.pop("num_img_tokens")
    (embeddings,) = ours.encode([MediaItem("image", b"", 0, int(count), dict(outputs))])
    inputs = {name: torch.from_numpy(tensor) for name, tensor in outputs.items()}
    expected = theirs.model.embed_tokens_extend.image_embed(
        torch.full((1, count), 480), torch.zeros(1, count, 64), **inputs
    )
    torch.testing.assert_close(embeddings, expected[0], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("frames", [3, 2000, 2021])
@pytest.mark.parametrize("mode", ["speech", "vision"])
def test_sounds_of_any_length(other, frames, mode):
    """500 frames of the encoder see each other; the rest of the last 500 are zeros."""
    ours, theirs = other
    mel = np.random.default_rng(0).normal(0, 1, (1, frames, 16)).astype(np.float32)
    count = -(-frames // 4)
    tensors = {"audio_input_features": mel, "beside_images": np.array(mode == "vision")}
    (embeddings,) = ours.encode([MediaItem("audio", b"", 0, count, tensors)])
    expected = theirs.model.embed_tokens_extend.audio_embed(
        torch.full((1, count), 481), torch.zeros(1, count, 64), torch.from_numpy(mel), [count],
        audio_projection_mode=mode,
    )  # fmt: skip
    torch.testing.assert_close(embeddings, expected[0], rtol=1e-4, atol=1e-4)
