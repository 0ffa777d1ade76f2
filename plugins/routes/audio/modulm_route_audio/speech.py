"""Sound to text: cut, asked piece by piece, asked again where an answer cannot be right, joined."""

from __future__ import annotations

import asyncio
import json
import math
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

__all__ = ["Asked", "Delta", "Deltas", "Heard", "Joiner", "Speech"]

#: Seconds of the shortest sound.
_SHORTEST = 0.1
#: What the engine's fields are called here.
_FIELDS = {"multi_modal_data": "file", "max_tokens": "max_completion_tokens"}
#: Best tokens of a place at which it is looked for what says that nobody speaks.
_BEST = 5
#: Languages that are written without spaces between sentences.
_UNSPACED = frozenset({"ja", "lo", "my", "th", "yue", "zh"})


@frozen(kw_only=True)
class Asked:
    """What a request wants of a sound. params: fields of SamplingParams; temperature: None or 0 for
    the first that gives a likely answer; adapter: of `find_model`; logprobs: of the text's tokens;
    words: when they are said, which costs a second request for each piece.
    """

    wanted: Wanted
    params: Mapping[str, Any] = field(factory=dict)
    temperature: float | None = None
    adapter: str | None = None
    logprobs: bool = False
    words: bool = False


@define
class Heard:
    """What was heard in one piece of a sound, times in seconds of the whole sound.

    words: where they were asked for. logprobs: (token, log probability) of the tokens of its text.
    prompt_tokens, tokens: of all tries.
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
        """All that was said."""
        return "".join(segment.text for segment in self.segments)


@frozen
class Delta:
    """What a stream has next: text, and tokens that it cost."""

    text: str
    logprobs: tuple[tuple[int, float], ...] = ()
    prompt_tokens: int = 0
    tokens: int = 0


@define
class Joiner:
    """Puts texts of pieces behind one another. language: of the text, None if nobody knows."""

    language: str | None
    _begun: bool = False
    _ends_in_space: bool = False
    _fresh: bool = True

    def piece(self) -> None:
        """What comes now is of another piece."""
        self._fresh = True

    def add(self, text: str) -> str:
        """What is to be written for a text."""
        if not text:
            return ""
        if self._fresh:
            text = text if self._begun else text.lstrip()
            apart = self._ends_in_space or text[:1].isspace() or self.language in _UNSPACED
            if self._begun and not apart:
                text = f" {text}"
        if text:
            self._begun, self._fresh = True, False
            self._ends_in_space = text[-1].isspace()
        return text


class Speech:
    """Asks one engine for the texts of sounds."""

    def __init__(self, generation: GenerationService) -> None:
        self._generation = generation
        self.flags = generation.config.group(TranscriptionConfig)

    @cached_property
    def _found(self) -> type[Transcriber] | None:
        architecture = self._generation.engine.info.architecture
        try:
            found: type[Transcriber] = manager.current().load("transcribers", architecture)
        except PluginNotFound:
            return None
        return found

    async def warm(self) -> None:
        """Load what the first request would wait for; what is wrong with it is told there."""
        if self.served:
            with suppress(Exception):
                await asyncio.to_thread(lambda: self.transcriber.languages)
                await self._generation.media.audio_rate()

    @property
    def served(self) -> bool:
        """Whether the model transcribes."""
        return self._found is not None

    @cached_property
    def transcriber(self) -> Transcriber:
        """How the model is asked. Raises ApiError(400) for one that does not transcribe."""
        if self._found is None:
            raise ApiError(400, "the model does not transcribe speech", code="unsupported")
        path = Path(self._generation.engine.info.path)
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        return self._found(self._generation.tokenizer, path, config)

    def wanted(self, task: Task, language: str | None, prompt: str, times: bool) -> Wanted:
        """What the model is to be asked. Raises ApiError(400) naming what it cannot do."""
        transcriber = self.transcriber
        if task not in transcriber.tasks:
            raise ApiError(400, "the model does not translate", code="unsupported")
        if times and not transcriber.times:
            words = "response_format: json or text; the model gives no times"
            raise bad_field("response_format", words, "unsupported")
        if prompt.strip() and not transcriber.takes_prompts:
            raise bad_field("prompt", "prompt: this model takes none", "unsupported")
        code = None
        if language is not None:
            code = self._code(language.strip().lower())
        elif len(transcriber.languages) == 1:
            code = next(iter(transcriber.languages))
        return Wanted(task=task, language=code, prompt=prompt, times=times)

    def check_words(self) -> None:
        """Raise ApiError(400) if the model does not tell when words are said."""
        if self.transcriber.aligns not in self._generation.engine.info.tasks:
            words = (
                "timestamp_granularities: word: this model tells no times of words; Whisper does, "
                "where alignment_heads of generation_config.json name heads of the model and no "
                "ranks share them"
            )
            raise bad_field("timestamp_granularities", words, "unsupported")

    def _code(self, given: str) -> str:
        """The code of a language, which may be given by its name. Raises ApiError(400)."""
        languages = self.transcriber.languages
        names = {name: code for code, name in languages.items()}
        code = given if given in languages else names.get(given)
        if code is None:
            known = ", ".join(sorted(languages)) or "none: the model is told no language"
            raise bad_field("language", f"language: {given!r:.40} is none of {known}")
        return code

    async def decode(self, data: bytes) -> Sound:
        """The sound of a file, at the rate of the model. Raises ApiError(400)."""
        most = self.flags.max_transcription_seconds
        rate = await self._generation.media.audio_rate()
        try:
            media = self._generation.media
            found = await media.decode("audio", data, {"rate": rate}, Limits(seconds=most))
        except Undecodable as error:
            raise bad_field("file", f"file: {error}", "invalid_audio") from error
        return self.checked(found, "file")

    def checked(self, sound: Sound, param: str) -> Sound:
        """The sound, if it is long enough to say something. Raises ApiError(400)."""
        if sound.seconds < _SHORTEST:
            words = f"{param}: the sound is shorter than {_SHORTEST:g} s"
            raise bad_field(param, words, "audio_too_short")
        return sound

    def cut(self, sound: Sound) -> list[tuple[float, Sound]]:
        """(where it begins in seconds, piece) of those pieces in which there is something."""
        found = pieces(sound.samples, sound.rate, self.transcriber.longest)
        return [
            (first / sound.rate, Sound(sound.samples[first:end], sound.rate))
            for first, end in found
            if not is_silent(sound.samples[first:end])
        ]

    async def with_language(self, asked: Asked, parts: Sequence[tuple[float, Sound]]) -> Asked:
        """The same with the language of the sound, where none was given and the model can tell."""
        transcriber = self.transcriber
        if asked.wanted.language is not None or not transcriber.detects or not parts:
            return asked
        question = transcriber.ask_language(parts[0][1])
        plain = {"max_tokens": 1, "output_kind": OutputKind.FINAL_ONLY, "ignore_eos": True}
        running = await self._run(question, plain, 0.0, asked.adapter)
        output = await running.last()
        code = transcriber.language(output.outputs[0].token_ids)
        return evolve(asked, wanted=evolve(asked.wanted, language=code))

    async def hear(self, asked: Asked, parts: Sequence[tuple[float, Sound]]) -> list[Heard]:
        """What is said in each piece; all are asked about at once, as far as the flags allow."""
        rooms = asyncio.Semaphore(self.flags.max_transcription_pieces)

        async def one(start: float, sound: Sound) -> Heard:
            async with rooms:
                return await self._hear(asked, start, sound)

        tasks = [asyncio.ensure_future(one(*part)) for part in parts]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hear(self, asked: Asked, start: float, sound: Sound) -> Heard:
        """One piece, asked about until the answer is likely, or the last temperature was tried."""
        question = self.transcriber.ask(sound, asked.wanted)
        heard = Heard(start)
        for temperature in (asked.temperature,) if asked.temperature else TEMPERATURES:
            running = await self._run(
                question, {**asked.params, **_scored(question)}, temperature, asked.adapter
            )
            output = await running.last()
            answer = output.outputs[0]
            segments = self.transcriber.read(answer.token_ids, sound.seconds)
            heard.segments = tuple(
                evolve(each, start=start + each.start, end=start + each.end) for each in segments
            )
            logprobs = tuple(_chosen(output))
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
        elif asked.words:
            heard.words = await self._words(asked, start, question, answer.token_ids)
        return heard

    async def _words(
        self, asked: Asked, start: float, question: Question, tokens: Sequence[int]
    ) -> tuple[Word, ...]:
        """The words of an answer, which is read once more for that."""
        transcriber, seconds = self.transcriber, question.sound.seconds
        wanted = transcriber.align(question, tokens)
        if wanted is None:
            return ()
        prompt = await self._prompt(wanted.tokens, question.sound)
        params = PoolingParams(**{**wanted.params, "task": transcriber.aligns})
        found = await self._generation.encode(prompt, params, adapter=asked.adapter)
        language = _written(asked.wanted)
        words = await asyncio.to_thread(
            transcriber.words, tokens, found.outputs.data, seconds, language
        )
        return tuple(evolve(word, start=start + word.start, end=start + word.end) for word in words)

    async def stream(self, asked: Asked, parts: Sequence[tuple[float, Sound]]) -> Deltas:
        """The text as it grows. The first piece's refusal is raised here, before there is any."""
        rooms = asyncio.Semaphore(self.flags.max_transcription_pieces)
        pumps = [_Pump() for _ in parts]

        async def fill(pump: _Pump, sound: Sound) -> None:
            try:
                async with rooms:
                    question = self.transcriber.ask(sound, asked.wanted)
                    params = {**asked.params, **({"logprobs": 0} if asked.logprobs else {})}
                    running = await self._run(
                        question, params, asked.temperature or 0.0, asked.adapter
                    )
                    async with aclosing(running):
                        pump.accepted.set_result(None)
                        async for output in running:
                            pump.outputs.put_nowait(output)
                pump.outputs.put_nowait(None)
            except Exception as error:
                if pump.accepted.done():
                    pump.outputs.put_nowait(error)
                else:
                    pump.accepted.set_exception(error)

        pairs = zip(pumps, parts, strict=True)
        tasks = [asyncio.ensure_future(fill(pump, sound)) for pump, (_, sound) in pairs]
        try:
            if pumps:
                await pumps[0].accepted
        except BaseException:
            await _end(tasks)
            raise
        return Deltas(_deltas(pumps, tasks, asked), tasks)

    async def _run(
        self,
        question: Question,
        params: Mapping[str, Any],
        temperature: float,
        adapter: str | None,
    ) -> Running:
        """A running answer to a question. Raises what is wrong with it."""
        prompt = await self._prompt(question.tokens, question.sound)
        sampling = with_temperature({**params, **question.params}, temperature)
        return await self._generation.generate(prompt, sampling, adapter=adapter, fields=_FIELDS)

    async def _prompt(self, tokens: Sequence[int], sound: Sound) -> Prompt:
        filled = await self._generation.media.fill_decoded(tokens, (Media("audio", sound),))
        return Prompt(array("q", filled.tokens.tobytes()), media=filled)


