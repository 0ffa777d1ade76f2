"""Every family that reads images, with a real processor, against transformers: one row each."""

from __future__ import annotations

import importlib
import json
from typing import get_type_hints

import attrs
import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from samples import parametrize_sample

import modulm
from modulm.errors import CheckpointError, ConfigError, RequestError
from modulm.nn import read_config
from modulm.plugins import manager
from modulm_media.grids import retained
from modulm_phi.tiles import Phi4MultimodalImageProcessorPil
from modulm_towers import tiny_text
from modulm_towers.testing import (
    ImageFamily,
    Prompt,
    check_images,
    films,
    images,
    processor_of,
    sounds,
    write_family,
)


def driver(architecture):
    return manager.current().load("models", architecture)


def clip(tokenizer, kind="LlavaProcessor", **settings):
    pixels = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    image = hf.models.clip.image_processing_pil_clip.CLIPImageProcessorPil(**pixels)
    return getattr(hf, kind)(
        image, tokenizer, patch_size=7, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, **settings,
    )  # fmt: skip


def llava_next(tokenizer):
    pixels = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    image = hf.models.llava_next.image_processing_pil_llava_next.LlavaNextImageProcessorPil(
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]], **pixels
    )
    return hf.LlavaNextProcessor(
        image, tokenizer, patch_size=7, vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )  # fmt: skip


class Files:
    """The files of a processor that transformers makes only where there is torchvision, as for
    video: the part for images, the settings of that for video, and the name of the class.
    """

    def __init__(self, kind, image, video=None, **settings):
        self.image, self.table = image, {"processor_class": kind, **settings}
        if video is not None:
            self.table["video_processor"] = video

    def save_pretrained(self, folder):
        self.image.save_pretrained(folder)
        (folder / "processor_config.json").write_text(json.dumps(self.table))
        if "Omni" in self.table["processor_class"]:
            file = folder / "preprocessor_config.json"
            heard = hf.WhisperFeatureExtractor(feature_size=16, chunk_length=1).to_dict()
            file.write_text(json.dumps({**heard, **json.loads(file.read_text())}))


def qwen(kind):
    def make(tokenizer):
        image = hf.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil(
            patch_size=4, merge_size=2, temporal_patch_size=2,
            size={"shortest_edge": 16 * 16, "longest_edge": 40 * 40},
        )  # fmt: skip
        return Files(kind, image)

    return make


def pil(module, name, **settings):
    """An image processor that needs no torchvision."""
    module_ = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    return getattr(module_, name)(**settings)


def glm(kind):
    def make(tokenizer):
        image = pil(kind, f"{kind.capitalize()}ImageProcessorPil".replace("46v", "46V"),
                    patch_size=4, merge_size=2, temporal_patch_size=2,
                    size={"shortest_edge": 16 * 16 * 2, "longest_edge": 40 * 40 * 2})  # fmt: skip
        return Files(f"{kind.capitalize()}Processor".replace("46v", "46V"), image)

    return make


def next_video(tokenizer):
    pixels = {"size": {"shortest_edge": 28}, "crop_size": SQUARE}
    image = pil("llava_next", "LlavaNextImageProcessorPil",
                image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]], **pixels)  # fmt: skip
    video = {"video_processor_type": "LlavaNextVideoVideoProcessor", **pixels}
    return Files(
        "LlavaNextVideoProcessor", image, video, patch_size=7,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip


def siglip_next(tokenizer):
    pixels = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    image = pil("llava_next", "LlavaNextImageProcessorPil",
                image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]], **pixels)  # fmt: skip
    return hf.LlavaNextProcessor(
        image, tokenizer, patch_size=7, vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
    )  # fmt: skip


def pixtral(merge):
    def make(tokenizer):
        image = pil("pixtral", "PixtralImageProcessorPil", patch_size=4 * merge,
                    size={"longest_edge": 32})  # fmt: skip
        return Files("PixtralProcessor", image, patch_size=4, spatial_merge_size=merge)

    return make


def gemma(tokenizer):
    image = pil("gemma3", "Gemma3ImageProcessorPil", size={"height": 56, "width": 56})
    return hf.Gemma3Processor(image, tokenizer, image_seq_length=16)


def aya(tokenizer):
    image = pil("got_ocr2", "GotOcr2ImageProcessorPil", size={"height": 28, "width": 28},
                crop_to_patches=True, max_patches=4)  # fmt: skip
    return hf.AyaVisionProcessor(image, tokenizer, patch_size=7, img_size=28, downsample_factor=2)


def idefics(module, kind):
    sizes = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}

    def make(tokenizer):
        if kind == "Idefics3":
            image = pil("idefics3", "Idefics3ImageProcessorPil", **sizes)
            return hf.Idefics3Processor(image, tokenizer, image_seq_len=4)
        image = pil("smolvlm", "SmolVLMImageProcessorPil", **sizes)
        video = {"video_processor_type": "SmolVLMVideoProcessor", "size": {"longest_edge": 56},
                 "max_image_size": {"longest_edge": 28}}  # fmt: skip
        return Files("SmolVLMProcessor", image, video, image_seq_len=4)

    return make


def internvl(tokenizer):
    image = pil("got_ocr2", "GotOcr2ImageProcessorPil", size={"height": 28, "width": 28},
                crop_to_patches=True, min_patches=1, max_patches=4)  # fmt: skip
    video = {"video_processor_type": "InternVLVideoProcessor", "size": SQUARE}
    return Files("InternVLProcessor", image, video, image_seq_length=4)


def qianfan(tokenizer):
    image = pil("got_ocr2", "GotOcr2ImageProcessorPil", size={"height": 28, "width": 28},
                crop_to_patches=True, min_patches=1, max_patches=4)  # fmt: skip
    return hf.QianfanOCRProcessor(image, tokenizer, image_seq_length=4)


