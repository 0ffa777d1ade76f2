"""Prompts with images, from the caller to the engine and back, on one tiny checkpoint."""

from __future__ import annotations

import base64
import io

import pytest
from tests.media.checkpoint import SLOTS, write_llava

import modulm
from modulm import SamplingParams
from modulm.errors import ConfigError, RequestError
from modulm_media.flags import MediaConfig
from modulm_media.reader import most_of
from modulm_towers.testing import images

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0)
TEXT = "What is <image> here"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def llm(folder):
    flags = {"limit_mm_per_prompt": {"image": 2}, "block_size": 16, "attention_backend": "sdpa"}
    with modulm.LLM(str(folder), device="cpu", dtype="float32", **flags) as llm:
        yield llm


@pytest.fixture(scope="module")
def pictures():
    return images([(30, 30), (40, 20), (20, 40)])


def ask(llm, image, text=TEXT, **more):
    prompt = {"prompt": text, "multi_modal_data": {"image": image}, **more}
    (answer,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    return answer


def test_a_placeholder_becomes_as_many_tokens_as_the_image_has(llm, pictures):
    answer = ask(llm, pictures[0])
    mark = llm.tokenizer.encode("<image>", add_special_tokens=False)[0]
    assert answer.prompt_token_ids.count(mark) == SLOTS
    expanded = {"prompt_token_ids": answer.prompt_token_ids}
    (same,) = llm.generate(
        {**expanded, "multi_modal_data": {"image": pictures[0]}}, GREEDY, use_tqdm=False
    )
    assert same.prompt_token_ids == answer.prompt_token_ids
    assert same.outputs[0].token_ids == answer.outputs[0].token_ids


def test_prefixes_are_known_by_their_images(llm, pictures):
    llm.reset_prefix_cache()
    text = f"{TEXT} and then some more words so that a block behind it is full"
    first, again = ask(llm, pictures[0], text), ask(llm, pictures[0], text)
    other = ask(llm, pictures[1], text)
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens >= 32
    assert other.num_cached_tokens < SLOTS
    logprobs = [answer.outputs[0].cumulative_logprob for answer in (first, again, other)]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-4)
    assert logprobs[2] != pytest.approx(logprobs[0], abs=1e-4)


def test_the_same_image_is_processed_and_encoded_once(llm, pictures, monkeypatch):
    family = llm._input_processor.media.family
    calls = []
    process = family.process
    monkeypatch.setattr(family, "process", lambda *a: calls.append(1) or process(*a))
    fresh = images([(31, 33)], seed=5)[0]
    ask(llm, [fresh, fresh], "<image> and <image>")
    ask(llm, fresh, "What is <image> now")
    assert len(calls) == 1


def test_what_was_sent_before_can_be_named(llm, pictures):
    uuids = {"multi_modal_uuids": {"image": ["a picture"]}}
    sent = ask(llm, pictures[2], **uuids)
    reused = ask(llm, [None], **uuids)
    assert reused.outputs[0].token_ids == sent.outputs[0].token_ids
    with pytest.raises(RequestError, match="send its data again") as caught:
        ask(llm, [None], multi_modal_uuids={"image": ["another"]})
    assert caught.value.param == "multi_modal_uuids"


def test_keywords_for_the_processor_change_what_is_made(llm, pictures):
    plain = ask(llm, pictures[0])
    dark = ask(llm, pictures[0], mm_processor_kwargs={"image_mean": [0.0, 0.0, 0.0]})
    assert dark.outputs[0].cumulative_logprob != plain.outputs[0].cumulative_logprob


