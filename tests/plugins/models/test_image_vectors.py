"""Vectors of images and texts in one space: those of transformers."""

from __future__ import annotations

import base64
import copy
import importlib
import io
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from samples import parametrize_sample, sample

import modulm
from modulm import LoRARequest, PoolingParams
from modulm.config import EngineConfig
from modulm.errors import CheckpointError, RequestError, UnsupportedError
from modulm.nn import read_config
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm_media.reader import load_processor
from modulm_server.engine.async_llm import AsyncLLM
from modulm_server.testing import serve_in_thread
from modulm_towers.testing import ImageFamily, images, processor_of, write_family

TOKENS = {"eos_token": "<|end|>"}
TEXTS = ["a small cat", "the capital of France"]
WIDE = PoolingParams(normalize=False)


def clip(tokenizer):
    side = {"height": 28, "width": 28}
    image = pil("clip", "CLIPImageProcessorPil", size={"shortest_edge": 28}, crop_size=side)
    return hf.CLIPProcessor(image, tokenizer)


def siglip(tokenizer):
    image = pil("siglip", "SiglipImageProcessorPil", size={"height": 28, "width": 28})
    return hf.SiglipProcessor(image, tokenizer)


def siglip2(tokenizer):
    image = pil("siglip2", "Siglip2ImageProcessorPil", max_num_patches=20)
    return hf.Siglip2Processor(image, tokenizer)


def pil(module, name, **settings):
    module = f"transformers.models.{module}.image_processing_pil_{module}"
    return getattr(importlib.import_module(module), name)(**settings)


#: Architecture -> special tokens, what makes its processor.
MODELS = {
    "CLIPModel": (TOKENS, clip),
    "SiglipModel": (TOKENS, siglip),
}


def write_siglip2(folder):
    """With a tokenizer of its kind, which lowers texts and fills them up with what config.json
    does not name.
    """
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    pieces_ = [*special, "\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    vocab = {word: index for index, word in enumerate(pieces_)}
    make_tiny(folder, "Siglip2Model")
    tokenizer = hf.Siglip2Tokenizer(vocab, [], padding_side="right")
    siglip2(tokenizer).save_pretrained(folder)


@pytest.fixture(scope="module", params=sample([*MODELS, "Siglip2Model"], every=3))
def opened(request, tmp_path_factory):
    """(engine, transformers' model, its processor, its folder)"""
    name: str = request.param
    folder: Path = tmp_path_factory.mktemp(name)
    driver = manager.current().load("models", name)
    if name in MODELS:
        write_family(ImageFamily(driver, *MODELS[name]), folder)
    else:
        write_siglip2(folder)
    model: Any = getattr(hf, name).from_pretrained(folder, dtype=torch.float32).eval()
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with modulm.LLM(str(folder), device="cpu", dtype="float32") as llm:
        yield llm, model, processor_of(name, folder), folder


def vectors(outputs):
    return np.array([output.outputs.embedding for output in outputs])


def test_images_have_the_vectors_of_transformers(opened):
    llm, model, read, _ = opened
    pictures = images([(56, 42), (30, 60), (28, 28)])
    prompts = [{"prompt": "", "multi_modal_data": {"image": one}} for one in pictures]
    embeddings = vectors(llm.embed(prompts, WIDE, use_tqdm=False))
    with torch.inference_mode():
        pixels = read.image_processor(pictures, return_tensors="pt")
        expected = model.get_image_features(**pixels).pooler_output.numpy()
    assert np.abs(embeddings - expected).max() < 1e-4
    (unit,) = vectors(llm.embed(prompts[:1], use_tqdm=False))
    assert np.abs(unit - expected[0] / np.linalg.norm(expected[0])).max() < 1e-4


def test_texts_beside_images_too(opened):
    llm, model, read, _ = opened
    end = read.tokenizer.eos_token
    texts = [text + end for text in TEXTS]
    (picture,) = images([(40, 40)])
    image = {"prompt": "", "multi_modal_data": {"image": picture}}
    embeddings = vectors(llm.embed([texts[0], image, texts[1]], WIDE, use_tqdm=False))
    for text, vector in zip(texts, embeddings[::2], strict=True):
        ids = read.tokenizer(text, add_special_tokens=False)["input_ids"]
        most = len(ids) if isinstance(model, hf.CLIPModel) else 40
        pad = read.tokenizer.pad_token_id
        pad = model.config.text_config.pad_token_id if pad is None else pad
        ids += [pad] * (most - len(ids))
        with torch.inference_mode():
            expected = model.get_text_features(torch.tensor([ids])).pooler_output[0].numpy()
        assert np.abs(vector - expected).max() < 1e-4


def test_a_prompt_is_a_text_or_one_image(opened):
    llm, *_ = opened
    pictures = images([(28, 28), (28, 28)])
    with pytest.raises(RequestError, match="a text or an image, not both"):
        llm.embed({"prompt": "cat", "multi_modal_data": {"image": pictures[0]}})
    with pytest.raises(RequestError, match="placeholders"):
        llm.embed({"prompt": "", "multi_modal_data": {"image": pictures}})


def test_what_siglip_2_says_that_is_not_read_so_is_refused(tmp_path):
    write_siglip2(tmp_path)
    driver, file = manager.current().load("models", "Siglip2Model"), tmp_path / "config.json"
    table = json.loads(file.read_text())
    wrong = {**table, "vision_config": {**table["vision_config"], "num_patches": 15}}
    with pytest.raises(CheckpointError, match="num_patches: 15 is not a square"):
        read_config(wrong, driver.config_type, str(file))
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "padding_side": "left"}))
    with pytest.raises(UnsupportedError, match="padding_side"):
        read_config(table, driver.config_type, str(file))


