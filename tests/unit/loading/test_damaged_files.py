"""Checkpoints with anything in their files: an error that names the file, or a model."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from modulm.config import EngineConfig
from modulm.errors import ModulmError
from modulm.loading import load_model, open_checkpoint
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny, make_tokenizer
from modulm_chat.conversation import encode_chat
from modulm_chat.templates import TemplateFailed, execute
from modulm_tokenizers.tokenizer import load_tokenizer

VALUES = (
    None, True, False, 0, 1, -1, 2, 3, 7, 0.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"),
    2**31, 2**63, -(2**63), 2**70, "", "x", "llama", "gelu", "../../etc/passwd", "\ud800", "\x00",
    [], [1], ["x"], [[]], {}, {"a": 1}, {"type": "x"}, {"rope_type": "linear", "factor": 0},
)  # fmt: skip


def damaged(data: bytes, rng: random.Random, within: int | None = None) -> bytes:
    """Bytes changed, cut out, put in, or the end cut off."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        offset = rng.randrange(min(len(content), within or len(content)) + 1)
        match rng.randrange(5):
            case 0:
                content[offset : offset + 1] = rng.randbytes(1)
            case 1:
                del content[offset : offset + rng.randrange(1, 9)]
            case 2:
                content[offset:offset] = rng.randbytes(rng.randrange(1, 9))
            case 3:
                content[offset:offset] = rng.choice((b"0", b"9", b'"', b"}", b"-", b"[", b"e9"))
            case _:
                del content[offset:]
    return bytes(content)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    keys: Any = list(value) if isinstance(value, dict) else ()
    for key in range(len(value)) if isinstance(value, list) else keys:
        yield from places(value[key], (*path, key))


def changed(table: Any, rng: random.Random) -> Any:
    """A copy of a JSON table in which some places hold another thing, or nothing."""
    table = json.loads(json.dumps(table))
    for _ in range(rng.choice((1, 1, 2, 3))):
        paths = list(places(table))
        if not paths:
            return table
        *path, last = rng.choice(paths)
        inner = table
        for key in path:
            inner = inner[key]
        if rng.random() < 0.2:
            del inner[last]
        else:
            inner[last] = copy.deepcopy(rng.choice(VALUES))
    return table


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("whole"), "LlamaForCausalLM")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def load(path: Path) -> None:
    config = EngineConfig.from_keywords(
        model=str(path), attention_backend="sdpa", kernels=["none"], dtype="float32"
    )
    plugins = manager.current()
    platform = plugins.load("platforms", "cpu")()
    load_model(config, open_checkpoint(config, plugins), platform, plugins)


def outcomes(path: Path, variants: Iterator[bytes | Any], count: int) -> Counter[str]:
    """Load with each variant of a file; anything but our own errors comes out."""
    seen: Counter[str] = Counter()
    for _, variant in zip(range(count), variants, strict=False):
        data = variant if isinstance(variant, bytes) else json.dumps(variant).encode()
        path.write_bytes(data)
        try:
            load(path.parent)
            seen["loaded"] += 1
        except ModulmError as error:
            seen[type(error).__name__ if str(error) else "silent"] += 1
        except Exception as error:
            raise AssertionError(
                f"{path.name}: {type(error).__name__}: {error}: {data!r}"
            ) from error
    assert not seen["silent"]
    return seen


def test_weights(folder: Path, rng: random.Random, rounds: int) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    head = 8 + int.from_bytes(data[:8], "little")
    variants = (damaged(data, rng, rng.choice((8, head, head, None))) for _ in iter(int, 1))
    seen = outcomes(path, variants, 40 * rounds)
    assert seen["CheckpointError"] > 15


