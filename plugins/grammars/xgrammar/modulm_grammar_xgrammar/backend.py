"""Grammar backend on xgrammar (Dong et al., arXiv 2411.15100), written against version 0.2."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from modulm.contracts.grammar import Grammar, GrammarBackend, Matcher
from modulm.contracts.sampling import StructuredOutputs
from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import RequestError
from modulm_grammar_xgrammar.library import VOCABULARIES, core
from modulm_grammar_xgrammar.schema import unsupported

__all__ = ["XGrammar"]

#: Control characters other than the line feed, as vocabularies of each kind spell them.
_CONTROL = {
    "raw": re.compile(r"[\x00-\x09\x0b-\x1f]"),
    "byte_level": re.compile(r"[\u0100-\u0109\u010b-\u011f]"),
    "byte_fallback": re.compile(r"[\x00-\x09\x0b-\x1f]|<0x(0[0-9B-F]|1[0-9A-F])>", re.IGNORECASE),
}
_SOURCE_LINE = re.compile(r"^(\[[^]]*\] )?\S+\.cc:\d+: ")
#: Maximum white space between two parts of JSON: a line end and twenty columns of indentation.
#: Without a limit, a small model can write line ends until it runs out of tokens.
_BLANKS = 22
#: What a text follows when it is tokenized, so that it gets no prefix space.
_BEFORE = "\n"
#: Kinds of constraints, in the order they are checked.
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class XGrammar(GrammarBackend):
    """JSON schemas, regular expressions, choices, EBNF (with a rule `root`), structural tags."""

    name = "xgrammar"
    api = 1
    preference = 10

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, stop_ids: tuple[int, ...]) -> None:
        super().__init__(tokenizer, vocabulary, stop_ids)
        self._ends = [token for token in stop_ids if token < vocabulary]

    def rejects(self, constraint: StructuredOutputs) -> str | None:
        if not self._ends:
            return "the tokenizer has no end-of-sequence token"
        if constraint.whitespace_pattern is not None:
            return "whitespace_pattern is not supported; use disable_any_whitespace"
        if constraint.json is not None:
            try:
                return unsupported(_schema(constraint))
            except ValueError as error:
                return f"the schema is not JSON: {error}"
        for schema in _tag_schemas(constraint.structural_tag):
            reason = unsupported(schema)
            if reason is not None:
                return reason
        return None

    def compile(self, constraint: StructuredOutputs) -> Grammar:
        try:
            compiled = self._compile(constraint)
        except (RuntimeError, ValueError, TypeError) as error:
            kind = next(k for k in _KINDS if getattr(constraint, k) is not None)
            message = _SOURCE_LINE.sub("", str(error).strip().splitlines()[0])[:300]
            raise RequestError(
                f"structured_outputs.{kind}: {message}", "structured_outputs"
            ) from error
        return _Compiled(compiled, self._ends, -(-self.vocabulary // 32), self._tokens)

    def _tokens(self, text: str) -> list[int]:
        """Return the tokens of a text inside a line, which need not be the model's choice."""
        line = self.tokenizer.encode(_BEFORE, add_special_tokens=False)
        tokens = self.tokenizer.encode(_BEFORE + text, add_special_tokens=False)
        return tokens[len(line) :] if tokens[: len(line)] == line else []

    def _compile(self, constraint: StructuredOutputs) -> Any:
        spaces = not constraint.disable_any_whitespace
        if constraint.json is not None:
            return self._compile_json(json.dumps(_schema(constraint)), spaces)
        if constraint.json_object:
            # xgrammar's built-in JSON grammar accepts any JSON value, not only objects.
            return self._compile_json('{"type": "object"}', spaces, strict=False)
        if constraint.regex is not None:
            return self._compiler.compile_regex(constraint.regex)
        if constraint.choice is not None:
            return self._compiler.compile_grammar_from_strings(
                _alternatives(constraint.choice), "root"
            )
        if constraint.grammar is not None:
            return self._compiler.compile_grammar_from_strings(constraint.grammar, "root")
        text = constraint.structural_tag or ""
        bounded = any("Length" in json.dumps(schema) for schema in _tag_schemas(text))
        compiler = self._bounded_tag_compiler if bounded else self._tag_compiler
        return compiler.compile_structural_tag(_tag(text, _BLANKS if spaces else 0))

    def _compile_json(self, schema: str, spaces: bool, strict: bool = True) -> Any:
        indent = separators = None
        most, any_order = _BLANKS if spaces else None, False
        return self._json_compiler.compile_json_schema(
            schema, spaces, indent, separators, strict, most, any_order
        )

    @cached_property
    def _compiler(self) -> Any:
        return self._new_compiler(self.tokenizer.special_ids)

    @cached_property
    def _json_compiler(self) -> Any:
        return self._new_compiler(self.tokenizer.special_ids | self._control)

    @cached_property
    def _control(self) -> frozenset[int]:
        """Tokens of control characters, which xgrammar allows in strings of limited length."""
        control = _CONTROL[self.tokenizer.spelling]
        tokens = ((i, self.tokenizer.id_to_token(i)) for i in range(self.vocabulary))
        return frozenset(i for i, token in tokens if token and control.search(token))

    @cached_property
    def _tag_compiler(self) -> Any:
        """Compiler for structural tags, which may contain special tokens unlike other text."""
        return self._new_compiler(frozenset())

    @cached_property
    def _bounded_tag_compiler(self) -> Any:
        """Compiler for structural tags with JSON strings of limited length."""
        return self._new_compiler(self._control)

    def _new_compiler(self, hidden: frozenset[int]) -> Any:
        """Create a compiler. hidden: tokens without a text, which no constraint allows."""
        tokens = [self.tokenizer.id_to_token(index) for index in range(self.vocabulary)]
        texts = ["" if i in hidden or token is None else token for i, token in enumerate(tokens)]
        spelling, prefix_space = VOCABULARIES[self.tokenizer.spelling], False
        info = core.TokenizerInfo(texts, spelling, self.vocabulary, self._ends, prefix_space)
        # The engine has its own bounded cache of compiled grammars.
        threads, cached, cache_bytes = 1, False, -1
        return core.GrammarCompiler(info, threads, cached, cache_bytes)