QWEN = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>",
}  # fmt: skip


PALIGEMMA = {"image_token": "<image>", "bos_token": "<bos>", "pad_token": "<pad>"}
IDEFICS = {
    "image_token": "<image>", "0": "<fake_token_around_image>", "1": "<global-img>",
    "2": "<row_1_col_1>", "3": "<row_1_col_2>", "4": "<end_of_utterance>",
}  # fmt: skip


def colqwen(tokenizer):
    sizes = {"shortest_edge": 16 * 16, "longest_edge": 40 * 40}
    image = pil("qwen2_vl", "Qwen2VLImageProcessorPil", patch_size=4, merge_size=2,
                temporal_patch_size=2, size=sizes)  # fmt: skip
    return hf.ColQwen2Processor(image, tokenizer)


def colpali(tokenizer):
    image = pil("siglip", "SiglipImageProcessorPil", size={"height": 28, "width": 28})
    image.image_seq_length = 16
    tokenizer.add_tokens = lambda tokens: (
        0
    )  # Those of places, which the tiny model has no room for.
    return hf.ColPaliProcessor(image, tokenizer)


def colmodernvbert(tokenizer):
    image = pil("idefics3", "Idefics3ImageProcessorPil", size={"longest_edge": 56},
                max_image_size={"longest_edge": 28})  # fmt: skip
    return hf.ColModernVBertProcessor(image, tokenizer, image_seq_len=4)


#: Architecture -> special tokens, what makes its processor, what stands before the page's prompt.
RETRIEVERS = {
    "ColQwen2ForRetrieval": (QWEN, colqwen, ""),
    "ColPaliForRetrieval": (PALIGEMMA, colpali, "<image>"),
    "ColModernVBertForRetrieval": (IDEFICS, colmodernvbert, ""),
}


@parametrize_sample("name", RETRIEVERS, every=3)
def test_every_token_of_a_page_has_the_vector_of_transformers(name, tmp_path):
    """Also where the page is between others, and of a question without one."""
    tokens, make, before = RETRIEVERS[name]
    driver = manager.current().load("models", name)
    write_family(ImageFamily(driver, tokens, make), tmp_path)
    model: Any = getattr(hf, name).from_pretrained(tmp_path, dtype=torch.float32).eval()
    read = processor_of(name, tmp_path)
    pages = images([(56, 42), (30, 60)])
    references = [read.process_images(images=[page]) for page in pages]
    references.insert(1, read.process_queries(text=["What is the capital of France?"]))
    text = before + read.visual_prompt_prefix
    requests = [{"prompt": text, "multi_modal_data": {"image": page}} for page in pages]
    requests.insert(1, {"prompt_token_ids": references[1]["input_ids"][0].tolist()})
    question = read.tokenizer.decode(references[1]["input_ids"][0])
    contents = [{"content": [{"type": "image", "image": page}]} for page in pages]
    with modulm.LLM(str(tmp_path), device="cpu", dtype="float32") as llm:
        outputs = llm.encode(requests, pooling_task="token_embed", use_tqdm=False)
        scores = llm.score(question, contents, use_tqdm=False)
    vectors = []
    for inputs, output in zip(references, outputs, strict=True):
        inputs.pop("labels", None)
        assert output.prompt_token_ids == inputs["input_ids"][0].tolist()
        with torch.inference_mode():
            expected = model(**inputs).embeddings[0].numpy()
        assert np.abs(output.outputs.data - expected).max() < 1e-4
        vectors.append(torch.from_numpy(expected))
    expected = read.score_retrieval(vectors[1:2], [vectors[0], vectors[2]])[0]
    assert [one.outputs.score for one in scores] == pytest.approx(expected.tolist(), abs=1e-3)


