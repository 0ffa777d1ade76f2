"""The parsers that are chosen by themselves, for the chat templates of the families.

The templates are written for these tests; they write the markers that the published ones do. What
each renders for a call is read by what was chosen for it.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from samples import parametrize_sample

from modulm.config import EngineConfig
from modulm.contracts.decision import Decision, Verdict
from modulm.contracts.parser import ParseContext
from modulm.loading import open_checkpoint
from modulm.plugins import manager
from modulm.plugins.selection import Selection
from modulm_chat.templates import execute
from modulm_parsing import assemble, message_parser
from modulm_parsing.choice import fitting_parser, parser_decisions, with_declared_parsers
from modulm_parsing.evidence import evidence_of
from modulm_parsing.examples import TOOLS, WEATHER
from modulm_parsing.fitting import Offer, offers_of

TEMPLATES = Path(__file__).parent / "templates"
PLUGINS = manager.current()
KINDS = ("tool_parsers", "reasoning_parsers")

#: template -> (model type, architecture), tool parser, reasoning parser.
FAMILIES: dict[str, tuple[str, str, str | None, str | None]] = {
    "apertus": ("apertus", "ApertusForCausalLM", "apertus", None),
    "beam": ("beam", "BeamForCausalLM", "beam", "beam"),
    "chatml": ("llama", "LlamaForCausalLM", None, None),
    "command4": ("cohere2", "Cohere2ForCausalLM", "cohere_command4", "cohere_command4"),
    "command_a": ("cohere2", "Cohere2ForCausalLM", "cohere_command3", None),
    "command_a_reasoning": ("cohere2", "Cohere2ForCausalLM", "cohere_command3", "cohere_command3"),
    "command_r": ("cohere", "CohereForCausalLM", None, None),
    "deepseek_r1": ("deepseek_v3", "DeepseekV3ForCausalLM", "deepseek_v3", "deepseek_r1"),
    "deepseek_v3": ("deepseek_v3", "DeepseekV3ForCausalLM", "deepseek_v3", None),
    "deepseek_v3_1": ("deepseek_v3", "DeepseekV3ForCausalLM", "deepseek_v31", "deepseek_v3"),
    "deepseek_v3_2": ("deepseek_v32", "DeepseekV32ForCausalLM", "deepseek_v32", "deepseek_v3"),
    "deepseek_v4": ("deepseek_v4", "DeepseekV4ForCausalLM", "deepseek_v4", "deepseek_v4"),
    "deepseek_v4_1": ("deepseek_v41", "DeepseekV41ForCausalLM", "deepseek_v41", "deepseek_v41"),
    "dots": ("dots1", "Dots1ForCausalLM", "dots", None),
    "ernie4_5_thinking": ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", "ernie45", "ernie45"),
    "exaone4_like": ("exaone4", "Exaone4ForCausalLM", "hermes", "qwen3"),
    "functiongemma": ("gemma3_text", "Gemma3ForCausalLM", "functiongemma", None),
    "gemma3": ("gemma3", "Gemma3ForConditionalGeneration", None, None),
    "gemma4": ("gemma4", "Gemma4ForConditionalGeneration", "gemma4", "gemma4"),
    "gigachat3": ("deepseek_v3", "DeepseekV3ForCausalLM", "gigachat3", None),
    "glm4_5": ("glm4_moe", "Glm4MoeForCausalLM", "glm45", "glm45"),
    "glm4_7": ("glm4_moe", "Glm4MoeForCausalLM", "glm47", "glm47"),
    "gpt_oss": ("gpt_oss", "GptOssForCausalLM", "openai", "openai_gptoss"),
    "granite3_0": ("granite", "GraniteForCausalLM", "granite", None),
    "granite3_1": ("granite", "GraniteForCausalLM", "granite", None),
    "granite3_2": ("granite", "GraniteForCausalLM", "granite", "granite"),
    "granite3_3": ("granite", "GraniteForCausalLM", "granite", "granite"),
    "granite4": ("granitemoehybrid", "GraniteMoeHybridForCausalLM", "granite4", None),
    "granite4_2": ("granitemoehybrid", "GraniteMoeHybridForCausalLM", "qwen3_coder",
                   "granite_thinking_parser"),
    "granite_20b": ("gpt_bigcode", "GPTBigCodeForCausalLM", "granite-20b-fc", None),
    "hermes2": ("mistral", "MistralForCausalLM", "hermes", None),
    "hunyuan_a13b": ("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", "hunyuan_a13b", "hunyuan_a13b"),
    "hy3": ("hy_v3", "HYV3ForCausalLM", "hy_v3", "hy_v3"),
    "hy4": ("hy_v4", "HYV4ForCausalLM", "hy_v4", "hy_v4"),
    "inkling": ("inkling", "InklingForCausalLM", "inkling", "inkling"),
    "internlm2": ("internlm2", "InternLM2ForCausalLM", "internlm", None),
    "jamba1_5": ("jamba", "JambaForCausalLM", "jamba", None),
    "k2_horizon": ("k2_horizon", "K2HorizonForCausalLM", "k2_horizon", "k2_horizon"),
    "kimi_k2": ("kimi_k2", "DeepseekV3ForCausalLM", "kimi_k2", None),
    "kimi_k2_thinking": ("kimi_k2", "DeepseekV3ForCausalLM", "kimi_k2", "kimi_k2"),
    "kimi_k3": ("kimi_k3", "KimiK3ForConditionalGeneration", "kimi_k3", "kimi_k3"),
    "laguna": ("laguna", "LagunaForCausalLM", "poolside_v1", "poolside_v1"),
    "lfm2": ("lfm2", "Lfm2ForCausalLM", "lfm2", None),
    "lfm2_5": ("lfm2", "Lfm2ForCausalLM", "lfm2", "deepseek_r1"),
    "ling3": ("bailing_moe_v3", "BailingMoeV3ForCausalLM", "ling3", "ling3"),
    "llama3": ("llama", "LlamaForCausalLM", None, None),
    "llama3_1": ("llama", "LlamaForCausalLM", "llama3_json", None),
    "llama3_2": ("llama", "LlamaForCausalLM", "llama3_json", None),
    "llama3_2_pythonic": ("llama", "LlamaForCausalLM", "pythonic", None),
    "llama4": ("llama4", "Llama4ForConditionalGeneration", "llama4_json", None),
    "llama4_pythonic": ("llama4", "Llama4ForConditionalGeneration", "llama4_pythonic", None),
    "longcat": ("longcat_flash", "LongcatFlashForCausalLM", "longcat", None),
    "magistral": ("mistral", "MistralForCausalLM", "mistral", "mistral"),
    "magistral_2506": ("mistral", "MistralForCausalLM", "mistral", "mistral"),
    "mimo_v2": ("mimo_v2_flash", "MiMoV2FlashForCausalLM", "mimo", "mimo"),
    "minicpm5": ("minicpm", "MiniCPMForCausalLM", "minicpm5", "qwen3"),
    "minicpm_v": ("minicpmv4_6", "MiniCPMV4_6ForConditionalGeneration", "qwen3_coder", "minicpmv"),
    "minimax_m1": ("minimax_m1", "MiniMaxM1ForCausalLM", "jamba", "deepseek_r1"),
    "minimax_m2": ("minimax_m2", "MiniMaxM2ForCausalLM", "minimax_m2", "minimax_m2"),
    "minimax_m3": ("minimax_m3", "MiniMaxM3ForCausalLM", "minimax_m3", "minimax_m3"),
    "mistral_v1": ("mistral", "MistralForCausalLM", None, None),
    "mistral_v3": ("mistral", "MistralForCausalLM", "mistral", None),
    "mistral_v11": ("mistral3", "Mistral3ForConditionalGeneration", "mistral", None),
    "mistral_v13": ("ministral3", "Ministral3ForCausalLM", "mistral", None),
    "muse_glimmer": ("muse_glimmer", "MuseGlimmerForCausalLM", "muse_glimmer", "muse_glimmer"),
    "muse_spark": ("muse_spark", "MuseSparkForCausalLM", "muse", "muse"),
    "nemotron3": ("nemotron_h", "NemotronHForCausalLM", "qwen3_coder", "nemotron_v3"),
    "nemotron_toolcall": ("nemotron_h", "NemotronHForCausalLM", None, "deepseek_r1"),
    "olmo3": ("olmo3", "Olmo3ForCausalLM", "olmo3", None),
    "olmo3_think": ("olmo3", "Olmo3ForCausalLM", "olmo3", "olmo3"),
    "phi4_mini": ("phi3", "Phi3ForCausalLM", "phi4_mini_json", None),
    "phi4_reasoning": ("phi3", "Phi3ForCausalLM", None, "deepseek_r1"),
    "plamo3": ("plamo3", "Plamo3ForCausalLM", "plamo3", "plamo3"),
    "qwen2_5": ("qwen2", "Qwen2ForCausalLM", "hermes", None),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", "hermes", "qwen3"),
    "qwen3_5": ("qwen3_5", "Qwen3_5ForConditionalGeneration", "qwen3_coder", "qwen3"),
    "qwen3_coder": ("qwen3_moe", "Qwen3MoeForCausalLM", "qwen3_coder", None),
    "qwen3_thinking": ("qwen3_moe", "Qwen3MoeForCausalLM", "hermes", "qwen3"),
    "qwq": ("qwen2", "Qwen2ForCausalLM", "hermes", "qwen3"),
    "r1_distill": ("llama", "LlamaForCausalLM", "deepseek_v3", "deepseek_r1"),
    "seed_oss": ("seed_oss", "SeedOssForCausalLM", "seed_oss", "seed_oss"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM", "hermes", "qwen3"),
    "step3": ("step3", "Step3VLForConditionalGeneration", "step3", "step3"),
    "step3_7": ("step3p7", "Step3p7ForConditionalGeneration", "step3p5", "step3p5"),
    "step5": ("step5", "Step5ForCausalLM", "step5", "step5"),
    "xlam": ("llama", "LlamaForCausalLM", "xlam", None),
}  # fmt: skip
#: Templates that list tools and leave the writing of calls to the model.
UNWRITTEN = {"lfm2", "phi4_mini"}
#: What ends a turn and is taken from the text by the engine.
ENDS = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<|end|>", "<|end_of_text|>", "<|EOT|>", "<|eos|>",
        "<|eom|>", "<|hy_eos|>", "<end_of_sentence>", "[e~[", "<|endofresponse|>", "<seed:eos>",
        "<|END_OF_TURN_TOKEN|>", "<end_of_turn>", "<turn|>", "<|assistant_end|>", "<|message_sep|>",
        "<|role_end|>", "</longcat_s>", "[|endofturn|]", "<|plamo:eot|>",
        "<|content_model_end_sampling|>")  # fmt: skip


@cache
def offers() -> Mapping[str, tuple[Offer, ...]]:
    return offers_of(PLUGINS)


def decide(
    folder: Path, template: str | None, config: Mapping[str, Any], **settings: Any
) -> list[Decision]:
    """What is decided for a checkpoint of these files."""
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    engine_config = EngineConfig.from_keywords(model=str(folder))
    evidence = evidence_of(engine_config, open_checkpoint(engine_config, PLUGINS))
    return [fitting_parser(kind, offers()[kind], evidence, PLUGINS) for kind in KINDS]


def of(model_type: str, architecture: str) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture]}


def template_of(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@parametrize_sample("name", FAMILIES, every=5)
def test_the_parsers_of_a_family(name: str, tmp_path: Path) -> None:
    model_type, architecture, *wanted = FAMILIES[name]
    decisions = decide(tmp_path, template_of(name), of(model_type, architecture))
    assert [decision.winner for decision in decisions] == wanted, decisions
    for decision in decisions:
        assert "fit as well" not in decision.reason
        assert (decision.winner is None) == ("no installed parser" in decision.reason)


def test_every_template_belongs_to_a_family() -> None:
    names = {file.stem for file in TEMPLATES.glob("*.jinja")}
    assert names - set(FAMILIES) == {"lfm2_plain"}


def written(name: str) -> tuple[str, str]:
    """A prompt, and what the template makes of a thought and a call behind it."""
    arguments = dict(WEATHER[0][1])
    call = {"type": "function", "function": {"name": WEATHER[0][0], "arguments": arguments}}
    question = {"role": "user", "content": "Weather?"}
    answer = {
        "role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "Hm.",
    }  # fmt: skip
    thinking = {"thinking": True, "enable_thinking": True, "reasoning_effort": "high"}
    variables = {"tools": [dict(tool) for tool in TOOLS], **thinking}
    source = template_of(name)
    prompt = execute(source, {**variables, "messages": [question], "add_generation_prompt": True})
    whole = execute(source, {**variables, "messages": [question, answer]})
    assert whole.startswith(prompt)
    text = whole[len(prompt) :].rstrip()
    for end in ENDS:
        text = text.removesuffix(end).rstrip()
    return prompt, text


@parametrize_sample("name", [n for n in FAMILIES if n not in UNWRITTEN and FAMILIES[n][2]], every=5)
def test_what_a_template_writes_is_read_by_what_is_chosen_for_it(name: str) -> None:
    _, _, tool, reasoning = FAMILIES[name]
    prompt, text = written(name)
    context = ParseContext(
        tools=TOOLS, prompt_tail=prompt[-512:],
        template_kwargs={"thinking": True, "enable_thinking": True, "reasoning_effort": "high"},
    )  # fmt: skip
    parser = message_parser(context, tool, reasoning)
    message = assemble([*parser.feed(text), *parser.finish()])
    calls = [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    assert calls == list(WEATHER), (text, message)
    assert message.content is None, text
    assert message.reasoning == ("Hm." if reasoning else None), text


def winners(decisions: list[Decision]) -> list[str | None]:
    return [decision.winner for decision in decisions]


LLAMA, QWEN = of("llama", "LlamaForCausalLM"), of("qwen3", "Qwen3ForCausalLM")


@pytest.mark.parametrize(
    ("name", "config", "wanted"),
    [
        ("hermes2", LLAMA, ["hermes", None]),
        ("qwen3", LLAMA, ["hermes", "qwen3"]),
        ("qwen2_5", QWEN, ["hermes", None]),
        ("qwen2_5", of("mimo", "MiMoForCausalLM"), ["hermes", None]),
        ("qwen3_5", of("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
         ["qwen3_coder", "qwen3"]),
        ("llama3_1", of("mistral", "MistralForCausalLM"), ["llama3_json", None]),
        ("mistral_v3", of("deepseek_v32", "DeepseekV32ForCausalLM"), ["mistral", None]),
        ("chatml", of("deepseek_v32", "DeepseekV32ForCausalLM"), [None, None]),
        ("chatml", of("gpt_oss", "GptOssForCausalLM"), [None, None]),
    ],
)  # fmt: skip
def test_the_template_counts_for_more_than_the_model(
    name: str, config: Mapping[str, Any], wanted: list[str | None], tmp_path: Path
) -> None:
    """Fine-tunes with a template of another family, and such without tools."""
    assert winners(decide(tmp_path, template_of(name), config)) == wanted


@pytest.mark.parametrize(
    ("config", "settings", "wanted"),
    [
        (LLAMA, {}, [None, None]),
        (QWEN, {"added_tokens_decoder": {"5": {"content": "<tool_call>"}}}, [None, None]),
        (of("deepseek_v32", "DeepseekV32ForCausalLM"), {}, ["deepseek_v32", "deepseek_v3"]),
        (of("mistral3", "Mistral3ForConditionalGeneration"),
         {"additional_special_tokens": ["[TOOL_CALLS]", "[THINK]"]}, ["mistral", "mistral"]),
        (LLAMA, {"additional_special_tokens": ["[TOOL_CALLS]"]}, ["mistral", None]),
        ({**of("x", "X"), "text_config": {"model_type": "gpt_oss"}}, {},
         ["openai", "openai_gptoss"]),
    ],
)  # fmt: skip
def test_without_a_template_model_and_tokens_tell(
    config: Mapping[str, Any], settings: dict[str, Any], wanted: list[str | None], tmp_path: Path
) -> None:
    assert winners(decide(tmp_path, None, config, **settings)) == wanted


def test_tokens_at_the_head_of_the_tokenizer(tmp_path: Path) -> None:
    """A template that lists tools and names no marker: the vocabulary has some."""
    tokens = [
        {"id": n, "content": f"<|tool_call_{word}|>"} for n, word in enumerate(("start", "end"))
    ]
    head = json.dumps({"version": "1.0", "added_tokens": tokens}, indent=2)
    (tmp_path / "tokenizer.json").write_text(head[:-2] + ', "model": {"type": "BPE", "vocab": {')
    config = of("lfm2", "Lfm2ForCausalLM")
    decisions = decide(tmp_path, template_of("lfm2_plain"), config)
    assert winners(decisions) == ["lfm2", None]
    assert "the vocabulary has <|tool_call_start|>" in decisions[0].reason
    assert winners(decide(tmp_path, template_of("chatml"), config)) == [None, None], "no tools"
    assert winners(decide(tmp_path, template_of("qwen2_5"), config)) == ["hermes", None]


def test_a_damaged_tokenizer_tells_nothing(tmp_path: Path) -> None:
    for head in (
        "",
        "{",
        '{"added_tokens": [{"content": 3}, 4, null',
        '{"added_tokens": []}',
        "\x00",
    ):
        (tmp_path / "tokenizer.json").write_text(head)
        assert winners(decide(tmp_path, None, LLAMA)) == [None, None]


def test_named_templates(tmp_path: Path) -> None:
    """Tools are looked for in the template for tools, thoughts in all."""
    templates = [
        {"name": "default", "template": template_of("phi4_reasoning")},
        {"name": "tool_use", "template": template_of("qwen2_5")},
    ]
    decisions = decide(tmp_path, None, LLAMA, chat_template=templates)
    assert winners(decisions) == ["hermes", "qwen3"]


def test_the_template_that_the_flag_gives_counts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text(template_of("llama3_1"), encoding="utf-8")
    file = str(TEMPLATES / "gemma4.jinja")
    config = EngineConfig.from_keywords(model=str(tmp_path), chat_template=file)
    evidence = evidence_of(config, open_checkpoint(config, PLUGINS))
    assert fitting_parser(KINDS[0], offers()[KINDS[0]], evidence, PLUGINS).winner == "gemma4"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("deepseek_v3", "deepseek_v3"), ("deepseek_v31", "deepseek_v31"),
        ("deepseek_v32", "deepseek_v32"), ("deepseek_v4", "deepseek_v4"),
        ("deepseek_v41", "deepseek_v41"), ("gemma3_pythonic", "pythonic"), ("glm45", "glm45"),
        ("granite", "granite"), ("granite_20b_fc", "granite-20b-fc"), ("hermes", "hermes"),
        ("hunyuan_a13b", "hunyuan_a13b"), ("internlm2_tool", "internlm"),
        ("llama3_json", "llama3_json"),
        ("llama4_json", "llama4_json"), ("pythonic", "pythonic"),
        ("llama4_pythonic", "llama4_pythonic"), ("mistral", "mistral"),
        ("phi4_mini", "phi4_mini_json"), ("qwen3coder", "qwen3_coder"),
        ("xlam_llama", "xlam"), ("xlam_qwen", "xlam"),
    ],
)  # fmt: skip
def test_templates_by_name_have_their_parsers(name: str, wanted: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(of("x", "X")), encoding="utf-8")
    config = EngineConfig.from_keywords(model=str(tmp_path), chat_template=name)
    evidence = evidence_of(config, open_checkpoint(config, PLUGINS))
    assert fitting_parser(KINDS[0], offers()[KINDS[0]], evidence, PLUGINS).winner == wanted


DESCRIBED = {"response_template": {"fields": {"content": {}}}}


def test_what_the_checkpoint_says_itself_comes_first(tmp_path: Path) -> None:
    decisions = decide(tmp_path, template_of("qwen3"), QWEN, **DESCRIBED)
    assert winners(decisions) == ["hf", "hf"]
    assert "describes its messages: response_template" in decisions[0].reason
    assert {v.name: v.reason for v in decisions[0].candidates}["hermes"].startswith("fits less")


def test_who_reads_whole_messages_stands_beside_nobody_else(tmp_path: Path) -> None:
    decide(tmp_path, template_of("qwen3"), QWEN, **DESCRIBED)
    config = EngineConfig.from_keywords(model=str(tmp_path))
    evidence = evidence_of(config, open_checkpoint(config, PLUGINS))
    kind = "reasoning_parsers"
    assert fitting_parser(kind, offers()[kind], evidence, PLUGINS, "hf").winner == "hf"
    beside = fitting_parser(kind, offers()[kind], evidence, PLUGINS, "hermes")
    assert beside.winner == "qwen3"
    assert {v.name: v.reason for v in beside.candidates}["hf"] == (
        "reads whole messages, so it cannot be combined with hermes"
    )


SOURCE = """
from modulm_parser_hermes import HermesToolParser

