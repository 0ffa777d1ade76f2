"""Folders of sentence-transformers: what its files say is what happens, by its definitions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import modulm
from modulm import PoolingParams
from modulm.errors import CheckpointError, RequestError, UnsupportedError
from modulm.testing.checkpoints import make_tiny
from modulm_command_explain.command import command

TEXT = "The capital of France is Paris."
LAYERS = {"Dense": "2_Dense", "LayerNorm": "3_LayerNorm", "Normalize": "4_Normalize"}


def write(file: Path, table: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(table))


def add_modules(folder: Path, kinds: Sequence[str], pooling: Mapping[str, Any]) -> None:
    """modules.json, 1_Pooling/config.json and the weights of layers, as the library stores them."""
    paths = {"Transformer": "", "Pooling": "1_Pooling", **LAYERS}
    types = [f"sentence_transformers.models.{kind}" for kind in kinds]
    modules = [
        {"idx": place, "name": str(place), "path": paths.get(kind, kind), "type": full}
        for place, (kind, full) in enumerate(zip(kinds, types, strict=True))
    ]
    write(folder / "modules.json", modules)
    write(folder / "1_Pooling/config.json", {"embedding_dimension": 64, **pooling})
    generator = torch.Generator().manual_seed(3)
    identity = "torch.nn.modules.linear.Identity"
    dense = {"in_features": 64, "out_features": 24, "bias": False}
    write(folder / "2_Dense/config.json", {**dense, "activation_function": identity})
    weight = {"linear.weight": torch.randn(24, 64, generator=generator)}
    save_file(weight, folder / "2_Dense/model.safetensors")
    write(folder / "3_LayerNorm/config.json", {"dimension": 24})
    norm = {f"norm.{part}": torch.rand(24, generator=generator) for part in ("weight", "bias")}
    save_file(norm, folder / "3_LayerNorm/model.safetensors")


def layer(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / LAYERS[name] / "model.safetensors")


def states(folder: Path, ids: list[int]) -> torch.Tensor:
    model = transformers.BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).last_hidden_state[0]


def open_llm(folder: Path, **flags: Any) -> modulm.LLM:
    return modulm.LLM(str(folder), **{"device": "cpu", "dtype": "float32", **flags})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "model", "BertModel")


def pooled(hidden: torch.Tensor, mode: str) -> torch.Tensor:
    """hidden: [tokens, hidden], by the library's definitions."""
    ranks = torch.arange(1, len(hidden) + 1)[:, None]
    return {
        "cls": hidden[0],
        "lasttoken": hidden[-1],
        "max": hidden.amax(0),
        "mean": hidden.mean(0),
        "mean_sqrt_len_tokens": hidden.sum(0) / len(hidden) ** 0.5,
        "weightedmean": (hidden * ranks).sum(0) / ranks.sum(),
    }[mode]


OLD = {
    "pooling_mode_cls_token": True,
    "pooling_mode_mean_tokens": True,
    "pooling_mode_max_tokens": False,
    "pooling_mode_weightedmean_tokens": True,
}


@pytest.mark.parametrize(
    ("table", "modes"),
    [
        ({"pooling_mode": "weightedmean"}, ["weightedmean"]),
        ({"pooling_mode": ["max", "cls"]}, ["max", "cls"]),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, ["mean_sqrt_len_tokens"]),
        (OLD, ["cls", "mean", "weightedmean"]),
        ({}, ["mean"]),
    ],
)
def test_modes_of_pooling_side_by_side(folder: Path, table: Any, modes: list[str]) -> None:
    add_modules(folder, ["Transformer", "Pooling"], table)
    with open_llm(folder) as llm:
        (output,) = llm.embed(TEXT, use_tqdm=False)
        (cut,) = llm.embed(TEXT, PoolingParams(dimensions=len(modes) * 64), use_tqdm=False)
        with pytest.raises(RequestError, match="dimensions"):
            llm.embed(TEXT, PoolingParams(dimensions=len(modes) * 64 + 1), use_tqdm=False)
    hidden = states(folder, output.prompt_token_ids)
    expected = torch.cat([pooled(hidden, mode) for mode in modes])
    assert output.outputs.embedding == pytest.approx(expected.tolist(), abs=1e-4)
    assert cut.outputs.embedding == output.outputs.embedding


