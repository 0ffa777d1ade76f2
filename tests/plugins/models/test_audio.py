"""Every family that hears, with a real processor, against transformers: one row each."""

from __future__ import annotations

import base64
import importlib
import json

import attrs
import numpy as np
import pytest
import soundfile
import soxr
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from samples import parametrize_sample
from tests.plugins.models.test_assembled_sounds import ASSEMBLED
from tests.plugins.models.test_images import (
    GEMMA4,
    NEMOTRON,
    STATES,
    Gemma4Unified,
    NemotronOmni,
    Unscaled,
)

import modulm
from modulm.errors import CheckpointError, RequestError
from modulm.nn import read_config
from modulm.plugins import manager
from modulm_towers.testing import (
    SoundFamily,
    check_images,
    images,
    processor_of,
    sounds,
    write_family,
)
from modulm_transformers.media_family import HEARING


def driver(architecture):
    return manager.current().load("models", architecture)


def mel(seconds=1, bins=16):
    return hf.WhisperFeatureExtractor(feature_size=bins, chunk_length=seconds)


def qwen2_audio(tokenizer):
    return hf.Qwen2AudioProcessor(mel(), tokenizer)


def flamingo(tokenizer):
    return hf.AudioFlamingo3Processor(mel(), tokenizer)


def apart(processor, text, sounds):
    """Inputs of a processor that takes one sound for each text, for texts with several."""
    tokenizer = processor.tokenizer
    first, *others = text.split(processor.audio_token)
    ids, processed = tokenizer(first, add_special_tokens=False)["input_ids"], []
    for sound, rest in zip(sounds, others, strict=True):
        processed.append(
            processor(
                text=[processor.audio_token],
                audio=[sound],
                add_special_tokens=False,
                return_tensors="pt",
                sampling_rate=16000,
            )
        )
        ids += np.asarray(processed[-1].pop("input_ids")[0]).tolist()
        ids += tokenizer(rest, add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([ids])
    tensors = {}
    for name in set(processed[0] if processed else ()) - {"attention_mask"}:
        arrays = [torch.as_tensor(one[name]) for one in processed]
        longest = max(one.shape[-1] for one in arrays)
        pads = [(one, (0, longest - one.shape[-1])) for one in arrays]
        tensors[name] = torch.cat([torch.nn.functional.pad(*pad) for pad in pads])
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **tensors}


class Omni:
    """The files of a processor that transformers makes only where there is torchvision: the parts
    for images and for sound, in one file as Qwen has them.
    """

    def __init__(self, kind, image):
        self.kind, self.image = kind, image

    def save_pretrained(self, folder):
        self.image.save_pretrained(folder)
        file = folder / "preprocessor_config.json"
        file.write_text(json.dumps({**mel().to_dict(), **json.loads(file.read_text())}))
        (folder / "processor_config.json").write_text(json.dumps({"processor_class": self.kind}))


def omni(kind):
    def make(tokenizer):
        image = hf.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil(
            patch_size=4, merge_size=2, temporal_patch_size=2,
            size={"shortest_edge": 16 * 16, "longest_edge": 40 * 40},
        )  # fmt: skip
        return Omni(kind, image)

    return make


def voxtral(tokenizer):
    return hf.VoxtralProcessor(mel(), tokenizer)


def voxtral_inputs(processor, text, sounds):
    """What transformers' processor makes of sounds; its texts are mistral-common's only."""
    inputs = {}
    if sounds:
        inputs["input_features"] = processor._retrieve_input_features(
            sounds, 40, sampling_rate=16000, padding=True, truncation=False,
            pad_to_multiple_of=6400, return_tensors="pt",
        )  # fmt: skip
    for sound in sounds:
        count = 5 * -(-len(sound) // 6400)
        text = text.replace("[AUDIO]", "<audio>" * count, 1)
    ids = processor.tokenizer(text.replace("<audio>", "[AUDIO]"), add_special_tokens=False)
    tokens = torch.tensor([ids["input_ids"]])
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **inputs}


