"""Mistral's own tokenizers: the ids of mistral-common, from text and from conversations."""

from __future__ import annotations

import base64
import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from mistral_common.protocol.instruct.messages import (
    AssistantMessage,
    SystemMessage,
    ToolMessage,
    UserMessage,
)
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import Function, FunctionCall, Tool, ToolCall
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

from modulm.config import EngineConfig
from modulm.contracts.sampling import StructuredOutputs
from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import CheckpointError, ConfigError, RequestError
from modulm.plugins import manager
from modulm.testing import kit
from modulm.testing.checkpoints import make_tokenizer
from modulm_chat import encode_chat, render
from modulm_parsing import parse
from modulm_server.app import create_app
from modulm_server.scripted import Reply, ScriptedEngine, scripted_info
from modulm_server.testing import serve_in_thread
from modulm_tokenizer_mistral import MistralTokenizerLoader, tokenizer_file
from modulm_tokenizers.detokenizer import Detokenizer
from modulm_tokenizers.tokenizer import load_tokenizer

CONTROL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]",
)  # fmt: skip
MERGES = ("he", "ll", "hell", "hello", " w", " wo", "or", " wor", "ld", " world", "is", "th", "é")
TEXTS = (
    "hello world",
    "  two  spaces\n\n",
    "été 你好 🎈🎈",
    "a</s>[INST] b",
    "",
    '{"x": [1, 2.5]}',
)
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
CALL = {"name": "get_weather", "arguments": '{"city": "Tromsø"}'}
TALK: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "hello [INST]"}], "name": "Ann"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "abcdefgh1", "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "sun"},
]


def make_tekken(folder: Path, version: str) -> Path:
    """tekken.json in the public format: 24 control tokens of 30, bytes, and a few longer ones."""
    byte_tokens = [bytes([byte]) for byte in range(256)] + [word.encode() for word in MERGES]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for rank, word in enumerate(byte_tokens)
    ]
    config = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+",
        "num_vocab_tokens": len(byte_tokens),
        "default_vocab_size": len(byte_tokens) + 30,
        "default_num_special_tokens": 30,
        "version": version,
    }
    special = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(CONTROL)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    written = {"config": config, "vocab": vocab, "special_tokens": special, "version": 1}
    (folder / "tekken.json").write_text(json.dumps(written))
    return folder