#: What Jina v4 is asked of an image.
PAGE = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|>\n"
)
#: A reranker's: what a query and a document say, with their images.
JUDGE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}|{% endfor %}"
)


@pytest.fixture(scope="module")
def qwen2_vl(tmp_path_factory):
    """(folder, transformers' model)"""

    folder = tmp_path_factory.mktemp("qwen2_vl")
    driver = manager.current().load("models", "Qwen2VLForConditionalGeneration")
    write_family(ImageFamily(driver, QWEN, Qwen2VL.make), folder)
    model = hf.Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    return folder, model.eval()


class Qwen2VL:
    """The files of a processor that transformers makes only with torchvision."""

    def __init__(self, image, tokenizer):
        self.image, self.tokenizer = image, tokenizer

    @classmethod
    def make(cls, tokenizer):
        sizes = {"shortest_edge": 16 * 16, "longest_edge": 40 * 40}
        image = pil("qwen2_vl", "Qwen2VLImageProcessorPil", patch_size=4, merge_size=2,
                    temporal_patch_size=2, size=sizes)  # fmt: skip
        return cls(image, tokenizer)

    def save_pretrained(self, folder):
        self.tokenizer.save_pretrained(folder)
        self.image.save_pretrained(folder)
        processor_settings = {"processor_class": "Qwen2VLProcessor"}
        (folder / "processor_config.json").write_text(json.dumps(processor_settings))


def theirs(folder, model, ids, pages):
    """What transformers makes of a prompt with images."""
    read = processor_of("JinaEmbeddingsV4Model", folder)
    seen = read.image_processor(images=pages, return_tensors="pt") if pages else {}
    kinds = torch.tensor([[int(token == 480) for token in ids]])
    with torch.inference_mode():
        return model(
            torch.tensor([ids]), mm_token_type_ids=kinds, output_hidden_states=True, **seen
        )


def test_a_decoder_that_sees_judges_pairs_with_images(qwen2_vl):
    """Both sides may have them, and the template says where they stand."""
    folder, model = qwen2_vl
    first, second = images([(56, 42), (30, 60)])
    reranker = {
        "architectures": ["Qwen2VLForSequenceClassification"],
        "classifier_from_token": ["n", "y"],
        "is_original_qwen3_reranker": True,
    }
    query = {"content": [{"type": "image", "image": first}, text("like this")]}
    document = {"content": [text("a page"), {"type": "image", "image": second}]}
    with modulm.LLM(str(folder), device="cpu", dtype="float32", hf_overrides=reranker) as llm:
        both, one = llm.score(query, [document, "words"], chat_template=JUDGE, use_tqdm=False)
        tokenizer = llm.get_tokenizer()
        no, yes = tokenizer.token_to_id("n"), tokenizer.token_to_id("y")
    for output, pages in ((both, [first, second]), (one, [first])):
        logits = theirs(folder, model, output.prompt_token_ids, pages).logits[0, -1]
        expected = torch.sigmoid(logits[yes] - logits[no]).item()
        assert output.outputs.score == pytest.approx(expected, abs=1e-4)


