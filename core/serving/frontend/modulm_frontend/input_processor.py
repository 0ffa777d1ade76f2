"""From a caller's prompt and parameters to checked requests of the engine, one per sequence."""

from __future__ import annotations

import logging
import time
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
from modulm.engine.sampling.validation import (
    bad_word_ids,
    check,
    check_pooling,
    check_prompt,
    truncated,
)
from modulm.errors import EngineError, RequestError
from modulm.loading.pooling import open_pooler
from modulm_frontend.beam_search import BeamSearch, BeamSearchParams
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
from modulm_media import Media, MediaReader
from modulm_media.flags import MediaConfig
from modulm_media.requested import io_options

if TYPE_CHECKING:
    from modulm.plugins.manager import PluginManager
    from modulm.text.tokenizer import Tokenizer
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
    """What a caller waits for, and the requests of the engine that will fill it."""

    state: RequestState
    requests: tuple[Request, ...]


@frozen(eq=False)
class BeamSearchRequest:
    """A beam search: what its caller waits for, and what all its requests have in common."""

    state: RequestState
    beams: BeamSearch
    params: SamplingParams
    common: Mapping[str, Any]

    @property
    def running(self) -> bool:
        """Whether it is neither at its end nor ended from outside."""
        return bool(self.beams.sequences) and not self.state.finished

    def next_step(self, name: str) -> PendingRequest:
        """One token of every running beam, as a request of its own that no statistics count."""
        sequences = self.beams.sequences
        names = tuple(f"{name}.{place}" for place in range(len(sequences)))
        state = RequestState(
            id=name, prompt=None, prompt_ids=_EMPTY, params=self.params, tokenizer=None,
            arrival=time.monotonic(), ids=names, keep=len(names), parent=self.state,
            adapter=self.state.adapter,
        )  # fmt: skip
        requests = tuple(
            Request(id=own, prompt=tokens, params=self.params, arrival=state.arrival,
                    **self.common)
            for own, tokens in zip(names, sequences, strict=True)
        )  # fmt: skip
        return PendingRequest(state, requests)

    def update(self, output: RequestOutput) -> None:
        """What came of `next_step`. A beam that failed or was aborted ends the search."""
        self.state.asked(output)
        positions = [choice.logprobs for choice in output.outputs]
        for choice, found in zip(output.outputs, positions, strict=True):
            if choice.finish_reason in ("abort", "error") or not found:
                error = EngineError(f"a beam failed: {choice.stop_reason}")
                aborted = choice.finish_reason == "abort"
                self._end("abort" if aborted else "error", None if aborted else error)
                return
        self.beams.feed([found[0] for found in positions if found])
        if not self.beams.sequences:
            self._fill()

    def _end(self, reason: Reason, error: Exception | None) -> None:
        for place, identity in enumerate(self.state.ids):
            self.state.ended(place, Finish(identity, reason, None, error))

    def _fill(self) -> None:
        prompt = len(self.state.prompt_ids)
        for place, beam in enumerate(self.beams.answers()):
            choice = self.state.choices[place]
            stop = beam.stop_reason if isinstance(beam.stop_reason, int) else None
            reason: Reason = "stop" if beam.finish_reason == "stop" else "length"
            finish = Finish(self.state.ids[place], reason, stop)
            *tokens, last = beam.tokens[prompt:]
            for token in tokens:
                choice.add(token, None, None)
            choice.add(last, None, finish)
            choice.cumulative = beam.cum_logprob
            if choice.logprobs is not None:
                choice.logprobs = [self._told(position) for position in beam.logprobs]

    def _told(self, position: Position) -> Position:
        """The position with the tokens' texts."""
        text = self.state.tokenizer.token_text if self.state.tokenizer is not None else None
        return {
            token: evolve(entry, decoded_token=text(token) if text else None)
            for token, entry in position.items()
        }