class Lfm2Vl:
    """The files of a processor that needs torchvision."""

    def save_pretrained(self, folder):
        image = {
            "image_processor_type": "Lfm2VlImageProcessorFast", "encoder_patch_size": 4,
            "tile_size": 16, "size": {"height": 16, "width": 16}, "min_image_tokens": 4,
            "max_image_tokens": 12, "max_tiles": 4, "do_image_splitting": True,
        }  # fmt: skip
        (folder / "preprocessor_config.json").write_text(json.dumps(image))
        (folder / "processor_config.json").write_text(
            json.dumps({"processor_class": "Lfm2VlProcessor"})
        )


def lfm2(tokenizer):
    return Lfm2Vl()


def onevision(tokenizer):
    image = pil("llava_onevision", "LlavaOnevisionImageProcessorPil",
                size={"height": 28, "width": 28},
                image_grid_pinpoints=[[28, 56], [56, 28], [56, 56]])  # fmt: skip
    video = {"video_processor_type": "LlavaOnevisionVideoProcessor", "size": SQUARE}
    return Files(
        "LlavaOnevisionProcessor", image, video, num_image_tokens=16,
        vision_feature_select_strategy="full", vision_aspect_ratio="anyres_max_2",
    )  # fmt: skip


def lighton(tokenizer):
    image = pil("pixtral", "PixtralImageProcessorPil", patch_size=8, size={"longest_edge": 32})
    return hf.LightOnOcrProcessor(image, tokenizer, patch_size=4, spatial_merge_size=2)


def deepseek(tokenizer):
    image = pil("deepseek_vl", "DeepseekVLImageProcessorPil", min_size=7,
                size={"height": 28, "width": 28})  # fmt: skip
    return hf.DeepseekVLProcessor(image, tokenizer, num_image_tokens=16)


def deepseek_ocr(tokenizer):
    image = pil("deepseek_ocr2", "DeepseekOcr2ImageProcessorPil", tile_size=64,
                size={"height": 48, "width": 48}, max_patches=3)  # fmt: skip
    return hf.DeepseekOcr2Processor(image, tokenizer, patch_size=1)


def paddle(tokenizer):
    image = pil("paddleocr_vl", "PaddleOCRVLImageProcessorPil", patch_size=4, merge_size=2,
                size={"shortest_edge": 16 * 16, "longest_edge": 40 * 40})  # fmt: skip
    return hf.PaddleOCRVLProcessor(image, tokenizer)


def cosmos(tokenizer):
    image = pil("cosmos3_edge", "Cosmos3EdgeImageProcessorPil", patch_size=4, merge_size=2,
                size={"shortest_edge": 16 * 16, "longest_edge": 40 * 40})  # fmt: skip
    return Files("Cosmos3EdgeProcessor", image)


def ovis(tokenizer):
    image = pil("ovis2", "Ovis2ImageProcessorPil", size={"height": 28, "width": 28},
                crop_to_patches=True, max_patches=4)  # fmt: skip
    return hf.Ovis2Processor(image, tokenizer, image_seq_length=4)


def paligemma(tokenizer):
    image = pil("siglip", "SiglipImageProcessorPil", size={"height": 28, "width": 28})
    image.image_seq_length = 16
    return hf.PaliGemmaProcessor(image, tokenizer)


def gemma4(tokenizer):
    image = pil("gemma4", "Gemma4ImageProcessorPil", patch_size=2, pooling_kernel_size=2,
                max_soft_tokens=70)  # fmt: skip
    sound = {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}
    return Files("Gemma4Processor", image, feature_extractor=sound)


class Gemma4Unified:
    """The files of a processor that needs torchvision."""

    def save_pretrained(self, folder):
        sizes = {"patch_size": 2, "pooling_kernel_size": 2, "max_soft_tokens": 70}
        table = {
            "processor_class": "Gemma4UnifiedProcessor",
            "image_processor": {"image_processor_type": "Gemma4UnifiedImageProcessor", **sizes},
            "video_processor": {"video_processor_type": "Gemma4UnifiedVideoProcessor", **sizes},
            "feature_extractor": {"feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor"},
        }
        (folder / "processor_config.json").write_text(json.dumps(table))


class Tiled:
    """The file of an image processor that needs torchvision."""

    def __init__(self, kind, **settings):
        self.table = {"image_processor_type": kind, "size": SQUARE, **settings}

    def save_pretrained(self, folder):
        (folder / "preprocessor_config.json").write_text(json.dumps(self.table))


def command_a(tokenizer):
    image = Tiled("Cohere2VisionImageProcessorFast", patch_size=2, max_patches=4)
    return Files("Cohere2VisionProcessor", image)


def phi(tokenizer):
    image = Phi4MultimodalImageProcessorPil(size=SQUARE, patch_size=7, dynamic_hd=4)
    sound = {"feature_extractor_type": "Phi4MultimodalFeatureExtractor", "feature_size": 16}
    return Files("Phi4MultimodalProcessor", image, audio_processor=sound)


def minicpm(tokenizer, version="4_6"):
    image = pil("minicpmv4_6", "MiniCPMV4_6ImageProcessorPil", patch_size=4, scale_resolution=32,
                max_slice_nums=4)  # fmt: skip
    video = {"video_processor_type": "MiniCPMV4_6VideoProcessor", "patch_size": 4,
             "scale_resolution": 32, "max_slice_nums": 1}  # fmt: skip
    return Files(f"MiniCPMV{version}Processor", image, video)


