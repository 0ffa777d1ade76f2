"""How Qwen3-Omni's talker is prompted: what users said, then the answer's first token.

The other tokens of the answer follow, one with each frame. Source: transformers'
`Qwen3OmniMoeForConditionalGeneration.generate`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from modulm_speakers.script import NONE, Script
from modulm_speakers.speaker import Answer, Speaker, Utterance

__all__ = ["OmniSpeaker", "moved_positions", "sampling"]

#: Keys of config.json and their values in the published checkpoint.
_TOKENS: Mapping[str, int] = MappingProxyType(
    {
        "im_start_token_id": 151644,
        "im_end_token_id": 151645,
        "tts_pad_token_id": 151671,
        "tts_bos_token_id": 151672,
        "tts_eos_token_id": 151673,
        "user_token_id": 872,
        "assistant_token_id": 77091,
    }
)
_CODES: Mapping[str, int] = MappingProxyType(
    {
        "codec_nothink_id": 4203,
        "codec_think_bos_id": 4204,
        "codec_think_eos_id": 4205,
        "codec_pad_id": 4196,
        "codec_bos_id": 4197,
    }
)
_MEDIA: Mapping[str, int] = MappingProxyType(
    {"audio_token_id": 151675, "image_token_id": 151655, "video_token_id": 151656}
)
#: The voice of transformers' default.
_FIRST = "ethan"
#: Sampling of first codes, and of a frame's others, by transformers' defaults.
_SAMPLING: Mapping[str, Any] = MappingProxyType(
    {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05, "max_tokens": 4096}
)
_DEPTH: Mapping[str, Any] = MappingProxyType({"temperature": 1.0, "top_k": 50, "top_p": 0.8})
#: How transformers names the arguments of both.
_PREFIX = "talker_"
_RENAMED: Mapping[str, str] = MappingProxyType({"max_tokens": "max_new_tokens"})
#: Tokens before the answer: the start of the turn, its role, a new line.
_OPENING = 3
#: Entries of the talker's opening that have padding as text.
_PADS = 4


class OmniSpeaker(Speaker):
    """Its voices are those of config.json."""

    kit_sample: ClassVar[Mapping[str, Any]] = {
        "talker_config": {"speaker_id": {"ethan": 40, "chelsie": 41}},
        **{name: index for index, name in enumerate(_TOKENS, 300)},
    }
    speaks_answers = True

    @property
    def voices(self) -> Sequence[str]:
        return sorted(self._ids, key=lambda name: (name != _FIRST, name))

    @property
    def _ids(self) -> Mapping[str, int]:
        table = self._talker.get("speaker_id") or {}
        return {str(name): int(code) for name, code in table.items()}

    @property
    def _talker(self) -> Mapping[str, Any]:
        table: Mapping[str, Any] = self.config.get("talker_config") or {}
        return table

    def _token(self, name: str) -> int:
        return int(self.config.get(name, _TOKENS[name]))

    def ask(self, text: str, voice: str, instructions: str = "") -> Utterance:
        """Build the request for a text as if it had been said by a user and repeated."""
        special, encode = self.tokenizer.special_ids, self.tokenizer.encode
        said = [token for token in encode(text, add_special_tokens=False) if token not in special]
        line = encode("\n", add_special_tokens=False)
        start, end = self._token("im_start_token_id"), self._token("im_end_token_id")
        user, assistant = self._token("user_token_id"), self._token("assistant_token_id")
        prompt = [start, user, *line, *said, end, *line, start, assistant, *line]
        utterance = self.reply(Answer(prompt=prompt, tokens=said), voice)
        return Utterance(tokens=[]) if utterance is None else utterance

    def states_of(self, prompt: Sequence[int]) -> Sequence[tuple[int, int]]:
        """Return the ranges of images, sound and video that users sent."""
        tokens = np.asarray(prompt, dtype=np.int64)
        thinker = self.config.get("thinker_config") or {}
        media = [int(thinker.get(name, default)) for name, default in _MEDIA.items()]
        seen = np.isin(tokens, media) & self._of_users(tokens)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], seen, [False]]).astype(np.int8)))
        return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]

    def _of_users(self, tokens: np.ndarray) -> np.ndarray:
        """Return which tokens are of users' turns: [n] bool."""
        starts = np.flatnonzero(tokens == self._token("im_start_token_id"))
        of_users = np.zeros(len(tokens), dtype=np.bool_)
        user = self._token("user_token_id")
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            of_users[start:end] = start + 1 < len(tokens) and tokens[start + 1] == user
        return of_users

    def _opening(self, tokens: np.ndarray) -> tuple[list[int], list[int]]:
        """Return how the answer's turn begins, and the tokens of the answer in the prompt."""
        start, role = self._token("im_start_token_id"), self._token("assistant_token_id")
        turns = np.flatnonzero((tokens[:-1] == start) & (tokens[1:] == role))
        if not len(turns):
            line = self.tokenizer.encode("\n", add_special_tokens=False)
            return [start, role, *line][:_OPENING], []
        turn = tokens[turns[-1] :].tolist()
        return turn[:_OPENING], turn[_OPENING:]

    def reply(self, answer: Answer, voice: str) -> Utterance | None:
        tokens = np.asarray(answer.prompt, dtype=np.int64)
        opening, begun = self._opening(tokens)
        end = self._token("im_end_token_id")
        said = [token for token in (*begun, *answer.tokens) if token != end]
        if not said:
            return None
        heard = self._of_users(tokens)
        texts = tokens[heard].copy()
        given = np.zeros(len(tokens), dtype=np.bool_)
        for start, stop in self.states_of(tokens):
            given[start:stop] = True
        given = np.flatnonzero(given[heard])
        texts[given] = NONE
        pad = self._token("tts_pad_token_id")
        spoken = [*opening, *[pad] * _PADS, self._token("tts_bos_token_id"), said[0]]
        nothink, begin, stop, padding, first = (
            int(self._talker.get(name, default)) for name, default in _CODES.items()
        )
        codes = [NONE] * (len(texts) + len(opening))
        codes += [nothink, begin, stop, self._ids[voice], padding, first]
        prompt = len(codes)
        script = Script(
            texts=np.array([*texts, *spoken, *said[1:], self._token("tts_eos_token_id")]),
            padding=pad,
            codes=np.array(codes),
            given=given if len(given) else None,
            states=answer.states if len(given) else None,
            **moved_positions(answer, heard, prompt),
        )
        own, greedy = sampling(self.path, _SAMPLING)
        depth = {"temperature": 0.0} if greedy else dict(_DEPTH)
        return Utterance(
            tokens=[pad] * prompt,
            params={**own, "extra_args": {**script.arguments(), "depth_sampling": depth}},
        )


