"""docs/ builds into a site without a warning: all pages in its nav, all links leading somewhere,
nothing loaded from elsewhere; and it can be read on a phone, in a real browser."""

from __future__ import annotations

import http.server
import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest
from tests.server.browser import BROWSER, Browser

pytest.importorskip("mkdocs", reason="mkdocs is in the docs group")

ROOT = Path(__file__).resolve().parents[3]
PAGES = ("index", "deployment", "python-api", "cli", "config", "troubleshooting", "http-api")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


class Loaded(HTMLParser):
    """What a page loads by itself: not where its links lead."""

    def __init__(self) -> None:
        super().__init__()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        table = dict(attrs)
        if tag == "link" and table.get("rel") not in ("canonical", "next", "prev"):
            self.urls.append(table.get("href") or "")
        elif tag != "a":
            self.urls += [table[key] or "" for key in ("src", "action", "data") if key in table]


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 80
    for page in pages:
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        assert loaded.urls
        outside = [url for url in loaded.urls if re.match(r"(\w+:)?//", url)]
        assert not outside, f"{page.name}: {outside}"
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", text), sheet.name


def test_pages_have_what_is_written_from_the_code(site: Path) -> None:
    text = (site / "python-api.html").read_text(encoding="utf-8")
    for name in ("modulm_frontend.llm.LLM.generate", "modulm.contracts.sampling.SamplingParams"):
        assert f'id="{name}"' in text
    assert "What went wrong" not in text
    assert "temperature" in text
    assert (site / "deploy/compose.yaml").is_file()
    assert 'href="deploy/compose.yaml"' in (site / "deployment.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tool_pages", ROOT / "tools/pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_patterns_of_the_nav(pages: ModuleType) -> None:
    nav = [{"A": ["a.md", "*.md"]}, {"B": [{"C": ["b-*.md"]}]}, {"D": ["d/*.md"]}]
    files = ["a.md", "b-1.md", "b-2.md", "new.md", "d/1.md"]
    assert pages.filled(nav, files) == [
        {"A": ["a.md", "new.md"]},
        {"B": [{"C": ["b-1.md", "b-2.md"]}]},
        {"D": ["d/1.md"]},
    ]


def test_links_out_of_docs_become_paths(pages: ModuleType) -> None:
    class Page:
        class file:
            src_uri = "adr/0001.md"

    text = "[a](../b.md) [run](../../bench/run.py) [c](../../deploy/nginx.conf)\n"
    fenced = "```\n[run](../../bench/run.py)\n```\n"
    page = pages.on_page_markdown(text + fenced, Page)
    assert page == "[a](../b.md) `bench/run.py` [c](../deploy/nginx.conf)\n" + fenced


@pytest.fixture(scope="module")
def url(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = partial(Quiet, directory=str(site))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(300)
    server.server_close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if BROWSER is None:
        pytest.skip("no Chromium here")
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.mark.parametrize("page", PAGES)
def test_a_phone_shows_it(browser: Browser, url: str, page: str) -> None:
    browser.events.clear()
    browser.screen(390, 844)
    browser.call("Page.navigate", {"url": f"{url}/{page}.html"})
    browser.wait(f"location.href.endsWith('/{page}.html') && document.readyState === 'complete'")
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert browser.elsewhere(url) == set()


def test_it_is_searched_without_a_network(browser: Browser, url: str) -> None:
    browser.screen(1280, 900, dark=True)
    browser.call("Page.navigate", {"url": f"{url}/index.html"})
    browser.wait("document.readyState === 'complete' && !!document.querySelector('[name=query]')")
    browser.wait(
        "(() => { const field = document.querySelector('[name=query]'); field.focus();"
        " field.value = 'nginx'; field.dispatchEvent(new Event('keyup', {bubbles: true}));"
        " return !!document.querySelector('.md-search-result__item'); })()"
    )
    assert "nginx" in browser.text(".md-search-result__list")
    assert browser.elsewhere(url) == set()
