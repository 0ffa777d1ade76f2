"""What reaches the awaits, socket and file operations of media, speech, documents, and files that
only a start reads: one short use of a part each.

Each raises what its callers handle, or gives the right result.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fault_parts import PARTS, Part
from fault_process_parts import _nothing, _replaced
from PIL import Image
from starlette.requests import Request
from starlette.websockets import WebSocketState
from torch._C import _distributed_c10d as c10d

import modulm_route_documents as documents
from modulm.config import EngineConfig
from modulm.errors import ModulmError
from modulm_adapters.hooks import modulm_explain_folder
from modulm_distributed.collectives import Members
from modulm_distributed.torch_group import Gloo
from modulm_downloads import headers
from modulm_mapped_weights import key
from modulm_media import containers, decode, images, offline, processors, reader, video
from modulm_media.fetch import Budget, from_base64
from modulm_media.flags import MediaConfig
from modulm_media.limits import Undecodable
from modulm_memory import fitting, hub_headers
from modulm_parsing import evidence
from modulm_plugin_lock import files
from modulm_route_audio import answers, realtime, speech
from modulm_route_audio.family import Audio
from modulm_route_files.disk import write_atomically
from modulm_route_pooling import family as pooling
from modulm_route_responses import family as responses
from modulm_route_sagemaker import _Forwarded
from modulm_tensor_files import beside


def _part(run: Part) -> Part:
    PARTS[run.__name__.replace("_", " ")] = run
    return run


def _later(value: Any = None) -> Callable[..., Awaitable[Any]]:
    """A coroutine function that gives a value in the next turn."""

    async def give(*_: Any, **__: Any) -> Any:
        await asyncio.sleep(0)
        return value

    return give


def _failing(error: Exception) -> Callable[..., Awaitable[Any]]:
    async def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


# Media.


def _png() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 4)).save(file, "PNG")
    return file.getvalue()


@_part
def files_of_media(folder: Path) -> None:
    with suppress(Undecodable), containers.opened(b"nothing"):
        pass
    assert decode.decode_image(_png()).size == (4, 4)
    (folder / "image.png").write_bytes(_png())
    assert offline._read("image", folder / "image.png").size == (4, 4)


@_part
def much_base64(folder: Path) -> None:
    data = bytes(1 << 20)
    budget = Budget(MediaConfig())
    assert asyncio.run(from_base64(base64.b64encode(data).decode(), budget)) == data


@_part
def settings_of_processors(folder: Path) -> None:
    (folder / "a.json").write_text('{"b": 1}')
    assert processors.ProcessorFiles(str(folder), str(folder)).table("a") == {"b": 1}
    assert reader._table(str(folder), "a.json") == {"b": 1}


@_part
def classes_of_processors(folder: Path) -> None:
    assert images.image_processor_class.__wrapped__("NoImageProcessor") is None
    assert video.video_processor_class.__wrapped__("NoVideoProcessor") is None


# Speech.


@_part
def a_stream_of_a_transcript(folder: Path) -> None:
    class Deltas:
        """Two deltas."""

        closed = 0

        def __aiter__(self) -> AsyncIterator[Any]:
            return self._deltas()

        async def _deltas(self) -> AsyncIterator[Any]:
            for text in ("a", "b"):
                yield speech.Delta(text, (), 1, 1)

        async def aclose(self) -> None:
            self.closed += 1

    deltas: Any = Deltas()
    options: Any = SimpleNamespace(task_options=SimpleNamespace(task="transcribe"))
    form: Any = SimpleNamespace(include=(), stream_continuous_usage_stats=False)
    tokenizer: Any = None

    async def main() -> list[bytes]:
        source = answers.frames(deltas, options, form, "M", tokenizer)
        try:
            return [frame async for frame in source]
        finally:
            await source.aclose()

    assert len(asyncio.run(main())) == 4
    assert deltas.closed


@_part
def a_translation(folder: Path) -> None:
    family: Any = SimpleNamespace(_answer=_later("translated"))
    request: Any = None
    assert asyncio.run(Audio.translate(family, request)) == "translated"


def _session(**socket: Any) -> Any:
    flags = SimpleNamespace(max_realtime_sessions=1, max_realtime_seconds=9.0)
    heard: Any = SimpleNamespace(flags=flags, task_options=_nothing)
    peer: Any = SimpleNamespace(query_params={}, **socket)
    generation: Any = None
    return realtime._Session(peer, generation, heard)


@_part
def a_session_of_speech(folder: Path) -> None:
    """It is counted while it is open."""
    flags = SimpleNamespace(max_realtime_sessions=1)
    heard: Any = SimpleNamespace(flags=flags, task_options=_nothing)
    generation: Any = None
    sessions = realtime.Sessions(generation, heard)
    peer: Any = SimpleNamespace(accept=_later(), query_params={})
    try:
        with _replaced(realtime._Session, run=_later()):
            asyncio.run(sessions.serve(peer))
    finally:
        assert not sessions._open


@_part
def turns_of_speech(folder: Path) -> None:
    async def main() -> int:
        session, sent = _session(), []
        session._settings = SimpleNamespace(rate=100, turns=SimpleNamespace(prefix_padding_ms=1))
        session._turns = SimpleNamespace(speaking=True)
        session._events = SimpleNamespace(started=lambda item, ms: sent.append(ms))
        session._send = _later()
        with _replaced(realtime, _heard=lambda *_: (b"", [("started", 5)])):
            await session._append({})
        return len(sent)

    assert asyncio.run(main()) == 1


@_part
def audio_that_cannot_be_transcribed(folder: Path) -> None:
    """The client is told, and the session goes on."""

    async def main() -> int:
        told = []
        session = _session(client_state=WebSocketState.CONNECTED)
        session._transcribe = _failing(OSError("no"))

        async def tell(*_: Any) -> None:
            told.append(1)
            await asyncio.sleep(0)

        session._fail = tell
        working = asyncio.ensure_future(session._work())
        try:
            for _ in range(2):
                session._jobs.put_nowait(None)
            async with asyncio.timeout(300):
                while len(told) < 2 and not working.done():
                    await asyncio.sleep(0)
        finally:
            working.cancel()
            (ended,) = await asyncio.gather(working, return_exceptions=True)
        if len(told) < 2:
            raise ended if isinstance(ended, OSError) else OSError("the session has ended")
        return len(told)

    assert asyncio.run(main()) == 2


def _hearing(**more: Any) -> Any:
    output = SimpleNamespace(
        outputs=[SimpleNamespace(token_ids=[1])], prompt_token_ids=[1], finished=True
    )
    transcriber = SimpleNamespace(
        ask=lambda *_: SimpleNamespace(tokens=[1], sound=SimpleNamespace(seconds=1.0)),
        read=lambda *_: (), aligns="token_embed", words=lambda *_: (), emits="",
        align=lambda *_: SimpleNamespace(tokens=[1], params={}),
    )  # fmt: skip
    pooled = SimpleNamespace(outputs=SimpleNamespace(data=None))
    return SimpleNamespace(
        transcriber=transcriber, _run=_later(SimpleNamespace(last=_later(output))),
        _prompt=_later(), _generation=SimpleNamespace(encode=_later(pooled)),
        flags=SimpleNamespace(max_transcription_pieces=1), **more,
    )  # fmt: skip


class Good:
    """Instead of how likely a transcript is."""

    failed = silent = False

    def __init__(self, *_: Any) -> None:
        """Whatever it is made of."""

    @classmethod
    def of(cls, *_: Any) -> Good:
        return cls()


@_part
def words_of_speech(folder: Path) -> None:
    hearing = _hearing()
    hearing._words = lambda *arguments: speech.Speech._words(hearing, *arguments)
    options = speech.TranscriptionOptions(
        task_options=SimpleNamespace(task="transcribe", language="en"),  # type: ignore[arg-type]
        temperature=0.5, word_times=True,
    )  # fmt: skip
    sound: Any = SimpleNamespace(seconds=1.0)
    with _replaced(
        speech, Quality=Good, _answer_logprobs=lambda _: (),
        _no_speech=lambda *_: 0.0, _score_params=lambda _: {},
    ):  # fmt: skip
        heard = asyncio.run(speech.Speech._hear(hearing, options, 0.0, sound))
    assert heard.tokens == 1


@_part
def speech_that_is_read_off_its_sound(folder: Path) -> None:
    """By a model that does not generate, whole and as a stream, whose tasks have ended."""
    hearing, sound = _hearing(), SimpleNamespace(seconds=1.0)
    hearing.transcriber.emits = "token_classify"
    hearing.transcriber.emitted = lambda *_: SimpleNamespace(segments=(), words=())
    pooled = SimpleNamespace(outputs=SimpleNamespace(data=[0]))
    hearing._generation.encode = _later(pooled)
    for name in ("_hear", "_emitted"):
        setattr(hearing, name, partial(getattr(speech.Speech, name), hearing))
    options = speech.TranscriptionOptions(task_options=None, word_times=True)  # type: ignore[arg-type]

    async def main() -> None:
        before = asyncio.all_tasks()
        try:
            await hearing._hear(options, 0.0, sound)
            with suppress(RuntimeError):  # a piece that is cut off
                deltas = await speech.Speech.stream(hearing, options, [(0.0, sound)])  # type: ignore[list-item]
                await deltas.aclose()
        finally:
            left = asyncio.all_tasks() - before
            await asyncio.wait_for(asyncio.gather(*left, return_exceptions=True), 300)

    asyncio.run(main())


@_part
def a_stream_of_speech_that_is_refused(folder: Path) -> None:
    """Its tasks have ended."""

    def refuse(*_: Any) -> Any:
        raise ValueError("no")

    async def main() -> None:
        hearing = _hearing()
        hearing.transcriber.ask = refuse
        options = speech.TranscriptionOptions(task_options=None)  # type: ignore[arg-type]
        before = asyncio.all_tasks()
        try:
            await speech.Speech.stream(hearing, options, [(0.0, None), (1.0, None)])  # type: ignore[list-item]
        finally:
            left = asyncio.all_tasks() - before
            await asyncio.wait_for(asyncio.gather(*left, return_exceptions=True), 300)

    with suppress(ValueError):
        asyncio.run(main())


# Documents.


def _request(body: Any) -> Request:
    content = json.dumps(body).encode()

    async def receive() -> Any:
        return {"type": "http.request", "body": content, "more_body": False}

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "headers": headers, "path": "/"}, receive)


@_part
def a_document(folder: Path) -> None:
    """Its process ends with it, also if it takes too long."""
    context: Any = None
    family = documents.Documents(context)
    body = {"name": "a.docx", "data": base64.b64encode(b"none").decode()}

    async def main() -> None:
        family.router()
        with suppress(ModulmError):
            await family.read(_request(body))
        with suppress(ModulmError), _replaced(documents, _SECONDS=0.0):
            await family.read(_request(body))

    asyncio.run(main())


# Files that a start reads.


@_part
def files_of_a_checkpoint(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(64))
    assert fitting.stored_bytes(folder) == 64
    assert evidence._head(folder / "config.json") in ("{}", "")
    plan: Any = SimpleNamespace(units=[], read={})
    assert key.weights_key(plan, folder, EngineConfig())


@_part
def a_model_of_the_hub(folder: Path) -> None:
    """Only its headers are fetched, unless it is in the cache."""
    name, commit = "nobody/nothing-of-this-name", "a" * 40
    config = EngineConfig.from_keywords(model=name, download_dir=str(folder))
    with _replaced(headers, _fetch=_nothing), hub_headers.headers_only(config) as there:
        assert there.model.model != name
    stored = folder / f"models--{name.replace('/', '--')}"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text(commit)
    (stored / "snapshots" / commit).mkdir(parents=True)
    index = stored / "snapshots" / commit / "model.safetensors.index.json"
    index.write_text('{"weight_map": {}}')
    assert headers._is_cached(config)


@_part
def files_of_a_package(folder: Path) -> None:
    assert files._files(distribution("attrs"), "attrs")


@_part
def folder_of_an_adapter(folder: Path) -> None:
    """Which model it is of is said if it can be read."""
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/Base"}')
    said = modulm_explain_folder(folder)
    assert "serve owner/Base with" in said or "serve its base model with" in said


@_part
def files_that_cannot_be_replaced(folder: Path) -> None:
    """Nothing unfinished is left if it can be removed."""
    (folder / "there" / "inner").mkdir(parents=True)
    for write in (
        lambda: beside.replace(folder / "there", b"new"),
        lambda: write_atomically(folder / "there", b"new", False),
    ):
        with suppress(IsADirectoryError):
            write()
    assert (folder / "there" / "inner").is_dir()


# Others.


@_part
def two_ranks_in_this_process(folder: Path) -> None:
    """What one sends arrives, or the other one's error says so."""
    store: Any = c10d.HashStore()
    platform: Any = SimpleNamespace(device=torch.device("cpu"))
    sent, got, failed = torch.arange(6.0).view(2, 3), [], []

    def run(rank: int) -> None:
        try:
            group = Gloo.open(platform, Members("x", rank, 2, store, seconds=5.0))
            if rank:
                got.extend(group.take_over())
            else:
                group.pass_on([sent])
        except (OSError, RuntimeError) as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    if failed:
        raise OSError(str(failed[0]))
    assert torch.equal(got[0], sent)


