"""MkDocs hooks (see mkdocs.yml) for docs/ pages that are also read as plain files.

Patterns in the nav expand to the matching pages, links to files of deploy/ lead to copies, and
links to other files of the repository become their paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[\w./-]+)\)")
_FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Expand the nav."""
    folder = Path(config.docs_dir)
    pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.md"))
    config.nav = filled(config.nav, pages)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the deployment files to the site."""
    paths = (path for path in (ROOT / "deploy").rglob("*") if path.is_file())
    for path in sorted(path for path in paths if path.name != "keys"):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def filled(nav: list[Any], pages: list[str]) -> list[Any]:
    """Return the nav with each pattern replaced by the matching pages that are not listed
    elsewhere.
    """
    entries = list(leaves(nav))
    listed = {entry for entry in entries if "*" not in entry}
    # The most specific patterns match first: pages of `plugins-*.md` are not matched by `*.md`.
    matches: dict[str, list[str]] = {}
    for pattern in sorted((e for e in entries if "*" in e), key=len, reverse=True):
        matches[pattern] = [
            page
            for page in pages
            if page not in listed
            and page.count("/") == pattern.count("/")
            and fnmatch(page, pattern)
        ]
        listed.update(matches[pattern])
    return replaced(nav, matches)


def leaves(nav: list[Any]) -> Iterator[str]:
    """Yield every page and pattern of a nav."""
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from leaves([value] if isinstance(value, str) else value)


def replaced(nav: list[Any], matches: dict[str, list[str]]) -> list[Any]:
    """Return the nav with patterns replaced by their pages."""
    out: list[Any] = []
    for entry in nav:
        if isinstance(entry, str):
            out += matches.get(entry, [entry])
        else:
            out.append(
                {
                    title: value if isinstance(value, str) else replaced(value, matches)
                    for title, value in entry.items()
                }
            )
    return out


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links out of docs/ by their text and path; code is unchanged."""
    depth = page.file.src_uri.count("/")

    def replacement(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        if target.count("../") <= depth:
            return match[0]
        path = target.replace("../", "")
        if path.startswith("deploy/") and (ROOT / path).is_file():
            return f"[{text}]({'../' * depth}{path})"
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(replacement, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(replacement, markdown[end:])])
