"""Flags as values: types, ranges, states, tables, and errors that name the flag."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version
from samples import parametrize_sample

import modulm
from modulm.config import EngineConfig
from modulm.config.schema import Flag, FlagGroup, Kind, catalog, flag, flag_group
from modulm.config.schema.known import known_flags
from modulm.contracts.flags import flags_of
from modulm.errors import ConfigError, PluginConflict
from modulm.plugins import manager
from modulm.plugins.manager import PluginManager, using
from modulm.structure import parse_int
from modulm_adapters.flags import LoRAConfig
from modulm_expert_routes.flags import ExpertRoutesConfig
from modulm_fleet.flags import FleetConfig
from modulm_gpu.flags import CompilationConfig
from modulm_hooks_otlp.flags import TracesConfig
from modulm_isolation.flags import IsolationConfig
from modulm_kv_events.flags import KVCacheMetricsConfig, KVEventsConfig
from modulm_kv_transfer.flags import ECTransferConfig, KVTransferConfig
from modulm_mapped_weights.flags import MappedWeightsFlags
from modulm_media.flags import MediaConfig
from modulm_plugin_lock.flags import PluginLockConfig
from modulm_prefix_retention.flags import PrefixRetentionConfig
from modulm_route_adapters.flags import ServedAdaptersConfig
from modulm_route_anthropic.flags import AnthropicConfig
from modulm_route_grpc.flags import GrpcConfig
from modulm_server.flags import ServerConfig
from modulm_server.models.flags import ModelsConfig
from modulm_speculation.flags import SpeculationConfig
from modulm_weight_offload.flags import OffloadConfig

ALL = list(catalog().specs.values())
KNOWN = catalog().elsewhere()


def group_of(spec: Flag) -> type[FlagGroup]:
    return catalog().owners[spec.name].cls


def test_every_core_group_is_an_attribute_of_the_config() -> None:
    config = EngineConfig()
    core = {group.name: group.cls for group in catalog().groups if not group.origin}
    assert {field.name for field in attrs.fields(EngineConfig)} == {
        *core,
        "package_groups",
        "unread",
    }
    assert {name: type(getattr(config, name)) for name in core} == core
    assert all(config.group(cls) is getattr(config, name) for name, cls in core.items())


def test_names_are_unique_also_among_flags_that_are_only_known() -> None:
    names = [alias for spec in (*ALL, *KNOWN) for alias in (spec.option, *spec.aliases)]
    assert len(names) == len(set(names))


def test_every_flag_says_what_it_does_or_why_it_does_not() -> None:
    assert [spec.name for spec in ALL if not spec.help.endswith(".")] == []
    assert [spec.name for spec in ALL if spec.state.kind is not Kind.WORKS] == []
    assert [spec.name for spec in KNOWN if not spec.state.reason] == []


def test_groups_are_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        EngineConfig().model.dtype = "float32"  # type: ignore[misc]


def wrong(spec: Flag) -> object:
    """What no reader of the flag's type takes."""
    if spec.is_list:
        return ["x"] if spec.type in (tuple[int, ...], tuple[int, ...] | None) else [object()]
    return "{" if spec.is_table else object() if spec.kinds == (str,) else "maybe"


@parametrize_sample(
    "spec",
    [spec for spec in ALL if not (spec.parse and spec.kinds != (int,)) and "Any" not in str(
        spec.type).removesuffix(" | None").removesuffix("Mapping[str, typing.Any]")], every=2,
    ids=lambda spec: spec.name,
)  # fmt: skip
def test_a_wrong_value_is_refused_with_the_flag_named(spec: Flag) -> None:
    with pytest.raises(ConfigError) as caught:
        group_of(spec)(**{spec.name: wrong(spec)})
    assert caught.value.field == spec.name
    assert str(caught.value).startswith(f"{spec.name}: ")


@pytest.mark.parametrize(
    "spec",
    [spec for spec in ALL if spec.least is not None or spec.most is not None],
    ids=lambda spec: spec.name,
)
def test_ranges_are_checked(spec: Flag) -> None:
    outside = [
        limit for limit in (
            None if spec.least is None else spec.least - 1,
            None if spec.most is None else spec.most + 1,
        )
        if limit is not None and not (spec.name == "max_model_len" and limit == -1)
    ]  # fmt: skip
    assert outside
    for value in outside:
        with pytest.raises(ConfigError) as caught:
            group_of(spec)(**{spec.name: value})
        assert caught.value.field == spec.name


