"""The portable path on a GPU: skipped where torch sees none."""

from __future__ import annotations

import pytest

from modulm.plugins import manager
from modulm.testing.attention import check_attention
from modulm.testing.models import check_model

pytestmark = pytest.mark.gpu


@pytest.fixture
def platform():
    driver = manager.current().load("platforms", "cuda")
    probe = driver.probe()
    if probe.score <= 0:
        pytest.skip(probe.reason)
    instance = driver()
    instance.start()
    return instance


def test_attention(platform):
    check_attention(manager.current().load("attention", "sdpa"), platform)


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"]
)
def test_models(platform, architecture):
    driver = manager.current().load("models", architecture)
    check_model(driver, device="cuda", attention_backend="sdpa")
