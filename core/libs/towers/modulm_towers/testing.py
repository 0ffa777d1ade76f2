"""The test kit for models that read images or audio: compares the engine with transformers.

    FAMILY = ImageFamily(
        LlavaForConditionalGeneration,
        tokens={"image_token": "<image>"},
        processor=lambda tokenizer: LlavaProcessor(image_processor, tokenizer, ...),
    )

    def test_family(tmp_path):
        check_images(FAMILY, tmp_path)

A tiny random checkpoint of the driver's `tiny()` is written with transformers and a real processor.
The special tokens of `tokens` have consecutive ids from 480. The log probabilities of the whole
vocabulary are compared in fp32, for every token of prompts and answers.

Of a checkpoint that transformers cannot open, compare whole prompts with the published equations,
and then execute it in other ways:

    check_execution(folder, requests)  # chunks, cached prefixes, preemption, two ranks
    check_weights(folder, requests)  # an adapter, int8, weights stored in fp8
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

import modulm
from modulm import LoRARequest
from modulm.plugins import manager
from modulm.testing.adapters import write_lora
from modulm.testing.checkpoints import make_tiny, make_tokenizer
from modulm_media.reader import load_processor
from modulm_media.values import Video

if TYPE_CHECKING:
    from PIL.Image import Image

    from modulm.contracts.model import Model

__all__ = [
    "ImageFamily",
    "Prompt",
    "SoundFamily",
    "check_execution",
    "check_images",
    "check_weights",
    "films",
    "images",
    "processor_of",
    "prompts_of",
    "sounds",
    "write_family",
]

#: The first id of a family's special tokens.
FIRST = 480
TOLERANCE = 1e-3
_ANSWER = 6
#: Log probabilities compared per token.
_LIKELIEST = 8
#: Settings of all engines of the kit.
SETTINGS: Mapping[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_logprobs": -1, "attention_backend": "sdpa",
    "block_size": 16,
}  # fmt: skip
#: Linear layers of text models, by their names in files.
_LINEAR = re.compile(
    r"\b(layers|h|blocks)\.\d+\.(self_attn|self_attention|attention|attn|mixer|mlp|feed_forward)\."
    r"(q_proj|k_proj|v_proj|qkv_proj|qkv|o_proj|dense|out_proj|wqkv|wo|w1|w2|w3|gate_proj|up_proj|"
    r"gate_up_proj|down_proj|fc1|fc2|to_q|to_k|to_v|to_out)\.weight$"
)
#: Parts of checkpoints that are not the text model. Qianfan-OCR's text layers are `model.encoder`,
#: DeepSeek-OCR 2's encoder is a Qwen 2, and Cosmos 3's has blocks without a prefix.
_ENCODERS = re.compile(
    r"vision|visual|audio|sound|tower|(?<!language_model\.model\.)encoder|resampler|projector|"
    r"perceiver|sam_model|qwen2_model|^blocks\.|aligner|"
    r"vit|vpm|apm|whisper|connector|lid|eh_proj|mtp|merger|vae|moe_gen"
)
_NOTHING = re.compile(r"(?!)")
_RANK = 4
#: An int8 model's log probabilities correlate with the original's; an unrelated model's do not.
_CORRELATION = 0.8
#: Model inputs with an entry for each token of a prompt.
_PER_TOKEN = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}
)


@frozen(eq=False)
class ImageFamily:
    """A family under test.

    tokens: tokenizer attribute -> special token, or additional tokens under numbers. processor:
    creates the real processor. mark: the placeholder of an image in prompts; empty for the
    processor's `image_token`. sizes: (width, height) of the images. loads: transformers' class that
    opens the checkpoint; empty for the architecture. chunk: tokens per prompt chunk; images with
    bidirectional attention must fit. prefix: prompts with images attend in both directions
    throughout, and there are no prompts without. videos: (frames, width, height), for models that
    take them. video_mark: the placeholder of a video. mixes: whether transformers accepts images
    and videos in one prompt. several: whether prompts may have several items. reuses: whether
    prefixes of such short prompts are cached, which is not so with recurrent layers. native:
    whether ranks, adapters and quantized weights are supported.
    """

    driver: type[Model]
    tokens: Mapping[str, str]
    processor: Callable[[Any], Any]
    mark: str = ""
    sizes: tuple[tuple[int, int], ...] = ((56, 42), (30, 60), (44, 44))
    changes: Mapping[str, Any] = field(factory=dict)
    loads: str = "AutoModelForImageTextToText"
    chunk: int = 7
    prefix: bool = False
    videos: tuple[tuple[int, int, int], ...] = ((4, 44, 30), (6, 30, 44))
    video_mark: str = ""
    mixes: bool = True
    several: bool = True
    reuses: bool = True
    native: bool = True
    kind: ClassVar[str] = "image"
    #: The keyword of transformers' processors for a list of items.
    keyword: ClassVar[str] = "images"

    def items(self) -> Sequence[Any]:
        """The images (or other items) of the prompts."""
        return images(self.sizes)

    def further(self, mark: str) -> Sequence[Prompt]:
        """Additional prompts for this family only; mark: the placeholder of an item."""
        return ()

    def model_inputs(self, processor: Any, prompt: Prompt) -> Mapping[str, Any]:
        """Inputs of transformers' model for a prompt."""
        media: dict[str, Any] = {self.keyword: list(prompt.items)} if prompt.items else {}
        if prompt.videos:
            media["videos"] = [video.frames for video in prompt.videos]
            media["video_metadata"] = [video.metadata() for video in prompt.videos]
            media["do_sample_frames"] = False
        inputs: Mapping[str, Any] = processor(
            text=[prompt.text], add_special_tokens=False, return_tensors="pt", **media
        )
        return inputs

    def rewrite(self, folder: Path) -> None:
        """Change the written checkpoint, before either library reads it."""

    @property
    def architecture(self) -> str:
        """The name in config.json."""
        name: str = self.driver.tiny()["architectures"][0]
        return name


