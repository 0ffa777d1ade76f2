"""`modulm serve` with a tiny checkpoint that reads images, asked by official clients."""

from __future__ import annotations

import base64
import io
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import anthropic
import grpc
import httpx
import openai
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from smg_grpc_proto import vllm_engine_pb2 as smg
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from tests.media.checkpoint import SLOTS, write_llava
from tests.media.files import image_file, sound_file, tone

import modulm
from modulm.testing.adapters import write_lora
from modulm_route_grpc.descriptors import message as proto
from modulm_towers.testing import images

SIZES = [(30, 30), (40, 20), (20, 40)]


class Files(BaseHTTPRequestHandler):
    """Pictures by their numbers, and how often each was asked for."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        data = image_file(PICTURES[int(self.path[1:])])
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


PICTURES = images(SIZES)


@pytest.fixture(scope="module")
def files() -> Iterator[tuple[str, list[str]]]:
    downloads: list[str] = []
    handler = type("Handler", (Files,), {"asked": downloads})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", downloads
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_llava(tmp_path_factory.mktemp("llava"))
    (folder / "media").mkdir()
    (folder / "media" / "a picture.png").write_bytes(image_file(PICTURES[0]))
    (folder / "secret.png").write_bytes(image_file(PICTURES[0]))
    (folder / "media" / "link.png").symlink_to(folder / "secret.png")
    return folder


@pytest.fixture(scope="module")
def url(folder: Path, serve_here: Callable[..., AbstractContextManager[str]]) -> Iterator[str]:
    flags = {
        "--served-model-name": "llava", "--device": "cpu", "--dtype": "float32",
        "--limit-mm-per-prompt": '{"image": 3}', "--allowed-media-networks": "127.0.0.0/8",
        "--allowed-local-media-path": folder / "media", "--attention-backend": "sdpa",
        "--grpc-port": 0,
    }  # fmt: skip
    arguments = [word for pair in flags.items() for word in pair]
    with serve_here(folder / "log", [folder, *arguments, "--enable-mm-embeds"]) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def encoded(picture: Image.Image, form: str = "PNG") -> str:
    return base64.b64encode(image_file(picture, form)).decode()


def data_url(picture: Image.Image) -> str:
    return f"data:image/png;base64,{encoded(picture)}"


def part(url: str, **more: Any) -> Any:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def ask(client: openai.OpenAI, *parts: Any, **more: Any) -> Any:
    content = [*parts, {"type": "text", "text": "What is this?"}]
    options: Any = {"model": "llava", "messages": [{"role": "user", "content": content}]}
    options |= {"temperature": 0, "max_tokens": 4, "logprobs": True, **more}
    return client.chat.completions.create(**options)


def told(answer: Any) -> tuple[str, tuple[float, ...], int]:
    """What was answered, how likely it was, and the prompt's length."""
    choice = answer.choices[0]
    likely = tuple(round(token.logprob, 3) for token in choice.logprobs.content)
    return choice.message.content, likely, answer.usage.prompt_tokens


def test_images_from_everywhere_are_the_same_image(
    client: openai.OpenAI, folder: Path, files: tuple[str, list[str]]
) -> None:
    where, _ = files
    sent = told(ask(client, part(data_url(PICTURES[0]))))
    local = (folder / "media" / "a picture.png").as_uri()
    for url in (f"{where}/0", local, local.replace("file:///", "file://localhost/")):
        assert told(ask(client, part(url))) == sent
    plain = {"type": "image_url", "image_url": data_url(PICTURES[0])}
    assert told(ask(client, plain)) == sent
    assert told(ask(client, {"image_url": data_url(PICTURES[0])})) == sent
    assert told(ask(client, part(data_url(PICTURES[1]))))[1] != sent[1]
    bare = ask(client)
    assert sent[2] - bare.usage.prompt_tokens == SLOTS + 1


def test_several_images_and_a_stream(client: openai.OpenAI) -> None:
    parts = [part(data_url(picture)) for picture in PICTURES]
    whole = ask(client, *parts)
    assert whole.usage.prompt_tokens - ask(client).usage.prompt_tokens == 3 * (SLOTS + 1)
    streamed = ask(client, *parts, stream=True, stream_options={"include_usage": True})
    text, usage = "", None
    for chunk in streamed:
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert usage is not None
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    swapped = told(ask(client, *reversed(parts)))
    assert swapped[1] != told(whole)[1]


