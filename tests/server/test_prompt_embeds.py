"""Embeddings that clients send (reference cases A150 to A156): tensors, and what only looks so."""

from __future__ import annotations

import base64
import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch

from modulm.config import EngineConfig
from modulm_server.testing import Live, error_of

ServerMaker = Callable[..., Live]

HIDDEN = 8  # of the scripted engine
URL, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def taking(make_server: ServerMaker) -> Live:
    """A server that takes them."""
    flags = {"enable_prompt_embeds": True}
    config = EngineConfig.from_keywords(**flags)
    return make_server(info={"config": config}, trust_request_chat_template=True, **flags)


@pytest.fixture
def client(taking: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{taking.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def numbers(tokens: int = 5, kind: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(tokens * HIDDEN).view(tokens, HIDDEN) / 16).to(kind)


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def coded(value: Any) -> str:
    return base64.b64encode(value if isinstance(value, bytes) else saved(value)).decode()


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["plain", "batched", "slice", "transposed"])
def test_tensors_arrive_as_they_were(
    client: openai.OpenAI, taking: Live, kind: torch.dtype, form: str
) -> None:
    tensor = {
        "plain": numbers(kind=kind),
        "batched": numbers(kind=kind)[None],
        "slice": torch.cat([numbers(9, kind)] * 2, 1)[2:7, 3 : 3 + HIDDEN],
        "transposed": numbers(kind=kind).t().contiguous().t(),
    }[form]
    answer = client.completions.create(
        model="M", prompt="", extra_body={"prompt_embeds": coded(tensor)}
    )
    assert answer.choices[0].text == "Hello there."
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5
    (item,) = taking.engine.seen[-1][0]["prompt_embeds"]
    expected = tensor.view(5, HIDDEN) if form == "batched" else tensor
    np.testing.assert_array_equal(item.tensors["embeds"], expected.float().numpy())


def test_several_are_several_prompts(client: openai.OpenAI) -> None:
    many = [coded(numbers(2)), coded(numbers(3))]
    answer = client.completions.create(
        model="M",
        prompt=None,  # type: ignore[arg-type]
        n=2,
        extra_body={"prompt_embeds": many},
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5


def parts(*content: Any) -> list[Any]:
    return [{"role": "system", "content": "Be kind."}, {"role": "user", "content": list(content)}]


def embeds(tokens: int) -> dict[str, str]:
    return {"type": "prompt_embeds", "data": coded(numbers(tokens))}


def test_parts_of_messages(client: openai.OpenAI, taking: Live) -> None:
    """The template is rendered around them; tokens stay what they would be."""
    text: Any = [{"type": "text", "text": "before"}, {"type": "text", "text": "<|im_end|> after"}]
    stream = client.chat.completions.create(
        model="M", messages=parts(text[0], embeds(4), text[1], embeds(3)), stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "Hello there."
    prompt = taking.engine.seen[-1][0]
    ids, items = prompt["prompt_token_ids"], prompt["prompt_embeds"]
    assert [item.length for item in items] == [4, 3]
    for item, tokens in zip(items, (4, 3), strict=True):
        assert list(ids[item.start : item.start + item.length]) == [0] * item.length
        np.testing.assert_array_equal(item.tensors["embeds"], numbers(tokens).numpy())
    decode = taking.engine.tokenizer.decode
    first, second = items
    around = (
        decode(ids[: first.start], False),
        decode(ids[first.start + 4 : second.start], False),
        decode(ids[second.start + 3 :], False),
    )
    assert around[0].endswith("user\nbefore\n")
    assert around[1] == "\n<|im_end|> after\n"
    assert around[2].startswith("<|im_end|>")
    special = taking.engine.tokenizer.special_ids
    assert not set(ids[first.start + 4 : second.start]) & set(special)
    assert "\ue004" not in prompt["prompt"]
    assert prompt["prompt"] == "".join(around)


def test_off_by_default(live: Live) -> None:
    with live.client() as http:
        answer = http.post(URL, json={"prompt_embeds": coded(numbers())})
        error = error_of(answer)
        assert (answer.status_code, error["param"]) == (400, "prompt_embeds")
        assert "--enable-prompt-embeds" in error["message"]
        error = error_of(http.post(CHAT, json={"messages": parts(embeds(2))}))
        assert error["param"] == "messages"
        assert "--enable-prompt-embeds" in error["message"]


class Touch:
    """Whose pickle runs something."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def archive(members: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", kind) as archive_file:
        for name, data in members.items():
            archive_file.writestr(f"archive/{name}", data)
    return file.getvalue()


def tensor_pickle(
    size: tuple[int, ...],
    strides: tuple[int, ...],
    numbers: int,
    offset: int = 0,
    key: str = "0",
    make: bytes = b"torch._utils\n_rebuild_tensor_v2\n",
) -> bytes:
    """The pickle of a tensor, with any numbers in it."""

    def whole(value: int) -> bytes:
        data = value.to_bytes(8, "little", signed=True)
        return b"\x8a" + bytes([len(data)]) + data

    def row(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(whole, values)) + b"t"

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu")
    hooks = b"ccollections\nOrderedDict\n)R"
    rest = whole(offset) + row(size) + row(strides) + b"\x89" + hooks
    return b"\x80\x02c" + make + b"((" + storage[1:] + whole(numbers) + b"tQ" + rest + b"tR."


def lying(stored: int, **fields: Any) -> bytes:
    pickled = tensor_pickle(**fields)
    members = {"data.pkl": pickled, "data/0": bytes(4 * stored), "byteorder": b"little"}
    return archive({**members, "version": b"3"})


FINE = {"size": (5, HIDDEN), "strides": (HIDDEN, 1), "numbers": 5 * HIDDEN}


def test_the_made_archives_are_right_where_nothing_lies(client: openai.OpenAI) -> None:
    body = {"prompt_embeds": coded(lying(5 * HIDDEN, **FINE))}
    assert client.completions.create(model="M", prompt="", extra_body=body).choices
    loaded = torch.load(io.BytesIO(lying(5 * HIDDEN, **FINE)), weights_only=True)
    assert loaded.shape == (5, HIDDEN)


SPARSE = torch.sparse_coo_tensor(
    torch.tensor([[0], [0]]), torch.tensor([1.0]), (5, HIDDEN), check_invariants=True
)
BAD: dict[str, Any] = {
    "no base64": "@@@@",
    "no archive": "AAAA",
    "empty": "",
    "a number": 5,
    "nothing": [],
    "many": [coded(numbers(1))] * 1000,
    "an old format": coded(pickle.dumps([1.0])),
    "a list": coded([numbers()]),
    "a parameter": coded(torch.nn.Parameter(numbers())),
    "sparse": coded(SPARSE),
    "integers": coded(numbers().long()),
    "double": coded(numbers().double()),
    "another width": coded(torch.zeros(5, HIDDEN + 1)),
    "one axis": coded(torch.zeros(HIDDEN)),
    "several prompts": coded(torch.zeros(2, 5, HIDDEN)),
    "no tokens": coded(torch.zeros(0, HIDDEN)),
    "too long": coded(torch.zeros(257, HIDDEN)),
    "no room": coded(torch.zeros(256, HIDDEN)),
    "not a number": coded(numbers() * torch.nan),
    "infinite": coded(numbers() / 0),
    "infinite as bfloat16": coded((numbers() / 0).bfloat16()),
    "expanded": coded(torch.zeros(1, HIDDEN).expand(200, HIDDEN)),
    "larger than stored": coded(lying(1, **FINE)),
    "out of its storage": coded(lying(5 * HIDDEN, **{**FINE, "strides": (HIDDEN + 1, 1)})),
    "behind its storage": coded(lying(5 * HIDDEN, **FINE, offset=1)),
    "before its storage": coded(lying(5 * HIDDEN, **FINE, offset=-4)),
    "negative strides": coded(lying(5 * HIDDEN, **{**FINE, "strides": (-HIDDEN, 1)})),
    "huge": coded(lying(5 * HIDDEN, **{**FINE, "size": (2**60, HIDDEN)})),
    "elsewhere": coded(lying(5 * HIDDEN, **FINE, key="../../etc/passwd")),
    "another function": coded(lying(5 * HIDDEN, **FINE, make=b"posix\nsystem\n")),
    "compressed": coded(
        archive(
            {"data.pkl": tensor_pickle(**FINE), "data/0": bytes(20 * HIDDEN)}, zipfile.ZIP_DEFLATED
        )
    ),
    "cut": coded(saved(numbers())[:-40]),
    "no pickle": coded(archive({"data/0": b"1234"})),
    "two": coded(archive({"data.pkl": b"\x80\x02.", "more/data.pkl": b""})),
    "an empty pickle": coded(archive({"data.pkl": b""})),
    "a long pickle": coded(archive({"data.pkl": b"(" * 10_000})),
    "a large header": coded(saved(numbers()).replace(struct.pack("<I", 160), b"\0\0\0\x80")),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_tensor(taking: Live, name: str) -> None:
    with taking.client() as http:
        answer = http.post(URL, json={"model": "M", "prompt_embeds": BAD[name]})
        assert answer.status_code == 400, answer.text
        assert error_of(answer)["param"] in ("prompt_embeds", "prompt")
        if isinstance(BAD[name], str):
            part = {"type": "prompt_embeds", "data": BAD[name]}
            answer = http.post(CHAT, json={"model": "M", "messages": parts(part)})
            assert answer.status_code == 400
            assert error_of(answer)["param"] == "messages"
    assert taking.engine.active == 0


def test_a151_nothing_is_run(taking: Live, tmp_path: Path) -> None:
    touched = tmp_path / "pwn"
    file = io.BytesIO()
    torch.save({"a": Touch(touched)}, file)
    with taking.client() as http:
        for data in (file.getvalue(), pickle.dumps(Touch(touched))):
            answer = http.post(URL, json={"model": "M", "prompt_embeds": coded(data)})
            assert answer.status_code == 400
    assert not touched.exists()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "text"}, "prompt"),
        ({"prompt": [5, 6]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
    ],
)
def test_a154_a155_what_does_not_go_with_them(
    taking: Live, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "M", "prompt_embeds": coded(numbers()), **fields}
    with taking.client() as http:
        answer = http.post(URL, json=body)
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"] == param


@pytest.mark.parametrize(
    "template",
    ["nothing", "{{ messages[1].content | upper }}", "{{ messages[1].content * 2 }}"],
)
def test_templates_that_lose_them(taking: Live, template: str) -> None:
    body = {"model": "M", "messages": parts(embeds(2)), "chat_template": template}
    with taking.client() as http:
        answer = http.post(CHAT, json=body)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == "messages"