@frozen(eq=False)
class SoundFamily(ImageFamily):
    """A family that reads audio.

    seconds: durations of its sounds at 16 kHz. inputs: makes the inputs of transformers' model from
    processor, text and sounds, if the processor alone does not.
    """

    seconds: tuple[float, ...] = (0.32, 0.2, 0.45)
    inputs: Callable[[Any, str, Sequence[Any]], Mapping[str, Any]] | None = None
    loads: str = ""
    videos: tuple[tuple[int, int, int], ...] = ()
    kind: ClassVar[str] = "audio"
    keyword: ClassVar[str] = "audio"

    def items(self) -> Sequence[Any]:
        """The sounds of the prompts."""
        return sounds(self.seconds)

    def model_inputs(self, processor: Any, prompt: Prompt) -> Mapping[str, Any]:
        """Inputs of transformers' model for a prompt."""
        if self.inputs is None:
            return super().model_inputs(processor, prompt)
        return self.inputs(processor, prompt.text, prompt.items)


def sounds(seconds: Sequence[float], seed: int = 0) -> list[np.ndarray]:
    """[n] float32 each, noise of varying loudness at 16 kHz."""
    rng = np.random.default_rng(seed)
    waves = []
    for length in seconds:
        noise = rng.normal(0, 0.2, int(length * 16000))
        waves.append((noise * np.sin(np.linspace(0, 9, len(noise)))).astype(np.float32))
    return waves


