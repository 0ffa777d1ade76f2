"""Validates request parameters against the engine's limits.

Token ids are checked against the width of the logits, not the tokenizer's length: an id that only
the tokenizer knows would make the step fail.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve, fields_dict

from modulm.contracts.sampling import (
    LogitsProcessor,
    OutputKind,
    PoolingParams,
    SamplingParams,
    StructuredOutputs,
)
from modulm.errors import ContextLengthExceeded, RequestError
from modulm.plugins.index import to_install
from modulm_frontend.repetition import problem_of
from modulm_samplers import SettingsProcessor, unserved

if TYPE_CHECKING:
    from modulm.contracts.config import EngineConfig
    from modulm.contracts.tokenizer import Tokenizer

__all__ = [
    "bad_word_ids",
    "check",
    "check_ids",
    "check_pooling",
    "check_prompt",
    "masked_params",
    "problem",
    "truncated",
]

#: Limits on lists and texts, which bound the cost of checking a request.
MAX_CHOICES = 16_384
MAX_STOPS = 64
MAX_STOP_LENGTH = 4_096
MAX_IDS = 1_024
#: As in vLLM.
MAX_NAMED = 128
MAX_BAD_WORDS = 256
MAX_BAD_LENGTH = 512
MAX_CONSTRAINT = 1 << 18
MAX_ALTERNATIVES = 10_000

_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_Rule = Callable[[Any], str | None]


def check(
    params: SamplingParams,
    *,
    vocabulary: int,
    max_model_len: int,
    prompt_len: int | None = None,
    max_logprobs: int = 20,
    max_temperature: float = math.inf,
    max_n: int = MAX_CHOICES,
    processors: Sequence[type[LogitsProcessor]] = (),
    config: EngineConfig | None = None,
) -> SamplingParams:
    """Validate and normalize parameters; `max_tokens` is limited to what fits the context.

    vocabulary: width of the logits. prompt_len: tokens of the prompt, if known. max_logprobs: -1
    allows the whole vocabulary. processors: those of the engine with the configuration `config`.
    Raises RequestError naming the field, ContextLengthExceeded if the prompt leaves no room.
    """
    for name in _FIELDS:
        message = problem(name, getattr(params, name))
        if message is not None:
            raise RequestError(f"{name} {message}", name)
    _check_limits(params, max_model_len, max_temperature, max_n)
    for name in ("logprobs", "prompt_logprobs"):
        _check_logprobs(name, getattr(params, name), max_logprobs)
    if len(params.allowed_token_ids or ()) > vocabulary:
        raise RequestError(
            f"allowed_token_ids has more entries than the model has tokens ({vocabulary})",
            "allowed_token_ids",
        )
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        check_ids(name, getattr(params, name) or (), vocabulary)
    bias = params.logit_bias
    if bias:
        bias = {_id(key): float(value) for key, value in bias.items()}
        check_ids("logit_bias", bias, vocabulary)
    constraint = _with_schema(params.structured_outputs)
    if constraint is not None:
        _check_constraint(constraint)
    for processor in processors:
        processor.validate_for(params, config)
    served = {name for processor in processors for name in processor.fields}
    if params.thinking_token_budget is not None and "thinking_token_budget" not in served:
        message = "thinking_token_budget" + to_install("modulm-logits-thinking-budget")
        raise RequestError(message, "thinking_token_budget")
    _check_samplers(params, processors)
    return evolve(
        params,
        logit_bias=bias or None,
        structured_outputs=constraint,
        logprobs=0 if params.logprob_token_ids else params.logprobs,
        top_k=0 if params.top_k == -1 else min(params.top_k, vocabulary),
        max_tokens=_room(params, max_model_len, prompt_len),
    )


def masked_params(params: SamplingParams) -> SamplingParams:
    """Return parameters with as many log probabilities as `--return-sampling-mask` needs.

    Raises RequestError for requests whose masks would be too large, as in vLLM.
    """
    if params.greedy:
        raise RequestError("temperature: must be above 0 for sampling masks", "temperature")
    if params.top_k <= 0:
        raise RequestError("top_k: must be above 0 for sampling masks, to bound them", "top_k")
    if params.logprob_token_ids:
        raise RequestError("logprob_token_ids: not with sampling masks", "logprob_token_ids")
    if params.logprobs == -1:
        return params
    return params.with_(logprobs=max(params.logprobs or 0, params.top_k))


def _check_samplers(params: SamplingParams, processors: Sequence[type[LogitsProcessor]]) -> None:
    """Raise RequestError if a sampler is enabled but not installed."""
    served: set[str] = set()
    for processor in processors:
        if issubclass(processor, SettingsProcessor):
            served.update(processor.arguments())
    missing = unserved(params.extra_args or {}, served)
    if missing is not None:
        message = f"{missing.switch} needs {missing.distribution}{to_install(missing.distribution)}"
        raise RequestError(message, missing.switch)


def problem(name: str, value: Any) -> str | None:
    """Describe what is wrong with a field's value, apart from the model and other fields."""
    return _FIELDS[name](value)


