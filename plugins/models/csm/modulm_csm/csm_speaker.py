"""How CSM is prompted: the number of a speaker in brackets, then the text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from modulm_speakers.speaker import Speaker, Utterance

__all__ = ["CsmSpeaker"]

_BEGIN, _END = "<|begin_of_text|>", "<|end_of_text|>"
#: Keys of generation_config.json for the codes after a frame's first one.
_DEPTH = "depth_decoder_"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p")
#: What Sesame's program samples with, where generation_config.json does not tell.
_DEFAULTS: Mapping[str, Any] = MappingProxyType({"temperature": 0.9, "top_k": 50})


class CsmSpeaker(Speaker):
    """Its voices are speakers of a conversation, "0" to "9"."""

    kit_sample: ClassVar[Mapping[str, Any]] = {}

    @property
    def voices(self) -> Sequence[str]:
        return [str(number) for number in range(10)]

    def ask(self, text: str, voice: str, instructions: str = "") -> Utterance:
        ids = self.tokenizer.encode(f"[{voice}]{text}", add_special_tokens=False)
        special = self.tokenizer.special_ids
        begin, end = (self.tokenizer.token_to_id(token) for token in (_BEGIN, _END))
        tokens = [begin, *(token for token in ids if token not in special), end]
        extra = {"depth_sampling": self._depth_sampling()}
        return Utterance(
            tokens=[token for token in tokens if token is not None],
            params={**_DEFAULTS, "extra_args": extra},
        )

    def _depth_sampling(self) -> Mapping[str, Any]:
        """Sampling of the other codes, as generation_config.json sets it."""
        path = self.path / "generation_config.json"
        table = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        own = {key: table[_DEPTH + key] for key in _SAMPLING if table.get(_DEPTH + key) is not None}
        return {"temperature": 0.0} if table.get(f"{_DEPTH}do_sample") is False else own
