"""Media family of Phi-4 multimodal as published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from modulm_media import Media
from modulm_phi.phi_media_family import PhiFamily

if TYPE_CHECKING:
    from modulm_media.processors import ProcessorFiles

__all__ = ["Phi4MMFamily"]

_SOUNDS = "transformers.models.phi4_multimodal.feature_extraction_phi4_multimodal"
#: Tokens of images and sounds.
_PHI4_TOKENS = {"image": 200010, "audio": 200011}


def _unnumbered(
    tokens: np.ndarray, media: Sequence[Media], tokenizer: Any, marks: Mapping[str, Sequence[int]]
) -> tuple[np.ndarray, Sequence[Media]]:
    """Put `marks` in place of numbered placeholders, "<|image_1|>", and media in their order.

    marks: kind to tokens.
    """
    spans: list[tuple[int, int, str]] = []
    order = {kind: [m for m in media if m.kind == kind] for kind in marks}
    for kind, items in order.items():
        found = [_span(tokens, tokenizer, f"<|{kind}_{i}|>") for i in range(1, len(items) + 1)]
        if not found or None in found:
            continue
        pairs = sorted(
            zip([span for span in found if span], items, strict=True), key=lambda p: p[0]
        )
        spans += [(first, end, kind) for (first, end), _ in pairs]
        order[kind] = [item for _, item in pairs]
    left = {kind: iter(items) for kind, items in order.items()}
    ordered = [next(left[m.kind]) if m.kind in left else m for m in media]
    pieces, last = [], 0
    for first, end, kind in sorted(spans):
        pieces += [tokens[last:first], np.array(marks[kind], dtype=np.int64)]
        last = end
    return np.concatenate([*pieces, tokens[last:]]), ordered


def _span(tokens: np.ndarray, tokenizer: Any, text: str) -> tuple[int, int] | None:
    """(first, end) of the only place where tokens are those of a text, None without one."""

    def encode(part: str) -> list[int]:
        ids: list[int] = tokenizer(part, add_special_tokens=False)["input_ids"]
        return ids

    # In the middle of a text, some tokenizers write no space before it.
    for ids in (encode(text), encode("\n" + text)[len(encode("\n")) :]):
        count = len(ids)
        places = [
            first
            for first in range(len(tokens) - count + 1)
            if tokens[first] == ids[0] and tokens[first : first + count].tolist() == ids
        ]
        if len(places) == 1:
            return places[0], places[0] + count
    return None


def _tokenizer(files: ProcessorFiles) -> Any:
    """The files' tokenizer, without their configuration, which transformers may refuse."""
    from transformers import AutoTokenizer, PreTrainedConfig

    remote = files.trust_remote_code
    return AutoTokenizer.from_pretrained(
        files.tokenizer, config=PreTrainedConfig(), trust_remote_code=remote
    )


class Phi4MMFamily(PhiFamily):
    """Phi-4 multimodal as published: transformers' processor, whatever code the files name."""

    @classmethod
    def open_processor(cls, files: ProcessorFiles) -> Any:
        from modulm_phi.tiles import Phi4MultimodalImageProcessorPil

        config, tokenizer = files.table("config"), _tokenizer(files)
        for kind, section in (("image", "vision_config"), ("audio", "audio_config")):
            number = (config.get(section) or {}).get(f"{kind}_token_id", _PHI4_TOKENS[kind])
            token = tokenizer.convert_ids_to_tokens(int(number))
            for name, value in ((f"{kind}_token", token), (f"{kind}_token_id", int(number))):
                object.__setattr__(tokenizer, name, value)
        written = files.table("preprocessor_config")
        settings = {name: written[name] for name in ("dynamic_hd", "size", "patch_size")
                    if name in written}  # fmt: skip
        sound = (config.get("audio_processor") or {}).get("config") or {}
        parts = {
            "image_processor": Phi4MultimodalImageProcessorPil(**settings),
            "audio_processor": import_module(_SOUNDS).Phi4MultimodalFeatureExtractor(
                feature_size=int(sound.get("input_size", 80))
            ),
            "tokenizer": tokenizer,
        }
        return files.from_parts("phi4_multimodal", "Phi4MultimodalProcessor", parts)

    def group_media(
        self, tokens: np.ndarray, media: Sequence[Media], options: Mapping[str, Any]
    ) -> tuple[np.ndarray, Sequence[Media]]:
        marks = {kind: self.features(kind) for kind in self.kinds}
        return _unnumbered(tokens, media, self.processor.tokenizer, marks)

    def needs_values(self, options: Mapping[str, Any]) -> bool:
        return False
