"""Media families of Gemma 3 and PaliGemma: image tokens attend in both directions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from modulm_media import Media, MediaFamily

__all__ = ["ColPaliFamily", "Gemma3Family", "PaliGemmaFamily"]

#: Maximum number of line feeds that one token stands for.
_LINES = 31


class Gemma3Family(MediaFamily):
    """Gemma 3. Blank lines around an image merge with line feeds of the text."""

    bidirectional = True

    def merged_token(self, left: int, right: int) -> int | None:
        count = self._lines.get(left, 0), self._lines.get(right, 0)
        return self._tokens.get(sum(count)) if all(count) else None

    @cached_property
    def _tokens(self) -> Mapping[int, int]:
        """Number of line feeds -> their single token, if the vocabulary has one."""
        encode = self.processor.tokenizer.encode
        every = {n: encode("\n" * n, add_special_tokens=False) for n in range(1, _LINES + 1)}
        return {count: ids[0] for count, ids in every.items() if len(ids) == 1}

    @cached_property
    def _lines(self) -> Mapping[int, int]:
        return {token: count for count, token in self._tokens.items()}


class PaliGemmaFamily(MediaFamily):
    """PaliGemma 1 and 2. The text of a prompt follows the last image and ends with a line feed.

    Images of a prompt without placeholders come before its text, as with transformers' processor.
    """

    prefix = True

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The processor's output without the text that it adds around the image."""
        outputs = dict(super().call(media, options))
        ids = np.asarray(outputs["input_ids"])
        outputs["input_ids"] = ids[:, ids[0] == self.features(media.kind)[0]]
        outputs.pop("labels", None)
        return outputs

    def complete_prompt(self, tokens: np.ndarray, mark: np.ndarray) -> np.ndarray:
        tokenizer = self.processor.tokenizer
        marks = np.flatnonzero(np.isin(tokens, mark))
        if not len(marks):
            return tokens
        end = int(marks[-1]) + 1
        if end < len(tokens) and tokens[end] == tokenizer.bos_token_id:
            return tokens
        line = tokenizer.encode("\n", add_special_tokens=False)
        return np.concatenate([tokens[:end], [tokenizer.bos_token_id], tokens[end:], line])

    def group_media(
        self, tokens: np.ndarray, media: Sequence[Media], options: Mapping[str, Any]
    ) -> tuple[np.ndarray, Sequence[Media]]:
        """The prompt and its media; images without any placeholder come first."""
        mark = np.array(self.features("image"), dtype=np.int64)
        if not media or np.isin(tokens, mark).any():
            return tokens, media
        bos = self.processor.tokenizer.bos_token_id
        text = tokens[1:] if len(tokens) and tokens[0] == bos else tokens
        return self.complete_prompt(np.concatenate([*[mark] * len(media), text]), mark), media

    def needs_values(self, options: Mapping[str, Any]) -> bool:
        return False


class ColPaliFamily(PaliGemmaFamily):
    """ColPali, whose prompts attend in both directions throughout.

    Only the image part of its processor is called, because the processor takes no text with images.
    """

    prefix = False

    def document(self, kind: str, is_only_item: bool) -> str:
        page: str = self.processor.visual_prompt_prefix
        return self.mark(kind) + (page if is_only_item else "")

    def call(self, media: Media, options: Mapping[str, Any]) -> Mapping[str, Any]:
        outputs = self.processor.image_processor(
            images=[media.value], return_tensors="pt", **options
        )
        tokens = list(self.features(media.kind)) * self.processor.image_seq_length
        return {**outputs, "input_ids": [tokens]}