def images(sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[Image]:
    """Random images, coarse enough to stay distinct after resizing."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    coarse = [Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)) for _ in sizes]
    return [picture.resize(size) for picture, size in zip(coarse, sizes, strict=True)]


def films(sizes: Sequence[tuple[int, int, int]]) -> list[Video]:
    """Random videos with 4 frames per second."""
    videos = []
    for seed, (frames, width, height) in enumerate(sizes):
        pictures = images([(width, height)] * frames, 100 + seed)
        videos.append(Video(np.stack([np.asarray(picture) for picture in pictures]), 4.0))
    return videos


@frozen(eq=False)
class Prompt:
    """A prompt with the items of its placeholders: of the family's kind, and videos."""

    text: str
    items: Sequence[Any] = ()
    videos: Sequence[Video] = ()

    def request(self, kind: str) -> Any:
        """The prompt for `LLM.generate`."""
        data: dict[str, Any] = {}
        if self.items:
            data[kind] = list(self.items)
        if self.videos:
            data["video"] = [(video.frames, {"fps": video.fps}) for video in self.videos]
        return {"prompt": self.text, "multi_modal_data": data} if data else self.text


def prompts_of(family: ImageFamily, processor: Any) -> list[Prompt]:
    """Prompts with one item, several, none, and videos (alone and mixed) if the model takes
    them.
    """
    items = family.items()
    mark = family.mark or str(getattr(processor, f"{family.kind}_token"))
    prompts = [
        Prompt(f"The capital {mark} of France is", items[:1]),
        Prompt("Once upon a time there was a small cat"),
        Prompt(f"The capital {mark} of France is", items[2:]),
    ]
    if family.several:
        prompts.insert(2, Prompt(f"Hello {mark} how {mark} are you", items[:2]))
    prompts += family.further(mark)
    if family.prefix:
        prompts = [prompt for prompt in prompts if prompt.items]
    if "video" in family.driver.media and family.videos:
        videos = films(family.videos)
        film = family.video_mark or str(processor.video_token)
        prompts.append(Prompt(f"The film {film} is about", (), videos[1:]))
        between, beside = (mark, items[1:2]) if family.mixes else ("this", ())
        prompts.append(Prompt(f"First {film} then {between} and {film} of", beside, videos))
    return prompts


def write_family(family: ImageFamily, folder: Path) -> Path:
    """Write the tiny checkpoint with its tokenizer and processor."""
    from transformers import AutoTokenizer

    make_tiny(folder, family.architecture, **family.changes)
    family.rewrite(folder)
    make_tokenizer(folder, vocab=FIRST)
    token_attributes = {name: token for name, token in family.tokens.items() if not name.isdigit()}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.tokens.values())})
    tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    table = json.loads(settings.read_text())
    settings.write_text(
        json.dumps({**table, "extra_special_tokens": token_attributes, **token_attributes})
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer.convert_tokens_to_ids(token) for token in family.tokens.values()]
    assert ids == list(range(FIRST, FIRST + len(ids))), f"special tokens have the ids {ids}"
    family.processor(tokenizer).save_pretrained(folder)
    load_processor.cache_clear()
    return folder


def check_images(
    family: ImageFamily, folder: Path, *, separately: bool = True, **flags: Any
) -> None:
    """Compare answers with transformers.

    Covers one and several items, mixed batches, chunked prompts, encoders in pieces, cached
    prefixes, and preemption. separately: also test pieces without preemption, two ranks, an
    adapter, int8 and stored fp8. Raises AssertionError with the difference.
    """
    write_family(family, folder)
    reference = _Reference(family, folder)
    prompts = prompts_of(family, reference.processor)
    requests = [prompt.request(family.kind) for prompt in prompts]
    settings = {**SETTINGS, **flags}
    with modulm.LLM(str(folder), **settings) as llm:
        answers = _ask(llm, requests, whole=True)
        for prompt, answer in zip(prompts, answers, strict=True):
            reference.compare(prompt, answer)
        again = _ask(llm, requests)
        if family.reuses:
            assert any(answer.num_cached_tokens for answer in again), "no prefix was reused"
        _check_same(again, answers, "after prefixes were reused")
    settings |= {"enable_prefix_caching": False, "mm_encoder_chunk": 1}
    pieces: dict[str, Any] = {"long_prefill_token_threshold": family.chunk}
    if not separately:
        _check_preempted(folder, requests, answers, settings | pieces)
        return
    with modulm.LLM(str(folder), **settings, **pieces) as llm:
        _check_same(_ask(llm, requests), answers, f"in pieces of {family.chunk}")
    _check_preempted(folder, requests, answers, settings)
    if family.native:
        _check_ranks(folder, requests, answers, settings)
        check_weights(folder, requests, chunk=family.chunk, **flags)


def processor_of(architecture: str, folder: Path, otherwise: str = "") -> Any:
    """Return a checkpoint's processor. otherwise: media family of architectures without one."""
    known = {declared.name for declared in manager.current().names("media_families")}
    name = architecture if architecture in known else otherwise
    return load_processor(manager.current().load("media_families", name), str(folder))


