"""Media family of models run by transformers, based on the checkpoint's processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve

from modulm.errors import RequestError
from modulm_media import Media, MediaFamily
from modulm_media.values import Processed
from modulm_transformers.names import model_type

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = [
    "BOTH_WAYS",
    "EMBEDDED",
    "HEARING",
    "MEDIA_FAMILY",
    "TOKENS",
    "BothWaysFamily",
    "BridgedFamily",
    "HearingFamily",
]

#: The names of the media families.
MEDIA_FAMILY, BOTH_WAYS = "transformers", "transformers_both_ways"
HEARING = "transformers_hearing"
#: Names of tensors with an item's tokens, and the mask of its placeholders.
TOKENS, EMBEDDED = "bridged_tokens", "bridged_embedded"
#: Model types that use another model's video processor.
_VIDEO = {
    "cosmos3_omni": "Qwen3VLVideoProcessor",
    "exaone4_5": "Qwen2VLVideoProcessor",
    "hyperclovax_vision_v2": "Qwen2VLVideoProcessor",
    "lfm3_vl": "Qwen3VLVideoProcessor",
    "muse_spark": "MuseGlimmerVideoProcessor",
}
#: Model types whose processor takes a placeholder only between the tokens around images.
_WRAPPED = frozenset({"hunyuan_vl"})
#: Model types whose processor writes the time of frames, and is not told it by default.
_TIMED = frozenset({"muse_glimmer", "muse_spark"})
#: Model types whose prompts begin with a token that the tokenizer does not write.
_BEGUN = frozenset({"emu3", "molmo2"})


class BridgedFamily(MediaFamily):
    """Prompts of any model; its own code receives an item's tokens with its tensors."""

    kinds = ("image", "video")

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        """Called if the architecture has no media family of its own."""
        return files.processor(video=_VIDEO.get(model_type(files.table("config"))))

    def mark(self, kind: str) -> str:
        mark = getattr(self.processor, f"{kind}_token", None)
        if not isinstance(mark, str):
            raise RequestError(f"the model's processor has no token for {kind}", kind)
        if self.config.get("model_type") in _WRAPPED:
            around = self.processor.image_start_token, self.processor.image_end_token
            return mark.join(around)
        return mark

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        if media.kind == "video" and self.config.get("model_type") in _TIMED:
            options = {"videos_kwargs": {"return_metadata": True}, **options}
        outputs = super().call(media, options)
        if self._begins:
            outputs = {**outputs, "input_ids": np.asarray(outputs["input_ids"])[:, 1:]}
        return outputs

    def complete_prompt(self, tokens: np.ndarray, mark: np.ndarray) -> np.ndarray:
        if not self._begins:
            return tokens
        tokenizer = self.processor.tokenizer
        begin = tokenizer.eos_token_id if tokenizer.bos_token is None else tokenizer.bos_token_id
        return tokens if tokens[:1] == begin else np.concatenate([[begin], tokens])

    def features(self, kind: str) -> Sequence[int]:
        """The feature tokens; for videos also those of images, since some models use these for
        frames.
        """
        tokens = super().features(kind) if self._has_token(kind) else ()
        return (*tokens, *super().features("image")) if kind == "video" else tokens

    def tensors(self, outputs: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        tokens = np.asarray(outputs["input_ids"][0], dtype=np.int64).ravel()
        extra = {TOKENS: tokens, EMBEDDED: np.isin(tokens, self.features("video"))}
        return {**super().tensors(outputs), **extra}

    @cached_property
    def _counts(self) -> Any:
        """transformers' function for multi-axis positions, None for one-dimensional ones."""
        import torch
        from transformers import CONFIG_MAPPING, MODEL_MAPPING

        settings = CONFIG_MAPPING[model_type(self.config)].from_dict(dict(self.config))
        model = MODEL_MAPPING[type(settings)]
        if not hasattr(model, "get_rope_index"):
            return None
        with torch.device("meta"):
            return model(settings).get_rope_index

    def positions(
        self, tokens: np.ndarray, items: Sequence[tuple[int, Processed]]
    ) -> np.ndarray | None:
        if self._counts is None:
            return None
        import torch

        kinds = self.processor.create_mm_token_type_ids([tokens.tolist()])
        inputs = {"input_ids": torch.from_numpy(tokens)[None]}
        inputs["mm_token_type_ids"] = torch.tensor(kinds)
        for _, item in items:
            for name in signature(self._counts).parameters.keys() & item.tensors.keys():
                before = (inputs[name],) if name in inputs else ()
                inputs[name] = torch.cat([*before, torch.from_numpy(item.tensors[name])])
        positions, _ = self._counts(**inputs)
        return np.asarray(positions[:, 0])

    @property
    def _begins(self) -> bool:
        return self.config.get("model_type") in _BEGUN

    def _has_token(self, kind: str) -> bool:
        names = (f"{kind}_token_id", f"{kind}_token_index")
        return any(name in self.config for name in names) or hasattr(self.processor, names[0])


class HearingFamily(BridgedFamily):
    """Muse Spark, which also takes sounds."""

    kinds = ("image", "video", "audio")

    def tensors(self, outputs: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
        tensors = super().tensors(outputs)
        tokens = (*self.features("video"), *self.features("audio"))
        return {**tensors, EMBEDDED: np.isin(tensors[TOKENS], tokens)}


class BothWaysFamily(BridgedFamily):
    """Molmo 2: all tokens of all images attend to each other."""

    kinds = ("image",)
    bidirectional = True
    together = True

    def features(self, kind: str) -> Sequence[int]:
        return (int(self.config["image_patch_id"]),)

    def process(self, media: Media, options: Mapping[str, Any]) -> Processed:
        processed = super().process(media, options)
        return evolve(processed, spans=((0, len(processed.tokens)),))
