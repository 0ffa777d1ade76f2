"""What transformers has as image-text-to-text and no package here: through the bridge, its own
embeddings in front of its own decoder on our memory, against transformers.
"""

from __future__ import annotations

import json

import pytest
import transformers as hf
from samples import parametrize_sample
from tests.plugins.models.test_images import GLM, GLM_SEEN, QWEN, clip, glm, pil, qwen

import modulm
from modulm.errors import UnsupportedError
from modulm_towers import tiny_text
from modulm_towers.testing import ImageFamily, SoundFamily, check_images, images, write_family
from modulm_transformers.config import TransformersConfig
from modulm_transformers.image_model import SeesAndHears, SeesBothWays, TransformersWithImages

PATCHES = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
    "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "out_hidden_size": 64,
}  # fmt: skip
VIT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 2}
ROUND_TOKENS = {
    "image_token": "<image>",
    "image_boundary_token": "<fake_token_around_image>",
    "end_of_utterance_token": "<end_of_utterance>",
}


def idefics(tokenizer):
    image = pil("idefics2", "Idefics2ImageProcessorPil", do_image_splitting=False,
                size={"longest_edge": 56, "shortest_edge": 28})  # fmt: skip
    return hf.Idefics2Processor(image, tokenizer, image_seq_len=4)


class Parts:
    """The files of a processor, with the settings of its parts."""

    def __init__(self, kind, image, **more):
        image = {"image_processor_type": kind.replace("Processor", "ImageProcessor"), **image}
        self.table = {"processor_class": kind, "image_processor": image, **more}

    def save_pretrained(self, folder):
        (folder / "processor_config.json").write_text(json.dumps(self.table))

    def __call__(self, tokenizer):
        return self


def patched(kind, video=None, **image):
    """A processor of patches of 4 pixels, of which squares of 4 make a token."""
    shared = {"patch_size": 4, "merge_size": 2}
    name = kind.replace("Processor", "VideoProcessor")
    video = {"video_processor_type": name, **shared, **(video or {})}
    return Parts(kind, {**shared, "size": AREA, **image}, video_processor=video)


class Begun(ImageFamily):
    """transformers' processor begins prompts without images, too, with a further token."""

    def model_inputs(self, processor, prompt):
        if prompt.items:
            return super().model_inputs(processor, prompt)
        return processor.tokenizer([prompt.text], add_special_tokens=False, return_tensors="pt")


class Timed(ImageFamily):
    """transformers' processor asks for the times of frames."""

    def model_inputs(self, processor, prompt):
        times = {"videos_kwargs": {"return_metadata": True}}
        return super().model_inputs(lambda **rest: processor(**rest, **times), prompt)


def family(
    architecture, tokens, processor, table, media=("image",), kind=ImageFamily,
    base=TransformersWithImages, **more,
):  # fmt: skip
    """A family whose checkpoint has this config.json; no driver here is called like it."""
    kinds = media

    class Driver(base):
        media = kinds

        @classmethod
        def tiny(cls):
            return {"architectures": [architecture]}

    return kind(Driver, tokens, processor, changes=table, native=False, **more)