class _Reference:
    """The checkpoint in transformers."""

    def __init__(self, family: ImageFamily, folder: Path) -> None:
        import transformers

        self.family = family
        self.prefix = family.prefix
        self.processor = processor_of(family.architecture, folder, family.driver.media_family)
        self.model = getattr(transformers, family.loads or family.architecture).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self.model.eval()

    def compare(self, prompt: Prompt, answer: Any) -> None:
        text = prompt.text
        inputs = dict(self.family.model_inputs(self.processor, prompt))
        ids = inputs["input_ids"][0].tolist()
        assert answer.prompt_token_ids == ids, (
            f"{text!r} became {answer.prompt_token_ids}, transformers has {ids}"
        )
        (choice,) = answer.outputs
        # transformers would expect media for placeholders that the model generated.
        generated = [*takewhile(lambda token: token < FIRST, choice.token_ids[:-1])]
        inputs.pop("labels", None)
        for name, tensor in inputs.items():
            if name == "cross_attention_mask":
                inputs[name] = torch.cat([tensor, *[tensor[:, -1:]] * len(generated)], dim=1)
            if name in _PER_TOKEN:
                more = torch.tensor([generated], dtype=tensor.dtype)
                if name != "input_ids":
                    more = torch.full_like(more, name == "attention_mask" or self.prefix)
                inputs[name] = torch.cat([tensor, more], dim=1)
        with torch.inference_mode():
            expected = self.model(**inputs).logits[0].float().log_softmax(-1)
        logprobs = [*answer.prompt_logprobs[1:], *choice.logprobs[: len(generated) + 1]]
        assert len(logprobs) == len(expected), (
            f"{len(logprobs)} tokens, transformers has {len(expected)}"
        )
        # Tokens outside transformers' head are never generated.
        entries = range(expected.shape[1])
        table = torch.tensor([[entry[i].logprob for i in entries] for entry in logprobs])
        worst = (table - expected).abs().amax(-1)
        assert worst.max() <= TOLERANCE, (
            f"{text!r}: log probabilities differ by {worst.max():.2g} at token "
            f"{int(worst.argmax())} of {len(logprobs)}, the first at "
            f"{int((worst > TOLERANCE).nonzero()[0])}"
        )
        best = expected[len(ids) - 1 :].argmax(-1).tolist()
        assert choice.token_ids[: len(generated) + 1] == best


def check_execution(
    folder: Path,
    requests: Sequence[Any],
    *,
    chunk: int = 7,
    reuses: bool = True,
    ranks: bool = True,
    **flags: Any,
) -> list[Any]:
    """Compare answers with those of whole prompts: after a prefix hit, of prompts in chunks with
    encoders in pieces, of preempted rows, and over two ranks. Returns the answers.

    chunk: tokens per prompt chunk. reuses: whether prefixes of such short prompts are cached.
    ranks: whether to try two ranks. Raises AssertionError with the difference.
    """
    # Short prompts fill small blocks, of which a prefix is reused.
    settings = {**SETTINGS, "block_size": 4, **flags}
    with modulm.LLM(str(folder), **settings) as llm:
        answers = _ask(llm, requests)
        again = _ask(llm, requests)
    assert not reuses or any(answer.num_cached_tokens for answer in again), "no prefix was reused"
    _check_same(again, answers, "after prefixes were reused")
    settings |= {"enable_prefix_caching": False, "mm_encoder_chunk": 1}
    with modulm.LLM(str(folder), **settings, long_prefill_token_threshold=chunk) as llm:
        _check_same(_ask(llm, requests), answers, f"in pieces of {chunk}")
    _check_preempted(folder, requests, answers, settings)
    if ranks:
        _check_ranks(folder, requests, answers, settings)
    return answers


def _check_ranks(
    folder: Path, requests: Sequence[Any], answers: Sequence[Any], settings: Mapping[str, Any]
) -> None:
    """Check answers of two ranks, which split encoders and text model."""
    with modulm.LLM(str(folder), **{**settings, "tensor_parallel_size": 2}) as llm:
        _check_same(_ask(llm, requests), answers, "over two ranks")