@_part
def a_response_that_is_cancelled(folder: Path) -> None:
    async def main() -> None:
        task = asyncio.ensure_future(asyncio.sleep(600))
        stored: Any = SimpleNamespace(task=task, over=False, body={}, log=None)
        try:
            await responses._end(stored)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert stored.body["status"] == "cancelled"

    asyncio.run(main())


@_part
def a_request_that_another_route_answers(folder: Path) -> None:
    async def router(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"{}"
        assert (await receive())["type"] == "http.disconnect"

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    async def main() -> None:
        await _Forwarded(router, "/x", b"{}")({"type": "http"}, gone, _later())

    asyncio.run(main())


@_part
def pairs_with_images(folder: Path) -> None:
    prompt = {"prompt_token_ids": [1], "multi_modal_data": []}
    job = SimpleNamespace(parts=[(prompt, None)])
    generation = SimpleNamespace(
        work=SimpleNamespace(run=_later(job)), with_media=_later(["a prompt"])
    )
    info = SimpleNamespace(texts=SimpleNamespace(template=None))
    family: Any = SimpleNamespace(
        _texts=SimpleNamespace(pairs=None), _run=_failing(OSError("full")), _variables=_nothing,
        context=SimpleNamespace(engine=SimpleNamespace(info=info), generation=generation),
    )  # fmt: skip
    body: Any = SimpleNamespace(chat_template_kwargs=None, priority=0)
    nobody: Any = None
    with _replaced(pooling, _params=_nothing), suppress(OSError):
        asyncio.run(pooling.Pooling._scores(family, [], [], nobody, body, nobody))
