"""Transcribes audio: splits it, transcribes each piece, retries unlikely results, joins texts."""

from __future__ import annotations

import asyncio
import json
import math
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import define, evolve, field, frozen

from modulm.contracts.sampling import OutputKind, PoolingParams
from modulm.errors import PluginNotFound
from modulm.plugins import manager
from modulm_media import Media, Sound
from modulm_media.limits import Limits, Undecodable
from modulm_route_audio.flags import TranscriptionConfig
from modulm_route_audio.schema import with_temperature
from modulm_server.errors import ApiError
from modulm_server.json_body import bad_field
from modulm_server.prompts import Prompt
from modulm_speech.cutting import is_silent, pieces
from modulm_speech.quality import TEMPERATURES, Quality
from modulm_speech.transcriber import Question, Segment, Task, Transcriber, Wanted, Word

if TYPE_CHECKING:
    from modulm.contracts.outputs import RequestOutput
    from modulm_server.generation import GenerationService, Running

__all__ = ["TranscriptionOptions", "Delta", "Deltas", "Heard", "Joiner", "Speech"]

_Part = TypeVar("_Part", Segment, Word)

#: Minimum length of audio in seconds.
_SHORTEST = 0.1
#: The API's names of engine fields.
_FIELDS = {"multi_modal_data": "file", "max_tokens": "max_completion_tokens"}
#: Top tokens among which to look for the no-speech token.
_BEST = 5
#: Languages that are written without spaces between sentences.
_UNSPACED = frozenset({"ja", "lo", "my", "th", "yue", "zh"})


@frozen(kw_only=True)
class TranscriptionOptions:
    """The options of a transcription.

    params: fields of SamplingParams. temperature: None or 0 tries several, up to a likely result.
    adapter: from `find_model`. logprobs: return log probabilities of the text's tokens.
    word_times: return word timestamps, which take a second request for each piece.
    """

    task_options: Wanted
    params: Mapping[str, Any] = field(factory=dict)
    temperature: float | None = None
    adapter: str | None = None
    logprobs: bool = False
    word_times: bool = False


@define
class Heard:
    """The transcript of one piece. Times are seconds from the start of the whole audio.

    words: with timestamps, if requested. logprobs: (token, log probability) of the text's tokens.
    prompt_tokens, tokens: over all attempts.
    """

    start: float
    segments: tuple[Segment, ...] = ()
    words: tuple[Word, ...] = ()
    quality: Quality = field(factory=lambda: Quality(0.0, 0.0))
    temperature: float = 0.0
    logprobs: tuple[tuple[int, float], ...] = ()
    prompt_tokens: int = 0
    tokens: int = 0

    @property
    def text(self) -> str:
        """The text of all segments."""
        return "".join(segment.text for segment in self.segments)


@frozen
class Delta:
    """A piece of streamed text, with its token counts."""

    text: str
    logprobs: tuple[tuple[int, float], ...] = ()
    prompt_tokens: int = 0
    tokens: int = 0


@define
class Joiner:
    """Joins the texts of pieces. language: of the text, None if unknown."""

    language: str | None
    _started: bool = False
    _ends_in_space: bool = False
    _fresh: bool = True

    def piece(self) -> None:
        """Start the next piece."""
        self._fresh = True

    def add(self, text: str) -> str:
        """Return the text to append, with a space before it if needed."""
        if not text:
            return ""
        if self._fresh:
            text = text if self._started else text.lstrip()
            separated = self._ends_in_space or text[:1].isspace() or self.language in _UNSPACED
            if self._started and not separated:
                text = f" {text}"
        if text:
            self._started, self._fresh = True, False
            self._ends_in_space = text[-1].isspace()
        return text