def _check_preempted(
    folder: Path, requests: Sequence[Any], answers: Sequence[Any], settings: Mapping[str, Any]
) -> None:
    """Check answers of preempted rows.

    All prompts fit into the cache together, but not with their answers, which grow by three blocks.
    Small blocks need few tokens; models with windows need longer answers and a smaller cache.
    """
    for size, spare in ((4, 2), (16, 2), (16, -1), (16, -4)):
        blocks = sum(-(-len(answer.prompt_token_ids) // size) for answer in answers)
        small = {**settings, "block_size": size, "num_gpu_blocks_override": blocks + spare}
        with modulm.LLM(str(folder), **small) as llm:
            counted = _Counted()
            llm.count_by(counted)
            _check_same(_ask(llm, requests, most=3 * size), answers, "after rows were preempted")
        if counted.preempted:
            return
    raise AssertionError("nothing was preempted")


class _Counted:
    preempted = 0

    def step(self, stats: Any) -> None:
        self.preempted += stats.preempted

    def parts(self, counts: Any) -> None: ...

    def gaps(self, seconds: Any) -> None: ...

    def finished(self, request: Any) -> None: ...


def check_weights(
    folder: Path,
    requests: Sequence[Any],
    *,
    chunk: int = 7,
    linear: str | None = None,
    **flags: Any,
) -> None:
    """Check the text model's weights with an adapter, rounded to int8, and stored in fp8.

    The adapter and the fp8 codes are compared with a checkpoint of the same products, merged or
    decoded. int8 is compared with the original by correlation. linear: a regular expression of the
    weights, by their names in files, where the usual ones do not occur. Raises AssertionError.
    """
    settings = {**SETTINGS, **flags, "enable_prefix_caching": False}
    chunks: dict[str, Any] = {"long_prefill_token_threshold": chunk}
    with modulm.LLM(str(folder), **settings) as llm:
        answers = _ask(llm, requests)
        tables = _tables(llm, requests)
    weights = _weights(folder)
    layers = _LINEAR if linear is None else re.compile(linear)
    encoders = _ENCODERS if linear is None else _NOTHING
    text = [name for name in weights if layers.search(name) and not encoders.search(name)]
    names = [name for name in text if weights[name].dim() == 2]
    assert names, f"no layer of a text model among {sorted(weights)[:40]}"
    _check_adapter(folder, requests, answers, {name: weights[name] for name in names},
                   {**settings, **chunks})  # fmt: skip
    with modulm.LLM(str(folder), **settings, **chunks, quantization="int8") as llm:
        rounded = _tables(llm, requests)
    for request, one, other in zip(requests, rounded, tables, strict=True):
        assert not torch.equal(one, other), "int8 changes nothing"
        correlation = float(torch.corrcoef(torch.stack([one, other]))[0, 1])
        assert correlation > _CORRELATION, f"int8 answers {request} otherwise: {correlation:.2f}"
    paths = [name[_layer(name, layers) :].removesuffix(".weight") for name in names]
    _check_stored(folder, requests, names, paths, encoders, {**settings, **chunks})


def _check_adapter(
    folder: Path,
    requests: Sequence[Any],
    answers: Sequence[Any],
    weights: Mapping[str, Tensor],
    settings: Mapping[str, Any],
) -> None:
    """Compare an adapter on all text layers with the checkpoint that it is merged into."""
    draw = torch.Generator().manual_seed(3)
    modules, merged = {}, {}
    for name, weight in weights.items():
        outputs, inputs = weight.shape
        down = torch.randn(_RANK, inputs, generator=draw) / inputs**0.5
        up = torch.randn(outputs, _RANK, generator=draw) / (2 * _RANK)
        modules[name.removesuffix(".weight")] = (down, up)
        merged[name] = weight + 2 * up @ down
    adapter = LoRARequest("a", 1, str(write_lora(folder / "adapter", modules, _RANK)))
    with modulm.LLM(str(_changed(folder, "merged", merged)), **settings) as llm:
        expected = _ask(llm, requests)
    with modulm.LLM(str(folder), **settings, enable_lora=True, max_lora_rank=8) as llm:
        for parity in (0, 1):
            adapters = [adapter if i % 2 == parity else None for i in range(len(requests))]
            wanted = [
                one if named else other
                for named, one, other in zip(adapters, expected, answers, strict=True)
            ]
            _check_same(_ask(llm, requests, lora=adapters), wanted, "with an adapter on some rows")


def _check_stored(
    folder: Path,
    requests: Sequence[Any],
    names: Sequence[str],
    paths: Sequence[str],
    ignored: re.Pattern[str],
    settings: Mapping[str, Any],
) -> None:
    """Compare fp8 codes with scales by output (compressed-tensors) with their decoded values.

    paths: of the layers, for the settings. ignored: parts that these exclude.
    """
    stored: dict[str, Tensor] = {}
    decoded: dict[str, Tensor] = {}
    weights = _weights(folder)
    for name in names:
        weight = weights[name].float()
        scale = weight.abs().amax(1, keepdim=True) / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        stored |= {name: codes, name.removesuffix("weight") + "weight_scale": scale}
        decoded[name] = codes.float() * scale
    targets = list(paths)
    fusions = (
        ("qkv_proj", "qkv", ("_proj",)),
        ("qkv", "qkv", ("_proj", "")),
        ("query_key_value", "qkv", ("_proj",)),
        ("Wqkv", "qkv", ("_proj",)),
        ("gate_up_proj", ("gate", "up"), ("_proj",)),
    )
    for fused, parts, ends in fusions:
        joined = [path.removesuffix(fused) for path in paths if path.endswith(f".{fused}")]
        targets += [f"{path}{part}{end}" for path in joined for part in parts for end in ends]
    # Models that call them otherwise rename their layers.
    targets += [re.sub(r"^(h|blocks)\.", "layers.", path) for path in targets]
    group = {
        "targets": targets,
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
    }
    method = {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "ignore": [f"re:.*({ignored.pattern})"],
        "config_groups": {"group_0": group},
    }  # fmt: skip
    with modulm.LLM(str(_changed(folder, "decoded", decoded)), **settings) as llm:
        expected = _ask(llm, requests)
    quantized = _changed(folder, "stored", stored, quantization_config=method)
    with modulm.LLM(str(quantized), **settings) as llm:
        _check_same(_ask(llm, requests), expected, "of weights stored in fp8")


def _layer(name: str, layers: re.Pattern[str]) -> int:
    """Where a name in files begins that does not depend on what is around the text model."""
    match = layers.search(name)
    return 0 if match is None else match.start()


def _weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def _changed(folder: Path, name: str, weights: Mapping[str, Tensor], **keys: Any) -> Path:
    """A copy of a checkpoint with other weights and further keys in config.json."""
    from safetensors.torch import save_file

    copy = folder.parent / f"{folder.name}-{name}"
    copy.mkdir(exist_ok=True)
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.copytree(entry, copy / entry.name, dirs_exist_ok=True)
        elif entry.suffix != ".safetensors" and not entry.name.endswith(".index.json"):
            shutil.copy(entry, copy)
    tensors = {**_weights(folder), **weights}
    tensors = {key: tensor.contiguous().clone() for key, tensor in tensors.items()}
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    config = copy / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **keys}))
    return copy