def make_sentencepiece(folder: Path, version: str) -> Path:
    """A SentencePiece model with Mistral's control tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world, this is the weather in the north"] * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=330,
        byte_fallback=True,
        control_symbols=list(CONTROL[3:10]),
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / f"tokenizer.model.{version}").write_bytes(model.getvalue())
    return folder


MAKERS = {
    "tekken v3": (make_tekken, "v3"),
    "tekken v7": (make_tekken, "v7"),
    "tekken v11": (make_tekken, "v11"),
    "tekken v13": (make_tekken, "v13"),
    "sentencepiece v3": (make_sentencepiece, "v3"),
}


@pytest.fixture(scope="module", params=MAKERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make, version = MAKERS[request.param]
    return make(tmp_path_factory.mktemp("mistral"), version)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return MistralTokenizer.from_file(str(tokenizer_file(folder)))


def test_contract() -> None:
    sample = partial(make_tekken, version="v11")
    kit.check("tokenizers", MistralTokenizerLoader, sample=sample)


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_tokenized_as_by_mistral_common(
    tokenizer: Tokenizer, theirs: Any, text: str
) -> None:
    inner = theirs.instruct_tokenizer.tokenizer
    assert tokenizer.encode(text) == inner.encode(text, bos=True, eos=False)
    plain = tokenizer.encode(text, add_special_tokens=False)
    assert plain == inner.encode(text, bos=False, eos=False)
    assert not tokenizer.special_ids & set(plain)
    assert tokenizer.decode(plain) == text or "sentencepiece" in type(inner).__module__


def test_text_comes_out_token_by_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello wörld 🎈 été, this is the weather", add_special_tokens=False)
    for skip in (True, False):
        ended = [*ids, tokenizer.eos_id or 0]
        stream = Detokenizer(tokenizer, (), skip_special_tokens=skip)
        pieces = [stream.feed([index]) for index in ended]
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
        assert "".join([*pieces, stream.finish()]) == tokenizer.decode(ended, skip)
        assert sum(map(bool, pieces)) > len("hello") // 2


def test_vocabulary(tokenizer: Tokenizer, theirs: Any) -> None:
    assert tokenizer.special["eos_token"] == "</s>"
    assert tokenizer.stop_ids == (theirs.instruct_tokenizer.tokenizer.eos_id,)
    assert len(tokenizer) == theirs.instruct_tokenizer.tokenizer.n_words
    for index in range(len(tokenizer)):
        token = tokenizer.id_to_token(index)
        assert token is not None
        assert tokenizer.token_to_id(token) == index
    assert tokenizer.id_to_token(len(tokenizer)) is None
    assert tokenizer.token_to_id("no such token") is None
    assert tokenizer.added_tokens["[TOOL_CALLS]"] in tokenizer.special_ids
    assert "[INST]" in tokenizer.special_tokens


def test_texts_are_cut_to_a_limit(tokenizer: Tokenizer) -> None:
    long = tokenizer.encode("hello world " * 9)
    assert tokenizer.fit("hello world " * 9, limit=5) == (long[:5], None)
    left, _ = tokenizer.fit("hello world " * 9, limit=5, side="left")
    assert left == [long[0], *long[-4:]]
    ids, second = tokenizer.fit("hello world " * 9, "is", limit=6)
    assert len(ids) == 6
    assert second is not None
    assert ids[second:] == tokenizer.encode("is", add_special_tokens=False)


def test_conversations_are_encoded_as_by_mistral_common(tokenizer: Tokenizer, theirs: Any) -> None:
    function = Function(
        name="get_weather", description="The weather.", parameters=TOOL["function"]["parameters"]
    )
    called = ToolCall(id="abcdefgh1", function=FunctionCall(**CALL))
    messages = [
        SystemMessage(content="Be kind."),
        UserMessage(content="hello [INST]"),
        AssistantMessage(tool_calls=[called]),
        ToolMessage(content="sun", tool_call_id="abcdefgh1"),
    ]
    request = ChatCompletionRequest(messages=messages, tools=[Tool(function=function)])
    expected = theirs.encode_chat_completion(request).tokens
    ids, text = encode_chat(TALK, tokenizer=tokenizer, tools=[TOOL])
    assert ids == expected
    assert text == tokenizer.decode(ids, skip_special_tokens=False)
    assert render(TALK, tokenizer=tokenizer, tools=[TOOL]) == text
    # What the user writes of control tokens is text: there is one of the format's own.
    assert ids.count(tokenizer.token_to_id("[INST]")) == 1
    assert text.count("[INST]") == 2


def test_an_answer_is_gone_on_with(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello wor"}]
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    ids, text = encode_chat(messages, tokenizer=tokenizer, **options)
    assert ids[-1] != tokenizer.eos_id
    assert text.replace("▁", " ").endswith("hello wor")


def test_identifiers_of_others_become_ones_of_mistral(tokenizer: Tokenizer) -> None:
    other = json.loads(json.dumps(TALK).replace("abcdefgh1", "call_of-another-length"))
    text = render(other, tokenizer=tokenizer, tools=[TOOL])
    assert text == render(other, tokenizer=tokenizer, tools=[TOOL])
    assert "call_of" not in text


@pytest.mark.parametrize(
    ("messages", "options", "param", "word"),
    [
        ([{"role": "assistant", "content": "a"}], {}, "messages", "."),
        ([TALK[1], {"role": "tool", "tool_call_id": "abcdefgh1", "content": "x"}], {},
         "messages", "tool"),
        ([TALK[1], {"role": "assistant", "content": "done"}], {}, "messages", "last role"),
        ([{"role": "critic", "content": "x"}], {}, "messages", "critic"),
        ([TALK[1]], {"tools": [{"type": "function", "function": {"name": "no name!"}}]},
         "tools", "no name!"),
        ([TALK[1]], {"kwargs": {"enable_thinking": True}}, "chat_template_kwargs", "enable"),
        ([TALK[1]], {"template": "{{ messages }}"}, "chat_template", "itself"),
        ([TALK[1]], {"documents": [{"text": "x"}]}, "documents", "itself"),
    ],
)  # fmt: skip
def test_what_the_format_does_not_have_is_the_requests_error(
    tokenizer: Tokenizer, messages: Any, options: dict[str, Any], param: str, word: str
) -> None:
    with pytest.raises(RequestError, match=f"(?i){word}") as caught:
        encode_chat(messages, tokenizer=tokenizer, **options)
    assert caught.value.param == param


def test_thoughts_of_the_past_are_told_where_there_are_tokens_for_them(tmp_path: Path) -> None:
    talk = [TALK[1], {"role": "assistant", "content": "a", "reasoning": "Hm."}, TALK[1]]
    rendered = render(talk, tokenizer=load_tokenizer(make_tekken(tmp_path / "new", "v13")))
    assert "[THINK]Hm.[/THINK]a" in rendered


def test_auto_takes_what_has_no_other_file(tmp_path: Path) -> None:
    folder = make_tekken(tmp_path / "both", "v11")
    assert load_tokenizer(folder).chat is not None
    make_tokenizer(folder)
    assert load_tokenizer(folder).chat is None
    assert load_tokenizer(folder, mode="mistral").chat is not None
    (tmp_path / "none").mkdir()
    with pytest.raises(CheckpointError, match=r"tekken\.json"):
        load_tokenizer(tmp_path / "none", mode="mistral")
    (folder / "tekken.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        load_tokenizer(folder, mode="mistral")


def test_constraints_are_held_in_its_bytes(tokenizer: Tokenizer) -> None:
    backend = manager.current().load("grammars", "xgrammar")
    grammars = backend(tokenizer, len(tokenizer), tokenizer.stop_ids)
    for choice, word, fits in (
        ("été", "été", True),
        ("hello", "hello", True),
        ("hello", "is", False),
    ):
        matcher = grammars.compile(StructuredOutputs(choice=[choice])).matcher()
        ids = tokenizer.encode(word, add_special_tokens=False)
        ids = [index for index in ids if tokenizer.id_to_token(index) != "▁"]
        if (tokenizer.id_to_token(ids[0]) or "").startswith("▁"):
            continue  # a word of SentencePiece's begins with a space
        assert all(matcher.accept(index) for index in ids) == fits


def test_the_server_refuses_a_wrong_order_and_reads_calls(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(make_tekken(tmp_path, "v11"))
    answer = 'I look.[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}'
    message = parse(answer, tool_parser="mistral", tools=[TOOL])
    assert message.tool_calls[0].arguments == '{"city": "Oslo"}'
    engine = ScriptedEngine(tokenizer, lambda *_: Reply("hello"), scripted_info(tokenizer))
    config = EngineConfig.from_keywords(
        model="M", disable_uvicorn_access_log=True, tool_call_parser="mistral",
        enable_auto_tool_choice=True,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="encodes messages itself"):
        create_app(engine, config.with_(chat_template="hermes"))
    with serve_in_thread(engine, config) as live, live.client() as client:
        wrong = {"model": "M", "messages": [TALK[1], TALK[3]]}
        refused = client.post("/v1/chat/completions", json=wrong)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages"
        good = {"model": "M", "messages": TALK, "tools": [TOOL], "return_token_ids": True}
        answered = client.post("/v1/chat/completions", json=good)
        assert answered.status_code == 200, answered.text
        body = answered.json()
        assert body["prompt_token_ids"] == encode_chat(TALK, tokenizer=tokenizer, tools=[TOOL])[0]
        assert body["choices"][0]["message"]["content"] == "hello"
