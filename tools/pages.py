"""What MkDocs needs so that docs/ stays pages to be read as files: named by `hooks` in mkdocs.yml.

The nav's patterns become the pages that match them, links to files of deploy/ lead to copies of
them, and links to other files of the repository become their paths.
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
    """Fill in the nav."""
    folder = Path(config.docs_dir)
    pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.md"))
    config.nav = filled(config.nav, pages)
    return config


def on_files(files: Any, config: Any) -> Any:
    """The files to deploy with are part of the site."""
    paths = (path for path in (ROOT / "deploy").rglob("*") if path.is_file())
    for path in sorted(path for path in paths if path.name != "keys"):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def filled(nav: list[Any], pages: list[str]) -> list[Any]:
    """The nav with each pattern replaced by the pages that match it and that nothing else names."""
    entries = list(leaves(nav))
    named = {entry for entry in entries if "*" not in entry}
    # The narrowest patterns take first: what `plugins-*.md` matches is none of `*.md`'s.
    taken: dict[str, list[str]] = {}
    for pattern in sorted((e for e in entries if "*" in e), key=len, reverse=True):
        taken[pattern] = [
            page
            for page in pages
            if page not in named
            and page.count("/") == pattern.count("/")
            and fnmatch(page, pattern)
        ]
        named.update(taken[pattern])
    return replaced(nav, taken)


def leaves(nav: list[Any]) -> Iterator[str]:
    """Every page and pattern of a nav."""
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for value in entry.values():
                yield from leaves([value] if isinstance(value, str) else value)


def replaced(nav: list[Any], taken: dict[str, list[str]]) -> list[Any]:
    """The nav with patterns replaced by their pages."""
    out: list[Any] = []
    for entry in nav:
        if isinstance(entry, str):
            out += taken.get(entry, [entry])
        else:
            out.append(
                {
                    title: value if isinstance(value, str) else replaced(value, taken)
                    for title, value in entry.items()
                }
            )
    return out


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that lead out of docs/ become what they say and the path; code stays as it is."""
    depth = page.file.src_uri.count("/")

    def shown(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        if target.count("../") <= depth:
            return found[0]
        path = target.replace("../", "")
        if path.startswith("deploy/") and (ROOT / path).is_file():
            return f"[{text}]({'../' * depth}{path})"
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(shown, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(shown, markdown[end:])])