class Box(HermesToolParser):
    name = "box"
"""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Decision]:
    """What is decided for a Qwen 3 beside a package of somebody else's with this declaration."""
    number = itertools.count()

    def decided(fits: str, source: str = SOURCE) -> Decision:
        package = f"box_parser_{next(number)}_{tmp_path.name.replace('-', '_')}"
        folder = tmp_path / package
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text(source)
        (folder / package / "fits.toml").write_text(fits)
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[modulm.tool_parsers]\nbox = {package}:Box\n")
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(folder))
            plugins = manager.PluginManager()
            decide(tmp_path, template_of("qwen3"), QWEN)
            config = EngineConfig.from_keywords(model=str(tmp_path))
            tool, reasoning = parser_decisions(config, plugins)
            assert reasoning.winner == "qwen3"
            return tool

    return decided


def test_a_package_from_elsewhere_takes_part(elsewhere: Callable[..., Decision]) -> None:
    equal = elsewhere('[tool_parsers.box]\nmarks = ["<tool_call>", "</tool_call>"]')
    assert equal.winner == "box"
    assert "hermes fit as well; box_parser_0_" in equal.reason
    more = elsewhere('[tool_parsers.box]\nmarks = ["<tool_call>", "</tool_call>", "<tools>"]')
    assert more.winner == "box"
    assert "fit as well" not in more.reason
    less = elsewhere('[tool_parsers.box]\nmarks = ["<tool_call>"]')
    assert less.winner == "hermes"
    assert Verdict("box", "fits less well: the chat template writes <tool_call>") in less.candidates
    absent = elsewhere('[tool_parsers.box]\nmarks = ["<tool_call>", "<box>"]')
    assert absent.winner == "hermes"
    assert Verdict("box", "the chat template does not write <box>") in absent.candidates