class Granite:
    """The files of a processor that needs torchaudio, with 8 mels to a frame."""

    def save_pretrained(self, folder):
        extractor = {
            "feature_extractor_type": "GraniteSpeechFeatureExtractor",
            "melspec_kwargs": {"n_mels": 8},
            "projector_window_size": 6,
            "projector_downsample_rate": 3,
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
        table = {"processor_class": "GraniteSpeechProcessor", "audio_token": "<|audio|>"}
        (folder / "processor_config.json").write_text(json.dumps(table))


def music(tokenizer):
    return hf.MusicFlamingoProcessor(mel(), tokenizer)


def vibevoice(tokenizer):
    extractor = hf.VibeVoiceAcousticTokenizerFeatureExtractor(sampling_rate=16000)
    return hf.VibeVoiceAsrProcessor(extractor, tokenizer)


class FunAsr:
    """The files of a processor that needs torchaudio, with 8 mels to a frame."""

    def save_pretrained(self, folder):
        table = {"processor_class": "FunAsrNanoProcessor", "feature_extractor": {"feature_size": 8}}
        (folder / "processor_config.json").write_text(json.dumps(table))


def fun_asr_inputs(processor, text, sounds):
    """What our own frames become in transformers' processor."""
    frames = [torch.from_numpy(processor.inputs(sound)) for sound in sounds]
    first, *others = text.split("<|object_ref_start|>")
    pairs = zip(frames, others, strict=True)
    text = first + "".join("<|object_ref_start|>" * len(one) + rest for one, rest in pairs)
    ids = torch.tensor([processor.tokenizer(text, add_special_tokens=False)["input_ids"]])
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if frames:
        pad = torch.nn.utils.rnn.pad_sequence
        inputs["input_features"] = pad(frames, batch_first=True)
        ones = [torch.ones(len(one), dtype=torch.long) for one in frames]
        inputs["input_features_mask"] = pad(ones, batch_first=True)
    return inputs


def glm_asr(tokenizer):
    return hf.GlmAsrProcessor(mel(2), tokenizer, audio_token="<|pad|>")


def moss(tokenizer):
    extractor = hf.MossTranscribeDiarizeFeatureExtractor(feature_size=16, chunk_length=2)
    return hf.MossTranscribeDiarizeProcessor(extractor, tokenizer)


def qwen3_asr(tokenizer):
    extractor = importlib.import_module(
        "transformers.models.qwen3_asr.feature_extraction_qwen3_asr"
    ).Qwen3ASRFeatureExtractor(feature_size=16, n_window=50)
    return hf.Qwen3ASRProcessor(extractor, tokenizer)


class Phi:
    """The files of a processor whose part for images needs torchvision, with 16 mels to a frame."""

    def save_pretrained(self, folder):
        image = {
            "image_processor_type": "Phi4MultimodalImageProcessor", "patch_size": 7,
            "size": {"height": 28, "width": 28}, "dynamic_hd": 4,
        }  # fmt: skip
        (folder / "preprocessor_config.json").write_text(json.dumps(image))
        sound = {"feature_extractor_type": "Phi4MultimodalFeatureExtractor", "feature_size": 16}
        table = {"processor_class": "Phi4MultimodalProcessor", "audio_processor": sound}
        (folder / "processor_config.json").write_text(json.dumps(table))


AUDIO = {"audio_token": "<|AUDIO|>"}
OMNI = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_token": "<|audio_pad|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
#: Architecture -> its special tokens, what makes its processor, and the rest of `SoundFamily`.
FAMILIES = {
    "Qwen2AudioForConditionalGeneration": (AUDIO, qwen2_audio, {}),
    "AudioFlamingo3ForConditionalGeneration": (
        {"audio_token": "<sound>"}, flamingo, {"seconds": (0.32, 1.2, 0.45), "inputs": apart},
    ),
    "Qwen2_5OmniThinkerForConditionalGeneration": (OMNI, omni("Qwen2_5OmniProcessor"), {}),
    "Qwen3OmniMoeThinkerForConditionalGeneration": (
        OMNI, omni("Qwen3OmniMoeProcessor"), {"seconds": (1.2, 1.05, 0.45), "inputs": apart},
    ),
    "VoxtralForConditionalGeneration": (
        {"audio_token": "[AUDIO]"}, voxtral, {"mark": "[AUDIO]", "inputs": voxtral_inputs}
    ),
    # Sounds of one prompt have one length: transformers hears the silence that fills a batch.
    "Phi4MultimodalForCausalLM": (
        {"image_token": "<|image|>", "audio_token": "<|audio|>"}, lambda tokenizer: Phi(),
        {"seconds": (0.4, 0.4, 0.25)},
    ),
    "GraniteSpeechForConditionalGeneration": (
        {"audio_token": "<|audio|>"}, lambda tokenizer: Granite(), {"seconds": (0.4, 0.4, 0.25)}
    ),
    "GraniteSpeechPlusForConditionalGeneration": (
        {"audio_token": "<|audio|>"}, lambda tokenizer: Granite(), {"seconds": (0.4, 0.4, 0.25)}
    ),
    "Gemma4UnifiedForConditionalGeneration": (
        GEMMA4, lambda tokenizer: Gemma4Unified(), {"seconds": (0.4, 0.4, 0.25)}
    ),
    "MossTranscribeDiarizeForConditionalGeneration": (
        {"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>",
         "audio_eos_token": "<|audio_end|>"},
        moss, {"seconds": (0.32, 2.3, 0.45), "inputs": apart},
    ),
    "MusicFlamingoForConditionalGeneration": (
        {"audio_token": "<sound>", "audio_bos_token": "<|sound_bos|>",
         "audio_eos_token": "<|sound_eos|>"},
        music, {"seconds": (0.32, 2.2, 0.45), "inputs": apart},
    ),
    # One of the sounds is encoded in several pieces.
    "VibeVoiceAsrForConditionalGeneration": (
        {"audio_token": "<|box_start|>", "audio_bos_token": "<|object_ref_start|>",
         "audio_eos_token": "<|object_ref_end|>"},
        vibevoice, {"seconds": (0.3, 1.1, 0.5), "inputs": apart},
    ),
    "FunAsrNanoForConditionalGeneration": (
        {"audio_token": "<|object_ref_start|>"}, lambda tokenizer: FunAsr(),
        {"mark": "<|object_ref_start|>", "inputs": fun_asr_inputs},
    ),
    "GlmAsrForConditionalGeneration": (
        {"audio_token": "<|pad|>"}, glm_asr, {"seconds": (0.32, 2.3, 0.45), "inputs": apart},
    ),
    "Qwen3ASRForConditionalGeneration": (
        {"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>",
         "audio_eos_token": "<|audio_end|>"},
        qwen3_asr, {"seconds": (0.32, 1.2, 0.45), "inputs": apart},
    ),
    # 0.4 s are a multiple of 8 frames, after which one more is encoded, masked.
    "NemotronH_Omni_Reasoning_V3": (
        NEMOTRON, lambda tokenizer: NemotronOmni(), {"seconds": (0.4, 0.4, 0.25), **STATES}
    ),
}  # fmt: skip


class UnscaledSounds(SoundFamily):
    """Files have no factors of branches."""

    rewrite = Unscaled.rewrite


#: Those whose checkpoints are changed.
OTHERS = {"NemotronH_Omni_Reasoning_V3": UnscaledSounds}
#: Encoders that emit tokens without a decoder, in test_parakeet.py.
EMITTING = {"ParakeetForCTC", "ParakeetForRNNT", "ParakeetForTDT"}
#: Further names of checkpoints of these.
ALIASES = {
    *ASSEMBLED,
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Super_Omni_Reasoning_V3",
    "Phi4MMForCausalLM",
    "Qwen3ASRRealtimeGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniModel",
    "Qwen3OmniMoeForConditionalGeneration",
}


def test_every_model_that_hears_is_in_the_table():
    """And says in both places the same of what it takes."""
    plugins = manager.current()
    names = [declared.name for declared in plugins.names("media_families")]
    families = {name: plugins.load("media_families", name) for name in names}
    # Encoders beside decoders have a table of their own, in test_encoder_decoder.py.
    kinds = {name: family.kinds for name, family in families.items() if not family.crosses}
    kinds = {name: taken for name, taken in kinds.items() if name not in EMITTING}
    assert {name for name in kinds if "audio" in kinds[name]} == {*FAMILIES, *ALIASES, HEARING}
    assert all(kinds[name] == plugins.load("models", name).media for name in (*FAMILIES, *ALIASES))


@parametrize_sample("architecture", FAMILIES, every=8)
def test_nonsense_in_the_encoders_numbers_is_refused(architecture):
    config = driver(architecture).config_type
    table = driver(architecture).tiny()
    read = {field.name for field in attrs.fields(config.audio_type)}
    read |= set(getattr(config.audio_type, "ALIASES", ()))
    audio = table[config.audio_key]
    numbers = [key for key, value in audio.items() if type(value) is int and key in read]
    assert numbers
    for key in numbers:
        for wrong in ("word", float("nan"), [1], -5):
            with pytest.raises(CheckpointError, match="config.json"):
                read_config({**table, config.audio_key: {**audio, key: wrong}}, config)


@parametrize_sample("architecture", FAMILIES, every=8)
def test_sounds_are_heard_as_by_transformers(architecture, tmp_path, pytestconfig):
    tokens, processor, more = FAMILIES[architecture]
    kind = OTHERS.get(architecture, SoundFamily)
    family = kind(driver(architecture), tokens, processor, **more)
    check_images(family, tmp_path, separately=pytestconfig.getoption("everything"))


@parametrize_sample(
    ("architecture", "whole"),
    [
        ("Qwen2_5OmniThinkerForConditionalGeneration", "Qwen2_5OmniModel"),
        (
            "Qwen3OmniMoeThinkerForConditionalGeneration",
            "Qwen3OmniMoeForConditionalGeneration",
        ),
    ],
    every=2,
)
def test_images_and_sounds_of_one_prompt_in_the_whole_model(architecture, whole, tmp_path):
    """As its files are published: with what speaks, which is left out."""
    tokens, processor, _ = FAMILIES[architecture]
    folder = write_family(SoundFamily(driver(architecture), tokens, processor), tmp_path)
    theirs = getattr(hf, architecture).from_pretrained(folder, attn_implementation="eager").eval()
    pictures, heard = images(((44, 44), (30, 60))), sounds((1.2,))
    text = (
        "The <|vision_start|><|image_pad|><|vision_end|> of <|audio_start|><|audio_pad|>"
        "<|audio_end|> and <|vision_start|><|image_pad|><|vision_end|> is"
    )
    inputs = processor_of(architecture, folder)(
        text=[text], images=pictures, audio=heard, add_special_tokens=False, return_tensors="pt"
    )
    with torch.inference_mode():
        expected = theirs(**inputs).logits[0].log_softmax(-1)

    config = json.loads((folder / "config.json").read_text())
    table = {"architectures": [whole], "model_type": "omni", "thinker_config": config}
    (folder / "config.json").write_text(json.dumps(table))
    weights = load_file(folder / "model.safetensors")
    prefixed = {f"thinker.{name}": tensor for name, tensor in weights.items()}
    save_file({**prefixed, "talker.codec_head.weight": torch.ones(4)}, folder / "model.safetensors")
    settings = {"device": "cpu", "dtype": "float32", "max_logprobs": -1}
    with modulm.LLM(str(folder), **settings) as llm:
        data = {"image": pictures, "audio": heard}
        params = modulm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1)
        (answer,) = llm.generate([{"prompt": text, "multi_modal_data": data}], params)
    assert answer.prompt_token_ids == inputs["input_ids"][0].tolist()
    logprobs = torch.tensor(
        [[entry[i].logprob for i in range(512)] for entry in answer.prompt_logprobs[1:]]
    )
    assert (logprobs - expected[:-1]).abs().max() < 1e-3