def test_a_decoder_that_sees_embeds_by_its_last_token(qwen2_vl):
    folder, model = qwen2_vl
    (page,) = images([(56, 42)])
    flags = {"device": "cpu", "dtype": "float32", "runner": "pooling"}
    prompt = "A <|vision_start|><|image_pad|><|vision_end|> of Paris"
    with modulm.LLM(str(folder), **flags) as llm:
        request = {"prompt": prompt, "multi_modal_data": {"image": page}}
        (output,) = llm.embed(request, WIDE, use_tqdm=False)
        content = [{"type": "image", "image": page}, text(" of Paris")]
        (score,) = llm.score({"content": [text("A "), *content]}, {"content": content})
    hidden = theirs(folder, model, output.prompt_token_ids, [page]).hidden_states[-1]
    assert np.abs(np.array(output.outputs.embedding) - hidden[0, -1].numpy()).max() < 1e-4
    assert score.prompt_token_ids[: len(output.prompt_token_ids)] == output.prompt_token_ids


@pytest.fixture(scope="module")
def jina(tmp_path_factory):
    """(folder, transformers' model, (weight, bias) of the projector); with two adapters in a file.

    What Jina's own code does behind the model is done by the tests.
    """
    name = "Qwen2_5_VLForConditionalGeneration"
    folder = tmp_path_factory.mktemp("jina")
    write_family(ImageFamily(manager.current().load("models", name), QWEN, Qwen2VL.make), folder)
    model = getattr(hf, name).from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 64) / 8, torch.randn(24)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"multi_vector_projector.{k}": t for k, t in (("weight", weight), ("bias", bias))}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    keys = {"architectures": ["JinaEmbeddingsV4Model"], "multi_vector_projector_dim": 24,
            "matryoshka_dims": [16, 32], "vision_start_token_id": 482,
            "vision_end_token_id": 483, "single_vector_pool_strategy": "mean"}  # fmt: skip
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))
    processor_settings = {"processor_class": "JinaEmbeddingsV4Processor"}
    (folder / "processor_config.json").write_text(json.dumps(processor_settings))
    load_processor.cache_clear()
    adapters, adapter_tensors = folder / "adapters", {}
    adapters.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (adapters / "adapter_config.json").write_text(json.dumps(settings))
    for task in ("retrieval", "text-matching"):
        for layer in range(3):
            at = f"base_model.model.model.language_model.layers.{layer}.self_attn.q_proj"
            adapter_tensors[f"{at}.lora_A.{task}.weight"] = torch.randn(4, 64) / 4
            adapter_tensors[f"{at}.lora_B.{task}.weight"] = torch.randn(64, 4) / 4
        adapter_tensors[f"base_model.model.multi_vector_projector.lora_A.{task}.weight"] = (
            torch.randn(4, 64)
        )
        adapter_tensors[f"base_model.model.multi_vector_projector.lora_B.{task}.weight"] = (
            torch.randn(24, 4)
        )
    save_file(adapter_tensors, adapters / "adapter_model.safetensors")
    return folder, model, (weight, bias)


def with_adapter(folder, model, projector, task):
    """The model and the projector with an adapter's tensors in them."""
    model, weight = copy.deepcopy(model), projector[0].clone()
    tensors = load_file(folder / "adapters/adapter_model.safetensors")
    for name, down in tensors.items():
        if f"lora_A.{task}." not in name:
            continue
        change = 2 * tensors[name.replace("lora_A", "lora_B")] @ down
        module = name.removeprefix("base_model.model.").partition(".lora_A")[0]
        if module == "multi_vector_projector":
            weight += change
        else:
            model.get_submodule(module).weight.data += change
    return model, (weight, projector[1])


