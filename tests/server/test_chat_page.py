"""The chat page: what it is allowed to do, and what it does in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from modulm_server.testing import Live

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")


def test_nothing_comes_from_elsewhere(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    addresses = set(re.findall(r"https?://[^\s'\"<>)]+", page.text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "only the name of a format"
    assert "innerHTML" not in page.text
    assert http.head("/").status_code == 200


#: The browser talks on descriptors 3 and 4: this puts ours there and becomes the browser.
_ON_3_AND_4 = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A headless browser, driven over its debugging pipe."""

    def __init__(self, folder: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--window-size=900,700", f"--user-data-dir={folder}",
            "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        handles = [str(to_browser), str(from_browser)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ON_3_AND_4, *handles, *command],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for handle in (to_browser, from_browser):
            os.close(handle)
        self._number = 0
        self._rest = b""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.call(
            "Target.attachToTarget", {"targetId": page["targetId"], "flatten": True}, session=None
        )
        self._session = attached["sessionId"]

    _session: str | None = None

    def call(
        self, method: str, params: dict[str, Any] | None = None, session: str | None = ""
    ) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params or {}}
        chosen = self._session if session == "" else session
        if chosen:
            message["sessionId"] = chosen
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser is gone"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def run(self, script: str) -> Any:
        params = {"expression": script, "returnByValue": True, "awaitPromise": True}
        result = self.call("Runtime.evaluate", params)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script: str, seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"never: {script}: {self.run('document.body.innerText')}"
            time.sleep(0.05)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if BROWSER is None:
        pytest.skip("no Chromium here")
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


def open_page(browser: Browser, url: str) -> None:
    browser.call("Page.navigate", {"url": url})
    browser.wait("document.readyState === 'complete' && !!document.querySelector('#model option')")


def say(browser: Browser, text: str) -> None:
    browser.run(f"text.value = {json.dumps(text)}; $('form').requestSubmit(); 0")


def test_a_conversation(browser: Browser, live: Live) -> None:
    open_page(browser, live.url)
    assert browser.run("$('model').value") == "M"
    say(browser, "think first")
    browser.wait("document.querySelector('.note')?.textContent.includes('tokens/s')")
    shown = browser.run("document.querySelector('article').innerText")
    assert "It is 4." in shown
    assert browser.run("document.querySelector('details summary').textContent") == "Reasoning"
    assert browser.run("document.querySelector('details').open") is False
    say(browser, "<img src=x onerror=alert(1)> hi")
    browser.wait("document.querySelectorAll('article').length === 2 && !running")
    assert browser.run("document.querySelectorAll('#talk img').length") == 0
    prompt = live.engine.seen[-1][0]["prompt"]
    assert prompt.index("think first") < prompt.index("It is 4.") < prompt.index("<img src=x")


def test_settings_and_tools(browser: Browser, live: Live) -> None:
    open_page(browser, live.url)
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    browser.run(f"$('tools').value = {json.dumps(json.dumps(tools))}; $('temperature').value = 0.5")
    browser.run("$('thinking').value = 'off'; $('system').value = 'Be kind.'; 0")
    say(browser, "call two tools")
    browser.wait("document.querySelectorAll('details').length === 2 && !running")
    assert browser.run("document.querySelector('details').open") is False
    assert "Paris" in browser.run("document.querySelector('details .said').textContent")
    prompt, params = live.engine.seen[-1]
    assert params.temperature == 0.5
    assert "Be kind." in prompt["prompt"]
    assert prompt["prompt"].endswith("</think>\n\n")


def test_text_is_set_in_shape_but_never_as_html(browser: Browser, live: Live) -> None:
    open_page(browser, live.url)
    source = "Use **bold** and `x < 1`:\\n```python\\nprint(1)\\n```\\n<b>no</b>"
    browser.run(f"const shaped = new Answer(); shaped.take({{content: '{source}'}}); 0")
    assert browser.run("document.querySelector('article strong').textContent") == "bold"
    assert browser.run("document.querySelector('article code').textContent") == "x < 1"
    assert browser.run("document.querySelector('article pre').firstChild.data") == "print(1)"
    assert "<b>no</b>" in browser.run("document.querySelector('article').innerText")


def test_a_first_question_is_offered_and_a_chat_begun_anew(browser: Browser, live: Live) -> None:
    open_page(browser, live.url)
    browser.run("document.querySelector('#hello button').click(); 0")
    browser.wait("document.querySelectorAll('article').length === 1 && !running")
    assert "capital of France" in live.engine.seen[-1][0]["prompt"]
    browser.run("$('fresh').click(); 0")
    assert browser.run("document.querySelectorAll('article').length") == 0
    assert browser.run("!!$('hello')")


@pytest.mark.parametrize("width", [320, 390, 900])
def test_it_fits_the_screen(browser: Browser, live: Live, width: int) -> None:
    screen = {"width": width, "height": 700, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.call("Emulation.setDeviceMetricsOverride", screen)
    try:
        open_page(browser, live.url)
        browser.run("openSettings(true); 0")
        assert browser.run("document.documentElement.scrollWidth") <= width
    finally:
        browser.call("Emulation.clearDeviceMetricsOverride")


def test_stop_ends_the_request(browser: Browser, live: Live) -> None:
    open_page(browser, live.url)
    before = len(live.engine.aborted)
    say(browser, "count slowly")
    browser.wait("document.querySelector('article')?.innerText.includes('2')")
    assert browser.run("$('send').textContent") == "Stop"
    browser.run("$('form').requestSubmit(); 0")
    browser.wait("document.querySelector('.note').textContent.includes('stopped')")
    assert browser.run("$('send').textContent") == "Send"
    for _ in range(200):
        if len(live.engine.aborted) > before:
            break
        time.sleep(0.01)
    assert len(live.engine.aborted) == before + 1


def test_errors_are_shown(browser: Browser, live: Live) -> None:
    open_page(browser, live.url)
    say(browser, "fail late")
    browser.wait("!!document.querySelector('.note.error')")
    assert "could not finish" in browser.run("document.querySelector('.note.error').textContent")
