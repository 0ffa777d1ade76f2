"""Whatever a model writes, however it is cut: the same events, all of the text, in linear time."""

import re
from functools import cache
from itertools import pairwise

from attrs import evolve
from samples import parametrize_sample

from modulm.contracts.parser import ParseContext
from modulm.plugins import manager
from modulm_parsing import merge, message_parser
from modulm_parsing.examples import TOOLS
from modulm_parsing.reading import Format
from modulm_parsing.testing import events_of

NAMES = [
    (kind, declaration.name)
    for kind in ("tool_parsers", "reasoning_parsers")
    for declaration in manager.current().names(kind)
]
PROSE = [*" \n`\"'{}[]<>é\\,:(=", "Hi", "to=f", "null", "f(a=1)", "\n\n", "functions.f:0"]
PROSE.append('{"name": "f", "arguments": {}}')


@cache
def fragments(parser):
    """Pieces that texts of this format are made of: markers, parts of examples, prose."""
    texts = list(PROSE)
    for example in parser.examples:
        texts += re.split(r"(?<=>)|(?=<)|(?<=[\]}\n])", example.text)
        instance = parser(example.context)
        if isinstance(instance, Format):
            texts += instance.every_word()
    return [piece for piece in dict.fromkeys(texts) if piece]


def cut(text, rng):
    cuts = sorted(rng.choices(range(len(text) + 1), k=5))
    return [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]


@parametrize_sample(("kind", "name"), NAMES, every=5, ids=lambda value: str(value))
def test_any_text_in_any_pieces_gives_the_same(kind, name, rng):
    parser = manager.current().load(kind, name)
    pieces = fragments(parser)
    for number in range(25):
        example = parser.examples[number % len(parser.examples)]
        example = evolve(example, context=evolve(example.context, tools=TOOLS * (number % 2)))
        text = "".join(rng.choices(pieces, k=rng.randint(1, 14)))
        if number % 3 == 0:
            at = rng.randint(0, len(example.text))
            text = example.text[:at] + text + example.text[at:]
        whole = merge(events_of(parser, example, [text]))
        for way in (list(text), cut(text, rng)):
            assert merge(events_of(parser, example, way)) == whole, f"{text!r} cut as {way!r}"


PAIRS = [("hermes", "qwen3"), ("qwen3_coder", "qwen3"), ("openai", "openai_gptoss"), ("hf", "hf"),
         ("kimi_k2", "kimi_k2"), ("kimi_k3", "kimi_k3"), ("gemma4", "gemma4"), ("muse", "muse"),
         ("cohere_command3", "cohere_command3"), ("inkling", "inkling"), ("beam", "beam"),
         ("deepseek_v3", "deepseek_r1"), ("deepseek_v32", "deepseek_v3"), ("glm45", "glm45"),
         ("minimax_m2", "minimax_m2"), ("mistral", "mistral"), ("hunyuan_a13b", "hunyuan_a13b"),
         ("qwen3_coder", "minicpmv"), ("qwen3_coder", "nemotron_v3"), ("openai", "qwen3"),
]  # fmt: skip


@parametrize_sample(("tool", "reasoning"), PAIRS, every=4)
def test_two_parsers_in_any_pieces_give_the_same(tool, reasoning, rng):
    plugins = manager.current()
    both = [plugins.load("tool_parsers", tool), plugins.load("reasoning_parsers", reasoning)]
    pieces = [piece for parser in both for piece in fragments(parser)]
    context = ParseContext(tools=TOOLS)

    def events(way):
        parser = message_parser(context, tool, reasoning)
        parsed = [event for piece in way for event in parser.feed(piece)]
        return merge(parsed + parser.finish())

    for _ in range(40):
        text = "".join(rng.choices(pieces, k=rng.randint(2, 16)))
        whole = events([text])
        for way in (list(text), cut(text, rng)):
            assert events(way) == whole, f"{text!r} cut as {way!r}"


@parametrize_sample(("kind", "name"), NAMES, every=7, ids=lambda value: str(value))
def test_a_marker_again_and_again_costs_no_more(kind, name):
    parser = manager.current().load(kind, name)
    instance = parser(parser.examples[0].context)
    for word in instance.openers[:3] if isinstance(instance, Format) else ():
        work = []
        for count in (200, 4000):
            instance = parser(parser.examples[0].context)
            for _ in range(count):
                instance.feed(word)
            instance.finish()
            work.append(instance.steps / count)
        assert work[1] <= 2 * work[0]