@pytest.mark.exhaustive
def test_jina_v4_is_the_mean_of_a_text_or_of_an_image_by_task(jina):
    folder, model, projector = jina
    (page,) = images([(56, 42)])
    question = "What is the capital of France?"
    flags = {"device": "cpu", "dtype": "float32", "enable_lora": True, "max_lora_rank": 8}
    adapter = LoRARequest("matching", 1, str(folder / "adapters/text-matching"))
    with modulm.LLM(str(folder), **flags) as llm:
        read = llm.embed(question, PoolingParams(prompt_name="query"), use_tqdm=False)
        requests = [{"prompt": f"Query: {question}"}, {"prompt": PAGE,
                 "multi_modal_data": {"image": page}}]  # fmt: skip
        plain = llm.embed(requests, use_tqdm=False)
        tuned = llm.embed(requests, use_tqdm=False, lora_request=adapter)
        (short,) = llm.embed(requests[1], PoolingParams(dimensions=16), use_tqdm=False)
        content = {"content": [{"type": "image", "image": page}]}
        (score,) = llm.score(question, content, use_tqdm=False)
        with pytest.raises(RequestError, match="dimensions"):
            llm.embed(question, PoolingParams(dimensions=20), use_tqdm=False)
        for wrong in ("adapters", "adapters/poetry"):
            with pytest.raises(Exception, match="retrieval"):
                llm.embed(question, lora_request=LoRARequest(wrong, 2, str(folder / wrong)))
    assert vectors(read) == pytest.approx(vectors(plain[:1]), abs=1e-6)
    for outputs, task in ((plain, None), (tuned, "text-matching")):
        adapted = model if task is None else with_adapter(folder, model, projector, task)[0]
        for output, pages in zip(outputs, ([], [page]), strict=True):
            hidden = theirs(folder, adapted, output.prompt_token_ids, pages).hidden_states[-1][0]
            ids = output.prompt_token_ids
            if pages:
                hidden = hidden[ids.index(482) : ids.index(483) + 1]
            expected = torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy()
            assert np.abs(np.array(output.outputs.embedding) - expected).max() < 1e-4
    cut = np.array(plain[1].outputs.embedding)[:16]
    assert short.outputs.embedding == pytest.approx(cut / np.linalg.norm(cut), abs=1e-5)
    pair = float(np.dot(*vectors(plain)))
    assert score.outputs.score == pytest.approx(pair, abs=1e-4)


def test_jina_v4_has_vectors_of_tokens_too(jina):
    folder, model, projector = jina
    (page,) = images([(56, 42)])
    flags = {"device": "cpu", "dtype": "float32", "enable_lora": True, "max_lora_rank": 8}
    adapter = LoRARequest("retrieval", 1, str(folder / "adapters/retrieval"))
    requests = [{"prompt": "Query: a cat"}, {"prompt": PAGE, "multi_modal_data": {"image": page}}]
    with modulm.LLM(str(folder), **flags, pooler_config={"task": "token_embed"}) as llm:
        outputs = llm.encode(requests, use_tqdm=False, lora_request=adapter)
    model, (weight, bias) = with_adapter(folder, model, projector, "retrieval")
    for output, pages in zip(outputs, ([], [page]), strict=True):
        hidden = theirs(folder, model, output.prompt_token_ids, pages).hidden_states[-1][0]
        expected = torch.nn.functional.normalize(hidden @ weight.T + bias, dim=-1).numpy()
        assert np.abs(output.outputs.data - expected).max() < 1e-4