def test_layers_in_their_order(folder: Path) -> None:
    kinds = ["Transformer", "Pooling", "Normalize", "Dense", "LayerNorm"]
    add_modules(folder, kinds, {"pooling_mode": "mean"})
    with open_llm(folder) as llm:
        (output,) = llm.embed(TEXT, use_tqdm=False)
    mean = states(folder, output.prompt_token_ids).mean(0)
    x = layer(folder, "Dense")["linear.weight"] @ torch.nn.functional.normalize(mean, dim=-1)
    norm = layer(folder, "LayerNorm")
    expected = torch.nn.functional.layer_norm(x, (24,), norm["norm.weight"], norm["norm.bias"])
    assert output.outputs.embedding == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.parametrize("kinds", [["Transformer", "CNN"], ["Pooling"]])
def test_modules_that_are_not_there_yet(folder: Path, kinds: list[str]) -> None:
    add_modules(folder, kinds, {})
    with pytest.raises(UnsupportedError, match=rf"modules.json.*{kinds[-1]}.*not supported yet"):
        open_llm(folder)


PROMPTS = {"prompts": {"query": "Find: ", "passage": "Doc: "}, "default_prompt_name": "query"}


@pytest.fixture(scope="module")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny(tmp_path_factory.mktemp("prompted") / "model", "BertModel")
    add_modules(folder, ["Transformer", "Pooling", "Normalize"], {"pooling_mode": "mean"})
    write(folder / "config_sentence_transformers.json", PROMPTS)
    return folder


@pytest.fixture(scope="module")
def llm(prompted: Path) -> Iterator[modulm.LLM]:
    with open_llm(prompted) as llm:
        yield llm


def test_the_default_prompt_a_named_one_and_none(llm: modulm.LLM) -> None:
    encode = llm.get_tokenizer().encode
    for name, prefix in ((None, "Find: "), ("passage", "Doc: "), ("", "")):
        (output,) = llm.embed(TEXT, PoolingParams(prompt_name=name), use_tqdm=False)
        assert output.prompt_token_ids == encode(prefix + TEXT)
    (ids,) = llm.embed([[20, 21]], use_tqdm=False)
    assert ids.prompt_token_ids == [20, 21]
    with pytest.raises(RequestError, match="prompt_name: 'pairs' is not one.*query, passage"):
        llm.embed(TEXT, PoolingParams(prompt_name="pairs"), use_tqdm=False)


def test_pairs_take_the_prompts_of_queries_and_documents(llm: modulm.LLM) -> None:
    (scored,) = llm.score(TEXT, "No", use_tqdm=False)
    encode = llm.get_tokenizer().encode
    assert scored.prompt_token_ids == [*encode("Find: " + TEXT), *encode("Doc: No")]
    plain = PoolingParams(prompt_name="")
    (same,) = llm.score(TEXT, TEXT, pooling_params=plain, use_tqdm=False)
    assert same.outputs.score == pytest.approx(1, abs=1e-5)


def test_a_prompt_that_is_not_pooled(folder: Path) -> None:
    table = {"pooling_mode": "weightedmean", "include_prompt": False}
    add_modules(folder, ["Transformer", "Pooling"], table)
    write(folder / "config_sentence_transformers.json", PROMPTS)
    with open_llm(folder) as llm:
        (output,) = llm.embed(TEXT, use_tqdm=False)
        start = len(llm.get_tokenizer().encode("Find: "))
        short = PoolingParams(truncate_prompt_tokens=start)
        with pytest.raises(RequestError, match="no tokens after its instruction"):
            llm.embed(TEXT, short, use_tqdm=False)
    hidden = states(folder, output.prompt_token_ids)
    ranks = torch.arange(1, len(hidden) + 1)[start:, None]
    expected = (hidden[start:] * ranks).sum(0) / ranks.sum()
    assert output.outputs.embedding == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_default_that_is_no_prompt(folder: Path) -> None:
    add_modules(folder, ["Transformer", "Pooling"], {})
    write(folder / "config_sentence_transformers.json", {"default_prompt_name": "query"})
    with pytest.raises(CheckpointError, match="default_prompt_name: 'query'"):
        open_llm(folder)


def test_length_and_case(folder: Path) -> None:
    add_modules(folder, ["Transformer", "Pooling"], {})
    write(folder / "sentence_bert_config.json", {"max_seq_length": 24, "do_lower_case": True})
    cut = PoolingParams(truncate_prompt_tokens=-1)
    with open_llm(folder) as llm:
        (output,) = llm.embed("PARIS Is " * 30, cut, use_tqdm=False)
        encode = llm.get_tokenizer().encode
        assert llm.info.max_model_len == 24
    assert output.prompt_token_ids == encode("paris is " * 30)[:24]
    with open_llm(folder, max_model_len=40) as llm:
        assert llm.info.max_model_len == 40