@pytest.mark.parametrize(
    "spec",
    [spec for spec in ALL if spec.choices and spec.kind is None],
    ids=lambda spec: spec.name,
)
def test_a_wrong_choice_lists_the_right_ones(spec: Flag) -> None:
    with pytest.raises(ConfigError) as caught:
        group_of(spec)(**{spec.name: "no-such-choice"})
    assert all(choice in str(caught.value) for choice in spec.choices)


def another(spec: Flag) -> object:
    """A value that asks for something."""
    if spec.is_switch:
        return not spec.default
    if spec.is_list:
        return ["1"]
    if spec.is_table:
        return {"a": 1}
    if spec.choices:
        return next(choice for choice in spec.choices if choice != spec.default)
    return (spec.default or 0) + 1 if spec.kinds[0] in (int, float) else "other"


@parametrize_sample("spec", KNOWN, every=2, ids=lambda spec: spec.name)
def test_a_flag_that_nothing_reads_is_never_ignored(spec: Flag) -> None:
    assert EngineConfig().with_parts({spec.name: spec.default}) == EngineConfig()
    if spec.state.kind in (Kind.NO_EFFECT, Kind.RENAMED):
        config = EngineConfig.from_keywords(**{spec.name: value_of_renamed(spec)})
        (notice,) = config.notices()
        assert notice.flag == spec.option
        assert spec.state.reason in notice.message
        assert config.value(spec.name) is not None
    else:
        with pytest.raises(ConfigError) as caught:
            EngineConfig.from_keywords(**{spec.name: another(spec)})
        assert caught.value.field == spec.name
        assert str(spec.state) in caught.value.message


def value_of_renamed(spec: Flag) -> object:
    return "xgrammar" if spec.name == "guided_decoding_backend" else another(spec)


def test_every_line_of_the_file_of_known_flags_is_used_or_checked_against_its_package() -> None:
    """Flags of packages are in the file for those who have not installed them."""
    packages = {
        "modulm-adapters": LoRAConfig,
        "modulm-fleet": FleetConfig,
        "modulm-gpu": CompilationConfig,
        "modulm-media": MediaConfig,
        "modulm-hooks-otlp": TracesConfig,
        "modulm-isolation": IsolationConfig,
        "modulm-kv-events": (KVCacheMetricsConfig, KVEventsConfig),
        "modulm-kv-transfer": (ECTransferConfig, KVTransferConfig),
        "modulm-route-adapters": ServedAdaptersConfig,
        "modulm-route-anthropic": AnthropicConfig,
        "modulm-route-grpc": GrpcConfig,
        "modulm-plugin-lock": PluginLockConfig,
        "modulm-expert-routes": ExpertRoutesConfig,
        "modulm-prefix-retention": PrefixRetentionConfig,
        "modulm-mapped-weights": MappedWeightsFlags,
        "modulm-server": (ServerConfig, ModelsConfig),
        "modulm-speculation": SpeculationConfig,
        "modulm-weight-offload": OffloadConfig,
    }
    brought = {spec.name: spec for spec in known_flags().values() if spec.package in packages}
    for package, brings in packages.items():
        groups = brings if isinstance(brings, tuple) else (brings,)
        known = {name for name, spec in brought.items() if spec.package == package}
        names = {flag.name for group in groups for flag in flags_of(group) if not flag.nested}
        assert known == names | {group.table for group in groups if group.table}
    for name, spec in brought.items():
        if name in catalog().tables:
            assert spec.aliases == catalog().tables[name].cls.table_aliases
            continue
        here = catalog().specs[name]
        assert (spec.default or None, spec.aliases) == (here.default or None, here.aliases)
        assert (spec.is_switch, spec.is_list, spec.is_table) == (
            here.is_switch, here.is_list, here.is_table,
        )  # fmt: skip
    assert set(known_flags()) == {*brought, *(spec.name for spec in KNOWN)}


def test_without_the_package_a_flag_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    others = tuple(d for d in PluginManager().everything() if d.kind != "flags")
    monkeypatch.setattr("modulm.plugins.manager.installed", lambda: others)
    with using(PluginManager()):
        assert EngineConfig.from_keywords(port=8000) == EngineConfig()
        with pytest.raises(ConfigError, match="pip install modulm-server") as caught:
            EngineConfig.from_keywords(port=9)
        assert caught.value.field == "port"


@flag_group
class Dice(FlagGroup):
    """How many dice."""

    title = "Dice"
    table = "dice_config"

    dice: int = flag(1, "How many are thrown.", least=1, key="number")
    sides: tuple[int, ...] = flag((6,), "Sides of each.")


