"""The contract kit over every parser that is installed, and the names that vLLM knows."""

from functools import cache

import pytest
from samples import parametrize_sample

from modulm.plugins import manager
from modulm_parsing.testing import check_parser

PARSERS = [
    (kind, declaration.name)
    for kind in ("tool_parsers", "reasoning_parsers")
    for declaration in manager.current().names(kind)
]
TOOL_PARSERS = """apertus beam cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32
deepseek_v4 deepseek_v41 dots ernie45 functiongemma gemma4 gigachat3 glm45 glm47 granite
granite-20b-fc granite4 hermes hf hunyuan_a13b hy_v3 hy_v4 inkling internlm jamba k2_horizon
kimi_k2 kimi_k3 lfm2 ling3 llama3_json llama4_json llama4_pythonic longcat mimo minicpm5 minimax_m2
minimax_m3 mistral muse muse_glimmer musespark1x olmo3 openai phi4_mini_json plamo3 poolside_v1
pythonic qwen3_coder qwen3_json qwen3_xml seed_oss step3 step3p5 step5 xlam"""
REASONING_PARSERS = """beam cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4
deepseek_v41 ernie45 gemma4 glm45 glm47 granite granite_thinking_parser hf holo2 hunyuan_a13b hy_v3
hy_v4 inkling k2_horizon kimi_k2 kimi_k3 ling3 mimo minicpmv minimax_m2 minimax_m2_append_think
minimax_m3 mistral muse muse_glimmer musespark1x nemotron_v3 olmo3 openai_gptoss plamo3 poolside_v1
qwen3 seed_oss step3 step3p5 step5"""


@cache
def checked(parser):
    """A parser that has two names is checked once."""
    check_parser(parser)


@parametrize_sample(("kind", "name"), PARSERS, every=16, ids=lambda value: str(value))
def test_contract(kind, name):
    checked(manager.current().load(kind, name))


@pytest.mark.parametrize(
    ("kind", "names", "count"),
    [("tool_parsers", TOOL_PARSERS, 58), ("reasoning_parsers", REASONING_PARSERS, 42)],
)
def test_every_name_is_there(kind, names, count):
    assert len(names.split()) == count
    assert not set(names.split()) - {entry.name for entry in manager.current().names(kind)}