class Speech:
    """Transcribes audio with an engine."""

    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation
        self.flags = generation.config.group(TranscriptionConfig)

    @cached_property
    def _transcriber_class(self) -> type[Transcriber] | None:
        architecture = self._generation.engine.info.architecture
        try:
            transcriber: type[Transcriber] = manager.current().load("transcribers", architecture)
        except PluginNotFound:
            return None
        return transcriber

    async def warm(self) -> None:
        """Load the transcriber before the first request, which reports any error."""
        if self.served:
            with suppress(Exception):
                await asyncio.to_thread(lambda: self.transcriber.languages)
                await self._generation.media.audio_rate()

    @property
    def served(self) -> bool:
        """Whether the model transcribes."""
        return self._transcriber_class is not None

    @cached_property
    def transcriber(self) -> Transcriber:
        """The model's transcriber. Raises ApiError(400) if the model does not transcribe."""
        if self._transcriber_class is None:
            raise ApiError(400, "the model does not transcribe speech", code="unsupported")
        path = Path(self._generation.engine.info.path)
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return self._transcriber_class(self._generation.tokenizer, path, config)

    def task_options(self, task: Task, language: str | None, prompt: str, times: bool) -> Wanted:
        """Build the model's task options. Raises ApiError(400) for unsupported ones."""
        transcriber = self.transcriber
        if task not in transcriber.tasks:
            raise ApiError(400, "the model does not translate", code="unsupported")
        if times and not transcriber.times:
            message = "response_format must be json or text; the model has no timestamps"
            raise bad_field("response_format", message, "unsupported")
        if prompt.strip() and not transcriber.takes_prompts:
            raise bad_field("prompt", "prompt is not supported by this model", "unsupported")
        code = None
        if language is not None:
            code = self._code(language.strip().lower())
        elif len(transcriber.languages) == 1:
            code = next(iter(transcriber.languages))
        return Wanted(task=task, language=code, prompt=prompt, times=times)

    def check_words(self) -> None:
        """Raise ApiError(400) if the model does not support word timestamps."""
        emits = bool(self.transcriber.emits)
        if not emits and self.transcriber.aligns not in self._generation.engine.info.tasks:
            message = (
                "timestamp_granularities: this model does not support word timestamps; Whisper "
                "does, if generation_config.json has alignment_heads and the heads are not split "
                "over ranks"
            )
            raise bad_field("timestamp_granularities", message, "unsupported")

    def check_choices(self, fields: Sequence[str]) -> None:
        """Raise ApiError(400) for fields about answers, if the model does not generate any."""
        if fields and self.transcriber.emits:
            message = f"{fields[0]}: this model reads its transcript off the sound without sampling"
            raise bad_field(fields[0], message, "unsupported")

    def check_speakers(self) -> None:
        """Raise ApiError(400) if the model does not name speakers."""
        if not self.transcriber.diarizes:
            message = (
                "response_format: diarized_json needs a model that names speakers, such as "
                "MOSS-Transcribe-Diarize or VibeVoice ASR"
            )
            raise bad_field("response_format", message, "unsupported")

    def _code(self, language: str) -> str:
        """The code of a language, from its code or name. Raises ApiError(400)."""
        languages = self.transcriber.languages
        names = {name: code for code, name in languages.items()}
        code = language if language in languages else names.get(language)
        if code is None:
            known = ", ".join(sorted(languages)) or "none"
            raise bad_field("language", f"language: {language!r:.40} is not one of {known}")
        return code

    async def decode(self, data: bytes) -> Sound:
        """Decode an audio file at the model's sampling rate. Raises ApiError(400)."""
        max_seconds = self.flags.max_transcription_seconds
        rate = await self._generation.media.audio_rate()
        try:
            media = self._generation.media
            sound = await media.decode("audio", data, {"rate": rate}, Limits(seconds=max_seconds))
        except Undecodable as error:
            raise bad_field("file", f"file: {error}", "invalid_audio") from error
        return self.checked(sound, "file")

    def checked(self, sound: Sound, param: str) -> Sound:
        """Return the audio unchanged. Raises ApiError(400) if it is too short."""
        if sound.seconds < _SHORTEST:
            message = f"{param}: the audio is shorter than {_SHORTEST:g} s"
            raise bad_field(param, message, "audio_too_short")
        return sound

    def cut(self, sound: Sound) -> list[tuple[float, Sound]]:
        """Split audio into pieces; returns (start in seconds, piece) without silent ones."""
        spans = pieces(sound.samples, sound.rate, self.transcriber.longest)
        return [
            (first / sound.rate, Sound(sound.samples[first:end], sound.rate))
            for first, end in spans
            if not is_silent(sound.samples[first:end])
        ]

    async def with_language(
        self, options: TranscriptionOptions, parts: Sequence[tuple[float, Sound]]
    ) -> TranscriptionOptions:
        """Detect the language if the request has none and the model supports it."""
        transcriber = self.transcriber
        if options.task_options.language is not None or not transcriber.detects or not parts:
            return options
        question = transcriber.ask_language(parts[0][1])
        plain = {"max_tokens": 1, "output_kind": OutputKind.FINAL_ONLY, "ignore_eos": True}
        running = await self._run(question, plain, 0.0, options.adapter)
        output = await running.last()
        code = transcriber.language(output.outputs[0].token_ids)
        return evolve(options, task_options=evolve(options.task_options, language=code))

    async def hear(
        self, options: TranscriptionOptions, parts: Sequence[tuple[float, Sound]]
    ) -> list[Heard]:
        """Transcribe all pieces concurrently, within the limit of the flags."""
        rooms = asyncio.Semaphore(self.flags.max_transcription_pieces)

        async def one(start: float, sound: Sound) -> Heard:
            async with rooms:
                return await self._hear(options, start, sound)

        tasks = [asyncio.ensure_future(one(*part)) for part in parts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hear(self, options: TranscriptionOptions, start: float, sound: Sound) -> Heard:
        """Transcribe a piece, retrying with higher temperatures while the result is unlikely."""
        question = self.transcriber.ask(sound, options.task_options)
        heard = Heard(start)
        if self.transcriber.emits:
            return await self._emitted(options, heard, question)
        for temperature in (options.temperature,) if options.temperature else TEMPERATURES:
            running = await self._run(
                question,
                {**options.params, **_score_params(question)},
                temperature,
                options.adapter,
            )
            output = await running.last()
            answer = output.outputs[0]
            segments = self.transcriber.read(answer.token_ids, sound.seconds)
            heard.segments = _later(segments, start)
            logprobs = tuple(_answer_logprobs(output))
            heard.quality = Quality.of(
                heard.text, [value for _, value in logprobs], _no_speech(question, output)
            )
            heard.temperature, heard.logprobs = temperature, logprobs
            heard.prompt_tokens += len(output.prompt_token_ids)
            heard.tokens += len(answer.token_ids)
            if not heard.quality.failed:
                break
        if heard.quality.silent:
            heard.segments, heard.logprobs = (), ()
        elif options.word_times:
            heard.words = await self._words(options, start, question, answer.token_ids)
        return heard

    async def _emitted(
        self, options: TranscriptionOptions, heard: Heard, question: Question
    ) -> Heard:
        """Transcribe a piece with a model that does not generate."""
        transcriber, seconds = self.transcriber, question.sound.seconds
        prompt = await self._prompt(question.tokens, question.sound)
        params = PoolingParams(task=transcriber.emits)
        pooled = await self._generation.encode(prompt, params, adapter=options.adapter)
        emitted = await asyncio.to_thread(transcriber.emitted, pooled.outputs.data, seconds)
        heard.segments = _later(emitted.segments, heard.start)
        if options.word_times:
            heard.words = _later(emitted.words, heard.start)
        heard.tokens = sum(len(segment.tokens) for segment in heard.segments)
        heard.prompt_tokens = len(pooled.outputs.data)
        return heard

    async def _words(
        self, options: TranscriptionOptions, start: float, question: Question, tokens: Sequence[int]
    ) -> tuple[Word, ...]:
        """Compute word timestamps with a second request."""
        transcriber, seconds = self.transcriber, question.sound.seconds
        wanted = transcriber.align(question, tokens)
        if wanted is None:
            return ()
        prompt = await self._prompt(wanted.tokens, question.sound)
        params = PoolingParams(**{**wanted.params, "task": transcriber.aligns})
        pooled = await self._generation.encode(prompt, params, adapter=options.adapter)
        language = _text_language(options.task_options)
        timed_words = await asyncio.to_thread(
            transcriber.words, tokens, pooled.outputs.data, seconds, language
        )
        return _later(timed_words, start)

    async def stream(
        self, options: TranscriptionOptions, parts: Sequence[tuple[float, Sound]]
    ) -> Deltas:
        """Stream the text. Raises if the engine rejects the first piece."""
        rooms = asyncio.Semaphore(self.flags.max_transcription_pieces)
        pumps = [_Pump() for _ in parts]

        async def fill(pump: _Pump, sound: Sound) -> None:
            try:
                async with rooms:
                    if self.transcriber.emits:
                        heard = await self._hear(options, 0.0, sound)
                        pump.accepted.set_result(None)
                        pump.outputs.put_nowait(heard)
                        pump.outputs.put_nowait(None)
                        return
                    question = self.transcriber.ask(sound, options.task_options)
                    params = {**options.params, **({"logprobs": 0} if options.logprobs else {})}
                    running = await self._run(
                        question, params, options.temperature or 0.0, options.adapter
                    )
                    async with aclosing(running):
                        pump.accepted.set_result(None)
                        async for output in running:
                            pump.outputs.put_nowait(output)
                pump.outputs.put_nowait(None)
            except (Exception, asyncio.CancelledError) as error:
                failure = error if isinstance(error, Exception) else RuntimeError("cut off")
                if pump.accepted.done():
                    pump.outputs.put_nowait(failure)
                else:
                    pump.accepted.set_exception(failure)
                    pump.accepted.exception()  # it may be that nobody waits any more
                if failure is not error:
                    raise

        pairs = zip(pumps, parts, strict=True)
        tasks = [asyncio.ensure_future(fill(pump, sound)) for pump, (_, sound) in pairs]
        try:
            if pumps:
                await pumps[0].accepted
        except BaseException:
            await _end(tasks)
            raise
        return Deltas(_deltas(pumps, tasks, options), tasks)

    async def _run(
        self,
        question: Question,
        params: Mapping[str, Any],
        temperature: float,
        adapter: str | None,
    ) -> Running:
        """Start a generation for a question. Raises if the engine rejects it."""
        prompt = await self._prompt(question.tokens, question.sound)
        sampling = with_temperature({**params, **question.params}, temperature)
        return await self._generation.generate(prompt, sampling, adapter=adapter, fields=_FIELDS)

    async def _prompt(self, tokens: Sequence[int], sound: Sound) -> Prompt:
        filled = await self._generation.media.fill_decoded(tokens, (Media("audio", sound),))
        return Prompt(array("q", filled.tokens.tobytes()), media=filled)


class Deltas:
    """The deltas of a stream: iterate it once; `aclose` cancels its tasks.

    tasks: the running transcriptions, which are also cancelled if nobody reads the stream.
    """

    def __init__(
        self, source: AsyncGenerator[Delta, None], tasks: Sequence[asyncio.Future[None]]
    ) -> None:
        self._source, self._tasks = source, tasks

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._source

    async def aclose(self) -> None:
        """Cancel the stream."""
        await _end(self._tasks)
        await self._source.aclose()

    def __del__(self) -> None:
        for task in self._tasks:
            if not task.done() and not task.get_loop().is_closed():
                task.get_loop().call_soon_threadsafe(task.cancel)


class _Pump:
    """A queue of a piece's outputs, with None or an error at the end."""

    def __init__(self) -> None:
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.outputs: asyncio.Queue[RequestOutput | Heard | Exception | None] = asyncio.Queue()


async def _deltas(
    pumps: Sequence[_Pump], tasks: Sequence[asyncio.Future[None]], options: TranscriptionOptions
) -> AsyncGenerator[Delta, None]:
    """Yield the deltas of the pieces in order."""
    joiner = Joiner(_text_language(options.task_options))
    try:
        for pump in pumps:
            joiner.piece()
            await pump.accepted
            first = True
            while (output := await pump.outputs.get()) is not None:
                if isinstance(output, Exception):
                    raise output
                if isinstance(output, Heard):
                    text = joiner.add(output.text)
                    yield Delta(text, (), output.prompt_tokens, output.tokens)
                    continue
                answer = output.outputs[0]
                logprobs = tuple(_answer_logprobs(output)) if options.logprobs else ()
                cost = len(output.prompt_token_ids) if first else 0
                yield Delta(joiner.add(answer.text), logprobs, cost, len(answer.token_ids))
                first = False
    finally:
        await _end(tasks)
        for pump in pumps:
            if pump.accepted.done() and not pump.accepted.cancelled():
                pump.accepted.exception()


async def _end(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _later(parts: Sequence[_Part], start: float) -> tuple[_Part, ...]:
    """Segments or words of a piece that begins at `start`, with times of the whole audio."""
    return tuple(evolve(part, start=start + part.start, end=start + part.end) for part in parts)


def _text_language(wanted: Wanted) -> str | None:
    """The language of the text."""
    return "en" if wanted.task == "translate" else wanted.language


def _score_params(question: Question) -> dict[str, Any]:
    """SamplingParams fields that return the probabilities for the quality of a result."""
    position = question.no_speech[0] if question.no_speech else None
    if position is None:
        return {"logprobs": 0}
    if position < len(question.tokens):
        return {"logprobs": 0, "prompt_logprobs": _BEST}
    return {"logprobs": _BEST}


def _no_speech(question: Question, output: RequestOutput) -> float:
    """The probability of no speech; 0.0 if it is not among the top tokens."""
    if question.no_speech is None:
        return 0.0
    position, token = question.no_speech
    answer_logprobs = output.outputs[0].logprobs or []
    scores = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
    entries = [*scores, *answer_logprobs][position : position + 1]
    logprob = entries[0].get(token) if entries and entries[0] else None
    return 0.0 if logprob is None else math.exp(logprob.logprob)


def _answer_logprobs(output: RequestOutput) -> list[tuple[int, float]]:
    """(token, log probability) of the answer's tokens."""
    answer = output.outputs[0]
    pairs = zip(answer.token_ids, answer.logprobs or (), strict=False)
    return [(token, float(position[token].logprob)) for token, position in pairs]
