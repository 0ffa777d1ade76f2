"""Every `auto` gets a value, an owner and a reason; what cannot be is refused by name."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
from attrs import frozen

from modulm.config import EngineConfig
from modulm.config.resolve import Resolved, choose_platform, resolve
from modulm.contracts.platform import Memory, Platform, Probe
from modulm.errors import ConfigError, UnsupportedError
from modulm.plugins import Choice, Proposal, hookimpl
from modulm.plugins.manager import PluginManager, using
from modulm.plugins.selection import Selection


class Machine(Platform):
    """A made-up platform with its own defaults."""

    name = "machine"
    api = 1
    attention = ()
    batched_tokens = (4096, 1024)
    sequences = (64, 32)
    block_size = 48
    no_effect = MappingProxyType({"swap_space": "it has no other memory"})

    @classmethod
    def probe(cls) -> Probe:
        return Probe(7, "it is there")

    @property
    def device(self) -> Any:
        raise NotImplementedError

    def memory(self) -> Memory:
        return Memory(1, 1)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("bfloat16", "float32")


class Absent(Machine):
    """A platform that this machine has not."""

    name = "absent"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(0, "no such chip")


class Lesser(Machine):
    """A platform that fits, but less well."""

    name = "lesser"

    @classmethod
    def probe(cls) -> Probe:
        return Probe(1, "it would do")


@pytest.fixture
def plugins() -> PluginManager:
    manager = PluginManager()
    manager._installed = ()
    manager.register("platforms", "machine", Machine)
    manager.register("executors", "uni", "modulm.nowhere:Uni")
    manager.register("schedulers", "fcfs", "modulm.nowhere:Fcfs")
    return manager


CONFIG = {"max_position_embeddings": 512, "torch_dtype": "bfloat16"}


def run(plugins: PluginManager, config: dict[str, Any] = CONFIG, **flags: Any) -> Resolved:
    use = flags.pop("use", "offline")
    return resolve(
        EngineConfig.from_keywords(**flags),
        platform=Machine(), hf_config=config, plugins=plugins, use=use,
    )  # fmt: skip


def test_plugins_are_chosen_for_a_whole_process(plugins: PluginManager) -> None:
    wanted = EngineConfig.from_keywords(plugins=("-machine", "-uni"))
    arguments = {"platform": Machine(), "hf_config": CONFIG, "plugins": plugins, "use": "offline"}
    with pytest.raises(ConfigError, match=r"^plugins: .* uses all; .*configure\('-machine,-uni'\)"):
        resolve(wanted, **arguments)
    plugins.selection = Selection.parse("-machine,-uni")
    assert resolve(wanted, **arguments).config.device.plugins == ("-machine", "-uni")


FILE = """
import modulm
from modulm.contracts.parser import Content, ToolParser

class Echo(ToolParser):
    name = "echo"
    api = 1
    examples = ()

    def feed(self, text, ids=()):
        return [Content(text)]

    def finish(self):
        return []