def check_prompt(
    ids: Sequence[int] | np.ndarray, *, vocabulary: int, max_model_len: int, room: int = 1
) -> None:
    """Raise RequestError if a prompt is empty, too long, or contains ids outside the vocabulary.

    room: tokens that must fit after it; 0 for pooling.
    """
    if not len(ids):
        raise RequestError("the prompt is empty; give at least one token", "prompt")
    _check_length(len(ids), max_model_len, room)
    wrong = _out_of_vocabulary(ids, vocabulary)
    if wrong is not None:
        raise RequestError(
            f"prompt holds token id {wrong[0]!r:.40}, which is out of vocabulary: the model has "
            f"ids 0 to {vocabulary - 1}",
            "prompt",
        )


def truncated(
    ids: Sequence[int], limit: int | None, max_model_len: int, room: int = 1
) -> Sequence[int]:
    """Truncate a prompt to `limit` tokens (truncate_prompt_tokens); -1 means as many as fit.

    Keeps the last tokens if an answer follows (`room`), else the first ones.
    """
    if limit is None:
        return ids
    if not room:
        return ids[: max_model_len if limit == -1 else limit]
    return ids[-(max_model_len - room if limit == -1 else limit) :]


def check_pooling(
    params: PoolingParams,
    *,
    tasks: Collection[str],
    hidden: int,
    max_model_len: int,
    offered: Collection[int] = (),
) -> None:
    """Raise RequestError if the model cannot serve a pooling request.

    tasks: the model's. hidden: width of its vectors. offered: the allowed dimensions, empty for
    any.
    """
    if params.task not in (known := sorted({*tasks} - {"generate"})):
        message = f"task {params.task!r:.40} is not one that the model has: "
        if known:
            message += ", ".join(known)
        else:
            message += "it generates. To pool it, start it with --runner pooling (LLM: runner="
            message += '"pooling")'
        raise RequestError(message, "task")
    if params.dimensions is not None:
        problem = _integer(params.dimensions, 1, hidden)
        if problem:
            raise RequestError(f"dimensions {problem}", "dimensions")
        if offered and params.dimensions not in (*offered, hidden):
            sizes = ", ".join(map(str, sorted(offered)))
            raise RequestError(f"dimensions must be one of {sizes}, of this model", "dimensions")
    if params.truncation_side not in (None, "left", "right"):
        raise RequestError("truncation_side must be left or right", "truncation_side")
    for name in ("normalize", "use_activation"):
        if getattr(params, name) not in (None, True, False):
            raise RequestError(f"{name} must be true or false", name)
    _check_truncation(params.truncate_prompt_tokens, max_model_len)


def bad_word_ids(
    words: Sequence[str], tokenizer: Tokenizer, vocabulary: int
) -> tuple[tuple[int, ...], ...]:
    """Token sequences for `RowStart.bad_words`: each word with and without a preceding space."""
    tokenized: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(" "), " " + word.lstrip(" ")):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            check_ids("bad_words", ids, vocabulary)
            if ids:
                tokenized[ids] = None
    return tuple(tokenized)


def check_ids(name: str, ids: Collection[Any], vocabulary: int) -> None:
    """Raise RequestError unless all ids are token ids of the model."""
    wrong = _out_of_vocabulary(ids, vocabulary)
    if wrong is not None:
        raise RequestError(
            f"{name} holds {wrong[0]!r:.40}, which is not a token id of the model "
            f"(0 to {vocabulary - 1})",
            name,
        )


def _out_of_vocabulary(ids: Collection[Any], vocabulary: int) -> tuple[Any] | None:
    """The first id that is not an integer or is outside the vocabulary, in a tuple, or None."""
    values: np.ndarray | None = None
    if isinstance(ids, np.ndarray):
        values = ids
    elif isinstance(ids, array):
        values = np.frombuffer(ids, dtype=ids.typecode)
    if values is not None and values.dtype.kind in "iu":
        wrong = values[(values < 0) | (values >= vocabulary)][:1].tolist()
        return (wrong[0],) if wrong else None
    return next(((i,) for i in ids if not _is_int(i) or not 0 <= i < vocabulary), None)