def moved_positions(answer: Answer, heard: np.ndarray, prompt: int) -> dict[str, Any]:
    """Return the script's positions: those of the conversation's `heard` tokens, moved together."""
    if answer.positions is None:
        return {}
    kept, at = [], 0
    edges = np.flatnonzero(np.diff(np.concatenate([[False], heard, [False]]).astype(np.int8)))
    for start, end in edges.reshape(-1, 2):
        part = answer.positions[:, start:end]
        part = part - part.min() + at
        at = int(part.max()) + 1
        kept.append(part)
    count = sum(part.shape[1] for part in kept)
    kept.append(np.tile(at + np.arange(prompt - count), (len(answer.positions), 1)))
    whole = np.concatenate(kept, axis=1).astype(np.int64)
    return {"positions": whole, "offset": int(whole.max()) + 1 - prompt}


def sampling(path: Path, defaults: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """Return the sampling of first codes, by generation_config.json with transformers' names, and
    whether the most likely codes are chosen.
    """
    file = path / "generation_config.json"
    table = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    names = {name: _PREFIX + _RENAMED.get(name, name) for name in defaults}
    own = {name: table[key] for name, key in names.items() if table.get(key) is not None}
    greedy = table.get(f"{_PREFIX}do_sample") is False
    return {**defaults, **own, **({"temperature": 0.0} if greedy else {})}, greedy