def test_a_package_that_is_broken_is_passed_over(
    elsewhere: Callable[..., Decision], caplog: pytest.LogCaptureFixture
) -> None:
    fits = '[tool_parsers.box]\nmarks = ["<tool_call>", "</tool_call>", "<tools>"]'
    broken = elsewhere(fits, "1 / 0")
    assert broken.winner == "hermes"
    (verdict,) = (v for v in broken.candidates if v.name == "box")
    assert "ZeroDivisionError" in str(verdict.reason)
    wrong = ('marks = "<tool_call>"', "marks = [3]", 'mark = ["<tool_call>"]', "shared = 1", "?")
    for line in wrong:
        caplog.clear()
        assert elsewhere(f"[tool_parsers.box]\n{line}").winner == "hermes"
        assert "fits.toml" in caplog.text


def test_a_parser_that_is_switched_off_is_not_chosen(tmp_path: Path) -> None:
    decide(tmp_path, template_of("qwen3"), QWEN)
    config = EngineConfig.from_keywords(model=str(tmp_path))
    plugins = manager.PluginManager(Selection.parse("-modulm-parser-hermes"))
    tool, reasoning = parser_decisions(config, plugins)
    assert (tool.winner, reasoning.winner) == (None, "qwen3")


@pytest.mark.parametrize("parser_flag", ["auto", None])
def test_flags_decide(parser_flag: str | None, tmp_path: Path) -> None:
    decide(tmp_path, template_of("qwen3"), QWEN)
    flags = {"tool_call_parser": parser_flag, "reasoning_parser": "none"}
    config = EngineConfig.from_keywords(model=str(tmp_path), **flags)
    resolved = with_declared_parsers(config, PLUGINS)
    assert resolved.tool_calls.tool_call_parser == "hermes"
    assert not resolved.structured_outputs.reasoning_parser
    assert with_declared_parsers(resolved, PLUGINS) == resolved
    both = EngineConfig.from_keywords(
        model=str(tmp_path), tool_call_parser="mistral", reasoning_parser="glm45"
    )
    decisions = parser_decisions(both, PLUGINS)
    assert [(d.winner, d.reason) for d in decisions] == [
        ("mistral", "set by flag"), ("glm45", "set by flag"),
    ]  # fmt: skip