@pytest.fixture
def dice() -> Iterator[None]:
    manager = PluginManager()
    manager.register("flags", "dice", Dice)
    with using(manager):
        yield


@pytest.mark.usefixtures("dice")
def test_a_package_brings_flags() -> None:
    config = EngineConfig.from_keywords(dice="2k", sides=[4, 8])
    assert config.group(Dice) == Dice(dice=2000, sides=(4, 8))
    assert EngineConfig().group(Dice) == Dice()
    assert config.changed() == {"dice": 2000, "sides": (4, 8)}
    assert EngineConfig().with_parts(config.changed()) == config
    assert config.with_(dice=1, sides=6) == EngineConfig()
    assert EngineConfig.from_keywords(dice_config={"number": 3}).group(Dice).dice == 3
    with pytest.raises(ConfigError, match="below the minimum"):
        EngineConfig.from_keywords(dice=0)


@flag_group
class Again(FlagGroup):
    """The same flag."""

    dice: int = flag(1, "How many are thrown.")


@pytest.mark.usefixtures("dice")
def test_two_packages_with_one_flag_are_an_error_that_names_both() -> None:
    from modulm.plugins import register

    register("flags", "again", Again)
    with pytest.raises(PluginConflict, match="--dice is defined by"):
        EngineConfig.from_keywords(dice=1)


@pytest.mark.parametrize("target", ["modulm.nowhere:Flags", "modulm.config:EngineConfig"])
def test_flags_that_cannot_be_loaded_are_left_out_and_named(target: str) -> None:
    manager = PluginManager()
    manager.register("flags", "broken", target)
    with using(manager):
        assert EngineConfig.from_keywords(seed=1).model.seed == 1
        with pytest.raises(ConfigError, match=f"is not a flag.*{target}"):
            EngineConfig.from_keywords(broken_flag=1)


def test_no_effect_and_deprecated_flags_give_a_notice() -> None:
    config = EngineConfig.from_keywords(jit_monitor_verbose=True, swap_space=8, max_num_seqs=4)
    notices = {notice.flag: notice.message for notice in config.notices()}
    assert set(notices) == {"--jit-monitor-verbose", "--swap-space"}
    assert notices["--jit-monitor-verbose"].startswith("no effect: ")
    assert notices["--swap-space"].startswith("no effect: ")


def test_renamed_flags_say_until_when_the_old_name_works() -> None:
    config = EngineConfig.from_keywords(guided_decoding_backend="auto")
    (notice,) = config.notices()
    assert notice.message == (
        "deprecated: use --structured-outputs-config.backend; the old name works until modulm 0.3"
    )
    renamed = [flag for flag in known_flags().values() if flag.state.kind is Kind.RENAMED]
    ends = {flag.state.reason.rpartition(" ")[2] for flag in renamed}
    assert [end for end in ends if Version(end) > Version(modulm.__version__)] == [*ends], "gone"


def test_unknown_names_come_with_close_ones() -> None:
    with pytest.raises(ConfigError, match="max_model_len") as caught:
        EngineConfig.from_keywords(max_model_length=5)
    assert caught.value.field == "max_model_length"


def test_other_names_of_a_flag_work() -> None:
    config = EngineConfig.from_keywords(device_memory_utilization=0.5, model_tag="x")
    assert (config.cache.gpu_memory_utilization, config.model.model) == (0.5, "x")


def test_two_names_of_one_flag_must_agree() -> None:
    with pytest.raises(ConfigError, match="set twice"):
        EngineConfig.from_keywords(model_tag="x", model="y")


def test_tables_fill_their_group() -> None:
    config = EngineConfig.from_keywords(
        structured_outputs_config={"backend": "auto", "disable_any_whitespace": True},
        attention_config='{"backend": "sdpa"}',
    )
    assert config.structured_outputs.disable_any_whitespace
    assert config.attention.attention_backend == "sdpa"


