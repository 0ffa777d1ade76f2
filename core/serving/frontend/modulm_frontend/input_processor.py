"""Turns a caller's prompt and parameters into validated engine requests, one per sequence."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from attrs import evolve, frozen

from modulm.contracts.engine_info import EngineInfo
from modulm.contracts.outputs import Position, RequestOutput
from modulm.contracts.pooler import PairContent, PoolingInputs, PoolingJob
from modulm.contracts.requests import Finish, PromptLike, Reason, Request
from modulm.contracts.sampling import LogitsProcessor, OutputKind, PoolingParams, SamplingParams
from modulm.errors import ConfigError, EngineError, RequestError
from modulm.loading.pooling import open_pooler
from modulm_expert_routes import with_replay_salt
from modulm_frontend.beam_search import BeamSearch, BeamSearchParams
from modulm_frontend.flags import OutputConfig
from modulm_frontend.output_processor import RequestState
from modulm_frontend.prompt_embeds import check_embeds, embedded_prompt
from modulm_frontend.prompt_media import (
    MEDIA_KEYS,
    NO_MEDIA,
    PromptMedia,
    messages_media,
    pair_contents,
    placed_media,
    split_prompt,
)
from modulm_frontend.validation import (
    bad_word_ids,
    check,
    check_pooling,
    check_prompt,
    masked_params,
    truncated,
)
from modulm_media import Media, MediaReader
from modulm_media.flags import MediaConfig
from modulm_media.requested import io_options

if TYPE_CHECKING:
    from modulm.contracts.tokenizer import Tokenizer
    from modulm.plugins.manager import PluginManager
    from modulm_media.messages import MediaSource
    from modulm_media.opener import MediaOpener

__all__ = ["BeamSearchRequest", "InputProcessor", "PendingRequest"]

log = logging.getLogger("modulm")

_EMPTY = np.empty(0, dtype=np.int64)
_KEYS = (
    frozenset({"prompt", "prompt_token_ids", "prompt_embeds", "prompt_is_token_ids", "cache_salt"})
    | MEDIA_KEYS
)


@frozen(eq=False)
class PendingRequest:
    """The state that a caller waits on, and the engine requests that fill it."""

    state: RequestState
    requests: tuple[Request, ...]


@frozen(eq=False)
class BeamSearchRequest:
    """A beam search: the state its caller waits on, and the fields that all its requests share."""

    state: RequestState
    beams: BeamSearch
    params: SamplingParams
    common: Mapping[str, Any]

    @property
    def running(self) -> bool:
        """Whether the search is neither complete nor aborted."""
        return bool(self.beams.sequences) and not self.state.finished

    def next_step(self, name: str) -> PendingRequest:
        """Build the request for the next token of every running beam, uncounted by statistics."""
        sequences = self.beams.sequences
        names = tuple(f"{name}.{index}" for index in range(len(sequences)))
        state = RequestState(
            id=name, prompt=None, prompt_ids=_EMPTY, params=self.params, tokenizer=None,
            arrival=time.monotonic(), ids=names, keep=len(names), parent=self.state,
            adapter=self.state.adapter,
        )  # fmt: skip
        requests = tuple(
            Request(id=name_of_beam, prompt=tokens, params=self.params, arrival=state.arrival,
                    **self.common)
            for name_of_beam, tokens in zip(names, sequences, strict=True)
        )  # fmt: skip
        return PendingRequest(state, requests)

    def update(self, output: RequestOutput) -> None:
        """Process the output of `next_step`. A failed or aborted beam ends the search."""
        self.state.record_step(output)
        positions = [choice.logprobs for choice in output.outputs]
        for choice, steps in zip(output.outputs, positions, strict=True):
            if choice.finish_reason in ("abort", "error") or not steps:
                error = EngineError(f"a beam failed: {choice.stop_reason}")
                aborted = choice.finish_reason == "abort"
                self._end("abort" if aborted else "error", None if aborted else error)
                return
        self.beams.feed([steps[0] for steps in positions if steps])
        if not self.beams.sequences:
            self._fill()

    def _end(self, reason: Reason, error: Exception | None) -> None:
        for index, identity in enumerate(self.state.ids):
            self.state.end_sequence(index, Finish(identity, reason, None, error))

    def _fill(self) -> None:
        prompt = len(self.state.prompt_ids)
        for index, beam in enumerate(self.beams.answers()):
            choice = self.state.choices[index]
            stop = beam.stop_reason if isinstance(beam.stop_reason, int) else None
            reason: Reason = "stop" if beam.finish_reason == "stop" else "length"
            finish = Finish(self.state.ids[index], reason, stop)
            *tokens, last = beam.tokens[prompt:]
            for token in tokens:
                choice.add(token, None, None)
            choice.add(last, None, finish)
            choice.cumulative = beam.cum_logprob
            if choice.logprobs is not None:
                choice.logprobs = [self._with_texts(position) for position in beam.logprobs]

    def _with_texts(self, position: Position) -> Position:
        """Fill in the texts of a position's tokens."""
        text = self.state.tokenizer.token_text if self.state.tokenizer is not None else None
        return {
            token: evolve(entry, decoded_token=text(token) if text else None)
            for token, entry in position.items()
        }


