"""The contract kit for grammar backends.

from modulm_structured_output.testing import check_grammar

def test_contract():
    check_grammar(MyBackend)
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

import numpy as np

from modulm.contracts.sampling import StructuredOutputs
from modulm.errors import RequestError
from modulm.testing.checkpoints import make_tokenizer
from modulm.testing.grammars import allowed
from modulm_tokenizers.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from modulm.contracts.grammar import Grammar, GrammarBackend, Matcher
    from modulm.contracts.tokenizer import Tokenizer

__all__ = ["check_grammar"]

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}


#: A constraint, texts that fit it and texts that do not. One of the first is enough, where formats
#: may differ in their spaces.
_SAMPLES: tuple[tuple[StructuredOutputs, tuple[str, ...], tuple[str, ...]], ...] = (
    (StructuredOutputs(choice=["yes", "no", "yes sir"]), ("yes",), ("maybe", "ye", "yess")),
    (StructuredOutputs(choice=["yes", "no", "yes sir"]), ("yes sir",), ("sir", "")),
    (StructuredOutputs(regex="[ab]{2,3}c"), ("abc",), ("abcd", "ac", "ab", "aaaac")),
    (
        StructuredOutputs(json=_SCHEMA),
        ('{"a": 1}', '{"a":1}', '{ "a": 1 }'),
        ('{"b": 1}', '{"a": "x"}', '{"a": 1', "{}", "[]"),
    ),
    (StructuredOutputs(json_object=True), ('{"a": 1}', '{"a":1}'), ("[1]", '{"a"}', '{"a": 1')),
)
_MALFORMED = (
    StructuredOutputs(regex="(a"),
    StructuredOutputs(json='{"type": "strng"}'),
    StructuredOutputs(grammar="root ::= ("),
)


def check_grammar(driver: type[GrammarBackend]) -> None:
    """Run the contract kit for grammar backends.

    Each kind of constraint that the backend does not reject is compiled for a small vocabulary, and
    texts that fit it and that do not are followed under the masks. Raises AssertionError with what
    was expected.
    """
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(make_tokenizer(folder))
    vocabulary = len(tokenizer) + 7  # the model's logits may be wider
    backend = driver(tokenizer, vocabulary, tokenizer.stop_ids)
    accepted = 0
    for constraint, fitting, others in _SAMPLES:
        if _rejected(backend, constraint):
            continue
        accepted += 1
        what = _title(constraint)
        grammar = backend.compile(constraint)
        assert isinstance(grammar.nbytes, int), f"{what}: nbytes is {grammar.nbytes!r}"
        assert grammar.nbytes >= 0, f"{what}: nbytes is {grammar.nbytes}"
        allowed_texts = [text for text in fitting if _follows(tokenizer, grammar, text, vocabulary)]
        assert allowed_texts, f"{what}: {fitting[0]!r} is forbidden"
        best = allowed_texts[0]
        for text in others:
            forbidden = not _follows(tokenizer, grammar, text, vocabulary)
            assert forbidden, f"{what}: {text!r} is allowed"
        ids = tokenizer.encode(best, add_special_tokens=False)
        _check_matcher(grammar, ids, tokenizer, vocabulary, what)
    assert accepted, "the backend rejects every kind of constraint"
    for constraint in _MALFORMED:
        if not _rejected(backend, constraint):
            _check_malformed(backend, constraint)


def _follows(tokenizer: Tokenizer, grammar: Grammar, text: str, vocabulary: int) -> bool:
    """Whether the masks allow a text and its end.

    A mask may forbid a token that the matcher accepts, such as half of one that must follow.
    """
    matcher = grammar.matcher()
    for token in [*tokenizer.encode(text, add_special_tokens=False), tokenizer.stop_ids[0]]:
        if token not in allowed(matcher, vocabulary):
            return False
        assert matcher.accept(token), f"the mask allows token {token}, which the matcher rejects"
    return True


def _title(constraint: StructuredOutputs) -> str:
    return next(name for name in _KINDS if getattr(constraint, name) is not None)


def _rejected(backend: GrammarBackend, constraint: StructuredOutputs) -> bool:
    try:
        reason = backend.rejects(constraint)
    except RequestError:
        return True
    assert reason is None or (isinstance(reason, str) and reason), (
        f"rejects() gave {reason!r} for {_title(constraint)}, not a reason or None"
    )
    return reason is not None


def _check_malformed(backend: GrammarBackend, constraint: StructuredOutputs) -> None:
    try:
        backend.compile(constraint)
    except RequestError:
        return
    except Exception as error:
        raise AssertionError(
            f"a malformed {_title(constraint)} raises {type(error).__name__}, not RequestError"
        ) from error
    raise AssertionError(f"a malformed {_title(constraint)} is compiled: RequestError was expected")


def _mask(matcher: Matcher, vocabulary: int, stale: int) -> list[int]:
    mask = np.full(-(-vocabulary // 32), stale, dtype=np.int32)
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), count=vocabulary, bitorder="little")
    tokens: list[int] = np.flatnonzero(bits).tolist()
    return tokens


def _check_matcher(
    grammar: Grammar, ids: list[int], tokenizer: Tokenizer, vocabulary: int, what: str
) -> None:
    """Check that matchers are independent, roll back, and overwrite the whole mask."""
    first, second = grammar.matcher(), grammar.matcher()
    start = _mask(second, vocabulary, 0)
    assert start, f"{what}: a new matcher allows nothing at the start of a text"
    assert start == _mask(second, vocabulary, -1), f"{what}: fill() leaves stale bits in the mask"
    assert not max(start) >= len(tokenizer), f"{what}: the mask allows tokens past the vocabulary"
    states = [start]
    for token in ids:
        plain = (t for t in range(len(tokenizer)) if t not in tokenizer.special_ids)
        outside = next(t for t in plain if t not in states[-1])
        assert not first.accept(outside), f"{what}: accept() takes a token that the mask forbids"
        same = _mask(first, vocabulary, 0) == states[-1]
        assert same, f"{what}: accept() advances by a token that it does not allow"
        assert not first.finished or set(states[-1]) <= set(tokenizer.stop_ids), (
            f"{what}: finished although other tokens than the end may follow"
        )
        first.accept(token)
        states.append(_mask(first, vocabulary, 0))
    assert _mask(second, vocabulary, 0) == start, f"{what}: matchers of one grammar share a state"
    only_end = set(states[-1]) <= set(tokenizer.stop_ids)
    assert first.finished == only_end, f"{what}: finished is {first.finished} at the end of a text"
    for back in (1, len(ids) - 1):
        first.rollback(back)
        del states[len(states) - back :]
        same = _mask(first, vocabulary, 0) == states[-1]
        assert same, f"{what}: rollback({back}) does not return to the state before"
