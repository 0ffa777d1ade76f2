"""Log probabilities of an engine are those that a trainer computes for the same tokens.

The engine samples many answers at once, with prefix hits and in batches of changing sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import modulm_demo
from modulm import LLM, SamplingParams

pytestmark = pytest.mark.exhaustive

CHECKPOINT = str(Path(modulm_demo.__file__).parent / "checkpoint")
PROMPTS = [{"prompt_token_ids": list(range(5, 5 + size))} for size in (3, 17, 40)]
PARAMS = SamplingParams(temperature=0.8, n=8, max_tokens=24, ignore_eos=True, logprobs=0, seed=3)
#: By dtype of the engine, the largest and the mean difference to a trainer in fp32.
BOUNDS = {"float32": (1e-4, 1e-5), "bfloat16": (0.25, 0.02)}


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("flags", [{}, {"batch_invariant": True, "kernels": "none"}])
@pytest.mark.parametrize("dtype", list(BOUNDS))
@torch.no_grad()
def test_a_trainer_recomputes_them(dtype: str, flags: dict[str, Any], mode: str) -> None:
    trainer = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    scale = PARAMS.temperature if mode == "processed_logprobs" else 1.0
    differences = []
    with LLM(CHECKPOINT, dtype=dtype, max_model_len=128, logprobs_mode=mode, **flags) as llm:
        for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False):
            start = len(output.prompt_token_ids)
            for answer in output.outputs:
                row = torch.tensor([[*output.prompt_token_ids, *answer.token_ids]])
                own = (trainer(row).logits[0, start - 1 : -1] / scale).log_softmax(-1)
                found = [
                    entry[token].logprob
                    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)
                ]
                differences.append(own.gather(-1, row[0, start:, None])[:, 0] - torch.tensor(found))
    apart = torch.cat(differences).abs()
    largest, mean = BOUNDS[dtype]
    assert apart.max() < largest
    assert apart.mean() < mean
    print(f"{dtype} {mode}: largest {apart.max():.2g}, mean {apart.mean():.2g}")
