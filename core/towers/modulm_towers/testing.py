"""The kit for models that read images: the engine's answers against transformers' own.

    FAMILY = ImageFamily(
        LlavaForConditionalGeneration,
        tokens={"image_token": "<image>"},
        processor=lambda tokenizer: LlavaProcessor(image_processor, tokenizer, ...),
    )

    def test_family(tmp_path):
        check_images(FAMILY, tmp_path)

A tiny random checkpoint of the driver's `tiny()` is written with transformers, with a real
processor beside it. The special tokens of `tokens` have the ids from 480 on, in their order. What
is compared is whole vocabularies of log probabilities in fp32, of every token of prompts and
answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import field, frozen

import modulm
from modulm.testing.checkpoints import make_tiny, make_tokenizer
from modulm_media.processors import load_processor

if TYPE_CHECKING:
    from PIL.Image import Image

    from modulm.contracts.model import Model

__all__ = ["ImageFamily", "check_images", "images", "write_family"]

#: The first id of a family's own special tokens.
FIRST = 480
TOLERANCE = 1e-3
_ANSWER = 6


@frozen(eq=False)
class ImageFamily:
    """tokens: attribute of the tokenizer -> special token, or more tokens under numbers.
    processor: makes the real one. mark: what stands for an image in prompts, the processor's
    `image_token` if it is empty. sizes: (width, height) of the images. loads: the class of
    transformers that opens the checkpoint. chunk: tokens of a piece of a prompt; images that look
    both ways have to fit.
    """

    driver: type[Model]
    tokens: Mapping[str, str]
    processor: Callable[[Any], Any]
    mark: str = ""
    sizes: tuple[tuple[int, int], ...] = ((56, 42), (30, 60), (44, 44))
    changes: Mapping[str, Any] = field(factory=dict)
    loads: str = "AutoModelForImageTextToText"
    chunk: int = 7

    @property
    def architecture(self) -> str:
        """What config.json calls it."""
        name: str = self.driver.tiny()["architectures"][0]
        return name


def images(sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[Image]:
    """Random pictures, coarse enough for any resizing to keep them apart."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    coarse = [Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)) for _ in sizes]
    return [picture.resize(size) for picture, size in zip(coarse, sizes, strict=True)]


