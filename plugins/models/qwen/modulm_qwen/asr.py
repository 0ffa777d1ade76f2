"""Qwen3-ASR and its forced aligner: Qwen3-Omni's hearing before Qwen 3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from attrs import evolve, frozen
from torch import Tensor

from modulm.contracts.media import MediaItem
from modulm.errors import CheckpointError
from modulm.nn import Builder, WeightNames
from modulm_qwen.hearing import Qwen3Hearing, Qwen3HearingConfig
from modulm_towers import MultimodalConfig, MultimodalModel, Pieces, tiny_audio, tiny_text

__all__ = [
    "Qwen3AlignerConfig",
    "Qwen3AsrConfig",
    "Qwen3AsrForConditionalGeneration",
    "Qwen3ForcedAligner",
]


@frozen(eq=False, kw_only=True)
class Qwen3AsrConfig(MultimodalConfig):
    """config.json of Qwen3-ASR, as Qwen publishes it or in transformers' format."""

    audio_type: ClassVar[type | None] = Qwen3HearingConfig

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        """Read config.json. The axes of its positions are equal, because sounds count like text.

        Raises CheckpointError, UnsupportedError.
        """
        inner = dict(table.get("thinker_config", table))
        for key, model_type in (("text_config", "qwen3"), ("audio_config", "qwen3_asr_encoder")):
            if isinstance(inner.get(key), Mapping):
                inner[key] = {**inner[key], "model_type": model_type}
        text = inner.get("text_config")
        if isinstance(text, dict) and "mrope_section" in (text.get("rope_scaling") or {}):
            inner["text_config"] = {**text, "rope_scaling": None}
        name = "Qwen3ASRForConditionalGeneration"
        return super().from_table(
            {**inner, "architectures": [name], "model_type": "qwen3_asr"}, file
        )


class Qwen3AsrForConditionalGeneration(MultimodalModel):
    """Qwen3-ASR: it names the language, then writes what is said."""

    api = 1
    config_type: ClassVar[type] = Qwen3AsrConfig
    media = ("audio",)
    names = WeightNames(
        rename=((r"^(?:model\.)?multi_modal_projector\.linear_(\d)\.", r"audio_tower.proj\1."),)
    )

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        return evolve(names, rename=((r"^thinker\.", ""), *names.rename))

    def make_encoders(self, config: Qwen3AsrConfig, b: Builder) -> None:
        self.ears = Qwen3Hearing(config.audio, b.at("audio_tower"), whole_chunks=True)

    def features(self, items: Sequence[MediaItem]) -> Pieces[Sequence[Tensor]]:
        sounds = []
        for item in items:
            frames = int(item.tensors["input_features_mask"].sum())
            sounds.append(self.tensor(item, "input_features")[0, :, :frames])
        return self.ears.hear(sounds)

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        audio = tiny_audio(
            "qwen3_asr_encoder", n_window_infer=200, output_dim=64, downsample_hidden_size=8
        )
        del audio["max_source_positions"]
        return {
            "architectures": ["Qwen3ASRForConditionalGeneration"],
            "model_type": "qwen3_asr",
            "audio_token_id": 480,
            "tie_word_embeddings": False,
            "text_config": tiny_text("qwen3", head_dim=16),
            "audio_config": audio,
        }


@frozen(eq=False, kw_only=True)
class Qwen3AlignerConfig(Qwen3AsrConfig):
    """config.json of the forced aligner. classes: of a token, which are times.

    The width of a class in milliseconds, `timestamp_segment_time`, is for the reader of answers.
    """

    classes: int = 0

    @classmethod
    def from_table(cls, table: Mapping[str, Any], file: str) -> Self:
        inner = table.get("thinker_config", table)
        classes = inner.get("classify_num", len(table.get("id2label", ())) or None)
        if type(classes) is not int or classes < 1:
            raise CheckpointError(f"{file}: classify_num: {classes!r} is no number of classes")
        # The head is of classes, so that none of words is stored.
        config = super().from_table({**inner, "tie_word_embeddings": True}, file)
        return evolve(config, classes=classes)


class Qwen3ForcedAligner(Qwen3AsrForConditionalGeneration):
    """The forced aligner: the class of a `<timestamp>` token is the time of the word beside it."""

    config_type: ClassVar[type] = Qwen3AlignerConfig
    tasks = ("token_classify",)

    def make_encoders(self, config: Qwen3AlignerConfig, b: Builder) -> None:  # type: ignore[override]
        super().make_encoders(config, b)
        self.classifier = b.linear("classifier", config.hidden_size, config.classes, split=False)

    @classmethod
    def weights(cls, config: Any) -> WeightNames:
        names = super().weights(config)
        head = (r"^(?:thinker\.lm_head|score)\.", "classifier.")
        return evolve(names, rename=(head, *names.rename))

    def logits(self, hidden: Tensor) -> Tensor:
        classes: Tensor = self.classifier(hidden)
        return classes

    @classmethod
    def tiny(cls) -> Mapping[str, Any]:
        inner = {key: value for key, value in super().tiny().items() if key != "architectures"}
        return {
            "architectures": ["Qwen3ASRForcedAlignerForTokenClassification"],
            "model_type": "qwen3_asr",
            "thinker_config": {**inner, "classify_num": 24, "model_type": "qwen3_forced_aligner"},
        }
