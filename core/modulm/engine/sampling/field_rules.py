"""Rules for single sampling fields, whatever the model and the other fields.

Token ids are checked against the width of the logits, not the length of the tokenizer: an id that
the tokenizer knows and the model does not have would otherwise end the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from attrs import fields_dict

from modulm.contracts.sampling import OutputKind, SamplingParams
from modulm.errors import RequestError

__all__ = [
    "FIELD_RULES",
    "Rule",
    "check_ids",
    "integer_problem",
    "is_integer",
    "problem",
    "token_id",
]

#: A value -> what is wrong with it, or None.
Rule = Callable[[Any], str | None]
#: Limits on lists and texts, so that no request costs more to check than to run.
MAX_STOPS = 64
MAX_STOP_LENGTH = 4_096
MAX_IDS = 1_024
MAX_BAD_WORDS = 256
MAX_BAD_LENGTH = 512


def problem(name: str, value: Any) -> str | None:
    """What is wrong with a value of the field `name` of SamplingParams; None if nothing is."""
    return FIELD_RULES[name](value)


def check_ids(name: str, ids: Collection[Any], vocabulary: int) -> None:
    """Raise RequestError unless all are token ids of the model."""
    for token in ids:
        if not is_integer(token) or not 0 <= token < vocabulary:
            raise RequestError(
                f"{name} holds {token!r:.40}, which is not a token id of the model "
                f"(0 to {vocabulary - 1})",
                name,
            )


def is_integer(value: Any) -> bool:
    """Whether a value is an integer, of numpy too, and no truth value."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def integer_problem(value: Any, least: float, most: float = math.inf) -> str | None:
    """What is wrong with a value that must be an integer in [least, most]; None if nothing is."""
    if is_integer(value) and least <= value <= most:
        return None
    if most == math.inf:
        return f"must be an integer of at least {least}"
    return f"must be an integer from {least} to {most}"


def _whole(least: int, most: float = math.inf, *, optional: bool = False) -> Rule:
    return lambda value: None if optional and value is None else integer_problem(value, least, most)


def _number(low: float, high: float = math.inf, *, open_low: bool = False) -> Rule:
    """A finite number in [low, high], or in (low, high]."""
    start = f"above {low:g}" if open_low else f"of at least {low:g}"
    words = f"must be a number {start}" + ("" if high == math.inf else f" and at most {high:g}")

    def rule(value: Any) -> str | None:
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            return words
        if not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
            return words
        return None

    return rule


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "must be true or false"


def _texts(count: int, length: int) -> Rule:
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
        if token_id(key) is None:
            return f"holds the key {key!r:.40}, which is not a token id"
        words = number(bias)
        if words is not None:
            return f"of token {key} {words}"
    return None


def token_id(key: Any) -> Any:
    """A token id given as an integer or, as in JSON, in decimal digits; None if it is neither."""
    if isinstance(key, str):
        return int(key) if key.isascii() and key.isdigit() and len(key) < 20 else None
    return key if is_integer(key) else None


def _some_ids(value: Any) -> str | None:
    return None if value is None or len(value) else "must name at least one token"


def _few_ids(value: Any) -> str | None:
    return None if len(value) <= MAX_IDS else f"must have at most {MAX_IDS} entries"


def _kind(value: Any) -> str | None:
    return None if isinstance(value, OutputKind) else "must be an OutputKind"


def _table(value: Any) -> str | None:
    return None if value is None or isinstance(value, Mapping) else "must be an object"


#: Field -> what is wrong with a value of it, None if nothing is; what depends on the model or on
#: other fields, front ends check.
FIELD_RULES: dict[str, Rule] = {
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
    "detokenize": _boolean,
    "skip_special_tokens": _boolean,
    "spaces_between_special_tokens": _boolean,
    "include_stop_str_in_output": _boolean,
    "truncate_prompt_tokens": lambda value: None,
    "output_kind": _kind,
    "logit_bias": _bias,
    "allowed_token_ids": _some_ids,
    "bad_words": _texts(MAX_BAD_WORDS, MAX_BAD_LENGTH),
    "structured_outputs": lambda value: None,
    "speculative": _whole(0, optional=True),
    "thinking_token_budget": _whole(-1, optional=True),
    "extra_args": _table,
}

if missing := set(fields_dict(SamplingParams)) - set(FIELD_RULES):
    raise TypeError(f"sampling fields without a check: {sorted(missing)}")
