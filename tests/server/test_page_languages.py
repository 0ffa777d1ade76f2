"""The chat page's languages have all that the page says, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

FILES = Path(__file__).parents[2] / "plugins/routes/chat_page/modulm_route_chat_page/files"
SOURCES = [*sorted(FILES.glob("js/*.js")), FILES / "main.js", FILES / "pooling.js"]
LANGUAGES = sorted(FILES.glob("languages/*.js"))
TEXT = re.compile(r'"(?:[^"\\]|\\.)*"')
ENTRY = re.compile(rf"^  ({TEXT.pattern}): ({TEXT.pattern}),$")
BLANK = re.compile(r"\{\d\}")
#: Texts that are translated where they are shown: names of fields, keys, states and prompts.
TABLES = {
    "fields.js": r"(?:label|hint): (%s)|^  \[(%s), \[$|\[\"[^\"]*\", (%s)\]",
    "main.js": r"\[(%s), (%s)\]",
    "presets.js": r"name: (%s)",
    "settings.js": r"(\"auto\"), (\"light\"), (\"dark\")|: (\"model's\")",
    "models.js": r"\[(\"loaded\"), (\"sleeping\"), (\"stopping\")\]",
}
#: States of models, kinds of files, efforts, and a field that is made for an error.
MORE = {
    "unloaded", "loading", "failed", "audio", "video", "none", "minimal", "low", "medium", "high",
    "JSON schema",
}  # fmt: skip
#: Hints and names that are the same in every language.
SAME = re.compile(r'[\d ,]*|\[?\{".*|.*": .*\}\]|[/?]|modulm')


def called(source: str) -> Iterator[str]:
    """Yield the texts that `t` is called with."""
    for call in re.finditer(r"(?<![\w.$])t\(", source):
        at, depth, compared = call.end(), 1, False
        while depth:
            if text := TEXT.match(source, at):
                at = text.end()
                if not compared:
                    yield json.loads(text[0])
                compared = False
                continue
            compared = source.startswith("=== ", at) or (compared and source[at] in "= ")
            if source[at] == "," and depth == 1:
                break
            depth += (source[at] in "([{") - (source[at] in ")]}")
            at += 1


class Page(HTMLParser):
    """Collects the texts of a page's file."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: set[str] = set()
        self._hidden = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden = tag in ("title", "noscript")
        names = ("aria-label", "title", "placeholder")
        self.texts |= {value for name, value in attrs if name in names and value}

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden and data.strip():
            self.texts.add(data.strip())


def said() -> set[str]:
    texts = set(MORE)
    for file in SOURCES:
        source = file.read_text(encoding="utf-8")
        texts |= set(called(source))
        if pattern := TABLES.get(file.name):
            found = re.finditer(pattern.replace("%s", TEXT.pattern), source, re.MULTILINE)
            texts |= {json.loads(each) for match in found for each in match.groups() if each}
    for name in ("chat.html", "pooling.html"):
        page = Page()
        page.feed((FILES / name).read_text(encoding="utf-8"))
        texts |= page.texts
    return {text for text in texts if not SAME.fullmatch(text)}


def entries(file: Path) -> dict[str, str]:
    lines = file.read_text(encoding="utf-8").splitlines()
    pairs = [match.groups() for line in lines if (match := ENTRY.match(line))]
    assert len(pairs) == sum(line.startswith('  "') for line in lines)
    table = {json.loads(text): json.loads(words) for text, words in pairs}
    assert len(table) == len(pairs), "a text occurs twice"
    return table


@pytest.mark.parametrize("file", LANGUAGES, ids=lambda file: file.stem)
def test_a_language_has_every_text(file: Path) -> None:
    table, texts = entries(file), said()
    assert table.keys() - texts == set()
    assert texts - table.keys() == set()
    for text, words in table.items():
        assert words.strip(), text
        assert sorted(BLANK.findall(words)) == sorted(BLANK.findall(text)), text


def test_every_language_is_offered() -> None:
    source = (FILES / "js/words.js").read_text(encoding="utf-8")
    listed = re.search(r"LANGUAGES = \{(.*)\}", source)
    assert listed
    tags = set(re.findall(r"(\w+): \"", listed[1]))
    assert tags == {"en", *(file.stem for file in LANGUAGES)}