class MiniCPMOcr:
    """The files of a processor that needs torchvision."""

    def save_pretrained(self, folder):
        sizes = {"patch_size": 4, "scale_resolution": 32}
        table = {
            "processor_class": "MiniCPMOcrProcessor",
            "image_processor": {
                "image_processor_type": "MiniCPMOcrImageProcessor", "max_slice_nums": 4, **sizes,
            },
            "video_processor": {
                "video_processor_type": "MiniCPMOcrVideoProcessor", "max_slice_nums": 1, **sizes,
            },
        }  # fmt: skip
        (folder / "processor_config.json").write_text(json.dumps(table))


class Kimi:
    """The files of a processor of Kimi K2.5, as transformers has them."""

    def save_pretrained(self, folder):
        shared = {"patch_size": 4, "merge_size": 2}
        image = {**shared, "image_processor_type": "Kimi_K25ImageProcessor", "max_patches": 60}
        video = {**shared, "video_processor_type": "Kimi_K25VideoProcessor", "max_patches": 36}
        parts = {"image_processor": image, "video_processor": video}
        table = {"processor_class": "Kimi_K25Processor", **parts}
        (folder / "processor_config.json").write_text(json.dumps(table))


class NemotronOmni:
    """The file of a processor, as published: its parts for images and videos share settings."""

    def save_pretrained(self, folder):
        image = {
            "image_processor_type": "NemotronH_Omni_Reasoning_V3ImageProcessor", "patch_size": 4,
            "min_num_patches": 16, "max_num_patches": 80, "video_target_num_patches": 24,
            "norm_mean": [0.48, 0.46, 0.41], "norm_std": [0.27, 0.26, 0.28],
        }  # fmt: skip
        (folder / "preprocessor_config.json").write_text(json.dumps(image))


def kimi(tokenizer):
    return Kimi()


def llama4(tokenizer):
    return Files("Llama4Processor", Tiled("Llama4ImageProcessorFast", max_patches=4), patch_size=7)


def mllama(tokenizer):
    image = pil("mllama", "MllamaImageProcessorPil", size={"height": 28, "width": 28},
                max_image_tiles=4)  # fmt: skip
    return hf.MllamaProcessor(image, tokenizer)


class LookedAt(ImageFamily):
    """Prompts without images are text, to which transformers' processor would add."""

    def further(self, mark):
        """Images side by side are looked at together, and not from the next one on."""
        return [Prompt(f"{mark}{mark} of a small {mark} cat", self.items())]

    def model_inputs(self, processor, prompt):
        if prompt.items:
            return super().model_inputs(processor, prompt)
        return processor.tokenizer([prompt.text], add_special_tokens=False, return_tensors="pt")


def blip2(tokenizer):
    image = pil("blip", "BlipImageProcessorPil", size={"height": 28, "width": 28})
    return hf.Blip2Processor(image, tokenizer, num_query_tokens=4)


class Unscaled(ImageFamily):
    """Files have no factors of branches, which transformers then takes as 1."""

    def rewrite(self, folder):
        file = folder / "model.safetensors"
        weights = {name: t for name, t in load_file(file).items() if "layer_scale" not in name}
        save_file(weights, file, {"format": "pt"})


def in_groups(get_video_features):
    """Transformers' model joins the groups of frames of a list, and has them in a tensor."""

    def listed(self, *inputs, **more):
        output = get_video_features(self, *inputs, **more)
        output.pooler_output = tuple(output.pooler_output)
        return output

    return listed


class OneFilm(Unscaled):
    """Transformers' processor takes one video, and no image beside it."""

    def rewrite(self, folder):
        super().rewrite(folder)
        model = hf.NemotronH_Omni_Reasoning_V3
        if model.get_video_features.__name__ != "listed":
            model.get_video_features = in_groups(model.get_video_features)

    def further(self, mark):
        clips = films(((4, 44, 30), (3, 30, 44)))
        return [Prompt(f"The film {self.tokens['video_token']} is", (), [clip]) for clip in clips]

    def model_inputs(self, processor, prompt):
        if not prompt.videos:
            return super().model_inputs(processor, prompt)
        (video,) = prompt.videos
        return processor(
            text=[prompt.text], videos=[video.frames], add_special_tokens=False,
            return_tensors="pt", do_sample_frames=False,
            video_metadata=hf.video_utils.VideoMetadata(**video.metadata()),
        )  # fmt: skip


class Kinds(ImageFamily):
    """transformers' processor does not return the kinds of tokens, which its model asks for."""

    def model_inputs(self, processor, prompt):
        inputs = super().model_inputs(processor, prompt)
        return {**inputs, "mm_token_type_ids": (inputs["input_ids"] == 480).int()}


class Queries(ImageFamily):
    """Transformers' processor takes one image, before the text."""

    def model_inputs(self, processor, prompt):
        image, tokenizer = str(processor.image_token), processor.tokenizer
        text = prompt.text if image in prompt.text else image * len(prompt.items) + prompt.text
        ids = tokenizer([text.replace(image, image * 4)], add_special_tokens=False,
                        return_tensors="pt")  # fmt: skip
        ids.pop("token_type_ids", None)
        # It reads an image for every prompt, also if no token is replaced.
        pictures = list(prompt.items or self.items()[:1])
        return {**ids, **processor.image_processor(pictures, return_tensors="pt")}

    def further(self, mark):
        return [Prompt("a photo of", self.items()[:1])]


class Halves(ImageFamily):
    """Transformers' processor makes pixels of bfloat16, whatever the model's type."""

    def model_inputs(self, processor, prompt):
        inputs = super().model_inputs(processor, prompt)
        pixels = {k: t.float() for k, t in inputs.items() if k == "pixel_values"}
        return {**inputs, **pixels}


class Leading(ImageFamily):
    """Images of a prompt without placeholders come first, and its text then."""

    def further(self, mark):
        return [Prompt("caption en", self.items()[:1])]