def _ask(
    llm: Any, requests: Sequence[Any], *, whole: bool = False, most: int = _ANSWER, lora: Any = None
) -> list[Any]:
    """Greedy answers; whole: with log probabilities of the vocabulary, of prompts too."""
    params = modulm.SamplingParams(
        temperature=0,
        max_tokens=most,
        ignore_eos=True,
        logprobs=-1 if whole else _LIKELIEST,
        prompt_logprobs=-1 if whole else None,
    )
    answers: list[Any] = llm.generate(requests, params, use_tqdm=False, lora_request=lora)
    for answer in answers:
        (choice,) = answer.outputs
        assert choice.finish_reason == "length", f"{choice.finish_reason}: {choice.stop_reason}"
    return answers


def _tables(llm: Any, requests: Sequence[Any]) -> list[Tensor]:
    """[vocabulary] log probabilities of the first token of each answer."""
    params = modulm.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=-1)
    entries = [
        answer.outputs[0].logprobs[0] for answer in llm.generate(requests, params, use_tqdm=False)
    ]
    # Tokens that a model never says have the least number.
    rows = [torch.tensor([entry[i].logprob for i in sorted(entry)]) for entry in entries]
    return [row.clamp(min=-100) for row in rows]


def _check_same(actual: Sequence[Any], expected: Sequence[Any], what: str) -> None:
    """Compare the tokens of answers and the log probabilities that they list."""
    for one, other in zip(actual, expected, strict=True):
        (choice,), (before,) = one.outputs, other.outputs
        count = len(before.token_ids)
        assert choice.token_ids[:count] == before.token_ids, f"other tokens {what}"
        for entry, known in zip(choice.logprobs[:count], before.logprobs, strict=True):
            worst = max(abs(entry[i].logprob - known[i].logprob) for i in entry if i in known)
            assert worst <= TOLERANCE, f"log probabilities differ by {worst:.2g} {what}"