def test_no_parser_is_imported_to_be_asked(tmp_path: Path) -> None:
    decide(tmp_path, template_of("apertus"), of("apertus", "ApertusForCausalLM"))
    code = (
        "import sys\n"
        "from modulm.config import EngineConfig\n"
        "from modulm.plugins import manager\n"
        "from modulm_parsing.choice import parser_decisions\n"
        f"config = EngineConfig.from_keywords(model={str(tmp_path)!r})\n"
        "tool, reasoning = parser_decisions(config, manager.current())\n"
        "assert (tool.winner, reasoning.winner) == ('apertus', None)\n"
        "print(sorted(name for name in sys.modules if name.startswith('modulm_parser_')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["['modulm_parser_apertus']"], done.stderr


def test_the_others_are_named_with_their_reasons(tmp_path: Path) -> None:
    tool, _ = decide(tmp_path, template_of("qwen3_5"), QWEN)
    verdicts = {verdict.name: verdict.reason for verdict in tool.candidates}
    assert verdicts["qwen3_coder"] is None
    assert verdicts["hermes"] == "fits less well: the chat template writes <tool_call> </tool_call>"
    assert verdicts["mimo"].startswith("neither template nor model has mimo")
    assert verdicts["glm45"] == "the chat template does not write <arg_key>"
    assert "apertus" not in verdicts, "nothing at all tells of it"