def _check_limits(
    params: SamplingParams, max_model_len: int, max_temperature: float, max_n: int
) -> None:
    if params.temperature > max_temperature:
        raise RequestError(f"temperature must be at most {max_temperature:g}", "temperature")
    if params.n > max_n:
        raise RequestError(f"n must be at most {max_n}", "n")
    if params.best_of is not None and not params.n <= params.best_of <= max_n:
        raise RequestError(f"best_of must be from n ({params.n}) to {max_n}", "best_of")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise RequestError(
            f"min_tokens ({params.min_tokens}) must not exceed max_tokens ({params.max_tokens})",
            "min_tokens",
        )
    if params.min_tokens >= max_model_len:
        raise RequestError(
            f"min_tokens must be below the context length of {max_model_len}", "min_tokens"
        )
    if params.stop and not params.detokenize:
        raise RequestError("stop strings need detokenize=True; use stop_token_ids", "stop")
    _check_truncation(params.truncate_prompt_tokens, max_model_len)


def _check_truncation(limit: Any, max_model_len: int) -> None:
    if limit is not None and limit != -1 and _integer(limit, 1, max_model_len):
        raise RequestError(
            f"truncate_prompt_tokens must be -1 or an integer from 1 to {max_model_len}",
            "truncate_prompt_tokens",
        )


def _check_logprobs(name: str, value: int | None, most: int) -> None:
    if value is None or most == -1:
        return
    if value == -1 or value > most:
        raise RequestError(
            f"{name} must be from 0 to {most} (set by --max-logprobs; -1, the whole vocabulary, "
            "needs --max-logprobs -1)",
            name,
        )


def _room(params: SamplingParams, max_model_len: int, prompt_len: int | None) -> int | None:
    """`max_tokens`, limited to the context that the prompt leaves."""
    if prompt_len is None:
        return params.max_tokens
    _check_length(prompt_len, max_model_len, max(params.min_tokens, 1))
    left = max_model_len - prompt_len
    return left if params.max_tokens is None else min(params.max_tokens, left)


def _check_length(prompt_len: int, max_model_len: int, generated: int) -> None:
    if not generated and prompt_len > max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_len} tokens and the model takes {max_model_len} at once; "
            "shorten it or set truncate_prompt_tokens",
            "prompt",
        )
    if prompt_len + generated > max_model_len:
        raise ContextLengthExceeded(
            f"the prompt has {prompt_len} tokens and at least {generated} must be generated, "
            "but the "
            f"model's context is {max_model_len} tokens; shorten the prompt or set "
            "truncate_prompt_tokens",
            "prompt",
        )


def _with_schema(constraint: Any) -> Any:
    """The constraint, with a pydantic class converted to its JSON schema."""
    kind: Any = getattr(constraint, "json", None)
    make_schema = getattr(kind, "model_json_schema", None) if isinstance(kind, type) else None
    return constraint if make_schema is None else evolve(constraint, json=make_schema())


def _check_constraint(constraint: Any) -> None:
    name = "structured_outputs"
    if not isinstance(constraint, StructuredOutputs):
        raise RequestError(f"{name} must be a StructuredOutputs", name)
    constraints = [key for key in _CONSTRAINTS if getattr(constraint, key) is not None]
    if len(constraints) != 1:
        raise RequestError(
            f"{name} takes exactly one of {', '.join(_CONSTRAINTS)}; "
            f"{' and '.join(constraints) or 'none'} given",
            name,
        )
    message = _constraint_rule(constraints[0])(getattr(constraint, constraints[0]))
    if message is not None:
        raise RequestError(f"{name}.{constraints[0]} {message}", name)
    pattern = constraint.whitespace_pattern
    if pattern is not None and not isinstance(pattern, str):
        raise RequestError(f"{name}.whitespace_pattern must be a string", name)


def _constraint_rule(key: str) -> _Rule:
    return {"json": _schema, "choice": _choice, "json_object": _true}.get(key, _source)


def _true(value: Any) -> str | None:
    return None if value is True else "must be true where it is given"


def _source(value: Any) -> str | None:
    if not isinstance(value, str) or not value.strip():
        return "must be a string that is not empty"
    if len(value) > MAX_CONSTRAINT:
        return f"must be at most {MAX_CONSTRAINT} characters long"
    return None


def _schema(value: Any) -> str | None:
    if not isinstance(value, str | Mapping):
        return "must be a JSON schema: an object, or a string that holds one"
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        parsed = json.loads(text) if len(text) <= MAX_CONSTRAINT else None
    except (TypeError, ValueError, RecursionError) as error:
        return f"is not valid JSON: {error}"[:200]
    if len(text) > MAX_CONSTRAINT:
        return f"must be at most {MAX_CONSTRAINT} characters of JSON"
    return None if isinstance(parsed, dict | bool) else "must hold an object"