@pytest.mark.parametrize(
    ("prompt", "param", "message"),
    [
        ({"prompt": "no mark"}, "prompt", "0 placeholders '<image>' for 1 image items"),
        ({"prompt": "<image> <image>"}, "prompt", "2 placeholders"),
        (
            {"prompt": TEXT, "multi_modal_data": {"audio": [0.5] * 9}},
            "audio",
            "does not support audio",
        ),
        ({"prompt": "<image>" * 3, "multi_modal_data": {"image": [1, 2, 3]}}, "image", "at most 2"),
        ({"prompt": TEXT, "mm_processor_kwargs": {"size": "x"}}, "multi_modal_data", "processor"),
        ({"prompt": TEXT, "mm_processor_kwargs": 7}, "mm_processor_kwargs", "a mapping"),
        ({"prompt": TEXT, "multi_modal_data": {"image": "/no/such"}}, "multi_modal_data", "such"),
    ],
)
def test_bad_prompts_name_the_field(llm, pictures, prompt, param, message):
    data = prompt.get("multi_modal_data", {"image": pictures[0]})
    if data.get("image") == [1, 2, 3]:
        data = {"image": pictures}
    with pytest.raises(RequestError, match=message) as caught:
        llm.generate({**prompt, "multi_modal_data": data}, GREEDY)
    assert caught.value.param == param


def test_prompts_with_media_are_not_cut(llm, pictures):
    params = SamplingParams(max_tokens=1, truncate_prompt_tokens=5)
    with pytest.raises(RequestError, match="cannot be truncated"):
        llm.generate({"prompt": TEXT, "multi_modal_data": {"image": pictures[0]}}, params)


def test_limits_are_checked_at_the_start():
    assert most_of(MediaConfig(limit_mm_per_prompt={"image": {"count": 3}}), "image") == 3
    assert most_of(MediaConfig(), "video") == 999
    assert most_of(MediaConfig(language_model_only=True), "image") == 0
    for wrong in ({"pictures": 1}, {"image": -1}, {"image": "many"}):
        with pytest.raises(ConfigError, match="limit_mm_per_prompt"):
            MediaConfig(limit_mm_per_prompt=wrong)


def url(picture):
    data = io.BytesIO()
    picture.save(data, "PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


@pytest.mark.parametrize("form", ["image_url", "plain url", "image_pil", "image", "file", "path"])
def test_messages_have_images_in_all_forms(llm, pictures, form, tmp_path):
    pictures[0].save(tmp_path / "a.png")
    part = {
        "image_url": {"type": "image_url", "image_url": {"url": url(pictures[0])}},
        "plain url": {"type": "image_url", "image_url": url(pictures[0])},
        "image_pil": {"type": "image_pil", "image_pil": pictures[0]},
        "image": {"type": "image", "image": pictures[0]},
        "file": {"type": "image_url", "image_url": {"url": f"file://{tmp_path / 'a.png'}"}},
        "path": {"type": "image", "image": str(tmp_path / "a.png")},
    }[form]
    content = [part, {"type": "text", "text": "What is this?"}]
    (answer,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    expected = ask(
        llm, pictures[0],
        "<|im_start|>user\n<image>\nWhat is this?<|im_end|>\n<|im_start|>assistant\n",
    )  # fmt: skip
    assert answer.prompt_token_ids == expected.prompt_token_ids
    assert answer.outputs[0].token_ids == expected.outputs[0].token_ids


def test_templates_that_want_parts_are_given_parts(llm, pictures):
    """What the user writes is text, also where it is what stands for an image."""
    template = (
        "{% for m in messages %}{% for p in m.content %}"
        "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endfor %}"
    )
    content = [{"type": "text", "text": "is <image>"}, {"type": "image", "image": pictures[0]}]
    (answer,) = llm.chat(
        [{"role": "user", "content": content}], GREEDY, use_tqdm=False, chat_template=template
    )
    mark = llm.tokenizer.encode("<image>", add_special_tokens=False)[0]
    assert answer.prompt_token_ids.count(mark) == SLOTS
    assert answer.prompt_token_ids[-1] == mark


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a"}}, "no public address"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "not an image"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,AAAA"}}, "base64"),
        ({"type": "image_url", "image_url": "/no/such.png"}, "no such file"),
        (
            {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
            "does not support audio",
        ),
        ({"type": "audio", "audio": [0.5] * 8}, "does not support audio"),
    ],
)
def test_bad_parts_of_messages(llm, part, message):
    with pytest.raises(RequestError, match=message) as caught:
        llm.chat([{"role": "user", "content": [part]}], GREEDY)
    assert f"messages[0].content[0].{part['type']}: " in caught.value.message