@pytest.mark.parametrize("table", catalog().tables)
def test_an_unknown_key_of_a_table_is_named(table: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_keywords(**{table: {"bakend": "x"}})
    assert caught.value.field == f"{table}.bakend"
    keys = [spec.key for spec in flags_of(catalog().tables[table].cls)]
    assert ("backend" in str(caught.value)) is ("backend" in keys)


def test_keys_that_vllm_knows_are_notes_or_say_what_is_missing() -> None:
    keys = {"cache_dir": "/x", "cudagraph_mm_encoder": True}
    notes = {
        n.flag: n.message for n in EngineConfig.from_keywords(compilation_config=keys).notices()
    }
    assert len(notes) == 2
    assert all(message.startswith("no effect") for message in notes.values())
    for table, key in (
        ({"attention_config": {"indexer_kv_dtype": "fp8"}}, "indexer_kv_dtype"),
        ({"profiler_config": {"wait_iterations": 2}}, "wait_iterations"),
        ({"profiler_config": {"proton_mode": "x"}}, "proton_mode"),
    ):
        with pytest.raises(ConfigError, match="ot supported yet") as caught:
            EngineConfig.from_keywords(**table)
        assert key in caught.value.field


def test_drivers_may_be_named_as_in_vllm() -> None:
    plugins = manager.current()
    for kind, theirs, ours in (
        ("attention", "FLASH_ATTN", "flash_attn"), ("grammars", "guidance", "llguidance"),
        ("loaders", "hf", "safetensors"), ("loaders", "runai_streamer_sharded", "sharded_state"),
    ):  # fmt: skip
        assert plugins.find(kind, theirs) == plugins.find(kind, ours)


def test_a_key_of_a_table_is_no_flag_of_its_own() -> None:
    with pytest.raises(ConfigError):
        EngineConfig.from_keywords(disable_any_whitespace=True)


def test_renamed_flags_reach_their_new_place() -> None:
    config = EngineConfig.from_keywords(guided_decoding_disable_any_whitespace=True)
    assert config.structured_outputs.disable_any_whitespace
    assert "structured-outputs-config" in str(config.notices()[0])


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "max_num_batched_tokens"),
        ({"ssl_keyfile": "k.pem"}, "ssl_certfile"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_model_len": 128},
            "max_num_batched_tokens",
        ),
    ],
)
def test_values_that_contradict_each_other(flags: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_keywords(**flags)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1k", 1000), ("1K", 1024), ("25.6k", 25_600), ("2M", 2 * 2**20), ("1g", 10**9),
        ("0.5m", 500_000), ("1_000", 1000), ("-1", -1), ("+3", 3), (8192.0, 8192),
    ],
)  # fmt: skip
def test_whole_numbers_for_people(text: object, value: int) -> None:
    assert parse_int(text) == value


@pytest.mark.parametrize(
    "text", ["", "k", "1.5", "1.5K", "1kb", "0.0001k", "1e3", "0x10", True, None, 1.5]
)
def test_what_is_no_whole_number(text: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        parse_int(text)


@given(st.integers(min_value=-(10**15), max_value=10**15))
def test_plain_numbers_mean_themselves(number: int) -> None:
    assert parse_int(str(number)) == number == parse_int(number)


@given(st.integers(min_value=0, max_value=10**6), st.sampled_from("kmgt"))
def test_decimal_suffixes_are_powers_of_a_thousand(number: int, suffix: str) -> None:
    power = 1000 ** ("kmgt".index(suffix) + 1)
    assert parse_int(f"{number}{suffix}") == number * power
    assert parse_int(f"{number}{suffix.upper()}") == number * 1024 ** ("kmgt".index(suffix) + 1)


def test_a_torch_dtype_is_understood() -> None:
    import torch

    assert EngineConfig.from_keywords(dtype=torch.bfloat16).model.dtype == "bfloat16"


@pytest.mark.parametrize("value", ["auto", -1, "-1", None])
def test_max_model_len_can_be_left_to_the_checkpoint(value: object) -> None:
    assert EngineConfig.from_keywords(max_model_len=value).model.max_model_len is None


def test_plugin_terms_are_split() -> None:
    config = EngineConfig.from_keywords(plugins="a, -b")
    assert config.device.plugins == ("a", "-b")
    assert EngineConfig.from_keywords(plugins=["a,-b", "c"]).device.plugins == ("a", "-b", "c")


def test_every_flag_that_works_is_read_somewhere() -> None:
    root = Path(__file__).parents[3]
    sources = [*(root / "core").rglob("*.py"), *(root / "plugins").rglob("*.py")]
    read = {
        word
        for path in sources
        if "schema" not in path.parts
        for word in re.findall(
            r"self\.(\w+)" if path.name == "flags.py" else r"\.(\w+)",
            path.read_text(encoding="utf-8"),
        )
    }
    ran = [spec.name for spec in ALL if spec.registers]
    assert [spec.name for spec in ALL if spec.name not in {*read, *ran}] == []