class Clips(ImageFamily):
    """Transformers takes clips of one length only, in a prompt."""

    def further(self, mark):
        film = self.tokens["video_token"]
        return [Prompt(f"{film} of a small cat", (), films(((3, 30, 44),)))]


class Heard(Prompt):
    """A prompt with one video and its sound, and maybe a sound beside."""

    def request(self, kind):
        data = {**super().request(kind)["multi_modal_data"], "audio": [*self.items]}
        del data[kind]
        options = {"use_audio_in_video": True}
        return {"prompt": self.text, "multi_modal_data": data, "mm_processor_kwargs": options}


class Omni(ImageFamily):
    """Videos with their sound; transformers' processors have sizes of their own for frames."""

    def options(self):
        frames = {"size": {"shortest_edge": 16 * 16, "longest_edge": 2000}}
        timed = {name: float(value) for name, value in self.changes.items()}
        return {"videos_kwargs": {**frames, "fps": 3 if timed else 2}, **timed}

    def further(self, mark):
        first_sound, *more = sounds((0.45, 0.45))
        film = self.video_mark
        (short, long) = films(self.videos)
        beside = "<|audio_start|><|audio_pad|><|audio_end|>"
        return [
            Heard(f"The film {film} is about", [first_sound], [long]),
            Heard(f"Hello {film} how {beside} are", [first_sound, *more], [short]),
        ]

    def model_inputs(self, processor, prompt):
        arguments = {**self.options()}
        if isinstance(prompt, Heard):
            among = [0, *[None] * (len(prompt.items) - 1)]
            arguments |= {"audio": prompt.items, "audio_from_video_indices": among,
                      "load_audio_from_video": True}  # fmt: skip
        elif prompt.items:
            arguments["images"] = prompt.items
        if prompt.videos:
            arguments["videos"] = [video.frames for video in prompt.videos]
            arguments["videos_kwargs"] = {**arguments["videos_kwargs"], "do_sample_frames": False}
            arguments["video_metadata"] = [video.metadata() for video in prompt.videos]
        inputs = processor(
            text=[prompt.text], add_special_tokens=False, return_tensors="pt", **arguments
        )
        heard = {"use_audio_in_video": torch.tensor(True)} if isinstance(prompt, Heard) else {}
        return {**inputs, **heard}


@pytest.fixture(autouse=True)
def nothing_is_looked_at_before_an_image(monkeypatch):
    """Tokens before the first image attend to nothing, in Meta's code: transformers lets them
    attend to all images alike, and masks no more than what follows.
    """
    layer = hf.models.mllama.modeling_mllama.MllamaCrossAttentionDecoderLayer
    forward = layer.forward

    def masked(self, *args, full_text_row_masked_out_mask=None, **more):
        def hook(module, inputs, outputs):
            row_mask = full_text_row_masked_out_mask
            return outputs if row_mask is None else (outputs[0] * row_mask[:, 0], outputs[1])

        handle = self.cross_attn.register_forward_hook(hook)
        mask = {"full_text_row_masked_out_mask": full_text_row_masked_out_mask}
        try:
            return forward(self, *args, **mask, **more)
        finally:
            handle.remove()

    monkeypatch.setattr(layer, "forward", masked)


@pytest.fixture(autouse=True)
def clips_of_frames_are_counted_once(monkeypatch):
    """Transformers 5.23 expects a clip's tokens as often as it has frames, and finds fewer."""

    def features(self, pixel_values, image_grid_thw=None, return_dict=True, **more):
        outputs = self.vision_tower(pixel_values, grid_thw=image_grid_thw)
        outputs.pooler_output = [self.mm_projector(outputs.pooler_output).squeeze(1)]
        return outputs

    kimi = hf.models.kimi_k25.modeling_kimi_k25.Kimi_K25Model
    monkeypatch.setattr(kimi, "get_image_features", features)


