"""Prompts in llama.cpp's forms, logit biases, and fill-in-the-middle prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import frozen

from modulm_server.errors import ApiError
from modulm_server.json_body import bad_field
from modulm_server.prompts import Prompt
from modulm_server.sampling import LIMITS

if TYPE_CHECKING:
    from modulm.contracts.tokenizer import Tokenizer
    from modulm_route_llama_cpp.schema import InfillRequest
    from modulm_server.generation import GenerationService

__all__ = ["Gap", "biases", "infill_prompt", "prompts_of"]

#: The names of fill-in-the-middle tokens in vocabularies.
_PREFIX = ("<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<｜fim▁begin｜>", "▁<PRE>", "<PRE>",
           "<|code_prefix|>", "[PREFIX]")  # fmt: skip
_SUFFIX = ("<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<｜fim▁hole｜>", "▁<SUF>", "<SUF>",
           "<|code_suffix|>", "[SUFFIX]")  # fmt: skip
_MIDDLE = ("<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<｜fim▁end｜>", "▁<MID>", "<MID>",
           "<|code_middle|>", "[MIDDLE]")  # fmt: skip
_REPOSITORY = ("<|repo_name|>", "<|fim_repo|>", "<fim-repo>", "<reponame>", "<repo_name>")
_FILE = ("<|file_sep|>", "<file_sep>", "<filename>")
#: Characters of text that cost about as much as one item of a list.
_PART = 16


@frozen
class Gap:
    """The fill-in-the-middle tokens of a model. The last two are optional."""

    prefix: int
    suffix: int
    middle: int | None
    repository: int | None
    file: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Gap:
        """Find the tokens of a tokenizer. Raises ApiError(501) if it has none."""
        known = tokenizer.added_tokens

        def find(names: Sequence[str]) -> int | None:
            return next((known[name] for name in names if name in known), None)

        prefix, suffix, middle = find(_PREFIX), find(_SUFFIX), find(_MIDDLE)
        # Mistral's tokenizers have no token for the middle: it follows the prefix.
        if prefix is None or suffix is None or (middle is None and "[PREFIX]" not in known):
            raise ApiError(
                501,
                "this model does not support infilling: its vocabulary has no tokens for prefix, "
                "suffix and middle; use /completion",
                code="not_supported",
            )
        return cls(prefix, suffix, middle, find(_REPOSITORY), find(_FILE))


async def prompts_of(prompt: Any, generation: GenerationService) -> tuple[Prompt, ...]:
    """Read prompts: texts, token ids, mixed lists, or lists of these. Raises ApiError(400)."""
    many = await generation.work.run(_size(prompt), _several, prompt)
    if not 0 < len(many) <= LIMITS.prompts:
        raise bad_field("prompt", f"prompt must have 1 to {LIMITS.prompts} prompts")
    if all(isinstance(one, str) for one in many):
        return await generation.tokenize(*many, whole=True)
    prompts = []
    for one in many:
        prompts.append(await _prompt(one, generation))
        await asyncio.sleep(0)  # short ones do not wait
    return tuple(prompts)


def _several(prompt: Any) -> list[Any]:
    """The prompts of a request, each in any form."""
    return prompt if isinstance(prompt, list) and _holds_prompts(prompt) else [prompt]


def _size(prompt: Any) -> int:
    """Estimate the cost of reading a prompt."""
    return len(prompt) if isinstance(prompt, list | str) else 1


def _holds_prompts(items: Sequence[Any]) -> bool:
    """Whether a list contains prompts, not the tokens and texts of one prompt."""
    nested = any(isinstance(item, list | dict) for item in items)
    return nested or (len(items) != 1 and all(isinstance(item, str) for item in items))


async def _prompt(source: Any, generation: GenerationService) -> Prompt:
    if isinstance(source, Mapping):
        if source.get("multimodal_data"):
            raise bad_field("prompt", "prompt.multimodal_data is not supported by this route")
        source = source.get("prompt_string")
    if isinstance(source, str):
        (prompt,) = await generation.tokenize(source, whole=True)
        return prompt
    if not isinstance(source, list) or not source:
        raise bad_field(
            "prompt", "prompt must be text, a list of token ids and texts, or a list of these"
        )
    size = await generation.work.run(len(source), _mixed_size, source)
    generation.work.check(size)
    tokenizer = generation.tokenizer

    def read() -> list[int]:
        ids: list[int] = []
        for index, item in enumerate(source):
            ids += [item] if _is_id(item) else tokenizer.encode(item, not index)
        return ids

    (prompt,) = await generation.from_ids(await generation.work.run(size, read))
    return prompt


def _mixed_size(source: Sequence[Any]) -> int:
    """The characters and token ids in a list of both. Raises ApiError(400) for anything else."""
    size = 0
    for index, item in enumerate(source):
        if not isinstance(item, str) and not _is_id(item):
            raise bad_field("prompt", f"prompt[{index}] must be a token id or text")
        size += len(item) if isinstance(item, str) else 1
    return size


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


async def infill_prompt(body: InfillRequest, generation: GenerationService) -> Prompt:
    """Build a fill-in-the-middle prompt. Raises ApiError(501), ApiError(400)."""
    tokenizer = generation.tokenizer
    gap = Gap.of(tokenizer)
    if body.prompt is not None and not isinstance(body.prompt, str):
        raise bad_field("prompt", "prompt must be text")

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False)) if text else []

    def read() -> list[int]:
        before = [gap.prefix, *ids(body.input_prefix)]
        after = [gap.suffix, *ids(body.input_suffix)]
        known: list[int] = []
        extra = _extra(body)
        if extra and gap.repository is not None and gap.file is not None:
            known += [gap.repository, *ids("myproject\n")]
            for name, text in extra:
                known += [gap.file, *ids(f"{name}\n{text}\n")]
            known += [gap.file, *ids("filename\n")]
        else:
            for _, text in extra:
                known += ids(text)
        last = ids(body.prompt or "")
        begin = _begin(tokenizer)
        if gap.middle is None:
            return [*begin, *known, *after, *before, *last]
        return [*begin, *known, *before, *after, gap.middle, *last]

    fields = (body.input_prefix, body.input_suffix, body.prompt or "")
    size = sum(map(len, fields)) + await generation.work.run(
        _PART * len(body.input_extra or ()), _extra_size, body
    )
    generation.work.check(size)
    (prompt,) = await generation.from_ids(await generation.work.run(size, read))
    return prompt


def _extra_size(body: InfillRequest) -> int:
    return sum(len(name) + len(text) + _PART for name, text in _extra(body))


def _extra(body: InfillRequest) -> list[tuple[str, str]]:
    files = []
    for index, part in enumerate(body.input_extra or ()):
        text, name = part.get("text"), part.get("filename", "tmp")
        if not isinstance(text, str) or not isinstance(name, str):
            raise bad_field(
                "input_extra", f"input_extra[{index}] must be an object with filename and text"
            )
        files.append((name, text))
    return files


def _begin(tokenizer: Tokenizer) -> list[int]:
    """The tokens at the start of every prompt of the model."""
    return list(tokenizer.encode("", add_special_tokens=True))[:1]


def biases(logit_bias: Any, tokenizer: Tokenizer) -> dict[int, float] | None:
    """Read `logit_bias`: pairs of a token (id or text) and a number or false, or an object.

    false forbids a token. A text means each of its tokens. Raises ApiError(400).
    """
    if not logit_bias:
        return None
    pairs = list(logit_bias.items()) if isinstance(logit_bias, Mapping) else logit_bias
    if not isinstance(pairs, list) or not all(_is_pair(pair) for pair in pairs):
        raise bad_field("logit_bias", "logit_bias must be pairs of a token and a number or false")
    result: dict[int, float] = {}
    for token, value in pairs:
        for index in _tokens(token, tokenizer, isinstance(logit_bias, Mapping)):
            result[index] = -100.0 if value is False else float(value)
    return result


def _is_pair(pair: Any) -> bool:
    return (
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and (isinstance(pair[0], str) or _is_id(pair[0]))
        and (pair[1] is False or (isinstance(pair[1], int | float) and pair[1] is not True))
    )


def _tokens(token: int | str, tokenizer: Tokenizer, keyed: bool) -> list[int]:
    if isinstance(token, int):
        return [token]
    if keyed and token.isascii() and token.isdigit() and len(token) < 20:
        return [int(token)]
    return list(tokenizer.encode(token, add_special_tokens=False))
