"""Grammar backends, and limits on the constraints that they compile."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from modulm.contracts.grammar import Grammar, GrammarBackend
from modulm.contracts.sampling import StructuredOutputs
from modulm.errors import RequestError, UnsupportedError
from modulm.plugins.index import to_install

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.tokenizer import Tokenizer
    from modulm.plugins.manager import PluginManager

__all__ = ["as_request_error", "check_size", "compile_by", "is_ordinary", "open_backends"]

_FIELD = "structured_outputs"
#: Limits of a JSON schema, and of the product of nested counts in a regular expression.
_MAX_DEPTH = 64
_MAX_NODES = 20_000
_MAX_REPEATS = 100_000
#: Limits of ordinary schemas: characters, values with references expanded, keywords.
_ORDINARY_TEXT, _ORDINARY_NODES = 4_096, 256
_ORDINARY = frozenset({
    "$defs", "$ref", "$schema", "additionalProperties", "anyOf", "const", "default", "definitions",
    "description", "enum", "format", "items", "properties", "required", "title", "type",
})  # fmt: skip
#: Parts of structural tags whose size is proportional to their text.
_ORDINARY_PARTS = ("any_text", "const_string", "json_schema", "optional", "or", "repeat",
                   "sequence", "structural_tag")  # fmt: skip
#: The dry run: tokens per path, and the CPU seconds that a token may take.
_DRY_TOKENS = 48
_DRY_SECONDS = 0.1

_QUANTIFIED = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\(|\)|\{(\d*)(?:,(\d*))?\}")


def open_backends(
    config: EngineConfig,
    tokenizer: Tokenizer,
    vocabulary: int,
    stop_ids: tuple[int, ...],
    plugins: PluginManager,
) -> list[GrammarBackend]:
    """Load the grammar backends, preferred ones first. Raises UnsupportedError if there is none."""
    name = config.structured_outputs.backend
    names = [name] if name != "auto" else [d.name for d in plugins.names("grammars")]
    classes: list[type[GrammarBackend]] = [plugins.load("grammars", each) for each in names]
    classes.sort(key=lambda backend: -backend.preference)
    if not classes:
        raise UnsupportedError(
            "structured outputs need a grammar backend" + to_install("modulm-grammar-xgrammar")
        )
    return [cls(tokenizer, vocabulary, stop_ids) for cls in classes]


def compile_by(
    backends: Sequence[GrammarBackend], constraint: StructuredOutputs, dry_run: bool = True
) -> Grammar:
    """Compile with the first backend that accepts the constraint. Raises RequestError.

    dry_run: whether to step through the grammar to check its speed.
    """
    reasons = []
    for backend in backends:
        reason = backend.rejects(constraint)
        if reason is None:
            grammar = backend.compile(constraint)
            if dry_run:
                _dry_run(grammar, backend.vocabulary)
            return grammar
        reasons.append(f"{backend.name}: {reason}")
    raise RequestError(f"{_FIELD} cannot be enforced: {'; '.join(reasons)}", _FIELD)


def is_ordinary(constraint: StructuredOutputs) -> bool:
    """Whether compiling is certainly cheap, so that no trial compilation is needed."""
    if constraint.whitespace_pattern is not None:
        return False
    if constraint.choice is not None:
        return sum(map(len, constraint.choice)) + len(constraint.choice) <= _ORDINARY_TEXT
    schema = constraint.structural_tag if constraint.json is None else constraint.json
    if schema is None:
        return constraint.json_object is not None
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, default=str)
        root = json.loads(text) if len(text) <= _ORDINARY_TEXT else None
        tagged = isinstance(root, dict) and root.keys() == {"type", "format"}
        if constraint.structural_tag is not None and not tagged:
            return False
        return _remaining_budget(root, root, _ORDINARY_NODES) > 0
    except (ValueError, RecursionError):
        return False


def _remaining_budget(schema: Any, root: Any, budget: int) -> int:
    """Return the node budget left after a schema; 0 if it is not ordinary."""
    if isinstance(schema, bool):
        return budget - 1
    if isinstance(schema, dict) and schema.get("type") in _ORDINARY_PARTS:
        parts = [schema[key] for key in ("json_schema", "content", "format") if key in schema]
        for each in schema.get("elements", parts):
            budget = _remaining_budget(each, schema.get("json_schema", root), budget)
        return budget - 1
    if budget <= 0 or not isinstance(schema, dict) or not schema.keys() <= _ORDINARY:
        return 0
    inner = [schema[key] for key in ("items", "additionalProperties") if key in schema]
    reference, named, several = (schema.get(key) for key in ("$ref", "properties", "anyOf"))
    if isinstance(reference, str):
        target = root
        for name in reference.split("/")[1:]:
            target = target.get(name) if isinstance(target, dict) else None
        inner.append(target)
    inner += named.values() if isinstance(named, dict) else ()
    inner += several if isinstance(several, list) else ()
    budget -= 1 + len(schema.get("enum", ()))
    for each in inner:
        budget = _remaining_budget(each, root, budget)
    return budget


def as_request_error(error: Exception) -> RequestError:
    """Convert an exception of a backend to a RequestError."""
    if isinstance(error, RequestError):
        return error
    reason = str(error) or "it needs more memory than allowed"
    return RequestError(f"{_FIELD}: {type(error).__name__}: {reason}"[:500], _FIELD)


def _dry_run(grammar: Grammar, vocabulary: int) -> None:
    """Step through the grammar along two paths.

    Raises RequestError if no text can satisfy it or a step is too slow. Ambiguous grammars, such
    as (a{0,50}){0,50}b, compile quickly but get slower with every token. CPU time is measured, so
    that load on the machine does not matter.
    """
    mask = np.zeros(-(-vocabulary // 32), dtype=np.int32)
    for pick in (0, -1):
        matcher = grammar.matcher()
        for step in range(_DRY_TOKENS):
            began = time.thread_time()
            matcher.fill(mask)
            bits = np.unpackbits(mask.view(np.uint8), count=vocabulary, bitorder="little")
            allowed = np.flatnonzero(bits)
            if not step and not len(allowed):
                raise RequestError(f"{_FIELD}: no text can satisfy it", _FIELD)
            if not len(allowed) or matcher.finished or not matcher.accept(int(allowed[pick])):
                break
            if time.thread_time() - began > _DRY_SECONDS:
                raise RequestError(
                    f"{_FIELD} is too ambiguous: a single token takes too long to check; avoid "
                    "repetitions inside repetitions",
                    _FIELD,
                )


def check_size(constraint: StructuredOutputs) -> None:
    """Raise RequestError for a constraint that is too large."""
    if constraint.regex is not None:
        _check_repeats(constraint.regex)
    text = constraint.structural_tag if constraint.json is None else constraint.json
    if text is None:
        return
    try:
        schema = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{_FIELD} is not valid JSON: {error}"[:300], _FIELD) from error
    for count, (depth, node) in enumerate(_nodes(schema)):
        if depth > _MAX_DEPTH or count > _MAX_NODES:
            raise RequestError(
                f"{_FIELD}: at most {_MAX_NODES} values, nested {_MAX_DEPTH} deep", _FIELD
            )
        if isinstance(node, dict) and isinstance(node.get("pattern"), str):
            _check_repeats(node["pattern"])


def _nodes(value: Any) -> Iterator[tuple[int, Any]]:
    """Yield (depth, value) of everything in a JSON value, parents first."""
    waiting = [(0, value)]
    while waiting:
        depth, node = waiting.pop()
        yield depth, node
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        waiting += [(depth + 1, each) for each in inner]


def _check_repeats(pattern: str) -> None:
    """Raise RequestError if the product of nested repetition counts is too large."""
    inner = [1]  # most repetitions so far in each open group
    last = 1  # ... in the item that a count would apply to
    for match in _QUANTIFIED.finditer(pattern):
        text = match.group()
        if text == "(":
            inner.append(1)
        elif text == ")" and len(inner) > 1:
            last = inner.pop()
            inner[-1] = max(inner[-1], last)
            continue
        elif text.startswith("{"):
            low, high = match.group(1), match.group(2)
            count = max((int(number[:9]) for number in (low, high) if number), default=1)
            closes = pattern[: match.start()].endswith(")")
            inner[-1] = max(inner[-1], count * (last if closes else 1))
        if max(inner) > _MAX_REPEATS:
            raise RequestError(
                f"{_FIELD}: a regular expression repeats something up to {max(inner)} times; at "
                f"most {_MAX_REPEATS} are possible",
                _FIELD,
            )