SQUARE = {"height": 28, "width": 28}
ONEVISION = {"image_token": "<image>", "video_token": "<video>"}
INTERNVL = {
    "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>",
    "end_image_token": "</img>", "video_token": "<video>",
}  # fmt: skip
QIANFAN = {
    "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>",
    "end_image_token": "</img>", "0": "<image>",
}  # fmt: skip
LFM2 = {
    "image_token": "<image>", "image_start_token": "<|image_start|>",
    "image_end_token": "<|image_end|>", "image_thumbnail": "<|img_thumbnail|>",
    **{str(i): f"<|img_row_{i // 4 + 1}_col_{i % 4 + 1}|>" for i in range(8)},
}  # fmt: skip
PALIGEMMA = {"image_token": "<image>", "bos_token": "<bos>"}
PIXTRAL = {"image_token": "[IMG]", "0": "[IMG_BREAK]", "1": "[IMG_END]"}
GEMMA = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
GEMMA4 = {
    "boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>",
    "0": "<|video|>", "audio_token": "<|audio|>", "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}  # fmt: skip
#: Each frame has some 66 tokens.
GEMMA4_CHUNKS = {"chunk": 80, "videos": ((2, 44, 30), (2, 30, 44)), "video_mark": "<|video|>"}
COMMAND_A = {
    "image_token": "<|IMG_PATCH|>", "boi_token": "<|START_OF_IMG|>",
    "eoi_token": "<|END_OF_IMG|>", "img_line_break_token": "<|IMG_LINE_BREAK|>",
}  # fmt: skip
LLAMA4 = {
    "image_token": "<|image|>", "0": "<|patch|>", "1": "<|image_start|>", "2": "<|image_end|>",
    "3": "<|tile_x_separator|>", "4": "<|tile_y_separator|>",
}  # fmt: skip
MLLAMA = {"bos_token": "<|begin_of_text|>", "image_token": "<|image|>", "0": "<|python_tag|>"}
AYA = {
    "0": "<|IMG_PATCH|>", "image_token": "<image>", "1": "<|START_OF_IMG|>",
    "2": "<|END_OF_IMG|>", "3": "TILE_GLOBAL", "4": "TILE_1", "5": "TILE_2",
}  # fmt: skip
IDEFICS = {
    "image_token": "<image>", "0": "<fake_token_around_image>", "1": "<global-img>",
    "2": "<row_1_col_1>", "3": "<row_1_col_2>", "4": "<end_of_utterance>",
}  # fmt: skip
QWEN = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
GLM = {
    "image_token": "<|image|>", "video_token": "<|video|>", "0": "<|begin_of_image|>",
    "1": "<|end_of_image|>", "2": "<|begin_of_video|>", "3": "<|end_of_video|>",
}  # fmt: skip
#: Transformers takes no images beside videos.
GLM_SEEN = {
    "mark": "<|begin_of_image|><|image|><|end_of_image|>",
    "video_mark": "<|begin_of_video|><|video|><|end_of_video|>",
    "mixes": False,
}
LIGHTON = {"image_token": "[IMG]", "image_break_token": "[BR]", "image_end_token": "[END]"}
OVIS = {
    "image_token": "<image>", "0": "<IMG_ATOM>", "1": "<IMG_START>", "2": "<IMG_GRID>",
    "3": "<IMG_COL>", "4": "<IMG_ROW>", "5": "<IMG_END>",
}  # fmt: skip
OMNI = {
    **QWEN,
    "audio_token": "<|audio_pad|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
SEEN = {
    "mark": "<|vision_start|><|image_pad|><|vision_end|>",
    "video_mark": "<|vision_start|><|video_pad|><|vision_end|>",
    "loads": "",
}
IMAGE = {"image_token": "<image>"}
PHI = {"image_token": "<|image|>", "audio_token": "<|audio|>"}
MINICPM = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
    "image_start_token": "<image>", "image_end_token": "</image>",
    "slice_start_token": "<slice>", "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
}  # fmt: skip
NEMOTRON = {
    "image_token": "<image>", "0": "<img>", "1": "</img>", "audio_token": "<so_embedding>",
    "2": "<so_start>", "3": "<so_end>", "video_token": "<video>",
}  # fmt: skip
KIMI = {
    "image_token": "<|media_pad|>", "video_token": "<|kimi_k25_video_placeholder|>",
    "0": "<|media_begin|>", "1": "<|media_content|>", "2": "<|media_end|>",
}  # fmt: skip
#: Processors that take several videos at once only where they have as many frames.
EQUAL = {"videos": ((3, 44, 30), (3, 30, 44))}
#: Of models with recurrent layers.
STATES = {"reuses": False}
#: Architecture -> its special tokens, what makes its processor, and the rest of `ImageFamily`.
FAMILIES = {
    "LlavaForConditionalGeneration": (IMAGE, clip, {}),
    "LlavaNextForConditionalGeneration": (IMAGE, llava_next, {}),
    "LlavaNextVideoForConditionalGeneration": (ONEVISION, next_video, EQUAL),
    "LlavaOnevisionForConditionalGeneration": (ONEVISION, onevision, EQUAL),
    "Glm4vForConditionalGeneration": (GLM, glm("glm4v"), GLM_SEEN),
    "Glm4vMoeForConditionalGeneration": (GLM, glm("glm4v"), GLM_SEEN),
    "Glm46VForConditionalGeneration": (GLM, glm("glm46v"), GLM_SEEN),
    "GlmOcrForConditionalGeneration": (GLM, glm("glm46v"), GLM_SEEN),
    "Exaone4_5_ForConditionalGeneration": (QWEN, qwen("Exaone4_5_Processor"), {}),
    "Qwen2VLForConditionalGeneration": (QWEN, qwen("Qwen2VLProcessor"), {}),
    "Qwen2_5_VLForConditionalGeneration": (QWEN, qwen("Qwen2_5_VLProcessor"), {}),
    "Qwen3VLForConditionalGeneration": (QWEN, qwen("Qwen3VLProcessor"), {}),
    "Qwen3VLMoeForConditionalGeneration": (QWEN, qwen("Qwen3VLProcessor"), {}),
    "Qwen2_5OmniThinkerForConditionalGeneration": (
        OMNI,
        qwen("Qwen2_5OmniProcessor"),
        {**SEEN, "changes": {"seconds_per_chunk": 1, "position_id_per_seconds": 10}},
    ),
    "Qwen3OmniMoeThinkerForConditionalGeneration": (OMNI, qwen("Qwen3OmniMoeProcessor"), SEEN),
    "Qwen3_5ForConditionalGeneration": (QWEN, qwen("Qwen3VLProcessor"), STATES),
    "Qwen3_5MoeForConditionalGeneration": (QWEN, qwen("Qwen3VLProcessor"), STATES),
    "Gemma3ForConditionalGeneration": (GEMMA, gemma, {"chunk": 20}),
    "Idefics3ForConditionalGeneration": (IDEFICS, idefics("idefics3", "Idefics3"), {}),
    "SmolVLMForConditionalGeneration": (
        {**IDEFICS, "video_token": "<video>"},
        idefics("smolvlm", "SmolVLM"),
        {"videos": ((2, 44, 30), (2, 30, 44)), "mixes": False},
    ),
    "Mistral3ForConditionalGeneration": (PIXTRAL, pixtral(2), {}),
    "AyaVisionForConditionalGeneration": (AYA, aya, {}),
    "InternVLForConditionalGeneration": (INTERNVL, internvl, EQUAL),
    "QianfanOCRForConditionalGeneration": (QIANFAN, qianfan, {"mark": "<image>"}),
    "Lfm2VlForConditionalGeneration": (LFM2, lfm2, STATES),
    "LightOnOcrForConditionalGeneration": (LIGHTON, lighton, {}),
    "DeepseekVLForConditionalGeneration": (IMAGE, deepseek, {}),
    "DeepseekOcr2ForConditionalGeneration": (
        IMAGE,
        deepseek_ocr,
        {"sizes": ((44, 40), (80, 40), (40, 48)), "chunk": 150},
    ),
    "PaddleOCRVLForConditionalGeneration": (IMAGE, paddle, {}),
    "Cosmos3EdgeForConditionalGeneration": (QWEN, cosmos, {}),
    "Cosmos3OmniForConditionalGeneration": (QWEN, qwen("Qwen3VLProcessor"), {}),
    "Ovis2ForConditionalGeneration": (OVIS, ovis, {}),
    "NemotronH_Omni_Reasoning_V3": (
        NEMOTRON,
        lambda tokenizer: NemotronOmni(),
        {"videos": (), **STATES},
    ),
    "Cohere2VisionForConditionalGeneration": (COMMAND_A, command_a, {}),
    "Llama4ForConditionalGeneration": (LLAMA4, llama4, {}),
    "Kimi_K25ForConditionalGeneration": (KIMI, kimi, {"videos": ((4, 44, 30), (8, 30, 44))}),
    "MiniCPMV4_6ForConditionalGeneration": (MINICPM, minicpm, STATES),
    "MiniCPMV4_7ForConditionalGeneration": (
        MINICPM,
        lambda tokenizer: minicpm(tokenizer, "4_7"),
        STATES,
    ),
    "MiniCPMOcrForConditionalGeneration": (MINICPM, lambda tokenizer: MiniCPMOcr(), STATES),
    "Phi4MultimodalForCausalLM": (PHI, phi, {"loads": "", "sizes": ((56, 42), (19, 60), (44, 44))}),
    "Blip2ForConditionalGeneration": (IMAGE, blip2, {}),
    "MllamaForConditionalGeneration": (MLLAMA, mllama, {"reuses": False}),
    "PaliGemmaForConditionalGeneration": (PALIGEMMA, paligemma, {"chunk": 60, "prefix": True}),
    "Gemma4ForConditionalGeneration": (GEMMA4, gemma4, GEMMA4_CHUNKS),
    "Gemma4UnifiedForConditionalGeneration": (
        GEMMA4,
        lambda tokenizer: Gemma4Unified(),
        GEMMA4_CHUNKS,
    ),
}
#: Those whose prompts are more.
OTHERS = {
    "Blip2ForConditionalGeneration": Queries,
    "Cosmos3EdgeForConditionalGeneration": Kinds,
    "Llama4ForConditionalGeneration": Halves,
    "Kimi_K25ForConditionalGeneration": Clips,
    "Qwen2_5OmniThinkerForConditionalGeneration": Omni,
    "Qwen3OmniMoeThinkerForConditionalGeneration": Omni,
    "MllamaForConditionalGeneration": LookedAt,
    "NemotronH_Omni_Reasoning_V3": OneFilm,
    "PaliGemmaForConditionalGeneration": Leading,
}
#: Further names of checkpoints of these.
ALIASES = {
    "BagelForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "HfMoondream",
    "InternS1ProForConditionalGeneration",
    "InternS2MobiusForConditionalGeneration",
    "IsaacForConditionalGeneration",
    "KananaVForConditionalGeneration",
    "LlamaNemotronVLForSequenceClassification",
    "LlamaNemotronVLModel",
    "LlavaOnevision2ForConditionalGeneration",
    "Moondream3ForCausalLM",
    "NemotronParseForConditionalGeneration",
    "OpenPanguVLForConditionalGeneration",
    "Ovis",
    "Phi4MMForCausalLM",
    "PixtralForConditionalGeneration",
    "Step3VLForConditionalGeneration",
    "MiniCPMO",
    "MiniCPMV",
    "StepVLForConditionalGeneration",
    "Llama_Nemotron_Nano_VL",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Nano_VL_V2",
    "NemotronH_Super_Omni_Reasoning_V3",
    "Cosmos3ForConditionalGeneration",
    "DeepseekVLV2ForCausalLM",
    "H2OVLChatModel",
    "OpenCUAForConditionalGeneration",
    "Ovis2_5",
    "Ovis2_6ForCausalLM",
    "Ovis2_6_MoeForCausalLM",
    "Phi3VForCausalLM",
    "Phi4ForCausalLMV",
    "BeeForConditionalGeneration",
    "DeepseekOCR2ForCausalLM",
    "DeepseekOCRForCausalLM",
    "InternS2PreviewForConditionalGeneration",
    "KeyeForConditionalGeneration",
    "KeyeVL1_5ForConditionalGeneration",
    "RForConditionalGeneration",
    "DotsOCRForCausalLM",
    "Eagle2_5_VLForConditionalGeneration",
    "NVLM_D",
    "InternS1ForConditionalGeneration",
    "InternVLChatModel",
    "MantisForConditionalGeneration",
    "SkyworkR1VChatModel",
    "Tarsier2ForConditionalGeneration",
    "TarsierForConditionalGeneration",
    "KimiK25ForConditionalGeneration",
    "KimiVLForConditionalGeneration",
    "LightOnOCRForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration",
    "Qwen2_5OmniModel",
    "Qwen3OmniMoeForConditionalGeneration",
}


#: Of `test_image_vectors.py`.
EMBEDDERS = {
    "CLIPModel", "ColUltraVBertForRetrieval",
    "ColModernVBertForRetrieval", "ColPaliForRetrieval", "ColQwen2ForRetrieval",
    "ColQwen3", "ColQwen3_5", "ModernVBertModel", "OpsColQwen3Model",
    "Qwen3VLNemotronEmbedModel",
    "JinaEmbeddingsV4Model",    "Siglip2Model", "SiglipModel",
}  # fmt: skip
#: Of `test_bridged_images.py`.
BRIDGE = {"transformers", "transformers_both_ways", "transformers_hearing"}


def test_every_model_that_takes_images_is_in_the_table():
    """And says in both places the same of what it takes."""
    plugins = manager.current()
    names = [declared.name for declared in plugins.names("media_families")]
    kinds = {name: plugins.load("media_families", name).kinds for name in names}
    known = {*FAMILIES, *ALIASES, *EMBEDDERS, *BRIDGE}
    assert {name for name in names if "image" in kinds[name]} == known
    for name in [*FAMILIES, *EMBEDDERS]:
        assert kinds[name] == plugins.load("models", name).media


def numbers_of(table, kind, part=""):
    """(table inside, key) of what counts something."""
    read = {field.name for field in attrs.fields(kind)}
    for key, value in table.items():
        if type(value) is int and key in read:
            yield part, key
        elif isinstance(value, dict) and attrs.has(inner := get_type_hints(kind).get(key)):
            yield from numbers_of(value, inner, key)


@parametrize_sample("architecture", FAMILIES, every=15)
def test_nonsense_in_the_encoders_numbers_is_refused(architecture):
    table = driver(architecture).tiny()
    vision = table["vision_config"]
    numbers = [*numbers_of(vision, driver(architecture).config_type.vision_type)]
    assert len(numbers) > 3
    for part, key in numbers:
        for wrong in ("word", float("nan"), [1], -5):
            inner = {part: {**vision[part], key: wrong}} if part else {key: wrong}
            changed = {**table, "vision_config": {**vision, **inner}}
            with pytest.raises(CheckpointError, match="config.json"):
                read_config(changed, driver(architecture).config_type)


#: Other shapes of some: Pixtral 12B, and Granite Vision, which reads several layers of SigLIP.
SHAPES = {
    "pixtral": (
        "LlavaForConditionalGeneration", PIXTRAL, pixtral(1),
        {
            "vision_config": {
                "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48,
                "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16,
                "image_size": 32, "patch_size": 4,
            },
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
    ),
    "granite": (
        "LlavaNextForConditionalGeneration", IMAGE, siglip_next,
        {
            "text_config": tiny_text("granite"),
            "vision_config": {
                "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48,
                "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28,
                "patch_size": 7,
            },
            "vision_feature_layer": [-3, -1],
            "vision_feature_select_strategy": "full",
        },
    ),
}  # fmt: skip


@pytest.mark.exhaustive
def test_paligemma_2_has_gemma_2s_text(tmp_path):
    model_class = driver("PaliGemmaForConditionalGeneration")
    windows = {"sliding_window": 200, "query_pre_attn_scalar": 20, "head_dim": 24}
    changes = {**model_class.tiny(), "text_config": tiny_text("gemma2", **windows)}
    _, processor, more = FAMILIES["PaliGemmaForConditionalGeneration"]
    check_images(ImageFamily(model_class, PALIGEMMA, processor, changes=changes, **more), tmp_path)


@pytest.mark.exhaustive
@parametrize_sample("shape", SHAPES, every=2)
def test_other_shapes_of_families(shape, tmp_path):
    architecture, tokens, processor, changes = SHAPES[shape]
    family = ImageFamily(driver(architecture), tokens, processor, changes=changes)
    check_images(family, tmp_path)


@parametrize_sample("architecture", FAMILIES, every=15)
def test_images_are_read_as_by_transformers(architecture, tmp_path, pytestconfig):
    tokens, processor, more = FAMILIES[architecture]
    family = OTHERS.get(architecture, ImageFamily)(driver(architecture), tokens, processor, **more)
    flags = {"mm_processor_kwargs": family.options()} if isinstance(family, Omni) else {}
    separately = pytestconfig.getoption("everything")
    check_images(family, tmp_path, separately=separately, **flags)


def test_the_sounds_of_videos_leave_no_placeholders():
    """As conversations have them; a video without a sound is refused."""
    from modulm_media import Media, Sound

    family = manager.current().load("media_families", "Qwen2_5OmniThinkerForConditionalGeneration")
    family = family(None, driver("Qwen2_5OmniThinkerForConditionalGeneration").tiny())
    film = Media("video", films(((2, 8, 8),))[0])
    first_sound, other = (Media("audio", Sound(sound, 16000)) for sound in sounds((0.1, 0.2)))
    tokens = np.array([1, 485, 484, 486, 482, 481, 483, 485, 484, 486, 2])
    options = {"use_audio_in_video": True}
    left, media = family.group_media(tokens, [film, first_sound, other], options)
    assert left.tolist() == [1, 482, 481, 483, 485, 484, 486, 2]
    assert [one.kind for one in media] == ["video", "audio"]
    assert media[0].hash not in {film.hash, first_sound.hash}
    assert media[1] is other
    plain, media = family.group_media(tokens, [film, first_sound, other], {})
    assert plain is tokens
    assert media == [film, first_sound, other]
    with pytest.raises(RequestError, match="1 videos and 0 sounds"):
        family.group_media(tokens, [film], options)


def test_minicpm_with_more_tokens_and_in_prompts_that_are_filled_already(tmp_path):
    """Fewer patches are merged; images keep the numbers that prompts have."""
    name, text = "MiniCPMV4_6ForConditionalGeneration", "The <|image_pad|> and <|image_pad|> are"
    folder = write_family(ImageFamily(driver(name), MINICPM, minicpm), tmp_path)
    pictures = images(((56, 42), (30, 30)))
    theirs = getattr(hf, name).from_pretrained(folder, attn_implementation="eager").eval()
    inputs = processor_of(name, folder)(
        text=[text], images=pictures, add_special_tokens=False, return_tensors="pt",
        downsample_mode="4x",
    )  # fmt: skip
    with torch.inference_mode():
        expected = theirs(**inputs, downsample_mode="4x").logits[0, -1].log_softmax(-1)
    ids = inputs["input_ids"][0].tolist()
    options = {"multi_modal_data": {"image": pictures}}
    wide = {**options, "mm_processor_kwargs": {"downsample_mode": "4x"}}
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    parts = text.split("<|image_pad|>")
    marks = [f"<image_id>{i}</image_id><|image_pad|>" for i in range(2)]
    numbered = f"{parts[0]}{marks[0]}{parts[1]}{marks[1]}{parts[2]}"
    partial_ids = tokenizer(numbered, add_special_tokens=False)["input_ids"]
    settings = {"device": "cpu", "dtype": "float32", "max_logprobs": -1}
    with modulm.LLM(str(folder), **settings) as llm:
        params = modulm.SamplingParams(max_tokens=1, temperature=0, logprobs=-1)
        prompts = [{"prompt": text}, {"prompt_token_ids": partial_ids}, {"prompt_token_ids": ids}]
        answers = llm.generate([{**prompt, **wide} for prompt in prompts], params, use_tqdm=False)
        (plain,) = llm.generate([{"prompt": text, **options}], params, use_tqdm=False)
        with pytest.raises(RequestError, match="use_image_id"):
            llm.generate(
                {"prompt": text, **options, "mm_processor_kwargs": {"use_image_id": False}}, params
            )
    for answer in answers:
        assert answer.prompt_token_ids == ids
        (entry,) = answer.outputs[0].logprobs
        table = torch.tensor([entry[i].logprob for i in range(512)])
        assert (table - expected).abs().max() < 1e-3
    assert ids.count(480) > 2 * plain.prompt_token_ids.count(480)


@pytest.mark.exhaustive
@parametrize_sample("name", ("Qwen2_5_VLForConditionalGeneration",
                             "Qwen2VLForConditionalGeneration"), every=2)  # fmt: skip
def test_videos_without_what_changes_least(name, tmp_path):
    """`--video-pruning-rate`: transformers on the tokens that remain, at their own positions."""
    tokens, processor, more = FAMILIES[name]
    folder = write_family(ImageFamily(driver(name), tokens, processor, **more), tmp_path)
    (film,) = films(((8, 44, 30),))
    text = "The film <|video_pad|> is about"
    inputs = dict(
        processor_of(name, folder)(
            text=[text], videos=[film.frames], video_metadata=[film.metadata()],
            do_sample_frames=False, add_special_tokens=False, return_tensors="pt",
        )
    )  # fmt: skip
    theirs = getattr(hf, name).from_pretrained(folder, attn_implementation="eager").eval()
    ids, (grid,) = inputs["input_ids"][0], inputs["video_grid_thw"].tolist()
    inside = (ids == 481).nonzero().flatten()
    kept = retained(grid[0], len(inside) // grid[0], 0.6)
    with torch.inference_mode():
        seen = theirs.model.visual(inputs["pixel_values_videos"], inputs["video_grid_thw"])
        seen = seen.pooler_output if hasattr(seen, "pooler_output") else seen
        frames = seen.unflatten(0, (grid[0], -1))
        change = 1 - torch.nn.functional.cosine_similarity(frames[1:], frames[:-1], dim=-1)
        order = torch.cat([torch.full((frames.shape[1],), 9.0), change.flatten()]).argsort(
            descending=True, stable=True
        )
        chosen = order[:kept].sort().values
        rest = torch.ones(len(ids), dtype=torch.bool)
        rest[inside] = False
        rest[inside[chosen]] = True
        times = {"second_per_grid_ts": inputs.get("second_per_grid_ts")}
        types = {"mm_token_type_ids": inputs.get("mm_token_type_ids")}
        options = {key: value for key, value in (times | types).items() if value is not None}
        if "2_5" not in name:
            options.pop("second_per_grid_ts", None)
        positions, _ = theirs.model.get_rope_index(
            ids[None], video_grid_thw=inputs["video_grid_thw"], **options
        )
        embeds = theirs.get_input_embeddings()(ids)
        embeds[inside] = seen.to(embeds.dtype)
        expected = (
            theirs(inputs_embeds=embeds[rest][None], position_ids=positions[:, :, rest])
            .logits[0]
            .log_softmax(-1)
        )
    settings = {"device": "cpu", "dtype": "float32", "max_logprobs": -1, "video_pruning_rate": 0.6}
    prompt = {"prompt": text, "multi_modal_data": {"video": [(film.frames, {"fps": film.fps})]}}
    params = modulm.SamplingParams(max_tokens=1, temperature=0, logprobs=-1, prompt_logprobs=-1)
    for chunk in (0, 5):
        pieces = {"long_prefill_token_threshold": chunk} if chunk else {}
        with modulm.LLM(str(folder), **settings, **pieces) as llm:
            (answer,) = llm.generate(prompt, params, use_tqdm=False)
        assert answer.prompt_token_ids == ids[rest].tolist()
        entries = [*answer.prompt_logprobs[1:], answer.outputs[0].logprobs[0]]
        table = torch.tensor([[entry[i].logprob for i in range(512)] for entry in entries])
        assert (table - expected).abs().max() < 1e-3
    llava = ImageFamily(driver("LlavaForConditionalGeneration"), IMAGE, clip)
    other = write_family(llava, tmp_path / "other")
    with pytest.raises(ConfigError, match="leaves out no tokens"):
        modulm.LLM(str(other), **settings)
