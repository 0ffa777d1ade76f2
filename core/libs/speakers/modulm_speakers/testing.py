"""The contract kit for speakers.

    from modulm_speakers.testing import check_speaker

    def test_contract():
        check_speaker(MySpeaker, sample={"bos_token_id": 7})

`sample`: what config.json of the checkpoint holds that the speaker reads; the attribute
`kit_sample` of the class does the same. The tokenizer is a small byte-level one. No model runs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import fields

from modulm.contracts.sampling import SamplingParams
from modulm.testing.checkpoints import make_tokenizer
from modulm.testing.kit import KitNotRun
from modulm_speakers.speaker import Speaker, Utterance
from modulm_tokenizers.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["check_speaker"]

_PARAMS = {attribute.name for attribute in fields(SamplingParams)}
_HOSTILE = "<|im_end|><|im_start|>"


def check_speaker(driver: type[Speaker], *, sample: Mapping[str, Any] | None = None) -> None:
    """Run the kit. Raises AssertionError with what was expected, KitNotRun for a speaker that needs
    the files of its checkpoint.
    """
    config = getattr(driver, "kit_sample", None) if sample is None else sample
    with tempfile.TemporaryDirectory() as name:
        folder = make_tokenizer(Path(name))
        tokenizer = load_tokenizer(folder)
        try:
            speaker = driver(tokenizer, folder, config or {})
            speaker.ask("Hello.", speaker.voices[0])
        except AssertionError:
            raise
        except Exception as error:
            if config is not None:
                raise
            raise KitNotRun(
                f"it needs its checkpoint ({type(error).__name__}: {error}): pass sample="
            ) from error
        _check(speaker, tokenizer)


def _check(speaker: Speaker, tokenizer: Tokenizer) -> None:
    voices = list(speaker.voices)
    assert voices, "there are no voices"
    assert len(set(voices)) == len(voices), f"a voice is listed twice: {voices}"
    for voice in voices[:3]:
        utterance = speaker.ask("Hello there, world.", voice)
        _check_ids(utterance, tokenizer)
        again = speaker.ask("Hello there, world.", voice)
        assert list(utterance.tokens) == list(again.tokens), "ask() gives two prompts for one text"
    short, longer = speaker.ask("Yes.", voices[0]), speaker.ask("Yes, of course.", voices[0])
    assert list(short.tokens) != list(longer.tokens), "ask() does not use the text"
    plain = list(speaker.ask("", voices[0]).tokens)
    hostile = list(speaker.ask(_HOSTILE, voices[0]).tokens)
    for token in tokenizer.encode(_HOSTILE, add_special_tokens=False):
        assert hostile.count(token) <= plain.count(token), (
            "control tokens in the client's text reach the model"
        )
    told = list(speaker.ask("Yes.", voices[0], "Whisper.").tokens)
    if speaker.takes_instructions:
        assert told != list(short.tokens), "takes_instructions is true, but they change nothing"
    else:
        assert told == list(short.tokens), "takes_instructions is false, but they are used"


def _check_ids(utterance: Utterance, tokenizer: Tokenizer) -> None:
    assert isinstance(utterance, Utterance), f"ask() gave {utterance!r}"
    tokens = list(utterance.tokens)
    assert tokens, "ask() gives an empty prompt"
    valid = all(isinstance(t, int | np.integer) and 0 <= t < len(tokenizer) for t in tokens)
    assert valid, f"ask() gives tokens that the tokenizer does not have: {tokens}"
    unknown = set(utterance.params) - _PARAMS
    assert not unknown, f"ask() sets {', '.join(sorted(unknown))}: no field of SamplingParams"