def test_conversations_with_sound(tmp_path):
    """In every form that parts of messages have, resampled where it must be."""
    architecture = "Qwen2AudioForConditionalGeneration"
    tokens, processor, _ = FAMILIES[architecture]
    folder = write_family(SoundFamily(driver(architecture), tokens, processor), tmp_path)
    (sound,) = sounds((0.3,))
    file = folder / "sound.wav"
    soundfile.write(file, sound, 16000, subtype="FLOAT")
    data = base64.b64encode(file.read_bytes()).decode()
    twice = soxr.resample(sound, 16000, 32000)
    parts = [
        {"type": "audio", "audio": sound},
        {"type": "audio", "audio": (sound, 16000)},
        {"type": "audio", "audio": torch.from_numpy(sound)},
        {"type": "audio", "audio": str(file)},
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
        {"type": "audio", "audio": (twice, 32000)},
    ]
    talks = [
        [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]
        for part in parts
    ]
    with modulm.LLM(str(folder), device="cpu", dtype="float32") as llm:
        params = modulm.SamplingParams(max_tokens=3, temperature=0, logprobs=1)
        first, *others = llm.chat(talks, params, use_tqdm=False)
        assert first.prompt_token_ids.count(480) == 7
        for other in others:
            assert other.prompt_token_ids == first.prompt_token_ids
            pairs = zip(other.outputs[0].logprobs, first.outputs[0].logprobs, strict=True)
            for one, known in pairs:
                for token, entry in known.items():
                    assert one[token].logprob == pytest.approx(entry.logprob, abs=1e-2)
        with pytest.raises(RequestError, match="does not support image"):
            llm.chat([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}], params)