class Deltas:
    """What a stream gives: iterate it once; `aclose` ends what runs for it.

    tasks: what runs. They end too where nobody ever began to read.
    """

    def __init__(
        self, source: AsyncGenerator[Delta, None], tasks: Sequence[asyncio.Future[None]]
    ) -> None:
        self._source, self._tasks = source, tasks

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._source

    async def aclose(self) -> None:
        """End it."""
        await _end(self._tasks)
        await self._source.aclose()

    def __del__(self) -> None:
        for task in self._tasks:
            if not task.done() and not task.get_loop().is_closed():
                task.get_loop().call_soon_threadsafe(task.cancel)


class _Pump:
    """Outputs of a piece, until its turn has come; None at the end, or what went wrong."""

    def __init__(self) -> None:
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.outputs: asyncio.Queue[RequestOutput | Exception | None] = asyncio.Queue()


async def _deltas(
    pumps: Sequence[_Pump], tasks: Sequence[asyncio.Future[None]], asked: Asked
) -> AsyncGenerator[Delta, None]:
    """What the pieces give, one after the other."""
    joiner = Joiner(_written(asked.wanted))
    try:
        for pump in pumps:
            joiner.piece()
            await pump.accepted
            first = True
            while (output := await pump.outputs.get()) is not None:
                if isinstance(output, Exception):
                    raise output
                answer = output.outputs[0]
                logprobs = tuple(_chosen(output)) if asked.logprobs else ()
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