def rope_text(model_type):
    """A text model with positions on three axes, of heads of 16."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]}
    return {**tiny_text(), "model_type": model_type,
            "rope_parameters": {**rope, "partial_rotary_factor": 1.0}}  # fmt: skip


AREA = {"shortest_edge": 16 * 16, "longest_edge": 40 * 40}
FILM_AREA = {"shortest_edge": 2 * 16 * 16, "longest_edge": 4 * 32 * 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
ONE_OF_EACH = {
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}
MUSE = {
    "image_token": "<|patch|>", "video_token": "<|video|>", "0": "<|image_start|>",
    "1": "<|image_end|>", "2": "<|vid_frame_separator|>", "3": "<|vid_start|>", "4": "<|vid_end|>",
}  # fmt: skip
MUSE_SIGHT = {
    "patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8, "max_position_embeddings": 64,
    "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 48,
    "layer_types": ["window_attention", "full_attention"],
}  # fmt: skip
MUSE_TABLE = {
    "image_token_id": 480, "video_token_id": 481, "out_hidden_size": 128,
    "projector_hidden_size": 48,
}  # fmt: skip
MUSE_PARTS = {"size": None, "max_image_tokens": 30}
COMPASS = {
    "image_token": "<|IMAGE_PAD|>", "video_token": "<|VIDEO_PAD|>", "0": "<|VISION_START|>",
    "1": "<|VISION_END|>",
}  # fmt: skip
ERNIE = {
    "image_token": "<|placeholder|>", "image_start_token": "<|image|>",
    "image_end_token": "<|/image|>", "video_token": "<|video@placeholder|>",
    "video_start_token": "<|video|>", "video_end_token": "<|/video|>",
}  # fmt: skip
STEP = {
    "image_token": "<im_patch>", "0": "<patch_start>", "1": "<patch_end>", "2": "<patch_newline>",
    "3": "<im_start>", "4": "<im_end>",
}  # fmt: skip
HUNYUAN = {"image_token": "<img>", "image_start_token": "<a>", "image_end_token": "</a>"}
MOLMO = {
    "image_token": "<|image|>", "video_token": "<|video|>", "0": "<im_patch>", "1": "<im_col>",
    "2": "<im_start>", "3": "<low_res_im_start>", "4": "<frame_start>", "5": "<im_end>",
    "6": "<frame_end>", "7": "<im_low>",
}  # fmt: skip
EMU = {
    "image_token": "<image>", "boi_token": "<|image start|>", "eoi_token": "<|image end|>",
    "image_wrapper_token": "<|image token|>", "eof_token": "<|extra_201|>",
    "bos_token": "<|extra_203|>",
}  # fmt: skip


SPARK = (
    "MuseSparkForConditionalGeneration",
    {**MUSE, "audio_token": "<|audio|>", "5": "<|soft_audio_start|>", "6": "<|soft_audio_end|>"},
    Parts(
        "MuseSparkProcessor", {
            "image_processor_type": "MuseGlimmerImageProcessor", "patch_size": 4,
            "max_image_tokens": 30,
        }, video_processor={
            "video_processor_type": "MuseGlimmerVideoProcessor", "patch_size": 4,
            "max_video_frame_tokens": 16,
        }, feature_extractor={
            "feature_extractor_type": "MuseSparkFeatureExtractor", "samples_per_token": 8,
            "sampling_rate": 16000,
        },
    ),
    {
        **MUSE_TABLE, "audio_token_id": 487, "vision_config": MUSE_SIGHT,
        "audio_config": {"patch_sizes": [4, 2], "hidden_sizes": [8, 16], "depths": [1, 1],
                         "num_hidden_layers": 2, "out_hidden_size": 64},
        "text_config": tiny_text(
            "muse_spark_text", head_dim=16, sliding_window=12, num_local_experts=4,
            moe_hidden_size=32, **EXPERTS, mlp_layer_types=ONE_OF_EACH["mlp_layer_types"],
        ),
    },
)  # fmt: skip
FAMILIES = [
    family("VipLlavaForConditionalGeneration", {"image_token": "<image>"}, clip, {
        "image_token_index": 480, "vision_feature_layers": [-2, -3], "text_config": tiny_text(),
        "vision_config": {**VIT, "model_type": "clip_vision_model", "image_size": 28,
                          "patch_size": 7},
    }),
    family("Exaone4_5_ForConditionalGeneration", QWEN, qwen("Exaone4_5_Processor"), {
        "image_token_id": 480, "video_token_id": 481, "text_config": tiny_text("exaone4"),
        "vision_config": {**PATCHES, "window_size": 16, "fullatt_block_indexes": [1],
                          "num_key_value_heads": 1},
    }, media=("image", "video")),
    family("HyperCLOVAXVisionV2ForConditionalGeneration", QWEN,
           qwen("HyperCLOVAXVisionV2Processor"), {
        "image_token_id": 480, "video_token_id": 481,
        "text_config": {**tiny_text("hyperclovax"), "logits_scaling": 0.5},
        "vision_config": {**PATCHES, "model_type": "qwen2_5_vl_vision", "window_size": 16,
                          "fullatt_block_indexes": [1]},
    }, media=("image", "video")),
    family("GlmOcrForConditionalGeneration", GLM, glm("glm46v"), {
        "image_token_id": 480, "video_token_id": 481, "image_start_token_id": 482,
        "image_end_token_id": 483, "video_start_token_id": 484, "video_end_token_id": 485,
        "text_config": rope_text("glm_ocr_text"), "vision_config": {**PATCHES, "image_size": 40},
    }, media=("image", "video"), **GLM_SEEN),
    family("Idefics2ForConditionalGeneration", ROUND_TOKENS, idefics, {
        "image_token_id": 480, "text_config": tiny_text("mistral"),
        "vision_config": {**VIT, "image_size": 56, "patch_size": 14},
        "perceiver_config": {
            "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
            "resampler_head_dim": 16, "num_key_value_heads": 1, "hidden_size": 64,
        },
    }),
    family("AriaForConditionalGeneration", {"image_token": "<image>"}, Parts(
        "AriaProcessor", {"max_image_size": 980}, size_conversion={"980": 4},
    ), {
        "image_token_index": 480, "projector_patch_to_query_dict": {"49": 4},
        "text_config": tiny_text("aria_text", moe_num_experts=4, moe_num_shared_experts=1),
        "vision_config": {**VIT, "model_type": "idefics3_vision", "image_size": 980,
                          "patch_size": 140},
    }),
    family("Granite4VisionForConditionalGeneration", {"image_token": "<image>"}, Parts(
        "Granite4VisionProcessor", {
            "image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 28},
            "crop_size": {"height": 28, "width": 28},
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        }, patch_size=7, vision_feature_select_strategy="full", downsample_rate="1/2",
    ), {
        "image_token_index": 480, "vision_feature_select_strategy": "full",
        "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]], "downsample_rate": "1/2",
        "deepstack_layer_map": [[-2, 0], [-1, 1]], "spatial_target_layers": [2, 3, 4, 5],
        "qformer_config": {
            "model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 48,
            "cross_attention_frequency": 1, "use_qformer_text_input": False,
        },
        "text_config": tiny_text(
            "granite4_vision_text", num_hidden_layers=6, embedding_multiplier=1.5,
            logits_scaling=0.9, residual_multiplier=0.8, attention_multiplier=0.3,
        ),
        "vision_config": {**VIT, "model_type": "siglip_vision_model", "hidden_size": 64,
                          "image_size": 28, "patch_size": 7},
    }),
    family("MuseGlimmerForConditionalGeneration", MUSE,
           patched("MuseGlimmerProcessor", {"max_video_frame_tokens": 16}, **MUSE_PARTS), {
        **MUSE_TABLE, "text_config": tiny_text("muse_glimmer_text", head_dim=16, sliding_window=12),
        "vision_config": MUSE_SIGHT,
    }, media=("image", "video"), kind=Timed),
    family("CohereCompassForConditionalGeneration", COMPASS,
           patched("CohereCompassProcessor", {"size": FILM_AREA}), {
        "image_token_id": 480, "video_token_id": 481, "vision_start_token_id": 482,
        "vision_end_token_id": 483,
        "text_config": tiny_text(
            "cohere_compass_text", sliding_window=12, logit_scale=0.5,
            layer_types=ONE_OF_EACH["layer_types"], rope_parameters={
                kind: {"rope_type": "default", "rope_theta": theta, "mrope_section": [2, 3, 3]}
                for kind, theta in (("full_attention", 1e5), ("sliding_attention", 1e4))
            },
        ),
        "vision_config": {**PATCHES, "num_position_embeddings": 64,
                          "deepstack_visual_indexes": [0, 1]},
    }, media=("image", "video")),
    family(*SPARK, media=("image", "video", "audio"), base=SeesAndHears, kind=Timed),
    # 0.01 s are 20 tokens.
    family(*SPARK, media=("audio",), base=SeesAndHears, kind=SoundFamily,
           seconds=(0.01, 0.01, 0.0073)),
    family("Ernie4_5_VLMoeForConditionalGeneration", ERNIE, patched(
        "Ernie4_5_VLMoeProcessor", {"size": FILM_AREA, "draw_on_frames": False},
    ), {
        "image_token_id": 480, "image_start_token_id": 481, "image_end_token_id": 482,
        "video_token_id": 483, "video_start_token_id": 484, "video_end_token_id": 485,
        "text_config": tiny_text(
            "ernie4_5_vl_moe_text", moe_num_experts=4, moe_k=2, moe_num_shared_experts=1,
            moe_intermediate_size=[32, 24], mlp_layer_types=ONE_OF_EACH["mlp_layer_types"],
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
        ),
        "vision_config": {**PATCHES, "temporal_merge_size": 2},
    }, media=("image", "video"), mark="<|image|><|placeholder|><|/image|>",
       video_mark="<|video|><|video@placeholder|><|/video|>"),
    family("Step3p7ForConditionalGeneration", STEP, Parts(
        "Step3p7Processor", {"size": {"height": 112, "width": 112}, "patch_size": 56},
    ), {
        "image_token_id": 480,
        "text_config": tiny_text(
            "step3p5", head_dim=16, sliding_window=12, num_sliding_attention_heads=2,
            n_routed_experts=4, share_expert_dim=32, swiglu_limits=[0.0, 0.0, 0.5],
            swiglu_limits_shared=[0.0, 0.5, 0.0], **EXPERTS, **ONE_OF_EACH,
        ),
        "vision_config": {**VIT, "num_hidden_layers": 2, "mlp_ratio": 1.5, "image_size": 112,
                          "max_position_embeddings": 64},
    }),
    family("HunYuanVLForConditionalGeneration", HUNYUAN, Parts(
        "HunYuanVLProcessor", {"patch_size": 4, "size": AREA},
    ), {
        "image_token_id": 480, "im_start_id": 481, "im_end_id": 482,
        "text_config": tiny_text("hunyuan_vl_text", head_dim=16, rope_parameters={
            "rope_type": "dynamic", "factor": 1.0, "alpha": 10.0, "rope_theta": 1e4,
            "mrope_section": [2, 2, 2, 2],
        }),
        "vision_config": {**VIT, "num_hidden_layers": 2, "patch_size": 4, "max_image_size": 32},
    }, mark="<a><img></a>"),
    family("Molmo2ForConditionalGeneration", MOLMO, Parts(
        "Molmo2Processor", {
            "size": {"height": 28, "width": 28}, "patch_size": 7, "overlap_margins": [1, 1],
            "max_crops": 4,
        }, video_processor={
            "video_processor_type": "Molmo2VideoProcessor", "size": {"height": 28, "width": 28},
            "patch_size": 7,
        },
    ), {
        "image_patch_id": 482, "image_start_token_id": 484, "low_res_image_start_token_id": 485,
        "frame_start_token_id": 486, "image_end_token_id": 487, "frame_end_token_id": 488,
        "text_config": tiny_text(
            "molmo2_text", vocab_size=480, additional_vocab_size=32, head_dim=16,
        ),
        "vision_config": {**VIT, "num_key_value_heads": 2, "head_dim": 16, "image_size": [28, 28],
                          "patch_size": 7},
        "adapter_config": {
            "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
            "intermediate_size": 48, "text_hidden_size": 64, "vision_feature_layer": [2, 0],
        },
    }, base=SeesBothWays, kind=Begun, chunk=130),
    family("Emu3ForConditionalGeneration", EMU, Parts(
        "Emu3Processor", {"min_pixels": 32 * 32, "max_pixels": 40 * 40},
    ), {
        "vocabulary_map": {"<image>": 480, "<|extra_200|>": 479,
                           **{f"<|visual token {i:06}|>": 300 + i for i in range(64)}},
        "text_config": tiny_text(
            "emu3_text_model", pad_token_id=0, bos_token_id=0, eos_token_id=2,
        ),
        "vq_config": {
            "codebook_size": 64, "temporal_downsample_factor": 2, "base_channels": 32,
            "channel_multiplier": [1, 1, 1, 1], "num_res_blocks": 1, "hidden_size": 32,
        },
    }, kind=Begun, sizes=((44, 44), (40, 40), (42, 42))),
]  # fmt: skip


@parametrize_sample("one", FAMILIES, every=20, ids=lambda one: f"{one.architecture}-{one.kind}")
def test_the_bridge_sees(one, tmp_path):
    check_images(one, tmp_path)


def test_a_published_name_that_is_not_transformers(tmp_path):
    one = next(one for one in FAMILIES if one.architecture.startswith("HyperCLOVA"))
    folder = write_family(one, tmp_path)
    file = folder / "config.json"
    answers = []
    for name, kind in ((one.architecture, None), ("HCXVisionV2ForCausalLM", "vlm")):
        table = {**json.loads(file.read_text()), "architectures": [name]}
        file.write_text(json.dumps({**table, "model_type": kind or table["model_type"]}))
        with modulm.LLM(str(folder), max_model_len=64, dtype="float32", device="cpu") as llm:
            prompt = {
                "prompt": "a <|image_pad|>",
                "multi_modal_data": {"image": images([(16, 16)])},
            }
            (output,) = llm.generate(prompt, modulm.SamplingParams(max_tokens=8))
            answers.append(output.outputs[0].token_ids)
    assert answers[0] == answers[1]


def test_a_kind_that_the_processor_does_not_know(tmp_path):
    folder = write_family(FAMILIES[0], tmp_path)
    film = [(images([(8, 8)]), {"fps": 1.0})]
    with modulm.LLM(str(folder), max_model_len=64) as llm:
        for kind in ("video", "audio"):
            with pytest.raises(modulm.errors.RequestError, match=kind):
                llm.generate({"prompt": "a <image>", "multi_modal_data": {kind: film}})


@pytest.mark.parametrize(
    ("name", "message"),
    [("Gemma3", "bidirectional"), ("Llama4", "chunked_attention")],
)
def test_what_it_would_get_wrong_is_refused(name, message):
    settings = getattr(hf, f"{name}Config")().to_dict()
    table = {**settings, "architectures": [f"{name}ForConditionalGeneration"]}
    with pytest.raises(UnsupportedError, match=message):
        TransformersConfig.from_table(table, "config.json")