def write_family(family: ImageFamily, folder: Path) -> Path:
    """The tiny checkpoint with its tokenizer and processor."""
    from transformers import AutoTokenizer

    make_tiny(folder, family.architecture, **family.changes)
    make_tokenizer(folder, vocab=FIRST)
    named = {name: token for name, token in family.tokens.items() if not name.isdigit()}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.tokens.values())})
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    table = json.loads(settings.read_text())
    settings.write_text(json.dumps({**table, "extra_special_tokens": named, **named}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in family.tokens.values()]
    assert ids == list(range(FIRST, FIRST + len(ids))), f"special tokens have the ids {ids}"
    family.processor(tokenizer).save_pretrained(folder)
    load_processor.cache_clear()
    return folder


def check_images(family: ImageFamily, folder: Path, **flags: Any) -> None:
    """One and several images, mixed batches, prompts in pieces, prefixes found again, rows that
    were preempted: as transformers has it. Raises AssertionError with what was expected.
    """
    write_family(family, folder)
    reference = _Reference(family, folder)
    pictures = images(family.sizes)
    mark = family.mark or str(reference.processor.image_token)
    prompts = [
        (f"The capital {mark} of France is", pictures[:1]),
        ("Once upon a time there was a small cat", []),
        (f"Hello {mark} how {mark} are you", pictures[:2]),
        (f"The capital {mark} of France is", pictures[2:]),
    ]
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_logprobs": -1}
    settings |= {"attention_backend": "sdpa", "block_size": 16, **flags}
    with modulm.LLM(str(folder), **settings) as llm:
        answers = _ask(llm, prompts, whole=True)
        for prompt, answer in zip(prompts, answers, strict=True):
            reference.compare(prompt, answer)
        again = _ask(llm, prompts)
        assert any(answer.num_cached_tokens for answer in again), "no prefix was found again"
        _same(again, answers, "after prefixes were found again")
    settings["enable_prefix_caching"] = False
    with modulm.LLM(str(folder), **settings, long_prefill_token_threshold=family.chunk) as llm:
        _same(_ask(llm, prompts), answers, f"in pieces of {family.chunk}")
    # All prompts find room together, but not what they go on to say; windows need less.
    blocks = sum(-(-len(answer.prompt_token_ids) // 16) for answer in answers)
    for spare in (2, -1, -4):
        with modulm.LLM(str(folder), **settings, num_gpu_blocks_override=blocks + spare) as llm:
            counted = _Counted()
            llm.count_by(counted)
            _same(_ask(llm, prompts, most=3 * 16), answers, "after rows were preempted")
        if counted.preempted:
            return
    raise AssertionError("nothing was preempted")


class _Counted:
    preempted = 0

    def step(self, stats: Any) -> None:
        self.preempted += stats.preempted

    def gaps(self, seconds: Any) -> None: ...

    def finished(self, request: Any) -> None: ...


class _Reference:
    """The checkpoint in transformers."""

    def __init__(self, family: ImageFamily, folder: Path) -> None:
        import transformers

        self.processor = load_processor(str(folder), str(folder))
        self.model = getattr(transformers, family.loads).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self.model.eval()

    def compare(self, prompt: tuple[str, list[Image]], answer: Any) -> None:
        text, pictures = prompt
        given = {"images": pictures} if pictures else {}
        inputs = self.processor(text=[text], add_special_tokens=False, return_tensors="pt", **given)
        ids = inputs["input_ids"][0].tolist()
        assert answer.prompt_token_ids == ids, (
            f"{text!r} became {answer.prompt_token_ids}, transformers has {ids}"
        )
        (choice,) = answer.outputs
        for name, tensor in inputs.items():
            if name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
                more = torch.tensor([choice.token_ids[:-1]])
                more = more if name == "input_ids" else torch.full_like(more, name[0] == "a")
                inputs[name] = torch.cat([tensor, more], dim=1)
        with torch.inference_mode():
            expected = self.model(**inputs).logits[0].float().log_softmax(-1)
        found = [*answer.prompt_logprobs[1:], *choice.logprobs]
        assert len(found) == len(expected), f"{len(found)} tokens, transformers has {len(expected)}"
        table = torch.tensor([[entry[i].logprob for i in range(len(entry))] for entry in found])
        worst = (table - expected).abs().amax(-1)
        assert worst.max() <= TOLERANCE, (
            f"{text!r}: log probabilities differ by {worst.max():.2g} at token "
            f"{int(worst.argmax())} of {len(found)}, the first at "
            f"{int((worst > TOLERANCE).nonzero()[0])}"
        )
        assert choice.token_ids == expected[len(ids) - 1 :].argmax(-1).tolist()


def _ask(
    llm: Any,
    prompts: Sequence[tuple[str, list[Image]]],
    *,
    whole: bool = False,
    most: int = _ANSWER,
) -> list[Any]:
    params = modulm.SamplingParams(
        temperature=0,
        max_tokens=most,
        ignore_eos=True,
        logprobs=-1,
        prompt_logprobs=-1 if whole else None,
    )
    asked: list[Any] = [
        {"prompt": text, "multi_modal_data": {"image": pictures}} if pictures else text
        for text, pictures in prompts
    ]
    found: list[Any] = llm.generate(asked, params, use_tqdm=False)
    for answer in found:
        (choice,) = answer.outputs
        assert choice.finish_reason == "length", f"{choice.finish_reason}: {choice.stop_reason}"
    return found


def _same(found: Sequence[Any], expected: Sequence[Any], what: str) -> None:
    for one, other in zip(found, expected, strict=True):
        (choice,), (before,) = one.outputs, other.outputs
        count = len(before.token_ids)
        assert choice.token_ids[:count] == before.token_ids, f"other tokens {what}"
        for entry, known in zip(choice.logprobs[:count], before.logprobs, strict=True):
            worst = max(abs(entry[i].logprob - known[i].logprob) for i in known)
            assert worst <= TOLERANCE, f"log probabilities differ by {worst:.2g} {what}"