def _choice(value: Any) -> str | None:
    if isinstance(value, str) or not isinstance(value, Sequence) or not value:
        return "must be a list of at least one string"
    if len(value) > MAX_ALTERNATIVES:
        return f"must have at most {MAX_ALTERNATIVES} entries"
    if not all(isinstance(text, str) and text for text in value):
        return "must hold strings that are not empty"
    return (
        f"must be at most {MAX_CONSTRAINT} characters in all"
        if sum(map(len, value)) > MAX_CONSTRAINT
        else None
    )


def _is_int(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _integer(value: Any, least: float, most: float = math.inf) -> str | None:
    if _is_int(value) and least <= value <= most:
        return None
    if most == math.inf:
        return f"must be an integer of at least {least}"
    return f"must be an integer from {least} to {most}"


def _whole(least: int, most: float = math.inf, *, optional: bool = False) -> _Rule:
    return lambda value: None if optional and value is None else _integer(value, least, most)


def _number(low: float, high: float = math.inf, *, open_low: bool = False) -> _Rule:
    """A rule for finite numbers in [low, high], or in (low, high]."""
    start = f"above {low:g}" if open_low else f"of at least {low:g}"
    message = f"must be a number {start}" + ("" if high == math.inf else f" and at most {high:g}")

    def rule(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            return message
        if not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
            return message
        return None

    return rule


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _texts(count: int, length: int) -> _Rule:
    def rule(value: Any) -> str | None:
        if len(value) > count:
            return f"must have at most {count} entries"
        if not all(isinstance(text, str) and text for text in value):
            return "must hold strings that are not empty"
        if any(len(text) > length for text in value):
            return f"must hold strings of at most {length} characters"
        return None

    return rule


def _bias(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return "must be an object: token id -> number from -100 to 100"
    if len(value) > MAX_IDS:
        return f"must have at most {MAX_IDS} entries"
    number = _number(-100, 100)
    for key, bias in value.items():
        if _id(key) is None:
            return f"holds the key {key!r:.40}, which is not a token id"
        message = number(bias)
        if message is not None:
            return f"of token {key} {message}"
    return None


def _id(key: Any) -> Any:
    """Convert a token id, an integer or a string of digits as in JSON; None for anything else."""
    if isinstance(key, str):
        return int(key) if key.isascii() and key.isdigit() and len(key) < 20 else None
    return key if _is_int(key) else None


def _some_ids(value: Any) -> str | None:
    return None if value is None or len(value) else "must name at least one token"


def _few_ids(value: Any) -> str | None:
    return None if len(value) <= MAX_IDS else f"must have at most {MAX_IDS} entries"


def _named_ids(value: Any) -> str | None:
    return None if len(value) <= MAX_NAMED else f"must have at most {MAX_NAMED} entries"


def _kind(value: Any) -> str | None:
    return None if isinstance(value, OutputKind) else "must be an OutputKind"


def _table(value: Any) -> str | None:
    return None if value is None or isinstance(value, Mapping) else "must be an object"


#: Field -> function that describes what is wrong with a value, or returns None. What depends on the
#: model or other fields is checked in `check`.
_FIELDS: dict[str, _Rule] = {
    "n": _whole(1),
    "best_of": _whole(1, optional=True),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0, 100, open_low=True),
    "temperature": _number(0),
    "top_p": _number(0, 1, open_low=True),
    "top_k": _whole(-1),
    "min_p": _number(0, 1),
    "seed": _whole(-(2**63), 2**63 - 1, optional=True),
    "stop": _texts(MAX_STOPS, MAX_STOP_LENGTH),
    "stop_token_ids": _few_ids,
    "ignore_eos": _boolean,
    "max_tokens": _whole(1, optional=True),
    "min_tokens": _whole(0),
    "logprobs": _whole(-1, optional=True),
    "prompt_logprobs": _whole(-1, optional=True),
    "logprob_token_ids": _named_ids,
    "repetition_detection": problem_of,
    "detokenize": _boolean,
    "skip_special_tokens": _boolean,
    "spaces_between_special_tokens": _boolean,
    "include_stop_str_in_output": _boolean,
    "truncate_prompt_tokens": lambda value: None,
    "output_kind": _kind,
    "stream_interval": _whole(1, optional=True),
    "logit_bias": _bias,
    "allowed_token_ids": _some_ids,
    "bad_words": _texts(MAX_BAD_WORDS, MAX_BAD_LENGTH),
    "structured_outputs": lambda value: None,
    "speculative": _whole(0, optional=True),
    "thinking_token_budget": _whole(-1, optional=True),
    "extra_args": _table,
}

if missing := set(fields_dict(SamplingParams)) - set(_FIELDS):
    raise TypeError(f"sampling fields without a check: {sorted(missing)}")
