"""The cost of parsing a streamed tool call: microseconds of CPU time per token above plain text.

The first call in each parser's examples gets a long string argument, is cut roughly as by a
tokenizer, and fed token by token with ids; it is compared with as many tokens of prose without a
parser. Also shows the parsers' cost for prose.

    python bench/parsing.py [--tokens 400] [--repeat 7] [NAME ...]
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from pathlib import Path

from modulm.contracts.parser import ParseContext
from modulm.contracts.tokenizer import Tokenizer
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tokenizer
from modulm_parsing import message_parser
from modulm_parsing.examples import TOOLS, WEATHER
from modulm_tokenizers.tokenizer import load_tokenizer

_TOKEN = re.compile(r"<[^<>\s]{1,40}>| ?\w{1,7}|\s+|[^\w\s]{1,3}")
LIMIT = 3.0


def cost(pieces: list[str], tool: str | None, tokenizer: Tokenizer, repeat: int) -> float:
    """Microseconds of CPU time per piece, the minimum of `repeat` runs."""
    context = ParseContext(tools=TOOLS, prompt_tail="", tokenizer=tokenizer)
    tokens = [(piece, (tokenizer.added_tokens.get(piece, 300),)) for piece in pieces]
    least = float("inf")
    for _ in range(repeat):
        parsers = [message_parser(context, tool, None) for _ in range(20)]
        began = time.process_time()
        for parser in parsers:
            for piece, ids in tokens:
                parser.feed(piece, ids)
            parser.finish()
        least = min(least, (time.process_time() - began) / len(parsers) / len(pieces))
    return least * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeat", type=int, default=7)
    options = parser.parse_args()
    plugins = manager.current()
    names = options.names or [entry.name for entry in plugins.names("tool_parsers")]
    words = "the weather of a long week, " * (options.tokens // 6)
    prose = _TOKEN.findall(words)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = load_tokenizer(make_tokenizer(Path(folder), vocab=512))
    none = cost(prose, None, tokenizer, options.repeat)
    print(f"{'no parser, prose':<24}{none:6.2f} us a token")
    print(f"{'':<24}{'prose':>7}{'call':>7}{'more':>7}")
    worst = 0.0
    for name in names:
        driver = plugins.load("tool_parsers", name)
        example = next(e for e in driver.examples if e.calls == WEATHER and "Oslo" in e.text)
        pieces = _TOKEN.findall(example.text.replace("Oslo", words.strip()))
        plain = cost(prose, name, tokenizer, options.repeat)
        call = cost(pieces, name, tokenizer, options.repeat)
        worst = max(worst, call - none)
        print(f"{name:<24}{plain:7.2f}{call:7.2f}{call - none:7.2f}", flush=True)
    print(f"the most: {worst:.2f} us a token more than plain text ({LIMIT} meant)")


if __name__ == "__main__":
    main()