def test_explain_says_where_the_length_comes_from(folder: Path) -> None:
    add_modules(folder, ["Transformer", "Pooling"], {})
    write(folder / "sentence_bert_config.json", {"max_seq_length": 24})
    shown = CliRunner().invoke(command, [str(folder)]).output
    assert "max_model_len: 24 (the checkpoint's pooling configuration" in shown


def test_the_length_of_newer_folders(folder: Path) -> None:
    add_modules(folder, ["Transformer", "Pooling"], {})
    file = folder / "tokenizer_config.json"
    write(file, {**json.loads(file.read_text()), "model_max_length": 19})
    with open_llm(folder) as llm:
        assert llm.info.max_model_len == 19


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_the_similarity_of_pairs(folder: Path, name: str) -> None:
    add_modules(folder, ["Transformer", "Pooling"], {"pooling_mode": "mean"})
    write(folder / "config_sentence_transformers.json", {"similarity_fn_name": name})
    with open_llm(folder) as llm:
        (score,) = llm.score(TEXT, "No", use_tqdm=False)
        a, b = (np.array(o.outputs.embedding) for o in llm.embed([TEXT, "No"], use_tqdm=False))
    expected = {
        "cosine": a @ b / np.linalg.norm(a) / np.linalg.norm(b),
        "dot": a @ b,
        "euclidean": -np.sqrt(((a - b) ** 2).sum()),
        "manhattan": -np.abs(a - b).sum(),
    }
    assert score.outputs.score == pytest.approx(expected[name], rel=1e-4, abs=1e-5)


def test_late_interaction(folder: Path) -> None:
    """Without a Pooling module tokens are embedded; a pair's score is MaxSim."""
    add_modules(folder, ["Transformer", "Dense"], {})
    write(folder / "config_sentence_transformers.json", {"query_prefix": "Find: "})
    with open_llm(folder) as llm:
        assert llm.info.tasks == ("token_embed",)
        (score,) = llm.score(TEXT, "No idea", use_tqdm=False)
        first, second = llm.encode(["Find: " + TEXT, "No idea"], use_tqdm=False)
    weight = layer(folder, "Dense")["linear.weight"]
    vectors = [
        torch.nn.functional.normalize(states(folder, o.prompt_token_ids) @ weight.T, dim=-1)
        for o in (first, second)
    ]
    assert first.outputs.data == pytest.approx(vectors[0].numpy(), abs=1e-4)
    expected = (vectors[0] @ vectors[1].T).amax(-1).sum()
    assert score.outputs.score == pytest.approx(float(expected), abs=1e-4)


def test_colbert_of_its_authors(folder: Path) -> None:
    """BERT under `bert.`, and a linear layer for its tokens at the top."""
    file = folder / "model.safetensors"
    weight = torch.randn(12, 64, generator=torch.Generator().manual_seed(5))
    hidden = states(folder, [20, 21, 22])
    inner = {f"bert.{name}": tensor for name, tensor in load_file(file).items()}
    save_file({**inner, "linear.weight": weight}, file, {"format": "pt"})
    table = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", {**table, "architectures": ["HF_ColBERT"]})
    with open_llm(folder) as llm:
        (output,) = llm.encode([[20, 21, 22]], use_tqdm=False)
        (score,) = llm.score(TEXT, TEXT, use_tqdm=False)
    expected = torch.nn.functional.normalize(hidden @ weight.T, dim=-1)
    assert output.outputs.data == pytest.approx(expected.numpy(), abs=1e-4)
    assert score.outputs.score == pytest.approx(len(score.prompt_token_ids) / 2, abs=1e-3)


def publish_jina(file: Path) -> torch.Tensor:
    """Write Jina's XLM-RoBERTa under its authors' names, with a linear layer, which is returned."""
    weight = torch.randn(12, 64, generator=torch.Generator().manual_seed(5))
    pairs = (
        ("embeddings.LayerNorm", "emb_ln"), (".self_attn.o_proj.", ".mixer.out_proj."),
        (".post_attention_layernorm.", ".norm1."), (".post_mlp_layernorm.", ".norm2."),
        (".self_attn.q_proj.", ".mixer.Wqkv."),
    )  # fmt: skip
    plain, stored = load_file(file), {"linear.weight": weight}
    for name, tensor in plain.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        parts = [plain[name.replace("q_proj", f"{n}_proj")] for n in "qkv"]
        theirs = "encoder." * name.startswith("layers.") + name
        for ours, other in pairs:
            theirs = theirs.replace(ours, other)
        stored[f"roberta.{theirs}"] = torch.cat(parts) if ".q_proj." in name else tensor
    save_file(stored, file, {"format": "pt"})
    return weight


