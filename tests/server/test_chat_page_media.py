"""Images and sound on the chat page: attached, pasted, dropped, recorded, seen and sent."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.types import ASGIApp
from tests.media.checkpoint import SLOTS, write_llava
from tests.media.files import image_file, shade, sound_file, tone, video_file
from tests.server.browser import BROWSER, Browser

from modulm.config import EngineConfig
from modulm_media import Media, MediaFamily, MediaReader, Processed, Sound, Video
from modulm_server.app import Served
from modulm_server.scripted import Reply, ScriptedEngine, scripted_info
from modulm_server.testing import Live, serve_in_thread
from modulm_tokenizers.tokenizer import load_tokenizer
from modulm_towers.testing import images

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium here")

IDLE = "document.querySelector('#send').getAttribute('aria-label') === 'Send'"
(PICTURE,) = images([(300, 200)])


class Senses(MediaFamily):
    """LLaVA that also hears, and sees films."""

    kinds = ("image", "audio", "video")

    def mark(self, kind: str) -> str:
        return super().mark(kind) if kind == "image" else f"<{kind}>"

    def process(self, media: Media, options: Mapping[str, Any]) -> Processed:
        tokens, mask = np.full(3, 479), np.ones(3, dtype=bool)
        if isinstance(media.value, Sound):
            return Processed("audio", tokens, mask, {"samples": media.value.samples})
        if isinstance(media.value, Video):
            tensors = {"frames": media.value.frames, "places": media.value.frame_indices}
            return Processed("video", tokens, mask, tensors)
        return super().process(media, options)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = write_llava(tmp_path_factory.mktemp("senses"))
    tokenizer = load_tokenizer(folder)
    config = EngineConfig.from_keywords(model="M", disable_uvicorn_access_log=True)
    info = scripted_info(tokenizer, config=config, max_model_len=2048, path=str(folder))
    engine = ScriptedEngine(tokenizer, lambda prompt, params: Reply("A tree."), info)

    def sense(served: Served) -> ASGIApp:
        served.generation.media.reader = MediaReader(Senses, info, tokenizer)
        return served.app

    with serve_in_thread(engine, config, sense) as live:
        yield live


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def tab(browser: Browser, page: Live) -> Iterator[Browser]:
    browser.screen(1200, 800)
    browser.open(page.url)
    browser.wait("!document.querySelector('#record').hidden")
    yield browser
    assert browser.run("faults") == []
    assert not browser.elsewhere(page.url)


def attach(tab: Browser, *files: Path) -> None:
    root = tab.call("DOM.getDocument")["root"]["nodeId"]
    node = tab.call("DOM.querySelector", {"nodeId": root, "selector": "#files"})["nodeId"]
    tab.call("DOM.setFileInputFiles", {"files": list(map(str, files)), "nodeId": node})


def give(tab: Browser, event: str) -> None:
    """Let go of, or paste, an image; `event` makes the event of its DataTransfer."""
    data = list(image_file(PICTURE))
    tab.run(
        "{ const data = new DataTransfer();"
        f" data.items.add(new File([new Uint8Array({json.dumps(data)})], 'a.png',"
        " {type: 'image/png'}));"
        f" {event}; }}"
    )


def say(tab: Browser, text: str) -> None:
    tab.type("#text", text)
    tab.run("document.querySelector('#composer').requestSubmit()")
    tab.wait(f"{IDLE} && document.querySelector('article.assistant')?.innerText.includes('tree')")


def sent(page: Live) -> Any:
    """What the engine got last: the media of its prompt."""
    return page.engine.seen[-1][0]["multi_modal_data"]


def test_images_are_attached_pasted_dropped_and_sent(
    tab: Browser, page: Live, tmp_path: Path
) -> None:
    (tmp_path / "tree.png").write_bytes(image_file(PICTURE))
    attach(tab, tmp_path / "tree.png")
    tab.wait("document.querySelectorAll('#attachments img').length === 1")
    give(tab, "dispatchEvent(new DragEvent('drop', {dataTransfer: data}))")
    tab.wait("document.querySelectorAll('#attachments img').length === 2")
    give(tab, "document.querySelector('#text').dispatchEvent(new ClipboardEvent('paste',"
              " {clipboardData: data, bubbles: true}))")  # fmt: skip
    tab.wait("document.querySelectorAll('#attachments img').length === 3")
    tab.wait("document.querySelector('#attachments img').naturalWidth === 300")
    tab.click("#attachments li button")
    assert tab.count("#attachments img") == 2
    say(tab, "What is on them?")
    items = sent(page).items
    assert [item.kind for item in items] == ["image", "image"]
    assert sum(token == 480 for token in sent(page).tokens) == 2 * SLOTS
    assert items[0].hash == items[1].hash
    tab.wait("document.querySelector('article.user .media img').naturalWidth === 300")
    assert tab.run("document.querySelector('#attachments').hidden")
    before = tab.text("article.user .said")
    tab.reload()
    assert tab.text("article.user .said") == before
    assert tab.count("article.user .media img") == 2


@pytest.mark.exhaustive
def test_large_images_and_others_formats_are_drawn_anew(tab: Browser, page: Live) -> None:
    size = tab.run(
        "(async () => { const { readFile } = await import('/page/js/attachments.js');"
        " const canvas = new OffscreenCanvas(4000, 1000); canvas.getContext('2d').fillRect(0, 0, 9,"
        " 9);"
        " const blob = await canvas.convertToBlob({type: 'image/png'});"
        " const made = await readFile(new File([blob], 'a.avif', {type: 'image/avif'}), ['image']);"
        " const image = new Image(); image.src = made.url; await image.decode();"
        " return [made.kind, image.naturalWidth, image.naturalHeight]; })()"
    )
    assert size == ["image", 2048, 512]
    wrong = tab.run(
        "(async () => { const { readFile } = await import('/page/js/attachments.js');"
        " const said = []; for (const [type, kinds] of [['image/png', ['text']],"
        " ['video/mp4', ['image', 'text']], ['image/avif', ['image']]])"
        " await readFile(new File(['x'], 'a', {type}), kinds)"
        ".catch((error) => said.push(error.message));"
        " return said; })()"
    )
    assert wrong == [
        "a: this model does not support images",
        "a: this model does not support video",
        "a is not an image that this browser can show",
    ]


@pytest.mark.exhaustive
def test_sound_is_recorded_heard_and_sent(tab: Browser, page: Live) -> None:
    tab.click("#record")
    tab.wait("document.querySelector('#record').getAttribute('aria-label') === 'Stop recording'")
    tab.run("new Promise((resolve) => setTimeout(resolve, 400))")
    tab.click("#record")
    tab.wait("document.querySelectorAll('#attachments audio').length === 1")
    assert tab.run("document.querySelector('#record').getAttribute('aria-pressed')") == "false"
    say(tab, "What do you hear?")
    (item,) = sent(page).items
    assert item.kind == "audio"
    assert 1000 < len(item.tensors["samples"]) < 16000 * 5
    assert tab.count("article.user .media audio[controls]") == 1


@pytest.mark.exhaustive
def test_a_film_is_attached_and_some_of_its_frames_are_seen(
    tab: Browser, page: Live, tmp_path: Path
) -> None:
    (tmp_path / "film.webm").write_bytes(video_file(40, form="webm", codec="libvpx-vp9"))
    attach(tab, tmp_path / "film.webm")
    tab.wait("document.querySelector('#attachments video')?.videoWidth === 64")
    say(tab, "What happens?")
    (item,) = sent(page).items
    assert item.kind == "video"
    assert item.tensors["frames"].shape == (32, 48, 64, 3)
    assert item.tensors["places"].tolist()[::31] == [0, 39]


def test_films_of_requests(page: Live) -> None:
    """As the API has them: by URL, with how many frames are wanted."""
    data = base64.b64encode(video_file(40)).decode()
    url = f"data:video/mp4;base64,{data}"
    part = {"type": "video_url", "video_url": {"url": url}}
    sound = base64.b64encode(sound_file(tone(0.2, 8000), 8000, "MP3")).decode()
    heard = {"type": "audio_url", "audio_url": {"url": f"data:audio/mpeg;base64,{sound}"}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": [part, heard]}]}
    body["media_io_kwargs"] = {"video": {"num_frames": 4}}
    with page.client() as http:
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        film, noise = sent(page).items
        greys = film.tensors["frames"][:, 24, 32].mean(-1)
        assert film.tensors["places"].tolist() == [0, 13, 26, 39]
        assert np.abs(greys - [shade(index) for index in (0, 13, 26, 39)]).max() < 9
        assert abs(len(noise.tensors["samples"]) - 3200) < 1200
        for kind, wrong in (("video", sound), ("audio", data)):
            bad = {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:;base64,{wrong}"}}
            answer = http.post(
                "/v1/chat/completions", json={"messages": [{"role": "user", "content": [bad]}]}
            )
            assert answer.status_code == 400
            message = answer.json()["error"]["message"]
            assert message.startswith(f"messages[0].content[0].{kind}_url: it has no {kind}")


@pytest.mark.exhaustive
def test_what_was_attached_is_exported_and_read_again(tab: Browser) -> None:
    attachments = tab.run(
        "(async () => { const { toMarkdown, fromText } = await import('/page/js/export.js');"
        " const { add, newConversation, path } = await import('/page/js/tree.js');"
        " const first = newConversation(); const url = 'data:image/png;base64,AAAA';"
        " add(first, null, {role: 'user', content: 'Look', attachments: ["
        "  {kind: 'image', name: 'a.png', url}, {kind: 'text', name: 'b', text: 'c'}]});"
        " const [again] = fromText(toMarkdown(first)); return path(again)[0].attachments; })()"
    )
    assert attachments == [
        {"kind": "image", "name": "a.png", "url": "data:image/png;base64,AAAA"},
        {"kind": "text", "name": "b", "text": "c"},
    ]
