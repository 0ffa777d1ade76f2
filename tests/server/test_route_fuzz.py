"""Routes that /openapi.json does not describe, or whose bodies are files: any conversation, and
damaged documents.
"""

from __future__ import annotations

import json
import random
import string
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from tests.server.test_documents import ask, pdf, sheet, slides, word
from tests.server.test_input_fuzz import damaged

from modulm_server.testing import Live

NAMES = ("a", "", "..", "../a", "%2e%2e", "a/b", "\0", "é" * 60, "x" * 101, "\u202e", "' OR 1=1 --")
UPDATED = (0, 1, 1.5, -1, 2**53, 2**53 + 1, 1e308, "1", None, True)
LEAVES = (None, True, 0, -1, 2**63, 1e-320, "", "\0", "🎈", "\ud83c", "'; DROP TABLE x", [], {})


def value(rng: random.Random, depth: int = 0) -> Any:
    if depth > 4 or rng.random() < 0.4:
        return rng.choice(LEAVES)
    entries = [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    if rng.random() < 0.5:
        return entries
    return {rng.choice(string.printable): one for one in entries}


def test_any_conversation_is_kept_as_it_is_or_refused(
    make_server: Callable[..., Live], tmp_path: Path, rng: random.Random, rounds: int
) -> None:
    live = make_server(chat_store=str(tmp_path / "chats.sqlite"))
    statuses: Counter[int] = Counter()
    base = "/chat_page/conversations"
    with live.client(headers={"Content-Type": "application/json"}) as http:
        for _ in range(60 * rounds):
            path = f"{base}/{quote(rng.choice(NAMES), safe='')}"
            body = {"updated": rng.choice(UPDATED), "conversation": {"a": value(rng)}}
            if rng.random() < 0.2:
                body["conversation"] = value(rng)
            content = json.dumps(body).encode()
            is_damaged = rng.random() < 0.3
            answer = http.put(path, content=damaged(content, rng) if is_damaged else content)
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (path, body, answer.text)
            if answer.status_code == 200:
                kept = http.get(path)
                assert kept.status_code in (200, 404), kept.text  # 404: a deleted one
                if kept.status_code == 200 and not is_damaged and body["updated"] == 2**53:
                    assert kept.json() == json.loads(content)["conversation"]
        assert http.get(base).status_code == 200
    assert {200, 400} <= statuses.keys(), statuses


def test_damaged_documents_are_read_or_refused(live: Live, rng: random.Random, rounds: int) -> None:
    if rounds == 1:
        pytest.skip("each is read by a process of its own: in make fuzz")
    whole = {
        "a.pdf": pdf("First page", "Second page"), "a.docx": word(), "a.xlsx": sheet(),
        "a.pptx": slides(),
    }  # fmt: skip
    for _ in range(2 * rounds):
        name = rng.choice(list(whole))
        answer = ask(live, name, damaged(whole[name], rng), pages=rng.choice((0, 1, 5)))
        assert answer.status_code in (200, 400), (name, answer.text)
    assert ask(live, "a.pdf", whole["a.pdf"]).status_code == 200