class InputProcessor:
    """Prepares the requests of one front end. `stream`: selects its random stream."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: Tokenizer | None,
        plugins: PluginManager,
        processors: Sequence[type[LogitsProcessor]] = (),
        stream: int = 0,
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._masked = info.config.group(OutputConfig).return_sampling_mask
        if self._masked and info.config.model.logprobs_mode != "processed_logprobs":
            message = "needs --logprobs-mode processed_logprobs, which knows what is left to draw"
            raise ConfigError("return_sampling_mask", message)
        if tokenizer is not None and len(tokenizer) > info.vocabulary:
            log.warning(
                "The tokenizer has %d ids and the model %d. Prompts with larger ids are rejected.",
                len(tokenizer),
                info.vocabulary,
            )
        ends = (*(tokenizer.stop_ids if tokenizer else ()), *info.eos)
        # A checkpoint may name ids that its model cannot produce.
        self.eos = tuple(dict.fromkeys(token for token in ends if 0 <= token < info.vocabulary))
        self._plugins = plugins
        self._processors = tuple(processors)
        self._random = np.random.default_rng([info.config.model.seed % 2**64, stream])

    def process(
        self,
        prompt: PromptLike,
        params: SamplingParams | PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        tenant: str = "",
        weight: float = 1.0,
    ) -> PendingRequest:
        """Validate a prompt and its parameters and build its requests. Raises RequestError.

        tenant, weight: as in `modulm.contracts.requests.Request`.
        """
        room = 0 if isinstance(params, PoolingParams) else 1
        text, ids, salt, media = self.read(prompt, params.truncate_prompt_tokens, room)
        if media.items:
            check_embeds(media.items, params)
        salt = cache_salt if cache_salt is not None else salt
        common = {"eos": self.eos, "priority": priority, "salt": salt, "adapter": adapter,
                  "tenant": tenant, "weight": weight, **media.fields}  # fmt: skip
        if isinstance(params, PoolingParams):
            return self._pooling(text, ids, params, request_id, common)
        return self._sampling(text, ids, params, request_id, common)

    def beam_search(
        self,
        prompt: PromptLike,
        params: BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        tenant: str = "",
        weight: float = 1.0,
    ) -> BeamSearchRequest:
        """Prepare a beam search up to its first step. Raises RequestError."""
        text, ids, salt, media = self.read(prompt)
        text_params = self._checked(params.text_params(), len(ids))
        mode = self.info.config.model.logprobs_mode
        if mode.endswith("logits"):
            raise RequestError(
                f"beam search needs log probabilities, but --logprobs-mode {mode} returns logits",
                "use_beam_search",
            )
        best = self.info.vocabulary if text_params.logprobs == -1 else text_params.logprobs
        beams = BeamSearch(
            ids.tolist(),
            params.with_(logprobs=best),
            max_tokens=text_params.max_tokens or 0,
            eos=(*(() if params.ignore_eos else self.eos), *params.stop_token_ids),
        )
        step_params = SamplingParams(
            temperature=params.temperature if mode == "processed_logprobs" else 0,
            max_tokens=1,
            logprobs=beams.num_candidates,
            ignore_eos=True,
            detokenize=False,
            output_kind=OutputKind.FINAL_ONLY,
        )
        state = self._state(text, ids, text_params, request_id, params.beam_width, adapter)
        state.keep = params.beam_width
        salt = cache_salt if cache_salt is not None else salt
        common = {"priority": priority, "salt": salt, "adapter": adapter, "tenant": tenant,
                  "weight": weight, **media.fields}  # fmt: skip
        return BeamSearchRequest(state, beams, step_params, common)

    def read(
        self, prompt: PromptLike, truncate: int | None = None, room: int = 1
    ) -> tuple[str | None, np.ndarray, str | None, PromptMedia]:
        """Read a prompt of any form into (text, token ids as int64, cache salt, media)."""
        prompt, decoder_prompt = split_prompt(prompt)
        text, ids, salt = self._fields(prompt)
        media = NO_MEDIA
        if isinstance(prompt, Mapping) and "prompt_embeds" in prompt:
            ids, items = embedded_prompt(prompt, self.info)
            media = PromptMedia(items)
        ids = self._encode(text) if ids is None else ids
        if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
            ids, media = placed_media(prompt, ids, self.media, truncate)
        elif (reader := self.media) is not None and reader.reads_text:
            ids, media = self._encoded_text(reader, ids, decoder_prompt, truncate)
        elif decoder_prompt is not None:
            raise RequestError("the model has no text encoder", "encoder_prompt")
        elif reader is not None and reader.crosses and not media.items:
            kinds = " or ".join(reader.kinds)
            raise RequestError(f"the model needs {kinds} in the prompt", "prompt")
        most, vocabulary = self.info.max_model_len, self.info.vocabulary
        checked_ids = (
            _array(cut) if len(cut := truncated(ids, truncate, most, room)) <= most else cut
        )
        check_prompt(checked_ids, vocabulary=vocabulary, max_model_len=most, room=room)
        return text, np.asarray(checked_ids, dtype=np.int64), salt, media

    def _encoded_text(
        self,
        reader: MediaReader,
        ids: Sequence[int] | np.ndarray,
        decoder_prompt: Any,
        truncate: int | None,
    ) -> tuple[np.ndarray, PromptMedia]:
        """(decoder prompt, encoder input) of a text for a model with a text encoder."""
        if truncate is not None:
            message = "encoder prompts cannot be truncated"
            raise RequestError(message, "truncate_prompt_tokens")
        check_prompt(ids, vocabulary=self.info.vocabulary, max_model_len=len(ids) + 1, room=1)
        if decoder_prompt is not None:
            text, first, _ = self._fields(decoder_prompt)
            decoder_prompt = first if first is not None else self._decoder_ids(text)
        prompt_media = reader.read_text(ids, decoder_prompt)
        return prompt_media.tokens, PromptMedia(prompt_media.items)

    def _decoder_ids(self, text: Any) -> list[int]:
        """The token ids of a decoder prompt, without special tokens added."""
        if not isinstance(text, str):
            raise RequestError("decoder_prompt must be text or token ids", "decoder_prompt")
        if self.tokenizer is None:
            raise RequestError("no tokenizer is loaded: pass token ids", "decoder_prompt")
        return self.tokenizer.encode(text, add_special_tokens=False)

    def pooling_job(self, prompt: PromptLike, params: PoolingParams) -> PoolingJob:
        """Build the engine's pooling job for a prompt. Raises RequestError."""
        text, ids, _ = self._fields(prompt)
        if isinstance(prompt, Mapping) and "prompt_embeds" in prompt:
            raise RequestError("embedding prompts cannot be pooled", "prompt_embeds")
        if ids is None:
            if not isinstance(text, str):
                raise RequestError("prompt must be text, token ids, or a mapping of them", "prompt")
            ids, params = self.texts.read(text, params)
        if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
            return PoolingJob([({**prompt, "prompt": None, "prompt_token_ids": ids}, params)])
        return self.texts.job(ids, params)

    @cached_property
    def texts(self) -> PoolingInputs:
        """Builds prompts from texts to pool. Raises PluginNotFound without a pooler."""
        return open_pooler(self.info.config, self._plugins).inputs(self.info, self.tokenizer)

    @cached_property
    def media(self) -> MediaReader | None:
        """Reads the media of prompts; None if the model takes none."""
        return MediaReader.open(self.info, self.tokenizer, self._plugins)

    def take_media(self, messages: Any) -> tuple[Any, tuple[Media, ...]]:
        """Fetch and decode the media of a conversation; returns (messages, media).

        Placeholders replace the media in the messages. For trusted callers in this process:
        local paths are allowed. Raises RequestError, and ImportError without modulm-chat.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            return messages, ()
        plain, sources = messages_media(messages, self.media)
        return plain, self._opener.open_now(sources, self._io) if sources else ()

    def pair_contents(self, side: Any, name: str) -> list[str | PairContent]:
        """Read one side of the pairs to score, fetching and decoding its media.

        Raises RequestError.
        """
        contents = pair_contents(side, name, lambda: self.media)
        sources = [
            one for content in contents if isinstance(content, PairContent) for one in content.media
        ]
        media_sources = cast("list[MediaSource]", sources)
        opened = iter(self._opener.open_now(media_sources, self._io) if media_sources else ())
        return [
            evolve(content, media=tuple(next(opened) for _ in content.media))
            if isinstance(content, PairContent)
            else content
            for content in contents
        ]

    @cached_property
    def _opener(self) -> MediaOpener:
        from modulm_media.opener import MediaOpener

        return MediaOpener(self.info.config.group(MediaConfig), trusted=True)

    @property
    def _io(self) -> Mapping[str, Mapping[str, Any]]:
        return io_options(self.info.config.group(MediaConfig), None, "media_io_kwargs")

    @staticmethod
    def _fields(prompt: PromptLike) -> tuple[Any, Any, str | None]:
        """The prompt's (text, token ids, cache salt); what it lacks is None."""
        text: Any = None
        ids: Any = None
        salt: Any = None
        if isinstance(prompt, Mapping):
            _check_keys(prompt)
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            salt = prompt.get("cache_salt")
        elif isinstance(prompt, str):
            text = prompt
        else:
            ids = prompt
        listed = isinstance(ids, Sequence | np.ndarray) and not isinstance(ids, str | bytes)
        if ids is not None and not listed:
            raise RequestError("prompt must be text, token ids, or a mapping of them", "prompt")
        return text, ids, salt

    def _encode(self, text: Any) -> list[int]:
        if not isinstance(text, str):
            raise RequestError("prompt must be text, token ids, or a mapping of them", "prompt")
        if self.tokenizer is None:
            raise RequestError("no tokenizer is loaded: pass prompt_token_ids", "prompt")
        return self.tokenizer.encode(text)

    def _checked(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        if "generate" not in self.info.tasks:
            raise RequestError(f"the model supports only {', '.join(self.info.tasks)}", "model")
        remote = self.info.limit("transfers", "remote")
        if not remote and (params.extra_args or {}).get("kv_transfer_params"):
            message = "this engine exchanges no KV cache: start it with --kv-transfer-config"
            raise RequestError(message, "kv_transfer_params")
        return check(
            params,
            vocabulary=self.info.vocabulary,
            max_model_len=self.info.max_model_len,
            prompt_len=prompt_len,
            max_logprobs=self.info.config.model.max_logprobs,
            processors=self._processors,
            config=self.info.config,
        )

    def _sampling(
        self,
        text: str | None,
        ids: np.ndarray,
        params: SamplingParams,
        request_id: str,
        common: Mapping[str, Any],
    ) -> PendingRequest:
        params = self._checked(params, len(ids))
        common = {**common, "salt": with_replay_salt(common["salt"], params)}
        count = params.best_of or params.n
        ranks = count > params.n and params.logprobs is None
        if ranks:
            params = params.with_(logprobs=0)
        bad = self._bad_words(params)
        state = self._state(text, ids, params, request_id, count, common["adapter"])
        state.keep, state.ranks_only = params.n, ranks
        if self._masked:
            params = masked_params(params)
            state.mask()
        if count > 1 and self.info.config.cache.enable_prefix_caching is False:
            # The choices share the prompt with one another only.
            common = {**common, "salt": f"{common['salt'] or ''}#{request_id}"}
        requests = tuple(
            Request(
                id=identity,
                prompt=ids,
                params=params,
                seed=self._seed(params, index),
                bad_words=bad,
                arrival=state.arrival,
                **common,
            )
            for index, identity in enumerate(state.ids)
        )
        return PendingRequest(state, requests)

    def _pooling(
        self,
        text: str | None,
        ids: np.ndarray,
        params: PoolingParams,
        request_id: str,
        common: Mapping[str, Any],
    ) -> PendingRequest:
        check_pooling(
            params,
            tasks=self.info.tasks,
            hidden=self.info.hidden,
            max_model_len=self.info.max_model_len,
            offered=self.info.texts.dimensions,
        )
        if params.pool_from >= len(ids):
            raise RequestError("the prompt has no tokens after its instruction", "prompt")
        state = self._state(text, ids, params, request_id, 1, common["adapter"])
        request = Request(id=request_id, prompt=ids, params=params, arrival=state.arrival, **common)
        return PendingRequest(state, (request,))

    def _state(
        self,
        text: str | None,
        ids: np.ndarray,
        params: SamplingParams | PoolingParams,
        request_id: str,
        count: int,
        adapter: str | None,
    ) -> RequestState:
        identities = tuple(f"{request_id}#{index}" for index in range(count))
        return RequestState(
            id=request_id,
            prompt=text,
            prompt_ids=ids,
            params=params,
            tokenizer=self.tokenizer,
            arrival=time.monotonic(),
            ids=identities if count > 1 else (request_id,),
            drafts=self.info.limit("drafts", "drafts"),
            adapter=adapter,
        )

    def _seed(self, params: SamplingParams, index: int) -> int | None:
        """The seed of one choice. Choices differ; without a request seed it is drawn at random."""
        if params.greedy:
            return None
        if params.seed is not None:
            return params.seed + index
        return int(self._random.integers(2**63))

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if not params.bad_words:
            return ()
        if self.tokenizer is None:
            raise RequestError("bad_words needs a tokenizer", "bad_words")
        return bad_word_ids(params.bad_words, self.tokenizer, self.info.vocabulary)


def _array(ids: Sequence[int] | np.ndarray) -> Sequence[int] | np.ndarray:
    """Convert plain integers to an int64 array; leave anything else for `check_prompt`."""
    if isinstance(ids, np.ndarray):
        return ids.copy() if ids.ndim == 1 else list(ids)
    if isinstance(ids, array) and ids.typecode == "q":
        return np.array(ids)
    if set(map(type, ids)) != {int}:
        return ids
    try:
        return np.array(ids, dtype=np.int64)
    except OverflowError:
        return ids


def _check_keys(prompt: Mapping[str, Any]) -> None:
    for key in prompt:
        if key not in _KEYS:
            raise RequestError(f"a prompt has no field {key!r:.60}", "prompt")