class InputProcessor:
    """Prepares the requests of one front end; `stream` keeps their random streams apart."""

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
        if tokenizer is not None and len(tokenizer) > info.vocabulary:
            log.warning(
                "the tokenizer has %d ids, the model %d: a prompt with one beyond that is refused",
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
    ) -> PendingRequest:
        """Check everything that can be checked before the engine sees it. Raises RequestError."""
        room = 0 if isinstance(params, PoolingParams) else 1
        text, ids, salt, media = self.read(prompt, params.truncate_prompt_tokens, room)
        if media.items:
            check_embeds(media.items, params)
        salt = cache_salt if cache_salt is not None else salt
        common = {"eos": self.eos, "priority": priority, "salt": salt, "adapter": adapter,
                  **media.fields}  # fmt: skip
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
    ) -> BeamSearchRequest:
        """A beam search that is ready for its first step. Raises RequestError."""
        text, ids, salt, media = self.read(prompt)
        shown = self._checked(params.shown(), len(ids))
        mode = self.info.config.model.logprobs_mode
        if mode.endswith("logits"):
            raise RequestError(
                f"beams are ranked by log probabilities and --logprobs-mode {mode} gives logits",
                "use_beam_search",
            )
        best = self.info.vocabulary if shown.logprobs == -1 else shown.logprobs
        beams = BeamSearch(
            ids.tolist(),
            params.with_(logprobs=best),
            most=shown.max_tokens or 0,
            eos=(*(() if params.ignore_eos else self.eos), *params.stop_token_ids),
        )
        asking = SamplingParams(
            temperature=params.temperature if mode == "processed_logprobs" else 0,
            max_tokens=1,
            logprobs=beams.best,
            ignore_eos=True,
            detokenize=False,
            output_kind=OutputKind.FINAL_ONLY,
        )
        state = self._state(text, ids, shown, request_id, params.beam_width, adapter)
        state.keep = params.beam_width
        salt = cache_salt if cache_salt is not None else salt
        common = {"priority": priority, "salt": salt, "adapter": adapter, **media.fields}
        return BeamSearchRequest(state, beams, asking, common)

    def read(
        self, prompt: PromptLike, truncate: int | None = None, room: int = 1
    ) -> tuple[str | None, np.ndarray, str | None, PromptMedia]:
        """(text, token ids as int64, cache salt, media) of a prompt in any of its forms."""
        prompt, begun = split_prompt(prompt)
        text, ids, salt = self._given(prompt)
        media = NO_MEDIA
        if isinstance(prompt, Mapping) and "prompt_embeds" in prompt:
            ids, items = embedded_prompt(prompt, self.info)
            media = PromptMedia(items)
        ids = self._encode(text) if ids is None else ids
        if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
            ids, media = placed_media(prompt, ids, self.media, truncate)
        elif (reader := self.media) is not None and reader.reads_text:
            ids, media = self._encoded_text(reader, ids, begun, truncate)
        elif begun is not None:
            raise RequestError("the model has no encoder that reads texts", "encoder_prompt")
        elif reader is not None and reader.crosses and not media.items:
            takes = " or ".join(reader.kinds)
            raise RequestError(f"the model answers to {takes}, and none is given", "prompt")
        most, vocabulary = self.info.max_model_len, self.info.vocabulary
        kept = _array(cut) if len(cut := truncated(ids, truncate, most, room)) <= most else cut
        check_prompt(kept, vocabulary=vocabulary, max_model_len=most, room=room)
        return text, np.asarray(kept, dtype=np.int64), salt, media

    def _encoded_text(
        self,
        reader: MediaReader,
        ids: Sequence[int] | np.ndarray,
        begun: Any,
        truncate: int | None,
    ) -> tuple[np.ndarray, PromptMedia]:
        """(what the decoder begins with, what its encoder reads). Raises RequestError."""
        if truncate is not None:
            words = "what an encoder reads cannot be truncated"
            raise RequestError(words, "truncate_prompt_tokens")
        check_prompt(ids, vocabulary=self.info.vocabulary, max_model_len=len(ids) + 1, room=1)
        if begun is not None:
            text, first, _ = self._given(begun)
            begun = first if first is not None else self._begun(text)
        found = reader.read_text(ids, begun)
        return found.tokens, PromptMedia(found.items)

    def _begun(self, text: Any) -> list[int]:
        """The tokens of what a decoder begins with, as they are written."""
        if not isinstance(text, str):
            raise RequestError("decoder_prompt: text or token ids are expected", "decoder_prompt")
        if self.tokenizer is None:
            raise RequestError("there is no tokenizer: give token ids", "decoder_prompt")
        return self.tokenizer.encode(text, add_special_tokens=False)

    def pooling_job(self, prompt: PromptLike, params: PoolingParams) -> PoolingJob:
        """What to ask of the engine to pool a prompt. Raises RequestError."""
        text, ids, _ = self._given(prompt)
        if isinstance(prompt, Mapping) and "prompt_embeds" in prompt:
            raise RequestError("prompts of embeddings are not pooled", "prompt_embeds")
        if ids is None:
            if not isinstance(text, str):
                raise RequestError("prompt must be text, token ids, or a table of them", "prompt")
            ids, params = self.texts.read(text, params)
        if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
            return PoolingJob([({**prompt, "prompt": None, "prompt_token_ids": ids}, params)])
        return self.texts.job(ids, params)

    @cached_property
    def texts(self) -> PoolingInputs:
        """How texts to pool become prompts. Raises PluginNotFound without a pooler."""
        return open_pooler(self.info.config, self._plugins).inputs(self.info, self.tokenizer)

    @cached_property
    def media(self) -> MediaReader | None:
        """What reads media in prompts, None for a model that takes none."""
        return MediaReader.open(self.info, self.tokenizer, self._plugins)

    def take_media(self, messages: Any) -> tuple[Any, tuple[Media, ...]]:
        """(messages, media) of a conversation of this program's: placeholders stand where its
        media were, which are fetched and decoded.

        Raises RequestError, ImportError without modulm-chat.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str):
            return messages, ()
        plain, sources = messages_media(messages, self.media)
        return plain, self._opener.open_now(sources, self._io) if sources else ()

    def pair_contents(self, given: Any, name: str) -> list[str | PairContent]:
        """One side of pairs of this program's, whose media are fetched and decoded.

        Raises RequestError.
        """
        made = pair_contents(given, name, lambda: self.media)
        sources = [one for own in made if isinstance(own, PairContent) for one in own.media]
        wanted = cast("list[MediaSource]", sources)
        opened = iter(self._opener.open_now(wanted, self._io) if wanted else ())
        return [
            evolve(own, media=tuple(next(opened) for _ in own.media))
            if isinstance(own, PairContent)
            else own
            for own in made
        ]

    @cached_property
    def _opener(self) -> MediaOpener:
        from modulm_media.opener import MediaOpener

        return MediaOpener(self.info.config.group(MediaConfig), own=True)

    @property
    def _io(self) -> Mapping[str, Mapping[str, Any]]:
        return io_options(self.info.config.group(MediaConfig), None, "media_io_kwargs")

    @staticmethod
    def _given(prompt: PromptLike) -> tuple[Any, Any, str | None]:
        """(text, token ids, cache salt) as they were given, ids or None."""
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
            raise RequestError("prompt must be text, token ids, or a table of them", "prompt")
        return text, ids, salt

    def _encode(self, text: Any) -> list[int]:
        if not isinstance(text, str):
            raise RequestError("prompt must be text, token ids, or a table of them", "prompt")
        if self.tokenizer is None:
            raise RequestError("there is no tokenizer: give prompt_token_ids", "prompt")
        return self.tokenizer.encode(text)

    def _checked(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        if "generate" not in self.info.tasks:
            raise RequestError(f"the model is for {', '.join(self.info.tasks)} only", "model")
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
        count = params.best_of or params.n
        ranks = count > params.n and params.logprobs is None
        if ranks:
            params = params.with_(logprobs=0)
        bad = self._bad_words(params)
        state = self._state(text, ids, params, request_id, count, common["adapter"])
        state.keep, state.ranks_only = params.n, ranks
        requests = tuple(
            Request(
                id=identity,
                prompt=ids,
                params=params,
                seed=self._seed(params, place),
                bad_words=bad,
                arrival=state.arrival,
                **common,
            )
            for place, identity in enumerate(state.ids)
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
            raise RequestError("no token of the text is left after its prompt", "prompt")
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
        identities = tuple(f"{request_id}#{place}" for place in range(count))
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


def _array(ids: Sequence[int] | np.ndarray) -> Sequence[int] | np.ndarray:
    """Plain integers as one int64 array; anything else as it is, for `check_prompt` to refuse."""
    if isinstance(ids, np.ndarray):
        return ids.copy() if ids.ndim == 1 else list(ids)
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