def test_what_was_sent_before_may_come_under_its_name(
    client: openai.OpenAI, files: tuple[str, list[str]]
) -> None:
    where, request = files
    sent = told(ask(client, part(f"{where}/2", uuid="a tree")))
    count = len(request)
    empty = {"type": "image_url", "image_url": None, "uuid": "a tree"}
    assert told(ask(client, empty)) == sent
    assert len(request) == count
    other = told(ask(client, part(data_url(PICTURES[1]), uuid="a tree")))
    assert other[1] != sent[1]
    assert told(ask(client, empty)) == other
    with pytest.raises(openai.BadRequestError, match="send its data again"):
        ask(client, {**empty, "uuid": "nobody's"})


def test_more_than_a_prompt_may_have_is_refused_before_anything_is_fetched(
    client: openai.OpenAI, files: tuple[str, list[str]]
) -> None:
    where, request = files
    count = len(request)
    with pytest.raises(openai.BadRequestError, match="at most 3"):
        ask(client, *[part(f"{where}/0")] * 200)
    assert len(request) == count


SOUND = base64.b64encode(sound_file(tone(0.1))).decode()


@pytest.mark.parametrize(
    ("media_part", "message"),
    [
        (part("https://169.254.169.254/latest/"), "no public address"),
        (part("file:///etc/passwd"), "no such file"),
        (part("file://SECRET"), "no such file"),
        (part("file://LINK"), "no such file"),
        (part("ftp://127.0.0.1/a.png"), "only http"),
        (part("data:image/png;base64,@@@"), "not base64"),
        (part("data:"), "data: URLs are"),
        (part("data:image/png;base64,"), "is empty"),
        (part("data:text/html;base64,PGh0bWw+"), "not an image"),
        (part("/etc/passwd"), "only http"),
        ({"type": "image_url", "image_url": {"url": None}}, "must have a url"),
        ({"type": "image_url", "image_url": 5}, "must have a url"),
        ({"type": "image_url", "image_url": data_url(PICTURES[0]), "uuid": ""}, "uuid"),
        ({"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}}, "support audio"),
        ({"type": "video_url", "video_url": {"url": "https://x.org/a.mp4"}}, "support video"),
    ],
)  # fmt: skip
def test_errors_name_the_field(
    client: openai.OpenAI, folder: Path, media_part: Any, message: str
) -> None:
    text = json.dumps(media_part).replace("SECRET", str(folder / "secret.png"))
    media_part = json.loads(text.replace("LINK", str(folder / "media" / "link.png")))
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        ask(client, {"type": "text", "text": "Look:"}, media_part)
    assert f"messages[0].content[1].{media_part['type']}: " in caught.value.message
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("mm_processor_kwargs", {"code_revision": "x"}, "not set 'code_revision'"),
        ("mm_processor_kwargs", {"trust_remote_code": True}, "not set 'trust_remote_code'"),
        ("mm_processor_kwargs", {"size": {"height": 10**9}}, "at most"),
        ("media_io_kwargs", {"video": {"max_frames": 10**9}}, "not an option"),
        ("media_io_kwargs", {"video": {"num_frames": 10**9}}, "at most 1024"),
        ("media_io_kwargs", {"image": {"rgba_background_color": [1, 2, 999]}}, "0 to 255"),
        ("media_io_kwargs", {"pictures": {}}, "a table for image"),
    ],
)
def test_options_of_requests_have_bounds(
    client: openai.OpenAI, field: str, value: Any, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        ask(client, part(data_url(PICTURES[0])), extra_body={field: value})
    assert caught.value.param == field


def test_options_of_requests_do_what_they_say(client: openai.OpenAI) -> None:
    clear = Image.new("RGBA", (30, 30), (0, 0, 0, 0))
    white = told(ask(client, part(data_url(clear))))
    black = {"media_io_kwargs": {"image": {"rgba_background_color": [0, 0, 0]}}}
    assert told(ask(client, part(data_url(clear)), extra_body=black))[1] != white[1]
    dark = {"mm_processor_kwargs": {"image_mean": [0.0, 0.0, 0.0]}}
    assert told(ask(client, part(data_url(clear)), extra_body=dark))[1] != white[1]


def test_tokens_are_counted_with_their_images(client: openai.OpenAI, url: str) -> None:
    content = [part(data_url(PICTURES[0])), {"type": "text", "text": "What is this?"}]
    body = {"messages": [{"role": "user", "content": content}]}
    prompt_tokens = ask(client, content[0]).usage.prompt_tokens
    with httpx.Client(base_url=url) as http:
        assert http.post("/tokenize", json=body).json()["count"] == prompt_tokens
        rendered = http.post("/v1/chat/completions/render", json=body).json()
        assert len(rendered["token_ids"]) == prompt_tokens
        text = [{"type": "input_text", "text": "What is this?"}]
        image = [{"type": "input_image", "image_url": data_url(PICTURES[0])}]
        request = {"input": [{"role": "user", "content": image + text}]}
        counted = http.post("/v1/responses/input_tokens", json=request).json()
        assert counted["input_tokens"] == prompt_tokens


def saved(tensor: torch.Tensor) -> str:
    file = io.BytesIO()
    torch.save(tensor, file)
    return base64.b64encode(file.getvalue()).decode()


def test_what_an_engine_that_only_encodes_gives_stands_for_the_image(
    client: openai.OpenAI, folder: Path
) -> None:
    flags: Any = {"device": "cpu", "dtype": "float32", "mm_encoder_only": True}
    with modulm.LLM(str(folder), **flags) as llm:
        prompt: Any = {"prompt": "<image>", "multi_modal_data": {"image": PICTURES[1]}}
        (output,) = llm.encode([prompt], pooling_task="token_embed", use_tqdm=False)
    rows = torch.as_tensor(output.outputs.data)
    assert rows.shape == (SLOTS, 64)
    answer = ask(client, {"type": "image_embeds", "image_embeds": saved(rows)})
    assert told(answer) == told(ask(client, part(data_url(PICTURES[1]))))


def test_images_may_be_embeddings(client: openai.OpenAI, folder: Path, url: str) -> None:
    """Those of some words are as good as the words."""
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as weights:
        (name,) = [key for key in weights.keys() if key.endswith("embed_tokens.weight")]  # noqa: SIM118
        rows = weights.get_tensor(name)[40:44]
    answer = ask(client, {"type": "image_embeds", "image_embeds": saved(rows)})
    content: Any = [part(data_url(PICTURES[0])), {"type": "text", "text": "What is this?"}]
    body = {"messages": [{"role": "user", "content": content}]}
    ids = httpx.post(f"{url}/tokenize", json=body).json()["tokens"]
    first = ids.index(480)
    ids[first : first + SLOTS] = range(40, 44)
    options: Any = {"model": "llava", "temperature": 0, "max_tokens": 4, "logprobs": 0}
    same = client.completions.create(prompt=ids, **options).choices[0]
    assert answer.usage.prompt_tokens == len(ids)
    assert same.logprobs is not None
    assert told(answer)[1] == pytest.approx(same.logprobs.token_logprobs, abs=2e-3)
    for wrong, message in ((rows[:, :-1], "must be|is expected"), (rows[0], r"\[tokens, hidden\]")):
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            ask(client, {"type": "image_embeds", "image_embeds": saved(wrong)})
        assert "messages[0].content[0].image_embeds: " in caught.value.message


def test_responses(client: openai.OpenAI) -> None:
    text = {"type": "input_text", "text": "What is this?"}
    url = data_url(PICTURES[0])
    expected = told(ask(client, part(url)))
    for image_part in (
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_file", "filename": "a.png", "file_data": url},
    ):
        answer = client.responses.create(
            model="llava",
            input=[{"role": "user", "content": [image_part, text]}],  # type: ignore[list-item]
            temperature=0,
            max_output_tokens=4,
        )
        assert answer.output_text == expected[0]
        assert answer.usage is not None
        assert answer.usage.input_tokens == expected[2]
    more = client.responses.create(
        model="llava", input="And now?", previous_response_id=answer.id, max_output_tokens=2
    )
    assert more.usage is not None
    assert more.usage.input_tokens > answer.usage.input_tokens + SLOTS
    for wrong in ({"type": "input_image", "image_url": "data:,"}, {"type": "input_file"}):
        with pytest.raises(openai.BadRequestError, match=r"input\[0\].content\[0\]") as caught:
            client.responses.create(model="llava", input=[{"role": "user", "content": [wrong]}])  # type: ignore[list-item]
        assert caught.value.param == "input"


def test_anthropic(claude: anthropic.Anthropic, client: openai.OpenAI, files: Any) -> None:
    source: Any = {"type": "base64", "media_type": "image/png", "data": encoded(PICTURES[0])}
    text: Any = {"type": "text", "text": "What is this?"}
    expected = told(ask(client, part(data_url(PICTURES[0]))))
    for options in (source, {"type": "url", "url": f"{files[0]}/0"}):
        content: Any = [{"type": "image", "source": options}, text]
        answer = claude.messages.create(
            model="llava", max_tokens=4, messages=[{"role": "user", "content": content}],
            extra_body={"temperature": 0},
        )  # fmt: skip
        assert answer.content[0].text == expected[0]
        usage = answer.usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == expected[2]
    call: Any = {"type": "tool_use", "id": "call_1", "name": "look", "input": {}}
    result: Any = {"type": "tool_result", "tool_use_id": "call_1"}
    talk: Any = [{"role": "user", "content": "Look!"}, {"role": "assistant", "content": [call]}]
    seen = [*talk, {"role": "user", "content": [{**result, "content": [content[0], text]}]}]
    blind = [*talk, {"role": "user", "content": [{**result, "content": [text]}]}]
    counts = [
        claude.messages.count_tokens(model="llava", messages=request).input_tokens
        for request in (seen, blind)
    ]
    assert counts[0] - counts[1] == SLOTS + 1
    wrong: Any = [{"type": "image", "source": {"type": "base64", "data": "AAAA"}}]
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\].content\[0\].source.data"):
        claude.messages.create(
            model="llava", max_tokens=1, messages=[{"role": "user", "content": wrong}]
        )


