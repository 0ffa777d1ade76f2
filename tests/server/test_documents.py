"""`/v1/documents` reads real files of each kind, and survives broken ones."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docx
import openpyxl
import pptx
import pytest
from loop_turns import BOUND, Beat
from PIL import Image
from pptx.util import Inches

import modulm_route_documents as documents
from modulm_server.testing import Live


def pdf(*pages: str) -> bytes:
    """A PDF of version 1.4 with a line of text on each page."""
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [%s] /Count %d >>"
        % (b" ".join(b"%d 0 R" % (4 + 2 * i) for i in range(len(pages))), len(pages)),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for index, text in enumerate(pages):
        stream = b"BT /F1 24 Tf 72 700 Td (%s) Tj ET" % text.encode()
        objects += [
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 595 842] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % (5 + 2 * index),
            b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream),
        ]
    written, places = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        places.append(len(written))
        written += b"%d 0 obj\n%s\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    return (
        b"%sxref\n0 %d\n0000000000 65535 f \n%strailer\n<< /Size %d /Root 1 0 R >>\n"
        b"startxref\n%d\n%%%%EOF\n"
        % (written, len(objects) + 1, table, len(objects) + 1, len(written))
    )


def word() -> bytes:
    document = docx.Document()
    document.add_heading("Report", level=2)
    document.add_paragraph("All is well.")
    table = document.add_table(rows=1, cols=2)
    table.rows[0].cells[0].text, table.rows[0].cells[1].text = "a", "b"
    return saved(document)


def sheet() -> bytes:
    book = openpyxl.Workbook()
    book.active.title = "Prices"
    book.active.append(["bread", 2.5])
    book.active.append([None, None])
    book.active.append(["milk", 1])
    return saved(book)


def slides() -> bytes:
    show = pptx.Presentation()
    slide = show.slides.add_slide(show.slide_layouts[5])
    slide.shapes.title.text = "Hello"
    cells = slide.shapes.add_table(1, 2, Inches(1), Inches(2), Inches(4), Inches(1)).table.rows[0]
    cells.cells[0].text, cells.cells[1].text = "x", "y"
    slide.notes_slide.notes_text_frame.text = "Say it slowly."
    return saved(show)


def saved(document: Any) -> bytes:
    file = io.BytesIO()
    document.save(file)
    return file.getvalue()


def ask(live: Live, name: str, data: bytes, **fields: Any) -> Any:
    body = {"name": name, "data": base64.b64encode(data).decode(), **fields}
    with live.client() as http:
        return http.post("/v1/documents", json=body)


def test_text_and_page_images_of_a_pdf(live: Live) -> None:
    answer = ask(live, "two.PDF", pdf("First page", "Second page"), pages=1).json()
    assert answer["text"] == "First page\n\nSecond page"
    assert not answer["truncated"]
    (page,) = answer["pages"]
    head, _, data = page.partition(",")
    assert head == "data:image/jpeg;base64"
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert (image.format, max(image.size)) == ("JPEG", 1540)
    assert image.convert("L").getextrema()[0] < 100


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("a.docx", word, "## Report\n\nAll is well.\n\na | b"),
        pytest.param(
            "a.xlsx", sheet, "# Prices\n\nbread | 2.5\nmilk | 1", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            "a.pptx", slides, "# Slide 1\n\nHello\n\nx | y\n\nSay it slowly.",
            marks=pytest.mark.exhaustive,
        ),
    ],
)  # fmt: skip
def test_text_of_office_files(live: Live, name: str, data: Any, text: str) -> None:
    answer = ask(live, name, data()).json()
    assert answer == {"text": text, "truncated": False, "pages": []}


def test_what_cannot_be_read_is_refused_with_the_reason(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = ask(live, "a.odt", b"").json()["error"]
    assert wrong["param"] == "name"
    assert "pdf, docx, xlsx, pptx" in wrong["message"]
    broken = ask(live, "a.docx", b"PK\x03\x04 no zip")
    assert broken.status_code == 400
    assert "a.docx cannot be read: " in broken.json()["error"]["message"]
    with live.client() as http:
        body = {"name": "a.pdf", "data": "no base64!"}
        assert http.post("/v1/documents", json=body).json()["error"]["param"] == "data"
    monkeypatch.setattr(documents, "_SECONDS", 0.001)
    late = ask(live, "a.pdf", pdf("late"))
    assert late.status_code == 400
    assert "takes more than 0.001 s" in late.json()["error"]["message"]


def replace_reader(monkeypatch: pytest.MonkeyPatch, file: Path, script: str) -> None:
    file.write_text(script)
    monkeypatch.setattr(documents.reader, "__file__", str(file))


def test_a_reader_that_writes_without_end_is_ended(
    live: Live, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file may be far larger when it is read than as it is sent."""
    script = "import sys\nwhile True: sys.stdout.buffer.write(bytes(1 << 16))"
    replace_reader(monkeypatch, tmp_path / "reader.py", script)
    monkeypatch.setattr(documents.reader, "MOST_BYTES", 1 << 20)
    monkeypatch.setattr(documents, "_SECONDS", 10.0)
    answer = ask(live, "a.pdf", b"x")
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unreadable_document"


def test_readers_know_nothing_of_the_servers_environment(
    live: Live, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MODULM_SECRET_OF_THE_TEST", "x")
    script = "import json, os\nprint(json.dumps({'error': 'MODULM' in ' '.join(os.environ)}))"
    replace_reader(monkeypatch, tmp_path / "reader.py", script)
    message = ask(live, "a.pdf", b"x").json()["error"]["message"]
    assert message == "a.pdf cannot be read: False"


def test_documents_of_a_key_have_their_turn(
    make_server: Callable[..., Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key's many documents are not all before another's first."""
    order: list[bytes] = []
    ending = asyncio.Event()

    async def read(kind: str, data: bytes, pages: int) -> bytes:
        order.append(data)
        await ending.wait()
        return b'{"text": "", "truncated": false, "pages": []}'

    monkeypatch.setattr(documents, "_read", read)
    live = make_server(api_key=("k1", "k2"))
    (family,) = (one for one in live.served.families if one.name == "documents")
    queues = family._free._waiting._queues  # type: ignore[attr-defined]
    sent = [("k1", b"first")] * 2 + [("k1", b"more")] * 3 + [("k2", b"other")]
    with live.client() as http, ThreadPoolExecutor(len(sent)) as pool:
        answers = []
        for count, (key, data) in enumerate(sent, 1):
            body = {"name": "a.pdf", "data": base64.b64encode(data).decode()}
            headers = {"Authorization": f"Bearer {key}"}
            answers.append(pool.submit(http.post, "/v1/documents", json=body, headers=headers))
            while len(order) + sum(map(len, queues.values())) < count:
                time.sleep(0.002)
        live.loop.call_soon_threadsafe(ending.set)
        assert all(answer.result(300).is_success for answer in answers)
    assert b"other" in order[2:4]


@pytest.mark.exhaustive
def test_a_long_document_holds_no_turn_of_the_loop(live: Live) -> None:
    document = docx.Document()
    for _ in range(3):  # as long as lxml lets a text be
        document.add_paragraph("\u4e2d" * (3 << 20))
    data = saved(document)
    ask(live, "a.docx", word())
    for name, content in (("a.docx", data), ("a.pdf", bytes(40 << 20))):
        beat = Beat(live.loop)
        answer = ask(live, name, content)
        assert beat.end() < BOUND, name
        assert answer.is_success == (name == "a.docx")
    assert len(ask(live, "a.docx", data).json()["text"]) == 4 << 20