def _written(wanted: Wanted) -> str | None:
    """The language of the text."""
    return "en" if wanted.task == "translate" else wanted.language


def _scored(question: Question) -> dict[str, Any]:
    """Fields of SamplingParams that tell how likely an answer is."""
    place = question.no_speech[0] if question.no_speech else None
    if place is None:
        return {"logprobs": 0}
    if place < len(question.tokens):
        return {"logprobs": 0, "prompt_logprobs": _BEST}
    return {"logprobs": _BEST}


def _no_speech(question: Question, output: RequestOutput) -> float:
    """The probability that nobody speaks; 0.0 where it is not among the best."""
    if question.no_speech is None:
        return 0.0
    place, token = question.no_speech
    own = output.outputs[0].logprobs or []
    scores = output.prompt_logprobs or [None] * len(output.prompt_token_ids)
    position = [*scores, *own][place : place + 1]
    found = position[0].get(token) if position and position[0] else None
    return 0.0 if found is None else math.exp(found.logprob)


def _chosen(output: RequestOutput) -> list[tuple[int, float]]:
    """(token, log probability) of the answer's tokens."""
    answer = output.outputs[0]
    pairs = zip(answer.token_ids, answer.logprobs or (), strict=False)
    return [(token, float(position[token].logprob)) for token, position in pairs]
