"""The chat page in a real browser, against a real server of a scripted engine."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tool_server
from loop_turns import BOUND, Beat
from samples import parametrize_sample
from tests.server.browser import BROWSER, READY, Browser
from tests.server.scripted_models import several_models
from tests.server.test_documents import pdf

from modulm.config import EngineConfig
from modulm.contracts.sampling import SamplingParams
from modulm.contracts.tokenizer import Tokenizer
from modulm.errors import ConfigError
from modulm_route_chat_page import conversations
from modulm_route_chat_page.conversations import ConversationStore
from modulm_server.models.settings import ModelSettings
from modulm_server.scripted import Reply, ScriptedEngine, scripted_info
from modulm_server.testing import Live, serve_in_thread

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'
MARKDOWN = r"""# Title

- one
- [x] two

> quoted

| a | b |
|---|--:|
| 1 | 2 |

[good](https://example.org/x) [bad](javascript:alert(1)) ![pic](https://example.org/p.png)

**bold** and `x < 1` and <b onclick="alert(1)">no</b><img src=x onerror=alert(1)>

```python
def f(): return "s"
```

Inline $e^{i\pi}+1=0$, costs $5 and $10, broken $\frac{$.

$$\int_0^1 x\,dx = \tfrac12$$
"""
#: What a preview shows: it runs scripts, and must not reach this page or a network.
PAGE = """<style>p { color: rgb(1, 2, 3) }</style><p>shown</p><script>
const tell = (text) => parent.postMessage(text, "*");
try { parent.document.title = "taken"; tell("reached"); } catch { tell("apart"); }
fetch("/v1/models").then(() => tell("reached"), () => tell("offline"));
tell(getComputedStyle(document.querySelector("p")).color);
</script>"""
#: A call of which nothing can be told before its end, so that all of it comes at once.
LATE_NAME = '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>'
#: What is answered to a question that begins with these words.
REPLIES = {
    "think first": Reply("<think>\nLet me see.\n</think>\n\nIt is 4."),
    "think slowly": Reply("<think>\nOne, two, three.\n</think>\n\nIt is 4.", delay=0.08),
    "call slowly": Reply(LATE_NAME, delay=0.01),
    "two lines": Reply("roses are red\nviolets are blue"),
    "call two": Reply(CALL % "Paris" + "\n" + CALL % "Rome"),
    "call": Reply(CALL % "Paris"),
    "count slowly": Reply("1 2 3 4 5 6 7 8 9 ", delay=0.02, endless=True),
    "fail late": Reply("one two three four", error_at=3),
    "fail": Reply(error_at=0),
    "markdown": Reply(MARKDOWN),
    "draw": Reply(f"```html\n{PAGE}\n```"),
    "Give this conversation a title": Reply('"Rain in Paris".\nIt is about rain.'),
}


class Script:
    """Answers by the last question; what is in `once` goes first, and only once."""

    def __init__(self) -> None:
        self.once: list[Reply] = []

    def __call__(self, prompt: str, params: SamplingParams) -> Reply:
        if self.once:
            return self.once.pop(0)
        question = prompt.rpartition("<|im_start|>user\n")[2]
        if "<|im_start|>tool\n" in question:
            return Reply("The tool said so.")
        for opening, reply in REPLIES.items():
            if question.startswith(opening):
                return reply
        return Reply("Hello there.")


class ToolHandler(BaseHTTPRequestHandler):
    """A tool as somebody runs it: JSON in, JSON out, open to pages of other origins."""

    def do_OPTIONS(self) -> None:
        self._answer(b"")

    def do_POST(self) -> None:
        arguments = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(json.dumps({"weather": f"rain in {arguments['city']}"}).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Access-Control-Allow-Origin", "*")
        self.send_header("Access-Control-Allow-Headers", "*")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def tool() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ToolHandler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def page(
    tokenizer: Tokenizer, tool: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    servers = tmp_path_factory.mktemp("tools") / "servers.yaml"
    command = [sys.executable, str(Path(tool_server.__file__))]
    servers.write_text(json.dumps({"servers": {"weather": {"command": command}}}))
    config = EngineConfig.from_keywords(
        tool_server=str(servers),
        model="M",
        disable_uvicorn_access_log=True,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
        allowed_hosts=("127.0.0.1", "plain.test"),
        chat_page_tool_origins=(tool,),
    )
    info = scripted_info(tokenizer, config=config, max_model_len=2048)
    with serve_in_thread(ScriptedEngine(tokenizer, Script(), info), config) as live:
        yield live


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def tab(browser: Browser, page: Live, tool: str) -> Iterator[Browser]:
    """The page, newly opened; nothing may have gone wrong unseen, or come from elsewhere."""
    browser.screen(1200, 800)
    browser.open(page.url)
    yield browser
    browser.run("sessionStorage.clear()")
    assert browser.run("faults") == []
    assert not browser.elsewhere(page.url, page.url.replace("127.0.0.1", "plain.test"), tool)


IDLE = "document.querySelector('#send').getAttribute('aria-label') === 'Send'"


def say(tab: Browser, text: str, *, wait: bool = True) -> None:
    tab.type("#text", text)
    tab.run("document.querySelector('#composer').requestSubmit()")
    if wait:
        tab.wait(IDLE)


def asked(page: Live) -> str:
    """The prompt of the last request."""
    prompt: str = page.engine.seen[-1][0]["prompt"]
    return prompt


def setting(tab: Browser, name: str, value: str) -> None:
    """Type into a field of the settings, found by its label."""
    tab.run(
        f"(async () => {{ const {{ FIELDS }} = await import('/page/js/fields.js');"
        f" const {{ label }} = FIELDS.find((field) => field.name === {json.dumps(name)});"
        " const found = [...document.querySelectorAll('#settings label')]"
        ".find((each) => each.firstChild.data === label);"
        f" const input = found.querySelector('input, select, textarea');"
        f" input.value = {json.dumps(value)};"
        " input.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


# What was wrong.


@pytest.mark.exhaustive
@needs_browser
def test_a_new_chat_during_an_answer_does_not_get_it(tab: Browser, page: Live) -> None:
    say(tab, "count slowly", wait=False)
    tab.wait("document.querySelector('article.assistant')?.innerText.includes('2')")
    tab.click("#fresh")
    assert tab.count("article") == 0
    say(tab, "hello")
    assert tab.count("article.assistant") == 1
    assert "Hello there." in tab.text("article.assistant")
    assert "count slowly" not in asked(page)
    tab.click("#conversations .open", 1)
    tab.wait("document.querySelector('article.user').innerText === 'count slowly'")
    tab.click("#send")
    tab.wait(IDLE)
    assert "1 2 3" in tab.text("article.assistant")
    assert "stopped" in tab.text("article.assistant .figures")


@needs_browser
def test_failed_turns_are_not_sent_again_and_can_be_retried(tab: Browser, page: Live) -> None:
    say(tab, "fail, please")
    assert "not sent with later messages" in tab.text(".failure")
    say(tab, "fail late")
    say(tab, "hello")
    assert "fail" not in asked(page)
    assert tab.count("article.user") == 3
    assert tab.text("article.user .said") == "fail, please"
    tab.reload()
    assert tab.count(".failure") == 2
    page.engine.reply.once = [Reply("Now it works.")]
    tab.click(".failure .retry")
    tab.wait(
        "!document.querySelector('article.running') && document.body.innerText.includes('works')"
    )
    assert tab.count("article") == 2
    assert tab.text("article.user .said") == "fail, please"
    assert tab.count(".failure") == 0


@pytest.mark.exhaustive
@needs_browser
def test_a_tool_call_has_the_rate_at_which_it_came(tab: Browser) -> None:
    setting(tab, "tools", json.dumps(TOOLS))
    say(tab, "call slowly")
    assert tab.count("details.call") == 1
    figures = tab.text("article.assistant .figures")
    rate = re.search(r"answer \d+ tokens, ([\d.,]+) tokens/s", figures)
    assert rate, figures
    assert float(rate[1].replace(",", "")) < 300, "one token takes 10 ms"


@pytest.mark.exhaustive
@needs_browser
def test_copy_works_without_a_secure_context(tab: Browser, page: Live) -> None:
    tab.open(page.url.replace("127.0.0.1", "plain.test"))
    assert tab.run("isSecureContext") is False
    say(tab, "hello")
    tab.click("article.assistant [aria-label=Copy]")
    assert tab.text("#status") == "Copied"
    tab.call("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
    tab.open(page.url)
    assert tab.run("navigator.clipboard.readText()") == "Hello there."


@pytest.mark.exhaustive
@needs_browser
def test_a_stream_that_is_cut_does_not_look_finished(tab: Browser) -> None:
    tab.call("Fetch.enable", {"patterns": [{"urlPattern": "*/v1/chat/completions"}]})
    say(tab, "hello", wait=False)
    request = tab.event("Fetch.requestPaused")["requestId"]
    chunk = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Half of"}}]}
    body = f"data: {json.dumps(chunk)}\n\n"
    import base64

    answer = {
        "requestId": request,
        "responseCode": 200,
        "responseHeaders": [{"name": "content-type", "value": "text/event-stream"}],
        "body": base64.b64encode(body.encode()).decode(),
    }
    tab.call("Fetch.fulfillRequest", answer)
    tab.wait(IDLE)
    tab.call("Fetch.disable")
    assert "connection ended" in tab.text(".failure")
    assert "Half of" in tab.text("article.assistant")
    assert "Continue" in tab.text(".failure")


@needs_browser
@parametrize_sample("width", [320, 390, 1200], every=3)
def test_settings_survive_a_reload_and_leave_room(tab: Browser, page: Live, width: int) -> None:
    tab.screen(width, 700)
    tab.click("#toggle-settings")
    setting(tab, "temperature", "0.5")
    box = tab.run("document.querySelector('#settings').getBoundingClientRect().toJSON()")
    assert tab.run("document.documentElement.scrollWidth") <= width
    if width < 500:
        assert box["height"] <= 350, "half of the screen"
    bottom = tab.run("document.querySelector('#text').getBoundingClientRect().bottom")
    assert bottom <= 700
    tab.reload()
    say(tab, "hello")
    assert page.engine.seen[-1][1].temperature == 0.5


# Conversations.


@needs_browser
def test_conversations_are_kept(tab: Browser) -> None:
    say(tab, "hello about apples")
    tab.click("#fresh")
    say(tab, "hello about pears")
    tab.reload()
    assert tab.count("#conversations li") == 2
    assert "pears" in tab.text("article.user")
    tab.type("#search", "apple")
    assert tab.text("#conversations") == "hello about apples"
    tab.click("#conversations .more")
    tab.click("#menu button")
    tab.type("#conversations .rename", "Fruit")
    tab.press("Enter")
    tab.type("#search", "")
    assert tab.text("#conversations .open") in ("Fruit", "hello about pears")
    assert "Fruit" in tab.text("#conversations")
    tab.click("#conversations .more")
    tab.click("#menu button", 5)
    assert tab.count("#conversations li") == 1
    tab.reload()
    assert tab.count("#conversations li") == 1
    tab.click("#conversations .more")
    tab.click("#menu button", 5)
    assert "No conversations" in tab.text("#conversations")
    tab.click(".toast button")
    assert tab.count("#conversations li .open") == 1


@pytest.mark.exhaustive
@needs_browser
def test_another_tab_sees_what_is_written(tab: Browser) -> None:
    """A second store stands for the other tab: they share the database and the channel."""
    say(tab, "hello from the first")
    tab.run(
        "(async () => { const { Store } = await import('/page/js/store.js');"
        " const store = new Store();"
        " const [kept] = await store.all();"
        " await store.put({ ...kept, title: 'Renamed elsewhere' }); })()"
    )
    tab.wait("document.querySelector('#title').textContent === 'Renamed elsewhere'")
    assert tab.text("#conversations .name") == "Renamed elsewhere"
    assert "Hello there." in tab.text("article.assistant")


@pytest.mark.exhaustive
@needs_browser
def test_export_and_import(tab: Browser, tmp_path: Path) -> None:
    say(tab, "think first\n<!-- user -->\n# not a heading")
    setting(tab, "temperature", "0.3")
    tab.call("Page.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    tab.click("#conversations .more")
    for index, ending in ((3, "md"), (4, "json")):
        tab.run("document.querySelector('#menu').showPopover()")
        tab.click("#menu button", index)
        end = time.monotonic() + 300
        while not [*tmp_path.glob(f"*.{ending}")]:
            assert time.monotonic() < end
            time.sleep(0.02)
    (markdown,) = tmp_path.glob("*.md")
    assert "## Answer\n\nIt is 4." in markdown.read_text()
    assert "Let me see." in markdown.read_text()
    tab.click("#conversations .more")
    tab.click("#menu button", 5)
    (stored,) = tmp_path.glob("*.json")
    foreign = tmp_path / "openai.json"
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "from elsewhere"}]
    foreign.write_text(json.dumps({"messages": messages}))
    tab.call("DOM.enable")
    root = tab.call("DOM.getDocument")["root"]["nodeId"]
    node = tab.call("DOM.querySelector", {"nodeId": root, "selector": "#import-file"})["nodeId"]
    files = [str(markdown), str(stored), str(foreign)]
    tab.call("DOM.setFileInputFiles", {"files": files, "nodeId": node})
    tab.wait("document.querySelectorAll('#conversations .open').length === 3")
    for index in range(2):
        tab.run(
            "[...document.querySelectorAll('#conversations .open')]"
            f".filter((each) => each.innerText.startsWith('think'))[{index}].click()"
        )
        assert tab.text("article.user .said") == "think first\n<!-- user -->\n# not a heading"
        assert "It is 4." in tab.text("article.assistant .markdown")
        thoughts = tab.run("document.querySelector('.thought .said').textContent")
        assert thoughts.strip() == "Let me see."
    broken = tmp_path / "broken.json"
    broken.write_text('{"some": "thing"}')
    tab.call("DOM.setFileInputFiles", {"files": [str(broken)], "nodeId": node})
    tab.wait("document.querySelector('#toasts').innerText.includes('no conversations')")


@needs_browser
def test_edit_versions_and_the_branch_that_is_sent(tab: Browser, page: Live) -> None:
    say(tab, "first words")
    tab.click("article.user [aria-label=Edit]")
    tab.type("article.user textarea", "other words")
    tab.run("document.querySelector('article.user form').requestSubmit()")
    tab.wait(f"{IDLE} && document.querySelector('.versions')?.innerText.includes('2/2')")
    assert "first words" not in asked(page)
    tab.click("article.assistant [aria-label='Regenerate']")
    tab.wait(f"{IDLE} && document.querySelectorAll('.versions').length === 2")
    assert tab.text("article.assistant .versions").strip() == "2/2"
    tab.click("article.user [aria-label='Previous version']")
    assert tab.text("article.user .said") == "first words"
    say(tab, "and then")
    assert "first words" in asked(page)
    assert "other words" not in asked(page)
    tab.click("article.assistant [aria-label=Edit]")
    tab.type("article.assistant textarea", "I said this.")
    tab.run("document.querySelector('article.assistant form').requestSubmit()")
    say(tab, "go on")
    assert "I said this." in asked(page)
    assert "Hello there." not in asked(page)


@pytest.mark.exhaustive
@needs_browser
def test_an_answer_goes_on(tab: Browser, page: Live) -> None:
    setting(tab, "max_tokens", "3")
    say(tab, "hello")
    part = tab.text("article.assistant .markdown").strip()
    assert "cut at the limit" in tab.text("article.assistant .figures")
    setting(tab, "max_tokens", "")
    page.engine.reply.once = [Reply(" and more.")]
    tab.click("article.assistant [aria-label=Continue]")
    tab.wait(f"{IDLE} && document.querySelector('article.assistant').innerText.includes('more')")
    assert tab.count("article.assistant") == 1
    assert asked(page).endswith(part)
    assert tab.text("article.assistant .markdown").strip().startswith(part)


@needs_browser
def test_stop_ends_the_request(tab: Browser, page: Live) -> None:
    before = len(page.engine.aborted)
    say(tab, "count slowly", wait=False)
    tab.wait("document.querySelector('article.assistant')?.innerText.includes('2')")
    tab.run("document.querySelector('#text').focus()")
    tab.press("Escape")
    tab.wait(IDLE)
    assert "stopped" in tab.text("article.assistant .figures")
    for _ in range(30_000):
        if len(page.engine.aborted) > before:
            break
        time.sleep(0.01)
    assert len(page.engine.aborted) == before + 1


# What an answer looks like.


@needs_browser
def test_markdown_is_whole_and_harmless(tab: Browser) -> None:
    say(tab, "markdown")
    tab.wait(
        "!!document.querySelector('.katex-display') && !!document.querySelector('.hljs-keyword')"
    )
    box = "article.assistant .markdown"
    assert tab.text(f"{box} h1") == "Title"
    assert tab.count(f"{box} li input[checked]") == 1
    assert tab.text(f"{box} blockquote").strip() == "quoted"
    assert tab.each(f"{box} td[align]", "getComputedStyle(node).textAlign") == ["right"]
    links = tab.each(f"{box} a", "node.href")
    assert links == ["https://example.org/x", "", "https://example.org/p.png"]
    assert tab.each(f"{box} a[href]", "node.rel") == ["noopener noreferrer nofollow"] * 2
    assert tab.count(f"{box} img") == 0
    assert '<b onclick="alert(1)">no</b><img src=x' in tab.text(box)
    assert tab.text(f"{box} strong") == "bold"
    assert tab.count(f"{box} .katex") == 2
    assert "costs $5 and $10, broken $\\frac{$" in tab.text(box)
    tab.click(f"{box} .code button")
    tab.wait("document.querySelector('#status').textContent !== ''")
    assert tab.text(f"{box} pre").strip() == 'def f(): return "s"'


@pytest.mark.exhaustive
@needs_browser
def test_reasoning_is_folded_with_its_time(tab: Browser, page: Live) -> None:
    say(tab, "think slowly", wait=False)
    tab.wait("document.querySelector('.thought[open] .said')?.textContent.includes('One')")
    assert tab.text(".thought summary") == "Thinking…"
    tab.wait(IDLE)
    assert re.fullmatch(r"Thought for \d+\.\d s", tab.text(".thought summary"))
    assert tab.run("document.querySelector('.thought').open") is False
    assert "It is 4." in tab.text("article.assistant .markdown")
    say(tab, "<img src=x onerror=alert(1)> hi")
    assert tab.count("#talk img") == 0
    prompt = asked(page)
    assert prompt.index("think slowly") < prompt.index("It is 4.") < prompt.index("<img src=x")


TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]


@pytest.mark.exhaustive
@needs_browser
def test_results_of_tools_are_given(tab: Browser, page: Live) -> None:
    setting(tab, "tools", json.dumps(TOOLS))
    say(tab, "call two")
    assert tab.count("details.call") == 2
    assert "Paris" in tab.text("details.call pre")
    tab.type("details.call textarea", '{"weather": "sun"}')
    tab.reload()
    assert tab.run("document.querySelector('details.call textarea').value") == '{"weather": "sun"}'
    tab.run("document.querySelectorAll('details.call textarea')[1].value = 'fog'")
    tab.click(".calls .give")
    tab.wait(f"{IDLE} && document.body.innerText.includes('The tool said so.')")
    assert '{"weather": "sun"}' in asked(page)
    assert "fog" in asked(page)
    assert tab.count("details.call textarea") == 0
    assert "sun" in tab.run("document.querySelector('details.call .result').textContent")


@needs_browser
def test_tools_are_run_over_http(tab: Browser, page: Live, tool: str) -> None:
    setting(tab, "tools", json.dumps([{**TOOLS[0], "url": f"{tool}/weather"}]))
    say(tab, "call")
    assert "url" not in asked(page)
    tab.click("details.call .run")
    tab.wait("document.querySelector('details.call textarea').value.includes('rain in Paris')")
    tab.click(".calls .give")
    tab.wait(f"{IDLE} && document.body.innerText.includes('The tool said so.')")
    assert "rain in Paris" in asked(page)
    setting(tab, "run_tools", "auto")
    say(tab, "call two")
    tab.wait(f"{IDLE} && document.querySelectorAll('article.assistant').length === 4")
    assert "rain in Rome" in asked(page)
    setting(tab, "tools", json.dumps([{**TOOLS[0], "url": "http://127.0.0.1:9/weather"}]))
    setting(tab, "run_tools", "")
    say(tab, "call")
    tab.click("details.call .run")
    tab.wait("document.body.innerText.includes('--chat-page-tool-origins http://127.0.0.1:9')")
    tab.run("faults.length = 0")


#: A call of a tool server, exported as Markdown and read again.
EXPORTED = """
import("./page/js/export.js").then(({ toMarkdown, fromText }) => {
  const hosted = [{ id: "a", name: "weather", output: "It rains." }];
  const nodes = { u: { id: "u", role: "user", content: "q", parent: "" },
    a: { id: "a", role: "assistant", content: "x", hosted, parent: "u" } };
  const [read] = fromText(toMarkdown({ title: "T", nodes, chosen: { "": "u", u: "a" } }));
  return JSON.stringify(Object.values(read.nodes));
})"""


@pytest.mark.exhaustive
@needs_browser
def test_calls_of_tool_servers_are_approved(tab: Browser, page: Live) -> None:
    setting(tab, "tools", json.dumps([{"type": "mcp", "server_label": "weather"}]))
    say(tab, "call")
    assert "weather waits for your approval" in tab.text(".calls")
    tab.click(".calls .approve")
    tab.wait(f"{IDLE} && document.body.innerText.includes('The tool said so.')")
    assert "It rains in Paris." in asked(page)
    assert "It rains in Paris." in tab.run("document.querySelector('.hosted').textContent")
    assert "It rains." in tab.run(EXPORTED)
    say(tab, "thanks")
    assert asked(page).count("It rains in Paris.") == 1


def test_origins_of_tools_are_origins() -> None:
    for wrong in (
        "localhost:9000",
        "http://a b",
        "http://a; script-src *",
        "http://a/path",
        "'self'",
    ):
        with pytest.raises(ConfigError, match="chat_page_tool_origins"):
            EngineConfig.from_keywords(chat_page_tool_origins=(wrong,))


# Settings.

PLAIN = {
    "temperature": (0.7, "temperature"), "top_p": (0.8, "top_p"), "top_k": (7, "top_k"),
    "min_p": (0.1, "min_p"), "seed": (5, "seed"), "max_tokens": (40, "max_tokens"),
    "min_tokens": (2, "min_tokens"), "repetition_penalty": (1.1, "repetition_penalty"),
    "presence_penalty": (0.2, "presence_penalty"), "frequency_penalty": (-0.3, "frequency_penalty"),
}  # fmt: skip


@needs_browser
def test_every_field_reaches_the_engine(tab: Browser, page: Live) -> None:
    for name, (value, _) in PLAIN.items():
        setting(tab, name, str(value))
    typed = {
        "stop": "END\n\\n\\n", "stop_token_ids": "5, 7", "include_stop_str_in_output": "true",
        "ignore_eos": "true", "logit_bias": '{"9": -5}', "bad_words": "ugly", "format": "regex",
        "constraint": "[a-z ]+", "skip_special_tokens": "false", "thinking": "off",
        "extra": '{"spaces_between_special_tokens": false}', "truncate_prompt_tokens": "100",
        "top_logprobs": "2",
    }  # fmt: skip
    for name, text in typed.items():
        setting(tab, name, text)
    tab.type("#system", "Be kind.")
    say(tab, "hello")
    assert tab.count(".failure") == 0, tab.text("#talk")
    params = page.engine.seen[-1][1]
    for name, (value, field) in PLAIN.items():
        assert getattr(params, field) == value, name
    assert params.stop == ("END", "\n\n")
    assert params.stop_token_ids == (5, 7)
    assert params.ignore_eos
    assert params.include_stop_str_in_output
    assert params.logit_bias == {9: -5.0}
    assert params.bad_words == ("ugly",)
    assert params.structured_outputs.regex == "[a-z ]+"
    assert params.skip_special_tokens is False
    assert params.logprobs == 2
    assert params.truncate_prompt_tokens == 100
    assert "Be kind." in asked(page)
    assert asked(page).endswith("</think>\n\n")


FORMS = {
    "json_object": ("", {"response_format": {"type": "json_object"}}),
    "json_schema": (
        '{"type": "object"}',
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": {"type": "object"}},
            }
        },
    ),
    "choice": ("yes\nno", {"structured_outputs": {"choice": ["yes", "no"]}}),
    "grammar": ('root ::= "a"', {"structured_outputs": {"grammar": 'root ::= "a"'}}),
}


@needs_browser
def test_forms_of_answers(tab: Browser, page: Live) -> None:
    for form, (constraint, expected) in FORMS.items():
        settings = json.dumps({"format": form, "constraint": constraint})
        request = tab.run(
            "import('/page/js/request.js').then(({ body }) =>"
            f" body({{ model: 'M', settings: {settings} }}, []))"
        )
        assert expected.items() <= request.items(), form
    setting(tab, "format", "json_schema")
    setting(tab, "constraint", '{"type": "object"}')
    say(tab, "hello")
    assert page.engine.seen[-1][1].structured_outputs.json == {"type": "object"}
    setting(tab, "constraint", "{")
    say(tab, "hello")
    assert tab.text("#toasts").startswith("JSON schema: not JSON")


@pytest.mark.exhaustive
@needs_browser
def test_settings_are_of_their_conversation(tab: Browser, page: Live) -> None:
    say(tab, "hello")
    setting(tab, "temperature", "0.25")
    tab.click("#fresh")
    say(tab, "hello again")
    assert page.engine.seen[-1][1].temperature != 0.25
    tab.reload()
    tab.click("#conversations .open", 1)
    say(tab, "hello")
    assert page.engine.seen[-1][1].temperature == 0.25
    tab.click("#as-default")
    tab.click("#fresh")
    say(tab, "hello")
    assert page.engine.seen[-1][1].temperature == 0.25
    tab.click("#reset")
    say(tab, "hello")
    assert page.engine.seen[-1][1].temperature != 0.25


@pytest.mark.exhaustive
@needs_browser
def test_settings_before_the_first_message_are_not_those_of_new_chats(
    tab: Browser, page: Live
) -> None:
    setting(tab, "temperature", "0.25")
    tab.reload()
    say(tab, "hello")
    assert page.engine.seen[-1][1].temperature == 0.25
    tab.click("#fresh")
    say(tab, "hello")
    assert page.engine.seen[-1][1].temperature != 0.25


@pytest.mark.exhaustive
@needs_browser
def test_enter_sends_an_edited_question(tab: Browser, page: Live) -> None:
    say(tab, "first words")
    tab.click("article.user [aria-label=Edit]")
    tab.type("article.user textarea", "other words")
    tab.press("Enter")
    tab.wait(f"{IDLE} && document.querySelector('.versions')?.innerText.includes('2/2')")
    assert asked(page).count("other words") == 1
    tab.click("article.assistant [aria-label=Edit]")
    tab.press("Enter")
    assert tab.count("article.assistant textarea") == 1, "an answer has lines"


@pytest.mark.exhaustive
@needs_browser
def test_lines_of_an_answer_stay_lines(tab: Browser) -> None:
    say(tab, "two lines")
    assert tab.text("article.assistant .markdown p").splitlines() == [
        "roses are red",
        "violets are blue",
    ]


@pytest.mark.exhaustive
@needs_browser
def test_toasts_leave_the_message_free(tab: Browser) -> None:
    tab.click("#as-default")
    box = "getBoundingClientRect()"
    toast = tab.run(f"document.querySelector('.toast').{box}.bottom")
    assert toast < tab.run(f"document.querySelector('#composer').{box}.top")


@pytest.mark.exhaustive
@needs_browser
def test_a_setting_that_cannot_be_sent_is_pointed_at(tab: Browser, page: Live) -> None:
    before = len(page.engine.seen)
    setting(tab, "top_p", "7")
    say(tab, "keep this text")
    assert tab.run("document.querySelector('#text').value") == "keep this text"
    assert tab.text("#toasts") == "Top p: at most 1"
    assert tab.run("document.querySelector('#settings').hidden") is False
    assert tab.run("document.activeElement.getAttribute('aria-invalid')") == "true"
    assert len(page.engine.seen) == before


@pytest.mark.exhaustive
@needs_browser
def test_presets_and_theme(tab: Browser, page: Live) -> None:
    tab.type("#system", "Speak like a pirate.")
    tab.type("#preset-name", "Pirate")
    tab.click("#preset-keep")
    tab.type("#theme", "dark")
    tab.reload()
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(23, 23, 22)"
    tab.type("#presets", "Short answers")
    assert tab.run("document.querySelector('#system').value") == "Answer in one or two sentences."
    tab.type("#presets", "Pirate")
    say(tab, "hello")
    assert "Speak like a pirate." in asked(page)
    tab.click("#preset-forget")
    assert "Pirate" not in tab.run("document.querySelector('#presets').textContent")


@pytest.mark.exhaustive
@needs_browser
def test_probabilities_under_the_pointer(tab: Browser) -> None:
    setting(tab, "top_logprobs", "3")
    say(tab, "hello")
    tab.click("article.assistant [aria-label=Tokens]")
    assert "".join(tab.each(".token", "node.textContent")).startswith("Hello there.")
    box = tab.run("document.querySelectorAll('.token')[1].getBoundingClientRect().toJSON()")
    at = {"x": box["x"] + 3, "y": box["y"] + 5}
    tab.call("Input.dispatchMouseEvent", {"type": "mouseMoved", **at})
    tab.wait("document.querySelectorAll('.tokens .card li').length >= 3")
    assert "60.7 %" in tab.text(".tokens .card strong")
    tab.run("document.querySelector('.token').focus()")
    tab.press("ArrowRight")
    assert tab.each(".token", "node === document.activeElement")[1]


@pytest.mark.exhaustive
@needs_browser
def test_several_answers_are_versions(tab: Browser) -> None:
    setting(tab, "n", "3")
    say(tab, "hello")
    assert tab.text("article.assistant .versions").strip() == "1/3"
    tab.click("article.assistant [aria-label='Next version']")
    assert "Hello there." in tab.text("article.assistant .markdown")


@pytest.mark.exhaustive
@needs_browser
def test_figures_tell_what_usage_tells(tab: Browser) -> None:
    usage = {
        "prompt_tokens": 100, "completion_tokens": 21,
        "prompt_tokens_details": {"cached_tokens": 60},
        "completion_tokens_details": {"reasoning_tokens": 4},
    }  # fmt: skip
    metrics = {
        "num_spec_steps": 10, "num_accepted_draft_tokens": 9, "draft_acceptance_rate": 0.45,
        "mean_acceptance_length": 1.9,
    }  # fmt: skip
    content = tab.run(
        "import('/page/js/figures.js').then((figuresOf) => {"
        " const { noFigures, takeUsage, takeDrafts, described } = figuresOf;"
        f" const figures = noFigures(); takeUsage(figures, {json.dumps(usage)});"
        f" takeDrafts(figures, {json.dumps(metrics)});"
        " return described({ ...figures, waited: 0.5, seconds: 2, steps: 20 }); })"
    )
    assert content == (
        "prompt 100 tokens (60 cached), 80.0 tokens/s · answer 21 tokens (4 reasoning), "
        "10.0 tokens/s · 9 drafts accepted (45 %, 1.9 tokens per step) · first token after 0.50 s"
    )
    say(tab, "hello")
    assert re.match(
        r"prompt \d+ tokens.* answer \d+ tokens", tab.text("article.assistant .figures")
    )
    assert "of 2,048 tokens of context" in tab.text("#context")


@pytest.mark.exhaustive
@needs_browser
def test_text_files_are_attached(tab: Browser, page: Live, tmp_path: Path) -> None:
    text, binary = tmp_path / "notes.md", tmp_path / "picture.bin"
    text.write_text("alpha ``` omega\n")
    binary.write_bytes(b"\xff\xfe\x00\x01")
    root = tab.call("DOM.getDocument")["root"]["nodeId"]
    node = tab.call("DOM.querySelector", {"nodeId": root, "selector": "#files"})["nodeId"]
    tab.call("DOM.setFileInputFiles", {"files": [str(text), str(binary)], "nodeId": node})
    tab.wait("document.querySelector('#toasts').innerText.includes('bin is not a text file')")
    assert tab.text("#attachments").strip() == "notes.md"
    say(tab, "hello, read this")
    assert "hello, read this\n\nFile notes.md:\n````\nalpha ``` omega\n````" in asked(page)
    assert tab.text("article.user summary").strip() == "notes.md"
    assert tab.run("document.querySelector('#attachments').hidden")


# Everybody.


@needs_browser
def test_by_keyboard_and_for_screen_readers(tab: Browser) -> None:
    tab.run("document.activeElement.blur()")
    tab.press("/", text="/")
    assert tab.run("document.activeElement.id") == "text"
    tab.call("Input.insertText", {"text": "call"})
    tab.press("Enter", modifiers=8)
    assert tab.run("document.querySelector('#text').value") == "call\n"
    tab.press("Enter")
    tab.wait(f"{IDLE} && document.querySelectorAll('article').length === 2")
    assert tab.text("#status").startswith("Answer done")
    tab.press("ArrowUp")
    assert tab.run("document.activeElement.getAttribute('aria-label')") == "Edit"
    tab.press("Escape")
    tab.press("<", code="Comma", modifiers=10)
    assert tab.run("document.querySelector('#settings').hidden") is False
    tab.press("O", code="KeyO", modifiers=10)
    assert tab.run("document.activeElement.id") == "text"
    assert tab.count("article") == 0
    tab.click("#conversations .open")
    roles = {"button", "textbox", "combobox", "searchbox", "link", "checkbox", "navigation"}
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    controls = [node for node in nodes if node.get("role", {}).get("value") in roles]
    assert len(controls) > 30
    unnamed = [node for node in controls if not node["ignored"] and not node["name"].get("value")]
    assert not unnamed, unnamed
    landmarks = {node["role"]["value"] for node in nodes if "role" in node}
    assert {"main", "navigation", "banner", "contentinfo", "complementary", "log"} <= landmarks


@needs_browser
@parametrize_sample("theme", ["light", "dark"], every=2)
def test_text_is_readable_in_both_themes(tab: Browser, theme: str) -> None:
    """The contrast that WCAG asks for: 4.5 between text and what is behind it."""
    tab.screen(1200, 800, dark=theme == "dark")
    say(tab, "think first")
    tab.click("#toggle-settings")
    low = tab.run(CONTRAST)
    assert low == []


#: Elements with text of their own whose contrast is below 4.5.
CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const linear = (part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const light = (colour) => {
    const [r, g, b] = rgba(colour).map((part) => linear(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = getComputedStyle(node).backgroundColor;
      if (rgba(colour)[3] > 200) return colour;
    }
    return "white";
  };
  const hidden = ".unseen, noscript, option, svg, .skip, :disabled";
  const written = (node) => [...node.childNodes].some((child) => child.nodeType === 3
    && child.data.trim()) && node.checkVisibility() && !node.closest(hidden);
  return [...document.querySelectorAll("body *")].filter(written).filter((node) => {
    const pair = [light(getComputedStyle(node).color), light(behind(node))];
    const [high, low] = pair.sort((x, y) => y - x);
    return (high + 0.05) / (low + 0.05) < 4.5;
  }).map((node) => `${node.tagName} ${node.className} ${node.textContent.slice(0, 30)}`);
})()"""


@pytest.mark.exhaustive
@needs_browser
def test_a_first_question_is_offered(tab: Browser, page: Live) -> None:
    tab.click("#hello button")
    tab.wait(f"{IDLE} && document.querySelectorAll('article').length === 2")
    assert "capital of France" in asked(page)
    tab.click("#fresh")
    assert tab.count("#hello") == 1


@pytest.mark.exhaustive
@needs_browser
def test_the_page_asks_for_a_key(browser: Browser, tokenizer: Tokenizer) -> None:
    config = EngineConfig.from_keywords(
        model="M", api_key=("secret",), disable_uvicorn_access_log=True
    )
    engine = ScriptedEngine(tokenizer, Script(), scripted_info(tokenizer, config=config))
    with serve_in_thread(engine, config) as live:
        browser.open(live.url)
        assert browser.text("#toasts") == "This server needs an API key."
        assert browser.run("document.activeElement.id") == "key"
        browser.type("#key", "secret")
        browser.wait("document.querySelector('#model').options.length === 1")
        say(browser, "hello")
        assert "Hello there." in browser.text("article.assistant")


@pytest.mark.exhaustive
@needs_browser
def test_texts_are_compared_where_the_model_gives_vectors(
    browser: Browser, tokenizer: Tokenizer
) -> None:
    for tasks, parts in (
        (("embed",), ["Compare", "Rank"]),
        (("score",), ["Rank"]),
        (("classify",), ["Classify"]),
    ):
        config = EngineConfig.from_keywords(model="M", disable_uvicorn_access_log=True)
        info = scripted_info(tokenizer, config=config, tasks=tasks)
        with serve_in_thread(ScriptedEngine(tokenizer, Script(), info), config) as live:
            browser.open(live.url)
            assert browser.each("form button", "node.innerText") == parts
            if tasks == ("score",):
                continue
            browser.run("document.querySelector('form').requestSubmit()")
            browser.wait("document.querySelector('.result').children.length > 0")
            assert browser.count(".result .error") == 0, browser.text(".result")
            if tasks == ("embed",):
                assert browser.count(".matrix tbody td") == 25
                assert browser.text(".matrix tbody td") == "1.00"
                assert browser.count(".scatter circle") == 5
                browser.run("document.querySelectorAll('form')[1].requestSubmit()")
                browser.wait("document.querySelectorAll('.bars li').length === 4")
            else:
                assert browser.count(".bars li") == 16
            assert browser.run("faults") == []


@pytest.mark.exhaustive
@needs_browser
def test_the_docs_need_no_network(browser: Browser, page: Live) -> None:
    browser.events.clear()
    browser.call("Page.navigate", {"url": f"{page.url}/docs"})
    browser.wait("document.querySelectorAll('.opblock').length > 10")
    assert "/v1/chat/completions" in browser.text()
    assert not browser.elsewhere(page.url)
    assert browser.run("faults") == []


@pytest.mark.exhaustive
@needs_browser
def test_html_of_an_answer_is_shown_in_a_frame_of_its_own(tab: Browser) -> None:
    tab.run("window.told = []; addEventListener('message', ({ data }) => told.push(data))")
    say(tab, "draw")
    preview = (
        "[...document.querySelectorAll('.code button')].find((b) => b.innerText === 'Preview')"
    )
    tab.run(f"{preview}.click()")
    tab.wait("told.length === 4")
    assert set(tab.run("told")) == {"ready", "apart", "offline", "rgb(1, 2, 3)"}
    assert tab.run("document.title") != "taken"
    assert tab.run("document.querySelector('iframe.preview').sandbox.value") == "allow-scripts"
    tab.run(f"{preview}.click()")
    assert tab.count("iframe.preview") == 0


@pytest.mark.exhaustive
@needs_browser
def test_an_answer_is_read_aloud_with_voices_of_this_machine(tab: Browser) -> None:
    tab.run(
        "window.said = []; speechSynthesis.getVoices = () => window.voices;"
        "speechSynthesis.speak = (utterance) => said.push(utterance.text);"
        "window.voices = [{localService: false, lang: 'en'}]"
    )
    say(tab, "hi")
    read = "document.querySelector('article.assistant button[aria-label=\"Read aloud\"]').click()"
    tab.run(read)
    tab.wait("document.querySelector('#toasts').innerText.includes('no voice of its own')")
    assert tab.run("said") == []
    tab.run("voices = [...voices, {localService: true, lang: 'en'}]")
    # A voice that is only described cannot be given to a real utterance.
    tab.run(
        "Object.defineProperty(SpeechSynthesisUtterance.prototype, 'voice', {writable: true}); 0"
    )
    tab.run(read)
    tab.wait("said.length === 1")
    assert tab.run("said") == ["Hello there."]


@pytest.mark.exhaustive
@needs_browser
def test_the_model_names_a_conversation(tab: Browser) -> None:
    say(tab, "hi")
    tab.run("document.querySelector('#conversations .more').click()")
    tab.run("[...document.querySelectorAll('#menu button')]"
        ".find((b) => b.textContent === 'Generate a name').click()")  # fmt: skip
    tab.wait("document.querySelector('#title').textContent === 'Rain in Paris'")
    tab.reload()
    tab.wait("document.querySelector('#conversations .name').textContent === 'Rain in Paris'")


# Without a browser.


def test_the_files_and_their_policy(page: Live) -> None:
    with page.client() as http:
        answer = http.get("/")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/html")
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy
        assert "<script>" not in answer.text
        assert "style=" not in answer.text
        assert http.head("/").status_code == 200
        assert not re.findall(r"(?:src|href)=.?https?:", answer.text)
        module = http.get("/page/js/app.js")
        assert module.headers["content-type"].startswith("text/javascript")
        assert module.headers["content-encoding"] == "gzip"
        tag = module.headers["etag"]
        assert http.get("/page/js/app.js", headers={"If-None-Match": tag}).status_code == 304
        plain = http.get("/page/js/app.js", headers={"Accept-Encoding": "identity"})
        assert plain.text == module.text
        for name in ("../__init__.py", "js", "", "js/none.js", "%2e%2e/flags.py", "..%2fflags.py"):
            assert http.get(f"/page/{name}").status_code == 404, name
        frame = http.get("/page/preview.html").headers["content-security-policy"]
        assert "sandbox allow-scripts;" in frame
        assert "default-src 'none'" in frame
        assert "connect-src" not in frame
        assert http.get("/redoc", follow_redirects=True).url.path == "/docs"


HTML = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b")


def test_our_modules_set_no_html() -> None:
    import modulm_route_chat_page

    folder = Path(modulm_route_chat_page.__file__).parent / "files"
    ours = [path for path in folder.rglob("*.js") if "vendor" not in path.parts]
    assert len(ours) > 15
    for path in ours:
        # The frame of previews has an origin of its own, and shows what others wrote.
        if path.name != "preview_frame.js":
            assert not HTML.search(path.read_text()), path


def test_the_libraries_are_as_they_were_published() -> None:
    import sys

    root = Path(__file__).resolve().parents[2]
    sys.path.insert(0, str(root / "tools"))
    try:
        import vendor  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    assert list(vendor.differences()) == []
    for package in vendor.packages():
        assert package["licence"]
        assert "LICENSE" in package["files"]


# A server of several models.


@pytest.fixture
def several(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """A server of two models and room for one."""

    def read(config: EngineConfig) -> list[ModelSettings]:
        return [
            ModelSettings(name=name, config=config.with_(model=name, served_model_name=(name,)))
            for name in ("first", "second")
        ]

    flags = {"memory_budget": "100MiB", "reply": Script()}
    with several_models(tokenizer, monkeypatch, read, **flags) as server:
        server.sizes.update(first=80 << 20, second=80 << 20)
        yield server.live


@needs_browser
def test_the_model_menu_shows_states_and_memory(browser: Browser, several: Live) -> None:
    browser.screen(1200, 800)
    browser.open(several.url)
    states = "[...document.querySelectorAll('#model option')].map((one) => one.label).join()"
    assert browser.run(states) == "first (unloaded),second (unloaded)"
    say(browser, "hello")
    assert "Hello there." in browser.text("article.assistant")
    browser.wait(f"{states} === 'first (loaded),second (unloaded)'")
    browser.click("#open-models")
    assert browser.each("#models li meter", "[node.value, node.max]") == [
        [80 << 20, 100 << 20], [0, 100 << 20]
    ]  # fmt: skip
    assert browser.each("#models li button", "node.innerText") == ["Stop", "Load"]
    browser.click("#models li button", 1)
    browser.wait(f"{states} === 'first (unloaded),second (loaded)'")
    assert browser.each("#models li meter", "node.value") == [0, 80 << 20]
    assert "loaded, 80 MiB" in browser.text("#models li:nth-child(2)")
    browser.click("#models .main")
    browser.type("#model", "second")
    say(browser, "hello")
    assert browser.count("article.assistant") == 2
    assert browser.run("faults") == []
    assert not browser.elsewhere(several.url)


@pytest.mark.exhaustive
@needs_browser
def test_fitting_parts_of_a_long_file_are_sent(
    browser: Browser, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With an embedding model on the server, unless the settings say otherwise."""

    def read(config: EngineConfig) -> list[ModelSettings]:
        return [
            ModelSettings(name=name, config=config.with_(model=name, served_model_name=(name,)))
            for name in ("chat", "embed")
        ]

    words = ["zebra", *(f"word{number}" for number in range(39))]
    long = tmp_path / "long.txt"
    long.write_text("\n\n".join(" ".join([word] * (1000 // len(word))) for word in words))
    flags = {"reply": Script(), "tasks": {"embed": ("embed",)}, "max_model_len": 200_000}
    with several_models(tokenizer, monkeypatch, read, **flags) as server:
        with server.live.client() as http:
            assert http.post("/models/load", json={"model": "embed"}).status_code == 200
        browser.screen(1200, 800)
        browser.open(server.live.url)

        def ask(question: str) -> str:
            browser.call("DOM.enable")
            root = browser.call("DOM.getDocument")["root"]["nodeId"]
            query = {"nodeId": root, "selector": "#files"}
            node = browser.call("DOM.querySelector", query)["nodeId"]
            browser.call("DOM.setFileInputFiles", {"files": [str(long)], "nodeId": node})
            browser.wait("!document.querySelector('#attachments').hidden")
            say(browser, question)
            prompt: str = server.model("chat").engine.seen[-1][0]["prompt"]
            return prompt

        browser.type("#model", "chat")
        prompt = ask("zebra zebra zebra")
        assert "File long.txt (parts):" in prompt
        assert "zebra " * 20 in prompt.partition("File long.txt")[2]
        assert sum(f"{word} {word}" in prompt for word in words) <= 16
        assert "Excerpts that were sent" in browser.text("article.user")
        browser.click("#fresh")
        browser.click("#toggle-settings")
        browser.type("#search-files", "no")
        browser.type("#model", "chat")
        assert f"{words[-1]} {words[-1]}" in ask("zebra")
        assert browser.run("faults") == []


@pytest.mark.exhaustive
@needs_browser
def test_a_pdf_is_attached_as_text(tab: Browser, page: Live, tmp_path: Path) -> None:
    good, bad = tmp_path / "two.pdf", tmp_path / "bad.pdf"
    good.write_bytes(pdf("First page", "Second page"))
    bad.write_bytes(b"%PDF-1.4 nothing")
    tab.call("DOM.enable")
    root = tab.call("DOM.getDocument")["root"]["nodeId"]
    node = tab.call("DOM.querySelector", {"nodeId": root, "selector": "#files"})["nodeId"]
    tab.call("DOM.setFileInputFiles", {"files": [str(good), str(bad)], "nodeId": node})
    tab.wait("document.querySelector('#toasts').innerText.includes('bad.pdf cannot be read')")
    assert tab.text("#attachments").strip() == "two.pdf"
    say(tab, "hello, read this")
    assert "File two.pdf:\n```\nFirst page\n\nSecond page\n```" in asked(page)


# Conversations on the server, in folders, and from other pages.


@pytest.fixture(scope="module")
def stored(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    file = tmp_path_factory.mktemp("store") / "chats.sqlite"
    config = EngineConfig.from_keywords(
        model="M", disable_uvicorn_access_log=True, api_key=["first", "second"],
        chat_store=str(file),
    )  # fmt: skip
    info = scripted_info(tokenizer, config=config, max_model_len=2048)
    with serve_in_thread(ScriptedEngine(tokenizer, Script(), info), config) as live:
        yield live


def test_a_key_finds_its_conversations_again(stored: Live, tmp_path: Path) -> None:
    base = "/chat_page/conversations"
    with stored.client() as http:
        assert http.get(base).status_code == 401
        first, second = ({"Authorization": f"Bearer {key}"} for key in ("first", "second"))
        talk = {"id": "a", "title": "T", "nodes": {}}
        new = {"updated": 20, "conversation": talk}
        assert http.put(f"{base}/a", json=new, headers=first).status_code == 200
        old = {"updated": 10, "conversation": {**talk, "title": "older"}}
        http.put(f"{base}/a", json=old, headers=first)
        assert http.get(f"{base}/a", headers=first).json() == talk
        assert http.get(f"{base}/a", headers=second).status_code == 404
        assert http.get(base, headers=second).json() == {"data": []}
        assert http.get("/page/about.json").json()["chat_store"] is True
        http.put(f"{base}/a", json={"updated": 30}, headers=first)
        (row,) = http.get(base, headers=first).json()["data"]
        assert row == {"id": "a", "updated": 30, "deleted": True}
        assert http.get(f"{base}/a", headers=first).status_code == 404
        wrong = http.put(f"{base}/{'a' * 101}", json=new, headers=first)
        assert wrong.json()["error"]["param"] == "id"
        wrong = http.put(f"{base}/a", json={"updated": -1}, headers=first)
        assert wrong.status_code == 400
    with pytest.raises(ConfigError, match="chat_store"):
        ConversationStore(str(tmp_path / "nowhere" / "chats.sqlite"))


def test_a_key_may_not_store_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "_MOST", 2)
    store = ConversationStore(str(tmp_path / "chats.sqlite"))
    assert [store.put("o", name, 1, b"{}") for name in "abc"] == [True, True, False]
    assert store.put("o", "a", 2, b"{}")
    assert store.put("p", "c", 1, b"{}")
    for name in "abcdef":  # which the owner may never have had
        store.put("p", name, 2, None)
    assert len(store.listed("p")) == 2
    assert all(store.put("p", name, 3, b"{}") for name in "gh")
    assert [one["id"] for one in store.listed("p")] == ["g", "h"]
    assert not store.put("p", "i", 4, None)
    monkeypatch.setattr(conversations, "_MOST_BYTES", 5)
    assert not store.put("p", "g", 4, b"{1234}")


def test_nobody_else_can_read_the_store_at_any_time(tmp_path: Path) -> None:
    """SQLite's files beside it have its mode, and are there before it is ready."""
    path, modes = tmp_path / "chats.sqlite", []

    class Watched(ConversationStore):
        def _open(self) -> Any:
            modes.append(path.stat().st_mode & 0o777)
            return super()._open()

    before = os.umask(0)
    try:
        Watched(str(path))
    finally:
        os.umask(before)
    assert modes == [0o600]


@pytest.mark.exhaustive
def test_a_long_conversation_holds_no_turn_of_the_loop(
    make_server: Callable[..., Live], tmp_path: Path
) -> None:
    live = make_server(chat_store=str(tmp_path / "chats.sqlite"))
    numbers = [number / 7 for number in range(1_900_000)]
    data = json.dumps({"updated": 1, "conversation": {"numbers": numbers}}).encode()
    with live.client() as http:
        http.get("/health")
        beat = Beat(live.loop)
        headers = {"Content-Type": "application/json"}
        answer = http.put("/chat_page/conversations/a", content=data, headers=headers)
    assert beat.end() < BOUND
    assert answer.is_success


@pytest.mark.exhaustive
@needs_browser
def test_the_page_is_in_the_chosen_language(tab: Browser) -> None:
    assert tab.run("document.documentElement.lang") == "en"
    tab.click("#toggle-settings")
    assert tab.each("#language option", "node.label") == [
        "the browser's language", "English", "Deutsch", "Français"
    ]  # fmt: skip
    tab.run("window.before = true")
    tab.type("#language", "de")
    tab.wait(f"!window.before && {READY}")
    assert tab.run("document.documentElement.lang") == "de"
    assert tab.text("#fresh") == "Neuer Chat"
    assert tab.run("document.getElementById('text').placeholder") == "Nachricht"
    say(tab, "hello there", wait=False)
    tab.wait("document.querySelectorAll('[aria-label=\"Noch einmal antworten\"]').length === 1")
    assert "Antwort" in tab.text("article.assistant .figures")
    tab.run(
        "(() => { const label = [...document.querySelectorAll('#settings label')]"
        ".find((each) => each.firstChild.data === 'Temperatur'); const [input] = label.children;"
        " input.value = '9'; input.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    assert "höchstens 2" in tab.text("#settings")
    tab.run("window.before = true")
    tab.type("#language", "")
    tab.wait(f"!window.before && {READY}")
    assert tab.text("#fresh") == "New chat"
    assert tab.run("faults") == []


#: A key that has no conversation yet.
KEYED = "sessionStorage.setItem('modulm.key', 'second')"


@pytest.mark.exhaustive
@needs_browser
def test_another_browser_has_the_same_conversations(
    browser: Browser, stored: Live, tmp_path: Path
) -> None:
    browser.open(stored.url)
    browser.run(KEYED)
    browser.reload()
    say(browser, "hello there")
    headers = {"Authorization": "Bearer second"}
    with stored.client() as http:
        end = time.monotonic() + 300
        while not (data := http.get("/chat_page/conversations", headers=headers).json()["data"]):
            assert time.monotonic() < end
            time.sleep(0.1)
    other = Browser(tmp_path)
    try:
        other.open(stored.url)
        other.run(KEYED)
        other.reload()
        other.wait("document.querySelectorAll('#conversations .open').length === 1")
        other.click("#conversations .open")
        assert "Hello there." in other.text("article.assistant")
        other.click("#conversations .more")
        other.click("#menu button", 5)
        with stored.client() as http:
            while not data[0]["deleted"]:
                assert time.monotonic() < end
                data = http.get("/chat_page/conversations", headers=headers).json()["data"]
    finally:
        other.close()
    browser.reload()
    browser.wait("document.body.innerText.includes('No conversations yet')")
    browser.run("sessionStorage.clear()")


CHATGPT = [{
    "title": "From there", "create_time": 1.0, "update_time": 2.0, "current_node": "c",
    "mapping": {
        "r": {"parent": None, "message": None},
        "a": {"parent": "r", "message": {
            "author": {"role": "user"}, "content": {"parts": ["What is it?"]}}},
        "b": {"parent": "a", "message": {
            "author": {"role": "assistant"}, "content": {"parts": ["Another answer."]}}},
        "c": {"parent": "a", "message": {
            "author": {"role": "assistant"}, "content": {"parts": ["This answer."]}}},
    },
}]  # fmt: skip
OPEN_WEBUI = [{
    "title": "From here", "created_at": 3, "updated_at": 4,
    "chat": {"history": {"currentId": "y", "messages": {
        "x": {"parentId": None, "role": "user", "content": "And?"},
        "y": {"parentId": "x", "role": "assistant", "content": "So."},
    }}},
}]  # fmt: skip


@pytest.mark.exhaustive
@needs_browser
def test_folders_and_conversations_of_other_pages(tab: Browser, tmp_path: Path) -> None:
    files = []
    for name, table in (("chatgpt", CHATGPT), ("open_webui", OPEN_WEBUI)):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(table))
        files.append(str(file))
    tab.call("DOM.enable")
    root = tab.call("DOM.getDocument")["root"]["nodeId"]
    node = tab.call("DOM.querySelector", {"nodeId": root, "selector": "#import-file"})["nodeId"]
    tab.call("DOM.setFileInputFiles", {"files": files, "nodeId": node})
    tab.wait("document.querySelectorAll('#conversations .open').length === 2")
    tab.click("#conversations .open", 1)
    assert "This answer." in tab.text("article.assistant")
    assert tab.text("#conversations .open") == "From here"
    tab.click("#conversations .more")
    tab.click("#menu button", 1)
    tab.type("#conversations .rename", "Work")
    tab.press("Enter")
    assert tab.text("#conversations summary") == "Work"
    tab.reload()
    assert tab.text("#conversations .folder .open") == "From here"
    tab.type("#search", "so.")
    assert tab.count("#conversations .folder") == 0
    assert "So." in tab.text("#conversations .open")
    tab.type("#search", "")
