"""Tokenizers and detokenizers on real tokenizer files."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import CheckpointError, ConfigError, PluginNotFound, RequestError
from modulm.testing.checkpoints import make_tokenizer
from modulm_tokenizers.detokenizer import Detokenizer
from modulm_tokenizers.tokenizer import load_tokenizer

VOCAB = 512


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=VOCAB)


@pytest.fixture(scope="module")
def bytes_tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def pieces_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As SentencePiece models are converted: a block for the space, bytes as a fallback."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    pieces = ["▁", "▁the", "▁cat", "s", "é", "▁你", "好", ".", "▁▁", "a", "b"]
    vocab |= {word: 259 + i for i, word in enumerate(pieces)}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder = tmp_path_factory.mktemp("pieces")
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return load_tokenizer(folder)


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool, prompt: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.feed([index]) for index in ids), detokenizer.finish()]


@settings(deadline=None, max_examples=150)
@given(
    ids=st.lists(st.integers(0, VOCAB - 1), max_size=40),
    skip=st.booleans(),
)
def test_random_ids_of_bytes(bytes_tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(stream(bytes_tokenizer, ids, skip, [])) == bytes_tokenizer.decode(ids, skip)


@settings(deadline=None, max_examples=150)
@given(ids=st.lists(st.integers(0, 269), max_size=40), skip=st.booleans())
def test_random_ids_of_pieces(pieces_tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    assert "".join(stream(pieces_tokenizer, ids, skip, [])) == pieces_tokenizer.decode(ids, skip)


@given(ids=st.lists(st.integers(0, VOCAB - 1), max_size=30), size=st.integers(1, 7))
def test_how_many_at_once_makes_no_difference(
    bytes_tokenizer: Tokenizer, ids: list[int], size: int
) -> None:
    detokenizer = Detokenizer(bytes_tokenizer)
    chunks = [ids[i : i + size] for i in range(0, len(ids), size)]
    joined = "".join(map(detokenizer.feed, chunks)) + detokenizer.finish()
    assert joined == bytes_tokenizer.decode(ids)


@given(text=st.text(max_size=40))
def test_text_survives_and_is_never_cut_in_a_character(
    bytes_tokenizer: Tokenizer, text: str
) -> None:
    pieces = stream(bytes_tokenizer, bytes_tokenizer.encode(text), True, [])
    assert "".join(pieces) == text or "<|" in text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_an_emoji_comes_whole(bytes_tokenizer: Tokenizer) -> None:
    ids = bytes_tokenizer.encode("🎈")
    assert len(ids) == 4
    assert stream(bytes_tokenizer, ids, True, []) == ["", "", "", "🎈", ""]
    assert stream(bytes_tokenizer, ids[:2], True, []) == ["", "", "\ufffd"]


def test_invalid_bytes_do_not_wait(bytes_tokenizer: Tokenizer) -> None:
    lone = bytes_tokenizer.encode("é")[1]
    assert stream(bytes_tokenizer, [lone, lone], True, []) == ["\ufffd", "\ufffd", ""]


def test_a_prompt_gives_the_space_before_the_first_word(pieces_tokenizer: Tokenizer) -> None:
    prompt = pieces_tokenizer.encode("the")
    cat = pieces_tokenizer.token_to_id("▁cat")
    assert cat is not None
    assert stream(pieces_tokenizer, [cat], True, prompt) == [" cat", ""]
    assert stream(pieces_tokenizer, [cat], True, []) == ["cat", ""]


def test_equals_transformers(folder: Path, bytes_tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(folder)
    text = "Hello <|im_start|>user <think>\n été 你好"
    ids = bytes_tokenizer.encode(text)
    assert ids == hf.encode(text)
    assert bytes_tokenizer.decode(ids) == hf.decode(ids, skip_special_tokens=True)
    assert bytes_tokenizer.decode(ids, False) == hf.decode(ids)
    assert len(bytes_tokenizer) == len(hf) == VOCAB
    assert bytes_tokenizer.eos_id == hf.eos_token_id == 2
    assert type(bytes_tokenizer.backend) is type(hf)


def test_names_of_tokens(bytes_tokenizer: Tokenizer) -> None:
    assert bytes_tokenizer.token_to_id("<|im_end|>") == 2
    assert bytes_tokenizer.id_to_token(2) == "<|im_end|>"
    assert bytes_tokenizer.id_to_token(-1) is None
    assert bytes_tokenizer.id_to_token(10**6) is None
    assert bytes_tokenizer.token_to_id("no such token") is None
    assert bytes_tokenizer.special_ids == {0, 1, 2}


def test_stop_ids_come_from_the_generation_config_too(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0, 99999]}')
    assert load_tokenizer(tmp_path).stop_ids == (2, 0)


def test_a_class_of_its_own_goes_through_transformers(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "Qwen2Tokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("Hello there") == load_tokenizer(folder).encode("Hello there")
    assert tokenizer.chat_template == load_tokenizer(folder).chat_template


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}'])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tokenizer"):
        load_tokenizer(tmp_path)


def test_code_from_the_checkpoint_is_refused(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    config = {"auto_map": {"AutoTokenizer": ["tok.Tok", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tok.py").write_text("open('touched', 'w')")
    with pytest.raises(ConfigError, match="trust-remote-code"):
        load_tokenizer(tmp_path)


def test_unknown_mode(folder: Path) -> None:
    with pytest.raises(PluginNotFound, match="tokenizer 'telepathy'"):
        load_tokenizer(folder, mode="telepathy")


def test_long_texts_are_tokenized_as_short_ones_are(bytes_tokenizer: Tokenizer) -> None:
    text = "A sentence, 12 numbers and ünicode: 你好. <|im_start|>" * 400
    core = bytes_tokenizer.core
    for special in (True, False):
        ids = core.encode(text, add_special_tokens=special).ids
        assert bytes_tokenizer.encode(text, add_special_tokens=special) == ids
        assert bytes_tokenizer.decode(ids, special) == core.decode(ids, skip_special_tokens=special)
    assert (
        bytes_tokenizer.fit(text, "short", limit=50)[0]
        == bytes_tokenizer.fit(text[:1000], "short", limit=50)[0]
    )


def test_a_catastrophic_expression_is_the_requests_error(tmp_path: Path) -> None:
    core = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "</s>": 2}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"(a+)+$"), "isolated")
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("ab") == [0, 1]
    for length in (40, 5000):
        with pytest.raises(RequestError, match="cannot encode the text"):
            tokenizer.encode("a" * length + "b")


def test_a_tokenizer_of_a_size_that_takes_minutes_is_not_read(folder: Path, tmp_path: Path) -> None:
    """M06: ten million merges are more than 128 MiB."""
    large = tmp_path / "tokenizer.json"
    large.write_bytes((folder / "tokenizer.json").read_bytes())
    with large.open("r+b") as file:
        file.truncate((128 << 20) + 1)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: has 128 MiB; at most"):
        load_tokenizer(tmp_path)


def test_merges_and_added_tokens_that_repeat_are_read(folder: Path, tmp_path: Path) -> None:
    """M06: what is said many times, or goes round in a circle, ends all the same."""
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"]["merges"] += 20_000 * document["model"]["merges"][:1]
    for index in range(3, 6):
        token = {"id": index, "content": "<|x|>", "special": False, "normalized": True}
        flags = {"single_word": False, "lstrip": False, "rstrip": False}
        document["added_tokens"].append({**token, **flags})
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode("a <|x|> b")
    assert "<|x|>" in tokenizer.decode(ids, False)


@pytest.mark.parametrize("kind", ["llama", "whisper"])
@pytest.mark.parametrize("left", [(), ("tokenizer_config.json",)])
def test_a_folder_without_a_tokenizer_is_named(
    folder: Path, tmp_path: Path, left: tuple[str, ...], kind: str
) -> None:
    """F38. transformers opens one of Whisper without a vocabulary."""
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    for name in left:
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=r"no tokenizer found .tokenizer\.json is missing"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_that_is_cut_is_named(folder: Path, tmp_path: Path) -> None:
    """F38."""
    whole = (folder / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_file_that_cannot_be_read_is_not_called_wrong(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, name = Path.read_text, "tokenizer_config.json"

    def fail(path: Path, *args: Any, **keywords: Any) -> Any:
        if path.name == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(path, *args, **keywords)

    monkeypatch.setattr(Path, "read_text", fail)
    with pytest.raises(CheckpointError, match=f"{name}: cannot be read: Input/output error"):
        load_tokenizer(folder)
