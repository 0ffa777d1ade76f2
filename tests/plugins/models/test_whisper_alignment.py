"""Times of tokens from Whisper's cross attention, against transformers, however steps are cut."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace as Named
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from samples import parametrize_sample
from torch.nn import Linear

import modulm
from modulm import PoolingParams, SamplingParams
from modulm.errors import RequestError
from modulm.testing.checkpoints import make_tiny
from modulm_transcriber_whisper.words import end_frames
from modulm_whisper.alignment import AlignmentPooler
from modulm_whisper.alignment_rows import AlignmentRows

HEADS = [[0, 3], [1, 0], [1, 2], [2, 1]]
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 32}
#: Prompt, answer, samples.
ASKED = (([1, 5, 6, 7], 130, 5000), ([1], 1, 14000), ([1, 9, 300], 40, 8000), ([1, 5], 120, 16000))


class Case:
    """A tiny checkpoint, sounds with made-up answers, and when transformers says they are said."""

    def __init__(self, folder: Path) -> None:
        make_tiny(folder, "WhisperForConditionalGeneration", max_target_positions=192)
        (folder / "generation_config.json").write_text(json.dumps({"alignment_heads": HEADS}))
        self.folder = folder
        whisper: Any = hf.WhisperForConditionalGeneration
        model = whisper.from_pretrained(folder, attn_implementation="eager").eval()
        hears: Any = hf.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
        hears.save_pretrained(folder)
        rng = np.random.default_rng(0)
        self.prompts: list[Any] = []
        self.params: list[PoolingParams] = []
        self.expected: list[list[int]] = []
        for decoder_start, count, size in ASKED:
            sound = rng.standard_normal(size).astype(np.float32) / 9
            tokens = [*decoder_start, *rng.integers(8, 500, count).tolist()]
            frames = -(-size // 160)
            self.prompts.append(
                {"prompt_token_ids": tokens, "multi_modal_data": {"audio": (sound, 16000)}}
            )
            extra = {"frames": frames // 2}
            self.params.append(
                PoolingParams(task="align", pool_from=len(decoder_start), extra_args=extra)
            )
            features = hears(sound, sampling_rate=16000, return_tensors="pt")
            with torch.inference_mode():
                decoder_ids = torch.tensor([tokens])
                out = model(**features, decoder_input_ids=decoder_ids, output_attentions=True)
            seen = hf.utils.ModelOutput(
                cross_attentions=[out.cross_attentions], sequences=decoder_ids
            )
            times = model._extract_token_timestamps(
                seen, HEADS, num_frames=frames, num_input_ids=len(decoder_start)
            )
            # The last time is said twice, for the end.
            self.expected.append(times[0, len(decoder_start) : -1].div(0.02).round().int().tolist())

    def align(self, llm: modulm.LLM) -> list[list[int]]:
        outputs = llm.encode(self.prompts, self.params, use_tqdm=False)
        return [end_frames(np.asarray(output.outputs.data)).tolist() for output in outputs]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("aligned"))


@pytest.fixture(scope="module")
def llm(case: Case) -> Any:
    with modulm.LLM(str(case.folder), **SETTINGS) as engine:
        yield engine


def test_times_are_those_of_transformers(case: Case, llm: modulm.LLM) -> None:
    times = case.align(llm)
    # Of one token transformers divides 0 by 0; it is there from the beginning.
    assert times[1] == [0]
    assert [*times[:1], *times[2:]] == [*case.expected[:1], *case.expected[2:]]
    assert all(ends == sorted(ends) and ends[-1] < 50 for ends in times)
    assert len({tuple(ends) for ends in times}) == len(ASKED)


@parametrize_sample(
    "flags",
    [
        {"long_prefill_token_threshold": 3, "attention_backend": "sdpa"},
        {"num_gpu_blocks_override": 7, "long_prefill_token_threshold": 7},
        {"batch_invariant": True, "enforce_eager": True},
    ],
    every=3,
)
def test_however_steps_are_cut(case: Case, flags: dict[str, Any]) -> None:
    with modulm.LLM(str(case.folder), **SETTINGS, **flags) as llm:
        times = case.align(llm)
    assert [*times[:1], *times[2:]] == [*case.expected[:1], *case.expected[2:]]


def test_the_model_answers_as_before_and_has_no_other_task(case: Case, llm: modulm.LLM) -> None:
    assert llm.info.tasks == ("generate", "align")
    (answer,) = llm.generate(case.prompts[:1], SamplingParams(temperature=0, max_tokens=4))
    assert 1 <= len(answer.outputs[0].token_ids) <= 4
    for task in ("generate", "embed"):
        with pytest.raises(RequestError, match="is not one that the model has: align"):
            llm.encode(case.prompts[:1], PoolingParams(task=task))


def test_a_row_that_was_preempted_begins_anew() -> None:
    def layer() -> Any:
        return Named(cross=Named(heads=1, head_dim=2, q=Linear(2, 2), kv=Linear(2, 4)))

    model: Any = Named(layers=[layer(), layer()])
    rows = AlignmentRows({"heads": [[1, 0]], "filter": 1})
    x, heard = torch.randn(2, 9, 2, generator=torch.Generator().manual_seed(0))

    def step(start: int, count: int, sound: Any) -> None:
        """One with another row in front, of two tokens."""
        plan: Any = Named(rows=np.array([5, 3]), starts=np.array([start and 4, start]),
                          counts=np.array([2, count]))  # fmt: skip

        def forward(batch: Any) -> Any:
            for one in model.layers:
                one.cross.q(torch.cat([x[:2], x[start : start + count]]))
                if not start:
                    one.cross.kv(torch.cat([heard * 3, sound]))

        rows.watched(model, forward, plan)(None)

    def whole() -> Any:
        step(0, 3, heard)
        step(3, 4, None)
        return rows.finish([3])[3]

    params = PoolingParams(task="align", pool_from=2, extra_args={"frames": 6})
    rows.admit(3, params, np.zeros(7))
    with torch.inference_mode():
        expected = whole()
        assert expected.shape == (5, 6)
        rows.release(3)
        rows.admit(3, params, np.zeros(7))
        step(0, 3, heard * 2)
        rows.release(3)
        rows.admit(3, params, np.zeros(7))
        assert np.array_equal(whole(), expected)
        q, k = model.layers[1].cross.q(x[2:7]), model.layers[1].cross.kv(heard)[:, :2]
        weights = (q @ k.T / 2**0.5).softmax(-1)[:, :6]
    wanted = (weights - weights.mean(0)) / weights.std(0, unbiased=False)
    assert np.allclose(expected, wanted, atol=1e-5)


@pytest.mark.parametrize("heads", [None, [[7, 0]], [[0, 4]], [[0]], "all"])
def test_checkpoints_without_such_heads_only_generate(heads: Any) -> None:
    model: Any = Named(
        tasks=("generate",), config=Named(decoder_attention_heads=4),
        layers=[Named(cross=Named(heads=4))] * 3,
    )  # fmt: skip
    checkpoint: Any = Named(generation_config={"alignment_heads": heads}, config={})
    assert AlignmentPooler().tasks(checkpoint, model, {}) == ("generate",)
    shared: Any = Named(**{**vars(model), "layers": [Named(cross=Named(heads=2))] * 3})
    checkpoint = Named(generation_config={"alignment_heads": HEADS}, config={})
    assert AlignmentPooler().tasks(checkpoint, shared, {}) == ("generate",)