@contextmanager
def serving(folder):
    """A client of the model's server."""
    config = EngineConfig.from_keywords(model=str(folder), device="cpu", dtype="float32")
    engine = AsyncLLM.from_config(config)
    try:
        with serve_in_thread(engine, config) as live, live.client() as client:
            yield client
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(a client of CLIP's server, the model's folder)"""
    folder = tmp_path_factory.mktemp("served")
    driver = manager.current().load("models", "CLIPModel")
    write_family(ImageFamily(driver, *MODELS["CLIPModel"]), folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    with serving(folder) as client:
        yield client, folder


def part(picture):
    """A picture as clients send it."""
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def text(content):
    return {"type": "text", "text": content}


def test_messages_with_an_image_over_http(served):
    client, folder = served
    (picture,) = images([(40, 40)])
    with modulm.LLM(str(folder), device="cpu", dtype="float32") as llm:
        request = {"prompt": "", "multi_modal_data": {"image": picture}}
        (expected,) = vectors(llm.embed(request, use_tqdm=False))
    body = {"messages": [{"role": "user", "content": [part(picture)]}]}
    answer = client.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    assert np.abs(np.array(answer.json()["data"][0]["embedding"]) - expected).max() < 1e-5
    body = {"messages": [{"role": "user", "content": [part(picture), text("cat")]}]}
    refused = client.post("/v1/embeddings", json=body)
    assert refused.status_code == 400
    assert "not both" in refused.json()["error"]["message"]


def test_scores_and_ranks_of_images_over_http(served):
    """The scores of vectors that were asked for one by one, under every name that clients use."""
    client, folder = served
    pages = images([(56, 42), (30, 60)])
    prompts = [{"prompt": "", "multi_modal_data": {"image": one}} for one in pages]
    with modulm.LLM(str(folder), device="cpu", dtype="float32") as llm:
        query, *documents = vectors(llm.embed(["a small cat", *prompts, "a dog"], use_tqdm=False))
    expected = [float(query @ one) for one in documents]
    contents = [{"content": [part(page)]} for page in pages] + ["a dog"]
    for first, second in (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents")):
        answer = client.post("/v1/score", json={first: "a small cat", second: contents})
        assert answer.status_code == 200, answer.text
        scores = [entry["score"] for entry in answer.json()["data"]]
        assert scores == pytest.approx(expected, abs=1e-3)
    body = {"query": {"content": [text("a small cat")]}, "documents": contents}
    plain = client.post("/rerank", json=body).json()["results"]
    whole = client.post("/rerank", json={**body, "return_documents": True}).json()["results"]
    order = sorted(range(3), key=lambda index: -expected[index])
    assert [one["index"] for one in plain] == [one["index"] for one in whole] == order
    returned = {one["index"]: one["document"] for one in whole}
    assert returned[0] == {"text": "", "multi_modal": contents[0]["content"]}
    assert {one["index"]: one["document"]["text"] for one in plain} == {0: "", 1: "", 2: "a dog"}


def test_late_interaction_over_http(tmp_path):
    """A retrieval model's scores of pages are those that `LLM.score` gives."""
    name, question = "ColQwen2ForRetrieval", "What is the capital of France?"
    tokens, make, _ = RETRIEVERS[name]
    driver = manager.current().load("models", name)
    write_family(ImageFamily(driver, tokens, make), tmp_path)
    pages = images([(56, 42), (30, 60)])
    contents = [{"content": [{"type": "image", "image": page}]} for page in pages]
    with modulm.LLM(str(tmp_path), device="cpu", dtype="float32") as llm:
        scores = llm.score(question, contents, use_tqdm=False)
    expected = [one.outputs.score for one in scores]
    sent = [{"content": [part(page)]} for page in pages]
    with serving(tmp_path) as client:
        answer = client.post("/v1/score", json={"text_1": question, "text_2": sent})
        assert answer.status_code == 200, answer.text
        actual = [entry["score"] for entry in answer.json()["data"]]
        ranked = client.post("/rerank", json={"query": question, "documents": sent}).json()
    assert actual == pytest.approx(expected, abs=1e-3)
    best = max(range(2), key=expected.__getitem__)
    assert [one["index"] for one in ranked["results"]] == [best, 1 - best]


def test_an_image_may_ask_for_texts_over_http(served):
    client, _ = served
    (page,) = images([(56, 42)])
    query = {"content": [part(page)]}
    one = client.post("/score", json={"text_1": query, "text_2": ["a cat", query]}).json()["data"]
    other = client.post("/score", json={"text_1": "a cat", "text_2": query}).json()["data"]
    assert one[0]["score"] == pytest.approx(other[0]["score"], abs=1e-5)
    assert one[1]["score"] == pytest.approx(1, abs=1e-5)


BROKEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}


@parametrize_sample(
    ("path", "body", "param", "message"),
    [
        ("/score", {"text_1": "a", "text_2": [{"content": [BROKEN]}]}, "text_2",
         "text_2[0].content[0].image_url"),
        ("/score", {"queries": {"content": [BROKEN]}, "documents": ["a"]}, "queries",
         "queries.content[0].image_url"),
        ("/rerank", {"query": "a", "documents": ["b", {"content": [text("c"), BROKEN]}]},
         "documents", "documents[1].content[1].image_url"),
        ("/rerank", {"query": "a", "documents": [{"content": [{"type": "audio_url"}]}]},
         "documents", "documents[0].content[0].audio_url"),
        ("/rerank", {"query": "a", "documents": [{"content": [{"type": "text"}]}]}, "documents",
         "documents"),
        ("/rerank", {"query": "a", "documents": [{"content": [BROKEN]}], "max_tokens_per_doc": 5},
         "max_tokens_per_doc", "max_tokens_per_doc"),
        ("/rerank", {"query": "a", "documents": [{"content": [BROKEN]}],
                     "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "truncated"),
        ("/rerank", {"query": "a", "documents": ["b"], "mm_processor_kwargs": {"run": "x"}},
         "mm_processor_kwargs", "mm_processor_kwargs"),
    ], every=2,
)  # fmt: skip
def test_what_is_wrong_with_an_image_of_a_pair_is_named(served, path, body, param, message):
    client, _ = served
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param, error
    assert message in error["message"], error
