"""From a caller's prompt and parameters to requests: tokenized, checked, one per sequence."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from attrs import frozen

from modulm.contracts.sampling import LogitsProcessor, PoolingParams, SamplingParams
from modulm.engine.answers import Answer
from modulm.engine.info import EngineInfo
from modulm.engine.requests import Request
from modulm.engine.validate import bad_word_ids, check, check_pooling, check_prompt, truncated
from modulm.errors import RequestError

if TYPE_CHECKING:
    from modulm.text.tokenizer import Tokenizer

__all__ = ["Preparer", "PromptLike", "Work"]

#: Text, token ids, or a table with `prompt` or `prompt_token_ids` (and `cache_salt`).
PromptLike: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"

_KEYS = frozenset({"prompt", "prompt_token_ids", "cache_salt"})
_LATER = {
    "prompt_embeds": "prompts of embeddings",
    "multi_modal_data": "images, audio and video",
    "encoder_prompt": "encoder-decoder prompts",
}


@frozen(eq=False)
class Work:
    """An answer that waits to be filled, and the requests that will fill it."""

    answer: Answer
    requests: tuple[Request, ...]


class Preparer:
    """Makes the work of one front end. `stream` keeps the random streams of front ends apart."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        processors: Sequence[type[LogitsProcessor]] = (),
        stream: int = 0,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        ends = (*(tokenizer.stop_ids if tokenizer else ()), *info.eos)
        self.eos = tuple(dict.fromkeys(ends))
        self._processors = tuple(processors)
        self._random = np.random.default_rng([info.config.model.seed, stream])

    def work(
        self,
        prompt: PromptLike,
        params: SamplingParams | PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
    ) -> Work:
        """Check everything that can be checked before the engine sees it. Raises RequestError."""
        room = 0 if isinstance(params, PoolingParams) else 1
        text, ids, salt = self.read(prompt, params.truncate_prompt_tokens, room)
        salt = cache_salt if cache_salt is not None else salt
        common = {"eos": self.eos, "priority": priority, "salt": salt, "adapter": adapter}
        if isinstance(params, PoolingParams):
            return self._pooling(text, ids, params, request_id, common)
        return self._sampling(text, ids, params, request_id, common)

    def unchecked(self, ids: list[int], params: SamplingParams, request_id: str) -> Work:
        """Work of the engine's own, which may ask for more than a caller may."""
        answer = self._answer(None, ids, params, request_id, 1)
        request = Request(id=request_id, prompt=ids, params=params, arrival=answer.arrival)
        return Work(answer, (request,))

    def read(
        self, prompt: PromptLike, truncate: int | None = None, room: int = 1
    ) -> tuple[str | None, list[int], str | None]:
        """(text, token ids, cache salt) of a prompt in any of its forms."""
        salt = None
        text: Any = None
        ids: Any = None
        if isinstance(prompt, Mapping):
            _check_keys(prompt)
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            salt = prompt.get("cache_salt")
        elif isinstance(prompt, str):
            text = prompt
        else:
            ids = prompt
        if ids is None:
            ids = self._encode(text)
        if isinstance(ids, str | bytes) or not isinstance(ids, Sequence | np.ndarray):
            raise RequestError("prompt must be text, token ids, or a table of them", "prompt")
        most, vocabulary = self.info.max_model_len, self.info.vocabulary
        kept = truncated(list(ids), truncate, most, room)
        check_prompt(kept, vocabulary=vocabulary, max_model_len=most, room=room)
        return text, [int(token) for token in kept], salt

    def _encode(self, text: Any) -> list[int]:
        if not isinstance(text, str):
            raise RequestError("prompt must be text, token ids, or a table of them", "prompt")
        if self.tokenizer is None:
            raise RequestError("there is no tokenizer: give prompt_token_ids", "prompt")
        return self.tokenizer.encode(text)

    def _sampling(
        self,
        text: str | None,
        ids: list[int],
        params: SamplingParams,
        request_id: str,
        common: Mapping[str, Any],
    ) -> Work:
        if "generate" not in self.info.tasks:
            raise RequestError(f"the model is for {', '.join(self.info.tasks)} only", "model")
        params = check(
            params,
            vocabulary=self.info.vocabulary,
            max_model_len=self.info.max_model_len,
            prompt_len=len(ids),
            max_logprobs=self.info.config.model.max_logprobs,
            processors=self._processors,
        )
        count = params.best_of or params.n
        ranks = count > params.n and params.logprobs is None
        if ranks:
            params = params.with_(logprobs=0)
        bad = self._bad_words(params)
        answer = self._answer(text, ids, params, request_id, count)
        answer.keep, answer.ranks_only = params.n, ranks
        requests = tuple(
            Request(
                id=identity,
                prompt=ids,
                params=params,
                seed=self._seed(params, place),
                bad_words=bad,
                arrival=answer.arrival,
                **common,
            )
            for place, identity in enumerate(answer.ids)
        )
        return Work(answer, requests)

    def _pooling(
        self,
        text: str | None,
        ids: list[int],
        params: PoolingParams,
        request_id: str,
        common: Mapping[str, Any],
    ) -> Work:
        check_pooling(
            params,
            tasks=self.info.tasks,
            hidden=self.info.hidden,
            max_model_len=self.info.max_model_len,
        )
        answer = self._answer(text, ids, params, request_id, 1)
        request = Request(
            id=request_id, prompt=ids, params=params, arrival=answer.arrival, **common
        )
        return Work(answer, (request,))

    def _answer(
        self,
        text: str | None,
        ids: list[int],
        params: SamplingParams | PoolingParams,
        request_id: str,
        count: int,
    ) -> Answer:
        identities = tuple(f"{request_id}#{place}" for place in range(count))
        return Answer(
            id=request_id,
            prompt=text,
            prompt_ids=ids,
            params=params,
            tokenizer=self.tokenizer,
            arrival=time.monotonic(),
            ids=identities if count > 1 else (request_id,),
        )

    def _seed(self, params: SamplingParams, place: int) -> int | None:
        """Each choice has a random stream of its own; without a seed, one nobody can repeat."""
        if params.greedy:
            return None
        if params.seed is not None:
            return params.seed + place
        return int(self._random.integers(2**63))

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if not params.bad_words:
            return ()
        if self.tokenizer is None:
            raise RequestError("bad_words needs a tokenizer", "bad_words")
        return bad_word_ids(params.bad_words, self.tokenizer, self.info.vocabulary)


def _check_keys(prompt: Mapping[str, Any]) -> None:
    for key in prompt:
        if key in _LATER:
            raise RequestError(f"{_LATER[key]}: not yet", key)
        if key not in _KEYS:
            raise RequestError(f"a prompt has no field {key!r:.60}", "prompt")
