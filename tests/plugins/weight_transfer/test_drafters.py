"""After an update of a drafter it drafts what one that was loaded with these weights drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.plugins.speculators import test_dflash as dflash
from tests.plugins.speculators import test_eagle as eagle
from tests.plugins.speculators import test_medusa as medusa
from torch import Tensor

from modulm import LLM, SamplingParams
from modulm.errors import RequestError
from modulm.testing.checkpoints import make_tiny
from modulm_weights_shared_memory import SharedWeights

FLAGS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "num_gpu_blocks_override": 64,
    "cpu_threads": 1, "weight_transfer_config": {"backend": "shared_memory"},
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": ids} for ids in ([5, 99, 7, 300], [8] * 21)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("target") / "tiny", num_hidden_layers=5)


def tensors_of(folder: Path | str) -> dict[str, Tensor]:
    files = Path(folder).glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def update(llm: LLM, tensors: dict[str, Tensor], partial: bool = True) -> None:
    with SharedWeights(tensors) as shared:
        llm.start_weight_update(partial=partial)
        llm.update_weights({**shared.info, "target": "draft"})
        llm.finish_weight_update()


def open_llm(target: Path, method: str, model: object) -> LLM:
    table = {"method": method, "adaptive": False, "num_speculative_tokens": 3}
    table |= {} if model is None else {"model": str(model)}
    return LLM(str(target), speculative_config=table, **FLAGS)


def drafted(llm: LLM) -> tuple[list[list[int]], int, int]:
    """Generated tokens, and how many were drafted and accepted."""
    counts = [0, 0]
    scheduler = llm._core.loop.scheduler
    plain = scheduler._stats

    def stats(*arguments: Any) -> Any:
        step = plain(*arguments)
        counts[0] += step.drafted
        counts[1] += step.accepted
        return step

    scheduler._stats = stats
    llm.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    scheduler._stats = plain
    return [list(output.outputs[0].token_ids) for output in outputs], *counts


def test_a_draft_model(target: Path, tmp_path: Path) -> None:
    """It drafts for another target at first, and with the target's weights it is always right."""
    other = make_tiny(tmp_path / "draft", num_hidden_layers=5, seed=3)
    with open_llm(target, "draft_model", other) as llm:
        expected, many, right = drafted(llm)
        assert right < many
        llm.init_weight_transfer_engine()
        update(llm, tensors_of(target), partial=False)
        tokens, many, right = drafted(llm)
        assert tokens == expected
        assert many == right > 0
        assert llm.get_weight_version() == 1
        norm = {"model.norm.weight": torch.full((64,), torch.nan)}
        with pytest.raises(RequestError, match=r"model\.norm\.weight has NaN"):
            update(llm, norm)
        with pytest.raises(RequestError, match=r"missing weights"):
            update(llm, {"model.norm.weight": torch.ones(64)}, partial=False)
        with pytest.raises(RequestError, match=r"unexpected weights: model\.odd"):
            update(llm, {"model.odd": torch.ones(64)})
        assert drafted(llm)[1:] == (many, right)


def with_mtp(folder: Path, seed: int) -> Path:
    """A model and a layer that drafts, which is like its first one."""
    make_tiny(folder, "Exaone4ForCausalLM")
    tensors, draw = tensors_of(folder), torch.Generator().manual_seed(seed)
    size = len(tensors["model.norm.weight"])
    first = "model.layers.0."
    layer = {k.replace(first, "mtp.layers.0."): v for k, v in tensors.items() if first in k}
    norms = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    layer |= {f"{name}.weight": torch.ones(size) for name in norms}
    layer["mtp.fc.weight"] = torch.zeros(size, 2 * size)
    for name, tensor in layer.items():
        noise = torch.randn(tensor.shape, generator=draw) * 0.2
        layer[name] = (tensor + noise).to(tensors["model.norm.weight"].dtype)
    save_file({**tensors, **layer}, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def head_of(method: str, path: Path, seed: int) -> object:
    """The folder of a drafter; equal in all but its weights, which the seed decides."""
    if method == "medusa":
        return medusa.own(path, medusa.make_heads(seed))
    if method == "dflash":
        draw = torch.Generator().manual_seed(seed)
        tensors = dflash.backbone() | {"lm_head.weight": torch.ones(dflash.WORDS, dflash.HIDDEN)}
        noise = {k: torch.randn(v.shape, generator=draw) * 0.3 for k, v in tensors.items()}
        return dflash.write(path, {k: v + noise[k] for k, v in tensors.items()}, "DFlashDraftModel")
    if method == "mtp":
        return with_mtp(path, seed)
    tensors = eagle.weights(seed, third=True, bias=False)
    return eagle.write(path, tensors, "LlamaForCausalLMEagle3", **eagle.THREE)


@pytest.mark.parametrize("method", ["eagle3", "medusa", "dflash", "mtp"])
def test_heads(target: Path, tmp_path: Path, method: str) -> None:
    """Those of a layer with a vocabulary of its own, those that are no model, that draft blocks,
    and that are stored with the target.
    """
    folders = [head_of(method, tmp_path / str(seed), seed) for seed in (1, 2)]
    results = []
    for folder in folders:
        own = method == "mtp"
        with open_llm(Path(str(folder)) if own else target, method, None if own else folder) as llm:
            results.append(drafts(llm))
            if folder == folders[0]:
                llm.init_weight_transfer_engine()
                update(llm, tensors_of(str(folders[1])))
                updated = drafts(llm)
    assert results[0] != results[1]
    assert updated == results[1]


def drafts(llm: LLM) -> list[list[int]]:
    """All that the drafter proposes."""
    runner = llm._core.executor._worker.runner
    (drafter,) = [p._drafter for p in runner.parts.values() if hasattr(p, "_drafter")]
    proposed: list[list[int]] = []
    propose = type(drafter).propose

    def recorded(step: Any) -> Any:
        found = propose(drafter, step)
        proposed.extend(tokens.tolist() for tokens in found)
        return found

    drafter.propose = recorded
    drafted(llm)
    del drafter.propose
    return proposed


def test_an_engine_without_a_drafter(target: Path) -> None:
    with LLM(str(target), **FLAGS) as llm:
        llm.init_weight_transfer_engine()
        with pytest.raises(RequestError, match="no drafter with weights"):
            update(llm, tensors_of(target))
        with SharedWeights(tensors_of(target)) as shared:
            llm.start_weight_update()
            with pytest.raises(RequestError, match="must be model or draft, not 'head'"):
                llm.update_weights({**shared.info, "target": "head"})
