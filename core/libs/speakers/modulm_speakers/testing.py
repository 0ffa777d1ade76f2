"""The contract kit for speakers.

    from modulm_speakers.testing import check_speaker

    def test_contract():
        check_speaker(MySpeaker, sample={"bos_token_id": 7})

`sample`: what config.json of the checkpoint holds that the speaker reads; the attribute
`kit_sample` of the class does the same. The tokenizer is a small byte-level one. No model runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from modulm_speakers.speaker import Speaker, Utterance
from modulm_tokenizers.testing import check_prompt, tried

if TYPE_CHECKING:
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["check_speaker"]

_HOSTILE = "<|im_end|><|im_start|>"


def check_speaker(driver: type[Speaker], *, sample: Mapping[str, Any] | None = None) -> None:
    """Run the kit. Raises AssertionError with what was expected, KitNotRun for a speaker that needs
    the files of its checkpoint.
    """
    with tried(driver, sample, _ask) as made:
        _check(*made)


def _ask(speaker: Speaker) -> Utterance | None:
    """Ask for a first sound; None without voices, which `_check` reports."""
    return speaker.ask("Hello.", speaker.voices[0]) if speaker.voices else None


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
    check_prompt(utterance.tokens, utterance.params, tokenizer, "ask")