class _Compiled(Grammar):
    def __init__(
        self,
        compiled: Any,
        ends: list[int],
        mask_words: int,
        tokens: Callable[[str], Sequence[int]],
    ) -> None:
        self.compiled = compiled
        self.tokens = tokens
        self.nbytes = compiled.memory_size_bytes()
        self.ends = ends
        self.mask_words = mask_words

    def matcher(self) -> Matcher:
        return _Matcher(self)


class _Matcher(Matcher):
    """After an end-of-sequence token, only end-of-sequence tokens are allowed."""

    def __init__(self, grammar: _Compiled) -> None:
        own_end, rollback, temperature = False, -1, None
        self._matcher = core.GrammarMatcher(
            grammar.compiled, grammar.ends, own_end, rollback, temperature
        )
        self._ends = grammar.ends
        self._mask_words = grammar.mask_words
        self._tokens = grammar.tokens
        self._after = 0

    def accept(self, token: int) -> bool:
        if self._matcher.is_terminated():
            self._after += token in self._ends
            return token in self._ends
        accepted: bool = self._matcher.accept_token(token, False)
        return accepted

    def fill(self, mask: np.ndarray) -> None:
        if self._matcher.is_terminated():
            mask[:] = _only(self._ends, len(mask))
        else:
            self._matcher.fill_next_token_bitmask(mask, 0, False)

    def forced(self) -> Sequence[int]:
        if self._matcher.is_terminated():
            return ()
        text: str = self._matcher.find_jump_forward_string()
        return self._tokens(text) if text else ()

    def rollback(self, tokens: int) -> None:
        after_end = min(tokens, self._after)
        self._after -= after_end
        if tokens > after_end:
            self._matcher.rollback(tokens - after_end)

    @property
    def finished(self) -> bool:
        if self._matcher.is_terminated():
            return True
        if not self._matcher.is_completed():
            return False
        mask = np.zeros(self._mask_words, dtype=np.int32)
        self.fill(mask)
        return bool((mask == _only(self._ends, self._mask_words)).all())


def _only(tokens: list[int], mask_words: int) -> np.ndarray:
    """Return a mask that allows only `tokens`."""
    mask = np.zeros(mask_words, dtype=np.uint32)
    for token in tokens:
        mask[token // 32] |= np.uint32(1 << (token % 32))
    return mask.view(np.int32)


def _schema(constraint: StructuredOutputs) -> Any:
    schema = constraint.json
    return json.loads(schema) if isinstance(schema, str) else schema


def _alternatives(texts: Any) -> str:
    """Return an EBNF grammar of the texts."""
    return "root ::= " + " | ".join(json.dumps(text) for text in dict.fromkeys(texts))


def _tag(text: str, blanks: int = _BLANKS) -> str:
    """Return the tag in xgrammar's format, converted from OpenAI's older form if necessary.

    The older form: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}. blanks: maximum
    white space between two parts of JSON.
    """
    tag = json.loads(text)
    if not isinstance(tag, dict) or "structures" not in tag:
        for node in _nodes(tag):
            if node.get("type") == "json_schema":
                node.setdefault("max_whitespace_cnt", blanks)
        return json.dumps(tag)
    tags = [
        {
            "begin": each["begin"],
            "content": {"type": "json_schema", "json_schema": each["schema"]},
            "end": each["end"],
        }
        for each in tag["structures"]
    ]
    form = {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}
    return json.dumps({"type": "structural_tag", "format": form})


def _tag_schemas(text: str | None) -> Iterator[Any]:
    """Yield the JSON schemas in a structural tag of either form; none if it cannot be parsed."""
    try:
        tag = None if text is None else json.loads(_tag(text))
    except (KeyError, TypeError, ValueError):
        return
    for node in _nodes(tag):
        if node.get("type") == "json_schema":
            yield node.get("json_schema")


def _nodes(tag: Any) -> Iterator[dict[str, Any]]:
    """Yield the objects of a tag, without those inside JSON schemas."""
    waiting = [tag]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            if node.get("type") != "json_schema":
                waiting += node.values()
        elif isinstance(node, list):
            waiting += node