@pytest.mark.parametrize("name", ["HF_ColBERT", "ColBERTJinaRobertaModel"])
def test_jinas_colbert(tmp_path: Path, name: str) -> None:
    folder = make_tiny(tmp_path / "model", "JinaEmbeddingsV3Model", type_vocab_size=1)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = model(torch.tensor([[20, 21, 22]])).last_hidden_state[0]
    weight = publish_jina(folder / "model.safetensors")
    table = json.loads((folder / "config.json").read_text())
    del table["rope_parameters"]
    rotary = {"position_embedding_type": "rotary", "rotary_emb_base": 20000.0}
    table |= {**rotary, "architectures": [name], "model_type": "xlm-roberta"}
    write(folder / "config.json", table)
    with open_llm(folder) as llm:
        (output,) = llm.encode([[20, 21, 22]], use_tqdm=False)
    expected = torch.nn.functional.normalize(hidden @ weight.T, dim=-1)
    assert output.outputs.data == pytest.approx(expected.numpy(), abs=1e-4)


def test_three_answers_of_bge_m3(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", "XLMRobertaModel", pad_token_id=1)
    ids = [0, 20, 21, 22, 2]
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
    layers = {n: torch.nn.Linear(64, width) for n, width in (("sparse", 1), ("colbert", 64))}
    for kind, each in layers.items():
        torch.save(each.state_dict(), folder / f"{kind}_linear.pt")
    table = json.loads((folder / "config.json").read_text())
    names = {"architectures": ["BgeM3EmbeddingModel"], "bos_token_id": 0, "eos_token_id": 2}
    write(folder / "config.json", {**table, **names})
    with open_llm(folder) as llm:
        (vector,) = llm.embed([ids], use_tqdm=False)
        (weights,) = llm.encode([ids], pooling_task="token_classify", use_tqdm=False)
        (tokens,) = llm.encode([ids], pooling_task="token_embed", use_tqdm=False)
    norm = torch.nn.functional.normalize
    with torch.inference_mode():
        sparse = layers["sparse"](hidden[1:-1]).relu()
        several = norm(layers["colbert"](hidden[1:]), dim=-1)
    expected = norm(hidden[0], dim=-1).numpy()
    assert vector.outputs.embedding == pytest.approx(expected, abs=1e-4)
    assert weights.outputs.data == pytest.approx(sparse.numpy(), abs=1e-4)
    assert tokens.outputs.data == pytest.approx(several.numpy(), abs=1e-4)
    (folder / "sparse_linear.pt").unlink()
    with pytest.raises(CheckpointError, match=r"sparse_linear\.pt"):
        open_llm(folder)


def test_jinas_reranker_returns_documents_before_the_query(tmp_path: Path) -> None:
    document, query = 151670, 151671
    folder = make_tiny(tmp_path / "model", "Qwen3ForCausalLM", vocab_size=query + 1)
    ids = [5, document, 9, 7, document, 8, query]
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
    generator = torch.Generator().manual_seed(5)
    layers = [torch.randn(*shape, generator=generator) for shape in ((32, 64), (12, 32))]
    file = folder / "model.safetensors"
    added = {f"projector.{2 * i}.weight": weight for i, weight in enumerate(layers)}
    save_file({**load_file(file), **added}, file, {"format": "pt"})
    table = json.loads((folder / "config.json").read_text())
    write(folder / "config.json", {**table, "architectures": ["JinaForRanking"]})
    with open_llm(folder, max_model_len=64) as llm:
        assert llm.info.tasks == ("token_embed",)
        (output,) = llm.encode([ids], use_tqdm=False)
    expected = (hidden[[1, 4, 6]] @ layers[0].T).relu() @ layers[1].T
    assert output.outputs.data == pytest.approx(expected.numpy(), abs=1e-4)


def test_dimensions_that_were_trained(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model", "BertModel", matryoshka_dimensions=[16, 32])
    with open_llm(folder) as llm:
        for size in (16, 64):
            (output,) = llm.embed(TEXT, PoolingParams(dimensions=size), use_tqdm=False)
            assert len(output.outputs.embedding) == size
        with pytest.raises(RequestError, match="dimensions must be one of 16, 32"):
            llm.embed(TEXT, PoolingParams(dimensions=24), use_tqdm=False)


def test_a_decoder_in_such_a_folder_embeds(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "model")
    add_modules(folder, ["Transformer", "Pooling", "Normalize"], {"pooling_mode": "lasttoken"})
    with open_llm(folder) as llm:
        assert llm.info.tasks == ("embed", "token_embed")
    with open_llm(folder, runner="generate") as llm:
        assert llm.info.tasks == ("generate",)