modulm.register("tool_parsers", "echo_of_a_file", Echo)
"""


def test_a_keyword_runs_a_file_as_the_flag_does(plugins: PluginManager, tmp_path: Path) -> None:
    path = tmp_path / "echo_parser.py"
    path.write_text(FILE)
    with using(plugins):
        run(plugins, tool_parser_plugin=str(path), tool_call_parser="echo_of_a_file")
    assert plugins.load("tool_parsers", "echo_of_a_file").name == "echo"


def reason(resolved: Resolved, subject: str) -> str:
    return next(d.reason for d in resolved.decisions if d.subject == subject)


@pytest.mark.parametrize(("use", "tokens", "rows"), [("offline", 4096, 64), ("server", 1024, 32)])
def test_everything_open_is_decided(
    plugins: PluginManager, use: str, tokens: int, rows: int
) -> None:
    resolved = run(plugins, use=use)
    config = resolved.config
    assert config.model.dtype == "bfloat16"
    assert config.model.max_model_len == 512
    assert config.scheduler.max_num_batched_tokens == tokens
    assert config.scheduler.max_num_seqs == rows
    assert config.cache.block_size == 48
    assert config.cache.enable_prefix_caching is True
    assert config.scheduler.enable_chunked_prefill is True
    assert config.device.device == "machine"
    assert config.parallel.distributed_executor_backend == "uni"
    assert config.model.served_model_name == ("demo",)
    assert all(decision.reason for decision in resolved.decisions)


def test_what_the_user_gave_stays(plugins: PluginManager) -> None:
    flags = {
        "dtype": "float32", "max_model_len": 100, "max_num_seqs": 3, "block_size": 16,
        "max_num_batched_tokens": 50, "enable_prefix_caching": False, "served_model_name": "x",
    }  # fmt: skip
    resolved = run(plugins, **flags)
    changed = resolved.config.changed()
    assert {name: changed[name] for name in flags} == {**flags, "served_model_name": ("x",)}
    assert not set(flags) & {decision.subject for decision in resolved.decisions}


@pytest.mark.parametrize(
    ("stored", "wanted", "dtype"),
    [
        ("float16", "auto", "bfloat16"), ("float32", "auto", "float32"),
        ("bfloat16", "float", "float32"), ("bfloat16", "half", "float16"),
    ],
)  # fmt: skip
def test_dtypes(plugins: PluginManager, stored: str, wanted: str, dtype: str) -> None:
    resolved = run(plugins, {**CONFIG, "torch_dtype": stored}, dtype=wanted)
    assert resolved.config.model.dtype == dtype
    assert reason(resolved, "dtype")


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"n_positions": 1024}, 1024),
        ({"text_config": {"max_position_embeddings": 64}, "max_position_embeddings": 8}, 64),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 2}}, 200),
        (
            {
                "max_position_embeddings": 400,
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100,
                },
            },
            400,
        ),
        ({"n_ctx": 100, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": None}, 100),
        ({}, 2048),
    ],
)  # fmt: skip
def test_the_checkpoint_s_length(
    plugins: PluginManager, config: dict[str, Any], length: int
) -> None:
    assert run(plugins, config).config.model.max_model_len == length


def test_a_length_beyond_the_checkpoint_s_is_refused(plugins: PluginManager) -> None:
    with pytest.raises(ConfigError, match="max_position_embeddings") as caught:
        run(plugins, max_model_len=513)
    assert caught.value.field == "max_model_len"


def test_a_window_caps_the_length_when_windows_are_off(plugins: PluginManager) -> None:
    config = {**CONFIG, "sliding_window": 128}
    assert run(plugins, config, disable_sliding_window=True).config.model.max_model_len == 128
    assert run(plugins, config).config.model.max_model_len == 512


def test_budgets_follow_from_each_other(plugins: PluginManager) -> None:
    assert run(plugins, max_num_batched_tokens=16).config.scheduler.max_num_seqs == 16
    wide = run(plugins, max_num_seqs=9000).config.scheduler
    assert wide.max_num_batched_tokens == 9000
    whole = run(plugins, {"n_ctx": 10_000}, enable_chunked_prefill=False).config.scheduler
    assert whole.max_num_batched_tokens == 10_000


def test_flags_without_meaning_on_the_platform_are_told(plugins: PluginManager) -> None:
    resolved = run(plugins, swap_space=9)
    assert [str(notice) for notice in resolved.notices] == [
        "--swap-space: no effect on machine: it has no other memory"
    ]


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"quantization": "nf5"}, "quantization"),
        ({"scheduling_policy": "fcsf"}, "scheduling_policy"),
        ({"attention_backend": "none-such"}, "attention_backend"),
        ({"load_format": "none-such"}, "load_format"),
    ],
)
def test_names_that_no_plugin_offers(
    plugins: PluginManager, flags: dict[str, str], field: str
) -> None:
    with pytest.raises(ConfigError, match="no installed plugin") as caught:
        run(plugins, **flags)
    assert caught.value.field == field


@frozen
class Options:
    speed: int = 1


class Tunable(Machine):
    name: ClassVar[str] = "tunable"
    Config = Options

    def __init__(self, options: Options) -> None:
        self.speed = options.speed


@pytest.mark.parametrize(
    ("flags", "speed"),
    [
        ({}, 1),
        ({"additional_config": {"speed": 2}}, 2),
        ({"plugin_config": {"platforms": {"tunable": {"speed": 3}}}}, 3),
    ],
)
def test_a_platform_is_made_with_its_options(
    plugins: PluginManager, flags: dict[str, Any], speed: int
) -> None:
    plugins.register("platforms", "tunable", Tunable)
    platform, _ = choose_platform(EngineConfig.from_keywords(device="tunable", **flags), plugins)
    assert isinstance(platform, Tunable)
    assert platform.speed == speed


@pytest.mark.parametrize("options", [{"sped": 2}, {"speed": "2"}])
def test_a_platform_refuses_options_that_it_has_not(
    plugins: PluginManager, options: dict[str, Any]
) -> None:
    plugins.register("platforms", "tunable", Tunable)
    for name in ("tunable", "machine"):
        config = EngineConfig.from_keywords(device=name, additional_config=options)
        with pytest.raises(ConfigError, match=f"platforms.{name}"):
            choose_platform(config, plugins)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"platform": {"machine": {}}}, "unknown kind; did you mean 'platforms'"),
        ({"platforms": {"machin": {}}}, "no installed plugin provides platform 'machin'"),
        ({"platforms": {"machine": {"speed": 1}}}, "takes no options, got speed"),
        ({"platforms": {"tunable": {"sped": 1}}}, "unknown option sped; there are speed"),
        ({"platforms": {"tunable": 5}}, "must be a table of options"),
        ({"platforms": 5}, "must be a table of drivers"),
        ({"hooks": {"nobody": {}}}, "no hook plugin 'nobody' is installed"),
    ],
)
def test_options_that_nobody_takes_are_refused(
    plugins: PluginManager, table: dict[str, Any], message: str
) -> None:
    plugins.register("platforms", "tunable", Tunable)
    with pytest.raises(ConfigError, match=message) as caught:
        run(plugins, plugin_config=table)
    assert caught.value.field == "plugin_config"


def proposing(*proposals: Proposal) -> Any:
    class Plugin:
        @hookimpl
        def modulm_config_proposals(self, config: Any) -> list[Proposal]:
            return list(proposals)

    return Plugin()


def test_plugins_propose_and_the_user_disposes(plugins: PluginManager) -> None:
    plugins.add(proposing(Proposal("block_size", 32, "its cache lines")), "one")
    resolved = run(plugins)
    assert resolved.config.cache.block_size == 32
    assert "its cache lines" in reason(resolved, "block_size")
    assert run(plugins, block_size=16).config.cache.block_size == 16


def test_two_proposals_that_differ_are_an_error(plugins: PluginManager) -> None:
    plugins.add(proposing(Proposal("block_size", 32, "first")), "one")
    plugins.add(proposing(Proposal("block_size", 64, "second")), "two")
    with pytest.raises(ConfigError, match=r"first.*second|second.*first") as caught:
        run(plugins)
    assert caught.value.field == "block_size"


def test_the_best_platform_wins_and_the_others_say_why_not(plugins: PluginManager) -> None:
    plugins.register("platforms", "absent", Absent)
    plugins.register("platforms", "broken", "modulm.nowhere:Broken")
    platform, decision = choose_platform(EngineConfig(), plugins)
    assert platform.name == decision.winner == "machine"
    reasons = {verdict.name: verdict.reason for verdict in decision.candidates}
    assert reasons["machine"] is None
    assert reasons["absent"] == "no such chip"
    assert "nowhere" in str(reasons["broken"])


def test_no_platform_fits() -> None:
    manager = PluginManager()
    manager._installed = ()
    manager.register("platforms", "absent", Absent)
    with pytest.raises(UnsupportedError, match="no such chip"):
        choose_platform(EngineConfig(), manager)


def test_a_plugin_may_choose_the_platform(plugins: PluginManager) -> None:
    class Chooser:
        @hookimpl
        def modulm_choose_platform(self, probes: Any) -> Choice:
            assert probes["machine"].score == 7
            return Choice("lesser", "because")

    plugins.register("platforms", "lesser", Lesser)
    plugins.add(Chooser(), "chooser")
    platform, decision = choose_platform(EngineConfig(), plugins)
    assert (platform.name, decision.reason) == ("lesser", "because; chosen by chooser")


def test_a_named_platform_is_taken(plugins: PluginManager) -> None:
    plugins.register("platforms", "lesser", Lesser)
    config = EngineConfig.from_keywords(device="lesser")
    assert choose_platform(config, plugins)[0].name == "lesser"


def test_a_named_platform_that_is_not_here(plugins: PluginManager) -> None:
    plugins.register("platforms", "absent", Absent)
    with pytest.raises(UnsupportedError, match="platform 'absent' cannot be used: no such chip"):
        choose_platform(EngineConfig.from_keywords(device="absent"), plugins)
