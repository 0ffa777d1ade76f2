"""Flags as values: types, ranges, states, tables, and errors that name the flag."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from modulm.config import EngineConfig
from modulm.config.schema import GROUPS, TABLES, Kind, all_flags, flags_of
from modulm.config.schema.flags import Flag, parse_int
from modulm.errors import ConfigError

ALL = [spec for _, spec in all_flags()]


def test_every_group_is_an_attribute_of_the_config() -> None:
    config = EngineConfig()
    assert {field.name for field in attrs.fields(EngineConfig)} == set(GROUPS)
    for name, group in GROUPS.items():
        assert type(config.group(name)) is group


def test_flag_names_are_unique() -> None:
    names = [spec.name for spec in ALL]
    assert len(names) == len(set(names))
    aliases = [alias for spec in ALL for alias in spec.aliases]
    assert len(aliases) == len(set(aliases))


def test_every_flag_says_what_it_does_and_why_it_does_not() -> None:
    for spec in ALL:
        assert spec.help.endswith("."), spec.name
        assert spec.state.kind is Kind.WORKS or spec.state.reason, spec.name


def test_groups_are_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        EngineConfig().model.dtype = "float32"  # type: ignore[misc]


WRONG = {
    "bool": "maybe",
    "int": "many",
    "float": "much",
    "str": object(),
    "Mapping[str, Any]": "{",
    "tuple[int, ...]": ["x"],
    "tuple[str, ...]": [object()],
}


@pytest.mark.parametrize(
    "spec",
    [spec for spec in ALL if spec.base in WRONG and not (spec.parse and spec.base != "int")],
    ids=lambda spec: spec.name,
)
def test_a_wrong_value_is_refused_with_the_flag_named(spec: Flag) -> None:
    group = next(group for group in GROUPS.values() if spec in flags_of(group))
    with pytest.raises(ConfigError) as caught:
        group(**{spec.name: WRONG[spec.base]})
    assert caught.value.field == spec.name
    assert str(caught.value).startswith(f"{spec.name}: ")


@pytest.mark.parametrize(
    "spec",
    [spec for spec in ALL if spec.least is not None or spec.most is not None],
    ids=lambda spec: spec.name,
)
def test_ranges_are_checked(spec: Flag) -> None:
    group = next(group for group in GROUPS.values() if spec in flags_of(group))
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
            group(**{spec.name: value})
        assert caught.value.field == spec.name


@pytest.mark.parametrize(
    "spec",
    [spec for spec in ALL if spec.choices and spec.kind is None],
    ids=lambda spec: spec.name,
)
def test_a_wrong_choice_lists_the_right_ones(spec: Flag) -> None:
    group = next(group for group in GROUPS.values() if spec in flags_of(group))
    with pytest.raises(ConfigError) as caught:
        group(**{spec.name: "no-such-choice"})
    assert all(choice in str(caught.value) for choice in spec.choices)


@pytest.mark.parametrize(
    "spec",
    [spec for spec in ALL if spec.state.kind in (Kind.NOT_YET, Kind.REFUSED)],
    ids=lambda spec: spec.name,
)
def test_what_cannot_be_set_says_so(spec: Flag) -> None:
    other = {
        "bool": not spec.default, "int": (spec.default or 0) + 1 if spec.base == "int" else 0,
        "float": (spec.default or 0) + 1 if spec.base == "float" else 0, "str": "other",
        "Mapping[str, Any]": {"a": 1}, "tuple[int, ...]": [1], "tuple[str, ...]": ["a"],
        "tuple[Any, ...]": ["a"],
    }[spec.base]  # fmt: skip
    if spec.choices:
        other = next(choice for choice in spec.choices if choice != spec.default)
    if spec.most is not None:
        other = spec.default / 2
    with pytest.raises(ConfigError) as caught:
        EngineConfig().with_parts({spec.name: other})
    assert spec.state.reason in str(caught.value)
    assert EngineConfig().with_parts({spec.name: spec.default}) == EngineConfig()


def test_no_effect_and_deprecated_flags_give_a_notice() -> None:
    config = EngineConfig.from_keywords(optimization_level=3, swap_space=8, max_num_seqs=4)
    shown = {notice.flag: notice.message for notice in config.notices()}
    assert set(shown) == {"--optimization-level", "--swap-space"}
    assert shown["--optimization-level"].startswith("no effect: ")
    assert shown["--swap-space"].startswith("deprecated: ")


def test_unknown_names_come_with_close_ones() -> None:
    with pytest.raises(ConfigError, match="max_model_len") as caught:
        EngineConfig.from_keywords(max_model_length=5)
    assert caught.value.field == "max_model_length"


def test_other_names_of_a_flag_work() -> None:
    config = EngineConfig.from_keywords(device_memory_utilization=0.5, model_tag="x")
    assert (config.cache.gpu_memory_utilization, config.model.model) == (0.5, "x")


def test_two_names_of_one_flag_must_agree() -> None:
    with pytest.raises(ConfigError, match="given twice"):
        EngineConfig.from_keywords(model_tag="x", model="y")


def test_tables_fill_their_group() -> None:
    config = EngineConfig.from_keywords(
        structured_outputs_config={"backend": "auto", "disable_any_whitespace": True},
        attention_config='{"backend": "sdpa"}',
    )
    assert config.structured_outputs.disable_any_whitespace
    assert config.attention.attention_backend == "sdpa"


@pytest.mark.parametrize("table", TABLES)
def test_an_unknown_key_of_a_table_is_named(table: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_keywords(**{table: {"bakend": "x"}})
    assert caught.value.field == f"{table}.bakend"
    assert "backend" in str(caught.value)


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
        for word in re.findall(r"\.(\w+)", path.read_text(encoding="utf-8"))
    }
    works = [spec for spec in ALL if spec.state.kind is Kind.WORKS and not spec.deprecated]
    assert [spec.name for spec in works if spec.name not in read] == []
