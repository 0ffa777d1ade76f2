"""Grammar backend on llguidance, written against version 1.9.

Its JSON schema compiler rejects every keyword that it does not enforce, and its parser has limits
of its own, so only a few checks are needed here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, any_to_lark

from modulm.contracts.grammar import Grammar, GrammarBackend, Matcher
from modulm.contracts.sampling import StructuredOutputs
from modulm.errors import RequestError
from modulm_grammar_llguidance.tags import TagError, as_lark

__all__ = ["LLGuidance"]


class LLGuidance(GrammarBackend):
    """JSON schemas, regular expressions, choices, Lark or GBNF grammars, structural tags."""

    name = "llguidance"
    api = 1

    def rejects(self, constraint: StructuredOutputs) -> str | None:
        if self.tokenizer.core is None:
            return "the tokenizer is not of the tokenizers library"
        if not self._ends:
            return "the tokenizer has no end-of-sequence token"
        if constraint.structural_tag is not None:
            try:
                form = _format(_json(constraint.structural_tag))
                as_lark(form, self.tokenizer.added_tokens, {})
            except TagError as error:
                return str(error)
            return _ignored(form)
        return None if constraint.json is None else _ignored(_schema(constraint))

    def compile(self, constraint: StructuredOutputs) -> Grammar:
        try:
            source = _source(constraint, self.tokenizer.added_tokens)
        except (ValueError, KeyError, TypeError, AssertionError, GbnfToLarkError) as error:
            raise _request_error(constraint, f"{type(error).__name__}: {error}") from error
        failed, messages = LLMatcher.validate_grammar_with_warnings(source, self._tokens)
        if failed:
            raise _request_error(constraint, messages[0])
        return _Compiled(LLMatcher(self._tokens, source, log_level=0), self._ends)

    @cached_property
    def _ends(self) -> list[int]:
        return [token for token in self.stop_ids if token < self.vocabulary]

    @cached_property
    def _tokens(self) -> LLTokenizer:
        core = self.tokenizer.core.to_str()
        return LLTokenizer(core, n_vocab=self.vocabulary, eos_token=self._ends)


class _Compiled(Grammar):
    def __init__(self, start: LLMatcher, ends: list[int]) -> None:
        self.start = start
        self.ends = ends

    def matcher(self) -> Matcher:
        return _Matcher(self.start.deep_copy(), self.ends)


class _Matcher(Matcher):
    """After an end-of-sequence token, only end-of-sequence tokens are allowed."""

    def __init__(self, matcher: LLMatcher, ends: list[int]) -> None:
        self._matcher = matcher
        self._ends = ends
        self._after = 0

    def accept(self, token: int) -> bool:
        if token in self._ends:
            complete = self._matcher.is_accepting()
            self._after += complete
            return complete
        return not self._after and bool(self._matcher.try_consume_tokens([token]))

    def fill(self, mask: np.ndarray) -> None:
        if self._after or self._matcher.is_stopped():
            mask[:] = 0
            for token in self._ends:
                mask.view(np.uint32)[token // 32] |= np.uint32(1 << (token % 32))
            return
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            raise RuntimeError(self._matcher.get_error()[:200])

    def forced(self) -> Sequence[int]:
        if self._after or self._matcher.is_stopped():
            return ()
        forced: list[int] = self._matcher.compute_ff_tokens()
        return forced

    def rollback(self, tokens: int) -> None:
        ends = min(tokens, self._after)
        self._after -= ends
        if tokens > ends:
            self._matcher.rollback(tokens - ends)

    @property
    def finished(self) -> bool:
        return bool(self._after) or self._matcher.is_stopped()


#: Maximum white space between two parts of JSON: a line end and twenty columns of indentation.
#: Without a limit, a small model can write line ends until it runs out of tokens.
_BLANKS = r"[ \t\r\n]{0,22}"


#: Keywords of older drafts, and of content types, that llguidance treats as annotations.
_IGNORED = frozenset({
    "contentEncoding", "contentMediaType", "contentSchema", "disallow", "divisibleBy", "extends",
})  # fmt: skip
#: Keywords whose values are tables of schemas, keyed by property names, or data.
_NAMED = frozenset({"$defs", "definitions", "patternProperties", "properties"})
_DATA = frozenset({"const", "default", "enum", "example", "examples", "required"})


def _source(constraint: StructuredOutputs, added: Mapping[str, int]) -> str:
    """Translate the constraint to llguidance's format. added: text -> id of added tokens."""
    options: dict[str, Any] = {"whitespace_flexible": not constraint.disable_any_whitespace}
    if constraint.whitespace_pattern is not None:
        options["whitespace_pattern"] = constraint.whitespace_pattern
    elif not constraint.disable_any_whitespace:
        options["whitespace_pattern"] = _BLANKS
    if constraint.json is not None:
        schema = _schema(constraint)
        if constraint.disable_additional_properties:
            schema = _closed(schema)
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    if constraint.json_object:
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=options)
    if constraint.regex is not None:
        return LLMatcher.grammar_from_regex(constraint.regex)
    if constraint.choice is not None:
        texts = " | ".join(json.dumps(text) for text in dict.fromkeys(constraint.choice))
        return LLMatcher.grammar_from_lark(f"start: {texts}")
    if constraint.grammar is not None:
        return LLMatcher.grammar_from_lark(any_to_lark(constraint.grammar))
    form = _format(_json(constraint.structural_tag or ""))
    return LLMatcher.grammar_from_lark(as_lark(form, added, options))


def _format(tag: Any) -> Mapping[str, Any]:
    """Return the format of a structural tag; OpenAI's older form is converted to the newer one.

    Raises TagError if it is neither.
    """
    if isinstance(tag, dict) and isinstance(tag.get("format"), dict):
        form: Mapping[str, Any] = tag["format"]
        return form
    try:
        tags = [
            {
                "begin": each["begin"],
                "content": {"type": "json_schema", "json_schema": each["schema"]},
                "end": each["end"],
            }
            for each in tag["structures"]
        ]
        return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    except (KeyError, TypeError) as error:
        raise TagError("a structural tag needs format, or structures and triggers") from error


def _schema(constraint: StructuredOutputs) -> Any:
    return _json(constraint.json) if isinstance(constraint.json, str) else constraint.json


def _ignored(schema: Any) -> str | None:
    """Return why llguidance would not enforce the schema, or None.

    llguidance rejects keywords that it knows and cannot enforce; those checked here it treats as
    annotations.
    """
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        if not isinstance(node, Mapping):
            continue
        ignored = sorted(_IGNORED & node.keys())
        if ignored:
            return f"the keyword {ignored[0]!r} is not supported"
        for key, inner in node.items():
            if key in _NAMED and isinstance(inner, Mapping):
                waiting += inner.values()
            elif key not in _DATA:
                waiting.append(inner)
    return None


def _closed(schema: Any) -> Any:
    """Add `additionalProperties: false` to objects that list their properties."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), Mapping):
        closed.setdefault("additionalProperties", False)
    return closed


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise RequestError(
            f"structured_outputs is not valid JSON: {error}", "structured_outputs"
        ) from error


def _request_error(constraint: StructuredOutputs, message: str) -> RequestError:
    kinds = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    kind = next(k for k in kinds if getattr(constraint, k) is not None)
    return RequestError(
        f"structured_outputs.{kind}: {' '.join(message.split())[:300]}", "structured_outputs"
    )
