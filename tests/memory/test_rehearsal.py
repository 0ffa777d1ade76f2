"""What a step's tensors are found to hold, and how that grows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from modulm.config import EngineConfig
from modulm.plugins import manager
from modulm.testing.models import tiny_folder
from modulm_memory.allocations import Allocations
from modulm_memory.estimate import estimate
from modulm_memory.rehearsal import Growth, _prompts
from modulm_memory.testing import measured


def test_tensors_at_the_addresses_of_freed_ones_count():
    with Allocations() as allocations:
        for _ in range(32):  # not counted: torch does not allocate them
            torch.from_numpy(np.zeros(1)).add(1)
        held = [torch.zeros(100, dtype=torch.float32) for _ in range(64)]
    assert len(held) == 64
    assert allocations.live[-1] == 64 * 400


def test_padding_is_no_growth():
    """Texts are padded to multiples of 16 tokens; pairs of tokens grow as they do."""

    def size(tokens):
        padded = -(-tokens // 16) * 16
        return 1000 + 300 * tokens + 70 * padded + 8 * padded**2

    prompts = (31, 63, 95)
    growth = Growth.through(prompts, [[size(tokens)] for tokens in prompts])
    for tokens in (255, 4095):
        assert growth.at(tokens) == size(tokens)


def test_what_grows_with_the_sequence_is_told_apart():
    """256 tokens of a step are computed at once, with the scores of all earlier ones."""

    def size(tokens, context):
        return 1000 + 300 * tokens + 8 * min(tokens, 256) * context

    prompts = (255, 511, 767)
    sizes = [[size(tokens, tokens)] for tokens in prompts]
    ahead = [[size(255, context)] for context in prompts[1:]]
    growth = Growth.through(prompts, sizes, ahead, pairs=False)
    assert growth.at(2047, 32767) == pytest.approx(size(2047, 32767), rel=0.01)


def test_prompts_pad_one_token_whatever_a_model_allows():
    assert _prompts(8192, 32) == [31, 63, 95]
    assert _prompts(77, 32) == [15, 31, 47]
    assert _prompts(2, 32) == [1, 3, 5]


@pytest.mark.parametrize("tokens", [1023, 2047])
def test_layers_with_a_window_grow_with_the_tokens_alone(tokens, tmp_path):
    """Their masks end at the window, beyond the prompts that are rehearsed first."""
    driver = manager.current().load("models", "ModernBertModel")
    folder = tiny_folder(driver, tmp_path, max_position_embeddings=2048)
    config = EngineConfig.from_keywords(model=str(folder), use_tqdm_on_load=False)
    (rank,) = estimate(config, manager.current()).ranks
    held = measured(config, manager.current(), 0, rank.sizing.blocks, tokens)
    assert rank.widths.step(tokens, 1) == pytest.approx(held.step, rel=0.05)
