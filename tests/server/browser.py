"""A real browser for tests of pages, driven over its debugging pipe."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["BROWSER", "READY", "Browser"]

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")

#: The browser talks on descriptors 3 and 4: this puts ours there and becomes the browser.
_ON_3_AND_4 = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""
#: A page of ours is there, with all that it asked the server at first.
READY = "document.documentElement?.dataset.ready === 'yes'"
#: What a page must never do: break its own policy, or fail without anybody seeing it.
_WATCH = """
window.faults = [];
document.addEventListener("securitypolicyviolation",
  (event) => faults.push(`${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}`));
addEventListener("error", (event) => faults.push(String(event.message)));
addEventListener("unhandledrejection", (event) => faults.push(String(event.reason)));
"""


class Browser:
    """A headless browser with one tab. `plain.test` is this machine, without a secure context."""

    def __init__(self, folder: Path) -> None:
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [
            str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--no-first-run", "--window-size=1200,800", f"--user-data-dir={folder}",
            "--host-resolver-rules=MAP plain.test 127.0.0.1",
            "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream",
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
        self.folder = folder
        self.events: list[dict[str, Any]] = []
        self._number = 0
        self._rest = b""
        self._session: str | None = None
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self.call(
            "Target.attachToTarget", {"targetId": page["targetId"], "flatten": True}
        )
        self._session = attached["sessionId"]
        for domain in ("Page", "Network"):
            self.call(f"{domain}.enable")
        self.call("Page.addScriptToEvaluateOnNewDocument", {"source": _WATCH})
        self.call("Emulation.setFocusEmulationEnabled", {"enabled": True})

    def call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """The result of a command of the debugging protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params or {}}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._message()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def event(self, method: str) -> dict[str, Any]:
        """The next event of this kind."""
        while True:
            for index, event in enumerate(self.events):
                if event.get("method") == method:
                    params: dict[str, Any] = self.events.pop(index)["params"]
                    return params
            self.events.append(self._message())

    def _message(self, seconds: float = 300) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], seconds)
            assert ready, "the browser says nothing"
            piece = os.read(self._read, 1 << 16)
            assert piece, "the browser is gone"
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def run(self, script: str) -> Any:
        """The value of a script, as a click of the user would run it."""
        kind = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        result = self.call("Runtime.evaluate", {"expression": script, **kind})
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script: str, seconds: float = 300) -> None:
        """Until the script is true; in between, another page may be loaded."""
        end = time.monotonic() + seconds
        while not self._holds(script):
            assert time.monotonic() < end, f"never: {script}: {self.run('document.body.innerText')}"
            time.sleep(0.03)

    def _holds(self, script: str) -> bool:
        try:
            return bool(self.run(script))
        except AssertionError as error:
            if "navigated or closed" not in str(error):
                raise
            return False

    def open(self, url: str, *, clean: bool = True) -> None:
        """Load a page; `clean`: with nothing left of earlier ones."""
        self.events.clear()
        if clean:
            origin = "/".join(url.split("/")[:3])
            self.call("Page.navigate", {"url": "about:blank"})
            self.call(
                "Storage.clearDataForOrigin",
                {"origin": origin, "storageTypes": "indexeddb,local_storage"},
            )
        self.call("Page.navigate", {"url": url})
        self.wait(READY)

    def reload(self) -> None:
        """Load the page again."""
        self.run("window.before = true")
        self.call("Page.reload")
        self.wait(f"!window.before && {READY}")

    def click(self, selector: str, index: int = 0) -> None:
        """Click what the selector finds."""
        self.run(f"document.querySelectorAll({json.dumps(selector)})[{index}].click()")

    def type(self, selector: str, text: str) -> None:
        """Write into a field, as typing does."""
        self.run(
            f"(() => {{ const field = document.querySelector({json.dumps(selector)});"
            f" field.value = {json.dumps(text)};"
            " for (const kind of ['input', 'change'])"
            " field.dispatchEvent(new Event(kind, {bubbles: true})); })()"
        )

    def press(self, key: str, code: str = "", modifiers: int = 0, text: str = "") -> None:
        """A key of a real keyboard. modifiers: 2 control, 8 shift."""
        common = {"key": key, "code": code or key, "modifiers": modifiers}
        if key == "Enter":
            common |= {"windowsVirtualKeyCode": 13}
            text = text or "\r"
        if key == "Tab":
            common |= {"windowsVirtualKeyCode": 9}
        down = {**common, "type": "keyDown", **({"text": text} if text else {})}
        self.call("Input.dispatchKeyEvent", down)
        self.call("Input.dispatchKeyEvent", {**common, "type": "keyUp"})

    def text(self, selector: str = "body") -> str:
        """What can be read there."""
        text: str = self.run(f"document.querySelector({json.dumps(selector)}).innerText")
        return text

    def count(self, selector: str) -> int:
        """How many there are."""
        count: int = self.run(f"document.querySelectorAll({json.dumps(selector)}).length")
        return count

    def each(self, selector: str, value: str) -> list[Any]:
        """`value`, an expression on `node`, for each that is found."""
        nodes = f"[...document.querySelectorAll({json.dumps(selector)})]"
        values: list[Any] = self.run(f"{nodes}.map((node) => {value})")
        return values

    def elsewhere(self, *origins: str) -> set[str]:
        """Addresses that were asked for since the page was opened, but not of these origins."""
        self.run("0")
        requests = (e for e in self.events if e.get("method") == "Network.requestWillBeSent")
        urls = {event["params"]["request"]["url"] for event in requests}
        return {url for url in urls if not url.startswith((*origins, "data:", "blob:"))}

    def screen(self, width: int, height: int, dark: bool = False) -> None:
        """Have a screen of this size; below 500 a phone's."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", {"features": [scheme]})

    def picture(self, file: Path) -> None:
        """Write what is on the screen to a PNG file."""
        data = self.call("Page.captureScreenshot", {"format": "png"})["data"]
        file.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
