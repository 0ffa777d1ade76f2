"""How Qwen2.5-Omni's talker is prompted: the whole conversation, as the thinker understood it.

Source: transformers' `Qwen2_5OmniForConditionalGeneration.generate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from modulm.errors import UnsupportedError
from modulm_qwen.omni_speaker import moved_positions, sampling
from modulm_speakers.script import NONE, Script
from modulm_speakers.speaker import Answer, Speaker, Utterance

__all__ = ["Omni25Speaker"]

#: Keys of `talker_config` and their values in the published checkpoint.
_KEYS: Mapping[str, int] = MappingProxyType(
    {
        "tts_text_end_token_id": 151861,
        "tts_text_pad_token_id": 151859,
        "tts_codec_start_token_id": 8293,
        "tts_codec_pad_token_id": 8292,
        "tts_codec_mask_token_id": 8296,
        "audio_token_index": 151646,
        "image_token_index": 151655,
        "video_token_index": 151656,
    }
)
#: The voice of transformers' default.
_FIRST = "Chelsie"
_SAMPLING: Mapping[str, Any] = MappingProxyType(
    {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.05, "max_tokens": 4096}
)
#: The file of voices, and more tokens than any answer has.
_VOICES, _ALL = "spk_dict.pt", 1 << 30


class Omni25Speaker(Speaker):
    """Its voices are those of the checkpoint's file."""

    kit_sample: ClassVar[Mapping[str, Any]] = {}
    speaks_answers = True
    reads_texts = False

    @cached_property
    def _first_texts(self) -> Mapping[str, int]:
        """The text token that each voice begins with."""
        import torch

        table = torch.load(self.path / _VOICES, map_location="cpu", weights_only=True)
        return {name: int(voice["bos_token"]) for name, voice in table.items()}

    @property
    def voices(self) -> Sequence[str]:
        return sorted(self._first_texts, key=lambda name: (name != _FIRST, name))

    def ask(self, text: str, voice: str, instructions: str = "") -> Utterance:
        """Raise UnsupportedError: the talker needs the thinker's states of what it says."""
        raise UnsupportedError("Qwen2.5-Omni speaks only its own answers")

    def states_of(self, prompt: Sequence[int]) -> Sequence[tuple[int, int]]:
        return [(0, _ALL)]

    def reply(self, answer: Answer, voice: str) -> Utterance | None:
        if answer.states is None:
            return None
        prompt, count = len(answer.prompt), len(answer.states)
        said = list(answer.tokens)[: count - prompt]
        if not said:
            return None
        keys = {name: self._key(name) for name in _KEYS}
        texts = np.array(answer.prompt, dtype=np.int64)
        texts[np.isin(texts, [keys[name] for name in _KEYS if name.endswith("_index")])] = NONE
        after = [self._first_texts[voice], *said, keys["tts_text_end_token_id"]]
        mask, pad = keys["tts_codec_mask_token_id"], keys["tts_codec_pad_token_id"]
        start, length = keys["tts_codec_start_token_id"], prompt + 2
        codes = [*[NONE] * prompt, pad, start]
        given = [*range(prompt), *range(prompt + 1, prompt + 1 + len(said))]
        own, _ = sampling(self.path, _SAMPLING)
        script = Script(
            texts=np.array([*texts.tolist(), *after]),
            padding=keys["tts_text_pad_token_id"],
            codes=np.array(codes),
            given=np.array(given),
            states=answer.states[: prompt + len(said)],
            voice=voice,
            **moved_positions(answer, np.ones(prompt, dtype=np.bool_), length),
        )
        tokens = [*[mask] * prompt, pad, start]
        return Utterance(tokens=tokens, params={**own, "extra_args": dict(script.arguments())})

    def _key(self, name: str) -> int:
        """A key of the talker's configuration, or of the thinker's for media."""
        part = "thinker_config" if name.endswith("_index") else "talker_config"
        table = self.config.get(part) or {}
        return int(table.get(name, _KEYS[name]))
