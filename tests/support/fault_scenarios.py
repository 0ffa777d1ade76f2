"""What reaches the awaits, socket and file operations of a server: one short exchange a scenario.

Each scenario may end with an error, which is what a client sees of a fault, and leaves nothing.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import numpy as np
import torch
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2
from PIL import Image

from modulm_media import MediaPrompt
from modulm_media.flags import MediaConfig
from modulm_media.messages import MediaSource
from modulm_media.values import Media
from modulm_route_adapters.flags import ServedAdaptersConfig
from modulm_route_audio.family import Audio
from modulm_route_grpc import descriptors
from modulm_route_openai.spoken import SpokenAnswers, Voiced
from modulm_server.media_service import RequestMedia
from modulm_server.prompts import ChatOptions
from modulm_server.speech_output import SpeechOutput
from modulm_server.testing import Live
from modulm_speakers.speaker import Speaker, Utterance

__all__ = ["SCENARIOS", "Scenario"]

Scenario = Callable[[Live, httpx.Client], object]
CHAT = "/v1/chat/completions"
TURN = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
SCENARIOS: dict[str, Scenario] = {}


def _embeds() -> str:
    """A prompt of two vectors, as clients send it."""
    file = io.BytesIO()
    torch.save(torch.ones(2, 8), file)
    return base64.b64encode(file.getvalue()).decode()


EMBEDS = _embeds()

#: Bodies of a request each, answered at once and, where the route streams, as events.
POSTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": TURN, "max_tokens": 2, "stream": True},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 2, "stream": True},
    f"{CHAT}/batch": {"messages": [TURN, TURN], "max_tokens": 1},
    "/generative_scoring": {"query": "a", "items": ["b"], "label_token_ids": [5]},
    "/v1/responses": {"input": "a", "max_output_tokens": 2, "stream": True},
    "/v1/messages": {"messages": TURN, "max_tokens": 2, "stream": True},
    "/v1/messages/count_tokens": {"messages": TURN},
    "/v2/chat": {"messages": TURN, "max_tokens": 2, "stream": True},
    "/v2/chat/render": {"messages": TURN},
    "/v1/chat": {"message": "a", "max_tokens": 2, "stream": True},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/embeddings": {"input": ["hello", "a"]},
    "/v2/embed": {"texts": ["a"]},
    "/pooling": {"input": "a"},
    "/classify": {"input": "a"},
    "/api/chat": {"messages": TURN, "stream": True},
    "/api/generate": {"prompt": "a", "stream": True},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/api/show": {},
    "/api/pull": {"stream": True},
    "/completion": {"prompt": ["a", "b"], "n_predict": 1, "stream": True},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "input_extra": [{"text": "c"}]},
    "/apply-template": {"messages": TURN},
    "/embedding": {"content": "a"},
    "/props": {},
    "/score": {"text_1": "a", "text_2": "b"},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v2/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "a b"},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/completions/render": {"prompt": "a", "return_token_offsets": True},
    f"{CHAT}/render": {"messages": TURN, "return_token_offsets": True},
    "/invocations": {"messages": TURN, "max_tokens": 1},
    "/pause": {},
    "/resume": {},
    "/sleep": {},
    "/wake_up": {},
    "/release_kv_cache_memory": {},
    "/reset_prefix_cache": {},
    "/collective_rpc": {"method": "x"},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "/none"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {}, "stream": True},
    "/v1/messages/render": {"messages": TURN, "max_tokens": 2},
    "/v1/responses/render": {"input": "a"},
    "/start_profile": {},
    "/stop_profile": {},
    "/reset_encoder_cache": {},
}
GETS = (
    "/health", "/ready", "/ping", "/version", "/v1/models", "/v1/models/M", "/metrics", "/load",
    "/openapi.json", "/api/tags", "/api/ps", "/api/version", "/props", "/slots", "/server_info",
    "/is_sleeping", "/is_paused", "/tokenizer_info", "/v1/lora_adapters", "/lora-adapters", "/",
    "/v1/files", "/v1/batches", "/get_world_size", "/models",
)  # fmt: skip


def _post(path: str, body: dict[str, Any]) -> Scenario:
    def run(live: Live, http: httpx.Client) -> object:
        answers = [http.post(path, json={"model": "M", **body})]
        if body.get("stream"):
            answers.append(http.post(path, json={"model": "M", **body, "stream": False}))
        return answers

    return run


def _get(path: str) -> Scenario:
    return lambda live, http: http.get(path)


for _path, _body in POSTS.items():
    SCENARIOS[f"POST {_path}"] = _post(_path, _body)
for _path in GETS:
    SCENARIOS[f"GET {_path}"] = _get(_path)


def _scenario(run: Scenario) -> Scenario:
    SCENARIOS[run.__name__.replace("_", " ").strip()] = run
    return run


def _upload(http: httpx.Client, content: bytes, purpose: str = "batch") -> str | None:
    data = {"purpose": purpose}
    answer = http.post("/v1/files", data=data, files={"file": ("x", content)})
    return answer.json()["id"] if answer.is_success else None


@_scenario
def files(live: Live, http: httpx.Client) -> None:
    identity = _upload(http, b"some text", "user_data")
    http.get("/v1/files")
    for path in (f"/v1/files/{identity}", f"/v1/files/{identity}/content"):
        http.get(path)
    http.delete(f"/v1/files/{identity}")


def _batch(http: httpx.Client, cancel: bool) -> None:
    lines = [
        {"custom_id": str(number), "method": "POST", "url": CHAT,
         "body": {"model": "M", "messages": TURN, "max_tokens": 1}}
        for number in range(2)
    ]  # fmt: skip
    identity = _upload(http, b"\n".join(json.dumps(line).encode() for line in lines))
    body = {"input_file_id": identity, "endpoint": CHAT, "completion_window": "24h"}
    answer = http.post("/v1/batches", json=body)
    if not answer.is_success:
        return
    batch = answer.json()
    if cancel:
        http.post(f"/v1/batches/{batch['id']}/cancel")
    end = time.monotonic() + 300
    while batch["status"] not in ("completed", "failed", "cancelled"):
        assert time.monotonic() < end, f"the batch does not end: {batch}"
        time.sleep(0.002)
        answer = http.get(f"/v1/batches/{batch['id']}")
        batch = answer.json() if answer.is_success else batch
    for name in ("output_file_id", "error_file_id"):
        if batch[name]:
            http.get(f"/v1/files/{batch[name]}/content")
    http.get("/v1/batches")


@_scenario
def a_batch(live: Live, http: httpx.Client) -> None:
    _batch(http, cancel=False)


@_scenario
def a_batch_that_is_cancelled(live: Live, http: httpx.Client) -> None:
    _batch(http, cancel=True)


@_scenario
def tools(live: Live, http: httpx.Client) -> None:
    turns = [{"role": "user", "content": "call a tool"}]
    body = {"model": "M", "messages": turns, "tools": [TOOL], "max_tokens": 60}
    for stream in (False, True):
        http.post(CHAT, json={**body, "stream": stream})
        http.post("/v1/responses", json={
            "model": "M", "input": "call a tool", "stream": stream,
            "tools": [{"type": "function", **TOOL["function"]}],
        })  # fmt: skip
    http.post(CHAT, json={**body, "tool_choice": "required"})


@_scenario
def stored_responses(live: Live, http: httpx.Client) -> None:
    conversation = http.post("/v1/conversations", json={"items": [{**TURN[0], "type": "message"}]})
    identity = conversation.json().get("id")
    for path in ("", "/items"):
        http.get(f"/v1/conversations/{identity}{path}")
    body = {"model": "M", "input": "a", "max_output_tokens": 1}
    first = http.post("/v1/responses", json={**body, "conversation": identity}).json().get("id")
    http.post("/v1/responses", json={**body, "previous_response_id": first})
    http.get(f"/v1/responses/{first}")
    http.get(f"/v1/responses/{first}/input_items")
    late = http.post("/v1/responses", json={**body, "background": True}).json().get("id")
    http.post(f"/v1/responses/{late}/cancel")
    http.delete(f"/v1/responses/{first}")
    http.post(f"/v1/conversations/{identity}", json={"metadata": {"a": "b"}})
    http.delete(f"/v1/conversations/{identity}")


@_scenario
def choices_beams_and_logprobs(live: Live, http: httpx.Client) -> None:
    body = {"model": "M", "messages": TURN, "max_tokens": 2}
    http.post(CHAT, json={**body, "n": 2, "logprobs": True, "top_logprobs": 2})
    http.post(CHAT, json={**body, "n": 2, "stream": True})
    http.post("/v1/completions", json={
        "model": "M", "prompt": "a", "max_tokens": 2, "echo": True, "logprobs": 1,
    })  # fmt: skip
    http.post("/v1/completions", json={
        "model": "M", "prompt": "a", "max_tokens": 2, "use_beam_search": True, "n": 2,
    })  # fmt: skip


@_scenario
def refusals(live: Live, http: httpx.Client) -> None:
    for content in (b"{", b"", b"[]", b"\xff", b'{"model": "none", "messages": []}'):
        http.post(CHAT, content=content, headers={"Content-Type": "application/json"})
    http.post(CHAT, json={"messages": [{"role": "user", "content": "queue is full"}]})
    http.post(CHAT, json={"messages": [{"role": "user", "content": "fail late"}], "stream": True})
    http.get("/none")
    http.post("/v1/files", content=b"--x\r\nbroken", headers={
        "Content-Type": "multipart/form-data; boundary=x",
    })  # fmt: skip
    http.post(CHAT, json={"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}},
    ]}]})  # fmt: skip


@_scenario
def a_client_that_leaves(live: Live, http: httpx.Client) -> None:
    body = {"model": "M", "messages": [{"role": "user", "content": "count slowly"}],
            "max_tokens": 200, "stream": True}  # fmt: skip
    with http.stream("POST", CHAT, json=body) as answer:
        for _ in answer.iter_bytes(1):
            break


@_scenario
def requests_that_are_aborted(live: Live, http: httpx.Client) -> None:
    """By their ids, by their own key and by the operator."""
    body = {"model": "M", "messages": [{"role": "user", "content": "count slowly"}],
            "max_tokens": 200, "stream": True}  # fmt: skip
    for path in ("/inference/v1/abort_requests", "/abort_requests"):
        with http.stream("POST", CHAT, json=body, headers={"X-Request-Id": "slow"}) as answer:
            for _ in answer.iter_bytes(1):
                break
            http.post(path, json={"request_ids": ["slow"]})


@_scenario
def adapters(live: Live, http: httpx.Client) -> None:
    body = {"lora_name": "poet", "lora_path": "poet"}
    http.post("/v1/load_lora_adapter", json=body)
    http.post(CHAT, json={"model": "poet", "messages": TURN, "max_tokens": 1})
    http.post("/v1/unload_lora_adapter", json={"lora_name": "poet"})


@_scenario
def an_adapter_in_a_folder(live: Live, http: httpx.Client) -> None:
    """Loaded by its path, and by a resolver that finds its name."""
    (folder,) = live.served.generation.config.group(ServedAdaptersConfig).allowed_lora_path
    live.engine._adapters.clear()  # what a resolver has loaded belongs to no key
    http.post("/v1/load_lora_adapter", json={"lora_name": "near", "lora_path": f"{folder}/far"})
    http.post(CHAT, json={"model": "far", "messages": TURN, "max_tokens": 1})
    for name in ("near", "far"):
        http.post("/v1/unload_lora_adapter", json={"lora_name": name})


@_scenario
def training(live: Live, http: httpx.Client) -> None:
    http.post("/init_weight_transfer_engine", json={"init_info": {}})
    http.post("/start_weight_update")
    http.post("/start_weight_update", json={"partial": True})
    http.post("/update_weights", json={"update_info": {}})
    http.post("/finish_weight_update")
    http.post("/finish_weight_update", json={"weight_version": 2})
    http.post("/shutdown_weight_transfer_engine")
    http.post("/update_weight_version", json={"weight_version": 1})
    http.get("/weight_info")
    for action in ("checksum", "reset"):
        http.post("/weight_checker", json={"action": action})
    http.post("/pause?mode=wait")
    http.post("/resume")
    http.post("/sleep?mode=wait")
    http.post("/wake_up")


@_scenario
def tokens_to_answers(live: Live, http: httpx.Client) -> None:
    answer = {"choices": [{"token_ids": [5, 6], "finish_reason": "stop"}]}
    chunk = {"stream": True, "generate_chunk": answer, "stream_state": {"token_ids": [5]}}
    for path, request in (
        (f"{CHAT}/derender", {"chat_request": {"model": "M", "messages": TURN}}),
        ("/v1/completions/derender", {"completion_request": {"model": "M", "prompt": "a"}}),
    ):
        http.post(path, json={
            **request, "generate_response": answer, "generate_responses": [answer],
        })  # fmt: skip
        http.post(path, json={**request, **chunk})


@_scenario
def prompts_of_all_kinds(live: Live, http: httpx.Client) -> None:
    for path, field in (("/v1/completions", "max_tokens"), ("/completion", "n_predict")):
        more = {"model": "M", field: 1}
        http.post(path, json={**more, "prompt": [[5, 6], [7]]})
        http.post(path, json={**more, "prompt": ["a"] * 33})
        http.post(path, json={**more, "prompt": ["a", "queue is full"]})
        http.post(path, json={**more, "prompt": "a", "stream": True})
    http.post("/completion", json={"prompt": [5, "a"], "n_predict": 1})
    http.post("/completion", json={"prompt": [{"prompt_string": "a"}], "n_predict": 1})
    http.post("/v1/completions", json={"model": "M", "max_tokens": 1, "prompt_embeds": EMBEDS})
    http.post("/v1/embeddings", json={"model": "M", "messages": TURN})
    http.post("/pooling", json={"model": "M", "data": ["a", "b"]})
    http.post("/tokenize", json={"model": "M", "messages": TURN})
    http.post("/tokenize", json={"model": "M", "content": "a", "with_pieces": True})
    http.post("/api/generate", json={"model": "M", "prompt": "a", "raw": True, "stream": False})
    http.post("/api/generate", json={
        "model": "M", "prompt": "a", "context": [5, 6], "stream": False,
    })  # fmt: skip


@_scenario
def thoughts(live: Live, http: httpx.Client) -> None:
    body = {"model": "M", "messages": [{"role": "user", "content": "think first"}]}
    http.post(CHAT, json={**body, "logprobs": True, "include_reasoning": False})
    body = {"model": "M", "messages": [{"role": "user", "content": "think at length"}]}
    http.post(CHAT, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    http.post("/v1/messages", json={**body, "max_tokens": 4000})


@_scenario
def large_bodies(live: Live, http: httpx.Client) -> None:
    """They are read in threads."""
    words = [{"role": "user", "content": [{"type": "text", "text": "a b"}] * 4000}]
    http.post("/v1/messages", json={"model": "M", "max_tokens": 1, "messages": words})
    http.post("/tokenize", json={"model": "M", "prompt": "a b " * 50_001})


@_scenario
def a_prompt_that_is_held(live: Live, http: httpx.Client) -> None:
    part = {"type": "text", "text": "a long text", "cache_control": {"type": "ephemeral"}}
    turns = [{"role": "user", "content": [{**part, "text": "a long text " * 200}]}]
    http.post("/v1/messages", json={"model": "M", "max_tokens": 1, "messages": turns})


class ImageReader:
    """Puts images into prompts without a processor."""

    kinds, family = ("image",), SimpleNamespace(rate=16000, document=lambda *_: "[image]")
    flags = MediaConfig()

    def cached(self, name: bytes, options: Any = None) -> None:
        """Return nothing: no image is remembered."""

    def mark(self, kind: str) -> str:
        return "[image]"

    def check(self, counts: Any) -> None:
        """Allow any number."""

    def embedded(self, item: Any) -> Media:
        return Media("image", None, hash=b"x")

    def prepare(self, media: Media, options: Any = None) -> Media:
        return media

    def read(self, tokens: Any, media: Any, options: Any = None) -> MediaPrompt:
        return MediaPrompt(np.asarray(tokens, np.int64), ())


@_scenario
def media(live: Live, http: httpx.Client) -> None:
    """Images in prompts, whose files would be decoded in another process."""
    generation = live.served.generation
    service = generation.media
    sources = (
        MediaSource(kind="image", field="x", data="aGk="),
        MediaSource(kind="image", field="y", embeds=EMBEDS),
    )
    request = RequestMedia(sources, {"image": {}, "audio": {}}, {})
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}

    async def extract(messages: Any, options: Any) -> Any:
        return messages, request

    async def main() -> None:
        await generation.with_media([([5], sources)], request)
        await generation.from_messages(TURN, ChatOptions())
        await service.read_pairs({"text_1": [{"content": [part]}]}, None, None)

    service.__dict__["reader"], service.extract = ImageReader(), extract  # type: ignore[method-assign]
    service._opener.workers.decode = lambda *_: Image.new("RGB", (4, 4))  # type: ignore[method-assign]
    try:
        with suppress(CancelledError):
            asyncio.run_coroutine_threadsafe(main(), live.loop).result(300)
    finally:
        del service.reader, service.extract


class Voice(Speaker):
    """Reads any text as the same two tokens."""

    voices, speaks_answers = ("a",), True

    def ask(self, text: str, voice: str, instructions: str = "") -> Utterance:
        return Utterance(tokens=[5, 6])

    def reply(self, answer: Any, voice: str) -> Utterance:
        return Utterance(tokens=[5, 6])


def _give_voice(output: SpeechOutput) -> None:
    with suppress(AttributeError):  # its files are read by the first one
        del output.speaker
    output._speaker_class = Voice  # type: ignore[misc]


@_scenario
def texts_that_are_read_aloud(live: Live, http: httpx.Client) -> None:
    (audio,) = (one for one in live.served.families if isinstance(one, Audio))
    body = {"model": "M", "input": "hi", "max_new_tokens": 2}
    _give_voice(audio.synthesis.output)
    for more in ({}, {"response_format": "wav", "stream_format": "sse"}):
        http.post("/v1/audio/speech", json={**body, **more})


@_scenario
def answers_that_are_spoken(live: Live, http: httpx.Client) -> None:
    def read(answers: SpokenAnswers, body: Any) -> Voiced:
        _give_voice(answers._output)
        return Voiced("a", "pcm")

    original, SpokenAnswers.read = SpokenAnswers.read, read  # type: ignore[method-assign]
    try:
        for stream in (False, True):
            http.post(CHAT, json={"messages": TURN, "max_tokens": 2, "stream": stream})
    finally:
        SpokenAnswers.read = original  # type: ignore[method-assign]


@_scenario
def two_keys(live: Live, http: httpx.Client) -> None:
    http.get("/v1/models", headers={"x-api-key": "another"})


@_scenario
def conversations_of_the_page(live: Live, http: httpx.Client) -> None:
    path = "/chat_page/conversations"
    http.put(f"{path}/a", json={"updated": 1, "conversation": {"title": "x"}})
    http.get(f"{path}/a")
    http.get(path)


@_scenario
def two_at_once(live: Live, http: httpx.Client) -> None:
    body = {"model": "M", "messages": TURN, "max_tokens": 1}
    other = threading.Thread(target=lambda: _quiet(lambda: http.post(CHAT, json=body)))
    other.start()
    try:
        http.post(CHAT, json=body)
    finally:
        other.join()


def _quiet(run: Callable[[], object]) -> None:
    with suppress(httpx.HTTPError):
        run()


# gRPC.


def _grpc(live: Live, http: httpx.Client, service: str, calls: dict[str, dict[str, Any]]) -> None:
    """Call methods of a service, one after the other: their names, up to a blank, and messages."""
    (family,) = (one for one in live.served.families if one.name == "grpc")
    metadata = (("authorization", http.headers["authorization"]),)
    methods = descriptors._pool.FindServiceByName(service)
    failed = None
    with grpc.insecure_channel(f"127.0.0.1:{family.server.port}") as channel:  # type: ignore[attr-defined]
        for name, fields in calls.items():
            method = methods.FindMethodByName(name.partition(" ")[0])
            message = GetMessageClass(method.input_type)(**fields)
            make = channel.unary_stream if method.server_streaming else channel.unary_unary
            call = make(f"/{service}/{method.name}", type(message).SerializeToString)
            try:
                answer = call(message, metadata=metadata, timeout=300)
                if method.server_streaming:
                    for _ in answer:
                        if "leaves" in name:
                            answer.cancel()
            except grpc.RpcError as error:
                code = error.code()  # type: ignore[attr-defined]
                if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise TimeoutError from error
                failed = failed or error
    if failed is not None:
        raise OSError(str(failed))


@_scenario
def grpc_for_programs(live: Live, http: httpx.Client) -> None:
    _grpc(live, http, "vllm.Inference", {
        "Generate": {"text": "a"},
        "GenerateStream": {"text": "a"},
        "GenerateStream that fails late": {"text": "fail late"},
        "GenerateStream that is refused": {"text": "queue is full"},
        "GenerateStream whose client leaves": {
            "text": "count slowly", "stopping": {"max_new_tokens": 200},
        },
        "Generate that fails": {"text": "a", "session_id": "b"},
        "Generate of a long text": {"text": "a b " * 20_000},
        "Generate of tokens": {"token_ids": {"ids": [5, 6]}},
    })  # fmt: skip


@_scenario
def grpc_without_a_message_or_a_key(live: Live, http: httpx.Client) -> None:
    (family,) = (one for one in live.served.families if one.name == "grpc")
    key = (("authorization", http.headers["authorization"]),)
    asked = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    failed = None
    with grpc.insecure_channel(f"127.0.0.1:{family.server.port}") as channel:  # type: ignore[attr-defined]
        for path, messages, metadata in (
            ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", [asked], ()),
            ("/vllm.Inference/Generate", [], key),
            ("/vllm.Inference/Generate", [b""], ()),
        ):
            call = channel.stream_stream(path)
            try:
                list(call(iter(messages), metadata=metadata, timeout=300))
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:  # type: ignore[attr-defined]
                    raise TimeoutError from error
                failed = error
    raise OSError(str(failed))


@_scenario
def grpc_for_routers(live: Live, http: httpx.Client) -> None:
    _grpc(live, http, "vllm.grpc.engine.VllmEngine", {
        "Generate": {"text": "a", "sampling_params": {"max_tokens": 2}},
        "Generate stream": {
            "text": "a", "stream": True, "sampling_params": {"max_tokens": 2},
        },
        "Generate of tokens": {
            "tokenized": {"input_ids": [5, 6]}, "kv_transfer_params_json": "{}",
            "sampling_params": {"max_tokens": 2},
        },
        "Embed": {"tokenized": {"input_ids": [5, 6]}},
        "HealthCheck": {}, "Abort": {"request_ids": ["a"]}, "FlushCache": {}, "StartProfile": {},
        "StopProfile": {}, "GetModelInfo": {}, "GetServerInfo": {}, "GetLoads": {},
        "GetTokenizer": {},
    })  # fmt: skip


@_scenario
def grpc_for_operators(live: Live, http: httpx.Client) -> None:
    _grpc(live, http, "vllm.Control", {
        "GetServerInfo": {}, "GetModelInfo": {}, "Abort": {"request_ids": ["a"]},
        "LoadLora": {"lora_name": "x", "source_path": "/none"}, "UnloadLora": {"lora_name": "x"},
        "ListLoras": {}, "GetKvEventSources": {}, "PauseGeneration": {"mode": 2}, "IsPaused": {},
        "ResumeGeneration": {}, "Sleep": {"mode": 2}, "Sleep at once": {}, "WakeUp": {},
        "IsSleeping": {},
    })  # fmt: skip
    http.post("/resume")


@_scenario
def grpc_for_trainers(live: Live, http: httpx.Client) -> None:
    _grpc(live, http, "vllm.Control", {
        "InitWeightTransferEngine": {}, "StartWeightUpdate": {},
        "UpdateWeights": {"update_info_json": b"{}"}, "FinishWeightUpdate": {"weight_version": "1"},
        "UpdateWeightVersion": {"weight_version": "2"}, "GetWeightVersion": {},
    })  # fmt: skip