def test_ollama(client: openai.OpenAI, url: str) -> None:
    expected = told(ask(client, part(data_url(PICTURES[0]))))
    images = [encoded(PICTURES[0])]
    common = {"model": "llava", "stream": False, "options": {"temperature": 0, "num_predict": 4}}
    message = {"role": "user", "content": "What is this?", "images": images}
    prompt = {"prompt": "What is this?", "images": images}
    with httpx.Client(base_url=url) as http:
        chat = http.post("/api/chat", json={**common, "messages": [message]}).json()
        assert (chat["message"]["content"], chat["prompt_eval_count"]) == expected[::2]
        body = http.post("/api/generate", json={**common, **prompt}).json()
        assert (body["response"], body["prompt_eval_count"]) == expected[::2]
        wrong = {**message, "images": ["@"]}
        refused = http.post("/api/chat", json={**common, "messages": [wrong]})
        assert refused.status_code == 400
        assert refused.json()["error"].startswith("messages[0].images[0]: it is not base64")


def test_batches_take_the_same_parts(folder: Path, client: openai.OpenAI, url: str) -> None:
    """A line of a batch is a request like any other."""
    content = [part(data_url(PICTURES[0])), {"type": "text", "text": "What is this?"}]
    body = {"model": "llava", "messages": [{"role": "user", "content": content}]}
    body |= {"temperature": 0, "max_tokens": 4, "logprobs": True}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    sent = client.files.create(file=("a.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=sent.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    end = time.monotonic() + 300
    while batch.status not in ("completed", "failed") and time.monotonic() < end:
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id is not None
    answer = json.loads(client.files.content(batch.output_file_id).text)["response"]["body"]
    expected = told(ask(client, part(data_url(PICTURES[0]))))
    assert answer["choices"][0]["message"]["content"] == expected[0]
    assert answer["usage"]["prompt_tokens"] == expected[2]


#: Tables as OCR models write them in HTML.
TABLE = """
root ::= "<table>" row row? "</table>"
row ::= "<tr>" cell cell? "</tr>"
cell ::= "<td>" [a-zA-Z0-9 .]{1,8} "</td>"
"""


@pytest.mark.exhaustive
def test_a_grammar_makes_a_table_of_an_image(client: openai.OpenAI) -> None:
    # The tiny model would think to the end.
    body = {"structured_outputs": {"grammar": TABLE}, "bad_words": ["<think>"]}
    more = {"extra_body": body, "max_tokens": 200}
    answer = ask(client, part(data_url(PICTURES[0])), **more).choices[0]
    assert answer.finish_reason == "stop"
    table = ElementTree.fromstring(answer.message.content)
    assert [row.tag for row in table] == ["tr"] * len(table)
    assert all(cell.tag == "td" and cell.text for row in table for cell in row)


@pytest.mark.exhaustive
def test_an_adapter_for_images(
    folder: Path, tmp_path: Path, serve_here: Callable[..., AbstractContextManager[str]]
) -> None:
    """`--default-mm-loras`: of requests for the model itself, those with images use it."""
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as weights:
        layers = {
            name.removesuffix(".weight"): tuple(reversed(weights.get_slice(name).get_shape()))
            for name in weights.keys()  # noqa: SIM118
            if name.endswith("_proj.weight") and "language_model" in name
        }
    write_lora(tmp_path / "sees", layers, 4, 1, lora_alpha=64)
    flags = {
        "--served-model-name": "llava", "--device": "cpu", "--dtype": "float32",
        "--attention-backend": "sdpa", "--default-mm-loras": f'{{"image": "{tmp_path}/sees"}}',
        "--lora-modules": f"named={tmp_path}/sees",
    }  # fmt: skip
    arguments = [word for pair in flags.items() for word in pair]
    with (
        serve_here(tmp_path / "log", [folder, *arguments, "--enable-lora"]) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        image = part(data_url(PICTURES[0]))
        seen, text = told(ask(client, image)), told(ask(client))
        assert seen == told(ask(client, image, model="named"))
        assert text != told(ask(client, model="named"))


def test_media_with_token_ids_and_over_grpc(
    client: openai.OpenAI, url: str, folder: Path, files: tuple[str, list[str]]
) -> None:
    """A prompt with one placeholder an image gives what the chat gives, whoever sends the image."""
    where, _ = files
    pictures = [data_url(PICTURES[0]), f"{where}/1"]
    chat = ask(client, *map(part, pictures), extra_body={"return_token_ids": True})
    expected = [token.logprob for token in chat.choices[0].logprobs.content]
    filled = chat.model_extra["prompt_token_ids"]
    mark = max(filled, key=filled.count)  # the token that stands for an image's vectors
    ids = [
        token for at, token in enumerate(filled) if (token, *filled[at - 1 : at]) != (mark, mark)
    ]
    sampling = {"temperature": 0, "max_tokens": 4, "logprobs": 0}
    body = {
        "token_ids": ids,
        "content_parts": list(map(part, pictures)),
        "sampling_params": sampling,
    }
    http = httpx.post(f"{url}/inference/v1/generate", json=body).json()
    content = http["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in content] == pytest.approx(expected, abs=1e-4)
    for parts, words in (
        ([{"type": "text", "text": "a"}], "content_parts[0]: must be media"),
        ([part(pictures[0])], "2 placeholders"),
        ([part(pictures[0])] * 4, "at most 3"),
    ):
        refused = httpx.post(f"{url}/inference/v1/generate", json={**body, "content_parts": parts})
        assert refused.status_code == 400
        assert words in refused.json()["error"]["message"]

    port = re.findall(r"gRPC is served at 127\.0\.0\.1:(\d+)", (folder / "log").read_text())[-1]
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        generate = channel.unary_unary(
            "/vllm.Inference/Generate",
            request_serializer=proto("GenerateRequest").SerializeToString,
            response_deserializer=proto("GenerateResponse").FromString,
        )
        for first in (
            {"data_uri": pictures[0]},
            {"raw_bytes": image_file(PICTURES[0]), "mime_type": "image/png"},
            {"url": f"{where}/0"},
        ):
            request = proto("GenerateRequest")(
                token_ids={"ids": ids}, temperature=0, stopping={"max_new_tokens": 4},
                response={"output_logprobs": True},
                media=[{"modality": 1, **first}, {"modality": 1, "url": pictures[1]}],
            )  # fmt: skip
            answer = generate(request, timeout=300).outputs
            assert list(answer.logprobs) == pytest.approx(expected, abs=1e-4)
        for item, words in (
            ({"modality": 0, "url": pictures[1]}, "media[0].modality"),
            ({"modality": 1, "features": {"length": 1}}, "media[0].features"),
            ({"modality": 1, "data_uri": pictures[1]}, "media[0].data_uri"),
            ({"modality": 3, "url": pictures[1]}, "does not support audio"),
        ):
            request = proto("GenerateRequest")(token_ids={"ids": ids}, media=[item])
            with pytest.raises(grpc.RpcError) as raised:
                generate(request, timeout=300)
            assert words in raised.value.details()
        router = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        request = smg.GenerateRequest(tokenized={"input_ids": ids})
        request.sampling_params.temperature, request.sampling_params.max_tokens = 0, 4
        request.sampling_params.logprobs = 0
        for picture in pictures:
            request.media_refs.items.add(modality=common_pb2.IMAGE, url=picture)
        (whole,) = router.Generate(request)
        found = list(whole.complete.output_logprobs.token_logprobs)
        assert found == pytest.approx(expected, abs=1e-4)