def test_configuration(folder: Path, rng: random.Random, rounds: int) -> None:
    path = folder / "config.json"
    table = json.loads(path.read_bytes())
    seen = outcomes(path, (changed(table, rng) for _ in iter(int, 1)), 100 * rounds)
    assert seen["CheckpointError"] > 20
    assert seen["loaded"] > 5


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_bytes_of_configurations(folder: Path, rng: random.Random, rounds: int, name: str) -> None:
    path = folder / name
    data = path.read_bytes()
    seen = outcomes(path, (damaged(data, rng) for _ in iter(int, 1)), 40 * rounds)
    assert seen["CheckpointError"] > 10


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("words"), vocab=300)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_tokenizers(
    words: Path, tmp_path: Path, rng: random.Random, rounds: int, name: str
) -> None:
    folder = Path(shutil.copytree(words, tmp_path / "words"))
    path = folder / name
    table = json.loads(path.read_bytes())
    seen: Counter[str] = Counter()
    for turn in range(60 * rounds):
        data = json.dumps(changed(table, rng)).encode()
        if turn % 3 == 0:
            data = damaged(path.read_bytes() if turn == 0 else data, rng)
        path.write_bytes(data)
        try:
            tokenizer = load_tokenizer(folder)
            ids = tokenizer.encode("Hello 😀 <|im_end|>\x00")
            tokenizer.decode([*ids, 299, 0])
            seen["loaded"] += 1
        except ModulmError as error:
            seen[type(error).__name__ if str(error) else "silent"] += 1
        except BaseException as error:
            raise AssertionError(f"{type(error).__name__}: {error}: {data[:2000]!r}") from error
    assert len(seen) > 1
    assert not seen["silent"]


FRAGMENTS = (
    "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{{ messages[0]['role'] }}",
    "{% if tools %}", "{% else %}", "{% endif %}", "{{ bos_token }}", "{{ 1 / 0 }}", "{{ x.y.z }}",
    "{% set a = namespace(b=[]) %}", "{{ a.b | tojson }}", "{{ 'a' * 99 }}", "{{ 9 ** 9 }}",
    "{% macro f(x) %}", "{% endmacro %}", "{{ f(1) }}", "{{ raise_exception('no') }}", "{%- ",
    "{{ messages | length }}", "{{ ''.__class__.__mro__ }}", "{{ self }}", "{% include 'x' %}",
    "{{ range(10**9) | list }}", "{{ strftime_now('%Y') }}", "{% generation %}", "{% break %}",
    "{{ messages.append(1) }}", "{{ 'x'.format(x) }}", "{{ '%s' % x }}", "text", "😀", "\x00", "}}",
    "{{ messages | map(attribute='content') | join }}", "{{ x | nope }}", "{% raw %}", "{# ", " #}",
)  # fmt: skip


def test_templates(rng: random.Random, rounds: int) -> None:
    """Whatever a template is made of: a text, or an error of the request that brought it."""
    seen: Counter[str] = Counter()
    variables = {"messages": [{"role": "user", "content": "hi"}], "tools": None, "bos_token": "<s>"}
    for _ in range(400 * rounds):
        source = "".join(rng.choice(FRAGMENTS) for _ in range(rng.randrange(1, 7)))
        try:
            assert isinstance(execute(source, variables, 1.0), str)
            seen["rendered"] += 1
        except TemplateFailed as error:
            seen["failed" if str(error) else "silent"] += 1
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}: {source!r}") from error
    assert min(seen["rendered"], seen["failed"]) > 20
    assert not seen["silent"]


def test_messages_in_any_shape(words: Path, rng: random.Random, rounds: int) -> None:
    """Messages and template keywords of any shape against a template that uses all of them."""
    tokenizer = load_tokenizer(words)
    template = (
        "{% for m in messages %}{{ m.role }}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    good = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "so"},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
    ]
    seen: Counter[str] = Counter()
    for _ in range(300 * rounds):
        messages = changed(good, rng)
        try:
            encode_chat(messages, tokenizer=tokenizer, template=template)
            seen["encoded"] += 1
        except ModulmError:
            seen["refused"] += 1
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}: {messages!r}") from error
    assert min(seen["encoded"], seen["refused"]) > 20
