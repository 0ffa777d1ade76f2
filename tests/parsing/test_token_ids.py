"""Ids decide what is a marker where a marker is one token of the vocabulary."""

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from modulm.contracts.parser import ParseContext, ToolStart
from modulm.testing.checkpoints import make_tokenizer
from modulm_parsing import assemble, merge, message_parser
from modulm_parsing.examples import TOOLS
from modulm_tokenizers.detokenizer import Detokenizer
from modulm_tokenizers.tokenizer import load_tokenizer

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "<tool_call>"}}\n</tool_call>'
HARMONY = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>"]
KIMI = ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>"]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Think and tool-call tags are added tokens; those of Harmony and Kimi are special ones."""
    folder = make_tokenizer(tmp_path_factory.mktemp("tokenizer"), vocab=512)
    wrapped = AutoTokenizer.from_pretrained(folder)
    wrapped.add_tokens([AddedToken(word, special=True) for word in [*HARMONY, *KIMI]])
    wrapped.save_pretrained(folder)
    return load_tokenizer(folder)


def spelled(tokenizer, text):
    """Ids of a text none of whose markers is a token of its own."""
    ids = [id_ for letter in text for id_ in tokenizer.encode(letter, add_special_tokens=False)]
    assert not {tokenizer.added_tokens[w] for w in tokenizer.added_tokens} & set(ids)
    return ids


def streamed(tokenizer, ids, tool, reasoning, size=1, lag=0, **context):
    """What parsers make of ids that come a few at a time; `lag` pieces of text come late."""
    parse_context = ParseContext(tokenizer=tokenizer, **{"prompt_tail": "", **context})
    parser = message_parser(parse_context, tool, reasoning)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
    events, waiting = [], []
    for at in range(0, len(ids), size):
        waiting.append(detokenizer.feed(ids[at : at + size]))
        text = waiting.pop(0) if len(waiting) > lag else ""
        events += parser.feed(text, ids[at : at + size])
    events += parser.feed("".join(waiting) + detokenizer.finish())
    return merge([*events, *parser.finish()])


WAYS = [{"size": 1}, {"size": 3}, {"size": 10_000}, {"size": 1, "lag": 2}]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_markers_spelled_with_other_tokens_are_prose(tokenizer, way):
    prose = f"A call: {CALL} <think> so"
    message = assemble(streamed(tokenizer, spelled(tokenizer, prose), "hermes", "qwen3", **way))
    assert message.content == prose
    assert message.tool_calls == ()


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_tokens_are_markers_even_in_quotes_and_behind_prose_about_them(tokenizer, way):
    ids = [
        *tokenizer.encode("<think>", add_special_tokens=False),
        *spelled(tokenizer, "Is <tool_call> or </think> right? `"),
        *tokenizer.encode("</think>", add_special_tokens=False),
        *spelled(tokenizer, "See <tool_call> here: "),
        *tokenizer.encode("<tool_call>", add_special_tokens=False),
        *spelled(tokenizer, '{"name": "f", "arguments": {"x": "<tool_call> é 東"}}'),
        *tokenizer.encode("</tool_call>", add_special_tokens=False),
    ]
    message = assemble(streamed(tokenizer, ids, "hermes", "qwen3", **way))
    assert message.reasoning == "Is <tool_call> or </think> right? `"
    assert message.content == "See <tool_call> here:"
    (call,) = message.tool_calls
    assert call.arguments == '{"x": "<tool_call> é 東"}'


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_channels_are_read_by_their_tokens(tokenizer, way):
    quoted = spelled(tokenizer, "The <|channel|>final<|message|> marker.")
    text = "<|channel|>analysis<|message|>"
    ids = [*tokenizer.encode(text, add_special_tokens=False), *quoted]
    text = ("<|end|><|start|>assistant<|channel|>commentary to=functions.f"
            ' <|constrain|>json<|message|>{"x": 1}')  # fmt: skip
    ids += tokenizer.encode(text, add_special_tokens=False)
    message = assemble(streamed(tokenizer, ids, "openai", "openai_gptoss", **way))
    assert message.reasoning == "The <|channel|>final<|message|> marker."
    assert [(c.name, c.arguments, c.complete) for c in message.tool_calls] == [
        ("f", '{"x": 1}', True)
    ]
    assert message.content is None


def test_kimis_identifiers_are_kept(tokenizer):
    text = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>"
        "{}<|tool_call_end|><|tool_calls_section_end|>"
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    events = streamed(tokenizer, ids, "kimi_k2", None)
    assert ToolStart(0, "f", "functions.f:7") in events
    parser = message_parser(ParseContext(tokenizer=tokenizer), "kimi_k2", None)
    assert set(parser.special_tokens) == set(KIMI)


def test_a_grammar_may_spell_markers_with_any_tokens(tokenizer):
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    ids = spelled(tokenizer, text)
    assert not assemble(streamed(tokenizer, ids, "hermes", None, tools=TOOLS)).tool_calls
    (call,) = assemble(
        streamed(tokenizer, ids, "hermes", None, tools=TOOLS, grammar_enforced=True)
    ).tool_calls
    assert call.complete


def test_text_without_ids_is_judged_by_its_letters(tokenizer):
    parser = message_parser(ParseContext(tokenizer=tokenizer, prompt_tail=""), "hermes", "qwen3")
    (call,) = assemble([*parser.feed(CALL), *parser.finish()]).tool_calls
    assert call.complete
