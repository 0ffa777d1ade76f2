"""Reads one document: its text, and its pages as images. Runs as a process of its own.

The file comes on standard input, its kind and the number of page images as arguments. The answer is
JSON on standard output: `{"text": ..., "truncated": whether there is more, "pages": [JPEG in
base64, ...]}`, or `{"error": ...}`.
"""

from __future__ import annotations

import base64
import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from io import BytesIO
from typing import Any

__all__ = ["KINDS", "MOST_BYTES", "main"]

#: Address space and time of the processor that a document may take, in bytes and seconds.
_MEMORY, _SECONDS = 2 << 30, 60
#: Most characters of a text, and bytes of all page images and of an answer.
_MOST, _PICTURES, MOST_BYTES = 4 << 20, 96 << 20, 160 << 20
#: Longest side of a page image in pixels, and its quality.
_SIDE, _QUALITY = 1540, 85


def _pdf(data: bytes, pages: int) -> tuple[str, list[bytes]]:
    import pypdfium2

    texts, images = [], []
    with closing(pypdfium2.PdfDocument(data)) as document:
        for number, page in enumerate(document):
            texts.append(page.get_textpage().get_text_bounded().replace("\r\n", "\n"))
            if number < pages:
                scale = _SIDE / max(page.get_size())
                image = BytesIO()
                picture = page.render(scale=scale).to_pil().convert("RGB")
                picture.save(image, "JPEG", quality=_QUALITY)
                images.append(image.getvalue())
    return "\n\n".join(text.strip() for text in texts), images


def _docx(data: bytes, pages: int) -> tuple[str, list[bytes]]:
    import docx
    from docx.table import Table

    blocks = []
    for block in docx.Document(BytesIO(data)).iter_inner_content():
        if isinstance(block, Table):
            blocks.append(_rows([cell.text for cell in row.cells] for row in block.rows))
        elif block.text.strip():
            style = str(block.style.name) if block.style is not None else ""
            level = style.removeprefix("Heading ")
            blocks.append(f"{'#' * int(level)} {block.text}" if level.isdigit() else block.text)
    return "\n\n".join(blocks), []


def _xlsx(data: bytes, pages: int) -> tuple[str, list[bytes]]:
    import openpyxl

    book = openpyxl.load_workbook(BytesIO(data), read_only=True, data_only=True)
    sheets = []
    for sheet in book.worksheets:
        rows = ([*values] for values in sheet.iter_rows(values_only=True))
        filled = (row for row in rows if any(value is not None for value in row))
        sheets.append(f"# {sheet.title}\n\n{_rows(filled)}")
    return "\n\n".join(sheets), []


def _pptx(data: bytes, pages: int) -> tuple[str, list[bytes]]:
    import pptx

    slides = []
    for number, slide in enumerate(pptx.Presentation(BytesIO(data)).slides, 1):
        texts = [f"# Slide {number}"]
        for shape in slide.shapes:
            if shape.has_text_frame and shape.text_frame.text.strip():
                texts.append(shape.text_frame.text)
            elif shape.has_table:
                texts.append(_rows([cell.text for cell in row.cells] for row in shape.table.rows))
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            texts.append(slide.notes_slide.notes_text_frame.text)
        slides.append("\n\n".join(text for text in texts if text.strip()))
    return "\n\n".join(slides), []


def _rows(rows: Iterator[list[Any]]) -> str:
    """Write a table with a line for each row."""
    texts = (["" if value is None else str(value) for value in row] for row in rows)
    return "\n".join(" | ".join(" ".join(text.split()) for text in row) for row in texts)


#: By the ending of a file's name: (data, page images) -> text and images.
KINDS: dict[str, Callable[[bytes, int], tuple[str, list[bytes]]]] = {
    "pdf": _pdf, "docx": _docx, "xlsx": _xlsx, "pptx": _pptx,
}  # fmt: skip


def main() -> None:
    """Read the document of standard input."""
    for kind_of_limit, limit in ((resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_CPU, _SECONDS)):
        with suppress(OSError, ValueError):  # not on every system
            resource.setrlimit(kind_of_limit, (limit, limit))
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it writes no files
    kind, pages = sys.argv[1], int(sys.argv[2])
    answer: dict[str, Any]
    try:
        text, images = KINDS[kind](sys.stdin.buffer.read(), pages)
        pictures = [base64.b64encode(image).decode() for image in images]
        shown = text[:_MOST].encode("utf-8", "replace").decode()  # without halves of characters
        answer = {"text": shown, "truncated": len(text) > _MOST, "pages": pictures}
        if sum(map(len, pictures)) > _PICTURES:
            answer = {"error": "the images of its pages are too large: ask for fewer"}
    except Exception as error:  # of any library, about any fault of a file
        answer = {"error": f"{type(error).__name__}: {error}"}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
