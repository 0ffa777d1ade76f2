"""The forms in which users of vLLM type their command lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from modulm.config.schema import Flag
from modulm.errors import ConfigError
from modulm_cli.arguments import Shapes, normalize

SHAPES = Shapes(
    tables=frozenset({"--hf-overrides", "--compilation-config"}),
    lists=frozenset({"--served-model-name"}),
    takes_value=lambda name: name in ("--dtype", "--optimization-level", "--prompt"),
    shorts={"-q": "--quantization", "-cc": "--compilation-config", "-p": "--prompt"},
)


def run(*args: str) -> list[str]:
    return normalize(list(args), SHAPES)[0]


def table(*args: str) -> Any:
    (word,) = run(*args)
    name, _, text = word.partition("=")
    assert name in SHAPES.tables
    return json.loads(text)


@pytest.mark.parametrize(
    ("args", "value"),
    [
        (["--hf-overrides", '{"a": 1}'], {"a": 1}),
        (["--hf-overrides.a", "1"], {"a": 1}),
        (["--hf_overrides.a=x y"], {"a": "x y"}),
        (["--hf-overrides.a.b", "1", "--hf-overrides.a.c", "true"], {"a": {"b": 1, "c": True}}),
        (["--hf-overrides.l+", "x", "--hf-overrides.l+=y,3"], {"l": ["x", "y", 3]}),
        (["--hf-overrides", '{"a": {"b": 1}}', "--hf-overrides.a.c=2"], {"a": {"b": 1, "c": 2}}),
        (["--hf-overrides.a=1", "--hf-overrides", '{"b": 2}'], {"a": 1, "b": 2}),
        (["--hf-overrides.key_1", "v_1"], {"key_1": "v_1"}),
        (["-cc.mode=3"], {"mode": 3}),
        (["-O.mode", "3"], {"mode": 3}),
        (["-O", '{"mode": 3}'], {"mode": 3}),
        (['-O={"mode": 3}'], {"mode": 3}),
    ],
)
def test_tables(args: list[str], value: Any) -> None:
    assert table(*args) == value


@pytest.mark.parametrize("args", [["-O3"], ["-O", "3"], ["-O=3"]])
def test_optimization_levels(args: list[str]) -> None:
    assert run(*args)[0].partition("=")[::2] == ("--optimization-level", "3")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--max_model_len", "3"], ["--max-model-len", "3"]),
        (["--max_model_len=a_b"], ["--max-model-len=a_b"]),
        (["--dtype", "--half_"], ["--dtype", "--half_"]),
        (["-p", "--a.b"], ["--prompt", "--a.b"]),
        (["model_x", "-5"], ["model_x", "-5"]),
        (["--served-model-name", "a", "b", "--x"],
         ["--served-model-name=a", "--served-model-name=b", "--x"]),
        (["--served_model_name=a,b"], ["--served-model-name=a,b"]),
        (["--x", "--", "--a_b", "-O3"], ["--x", "--", "--a_b", "-O3"]),
        ([], []),
    ],
)  # fmt: skip
def test_other_words(args: list[str], expected: list[str]) -> None:
    assert run(*args) == expected


KNOWN = {
    spec.name: spec for spec in (
        Flag(name="max_loras", type=int | None), Flag(name="enable_lora", type=bool | None),
        Flag(name="lora_modules", type=tuple[str, ...] | None),
        Flag(name="sc", type=Mapping[str, Any] | None),
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("args", "values"),
    [
        (["--max_loras", "3", "x"], {"max_loras": "3"}),
        (["x", "--max-loras=3"], {"max_loras": "3"}),
        (["--enable-lora", "x"], {"enable_lora": True}),
        (["--no-enable-lora", "x"], {"enable_lora": False}),
        (["x", "--lora-modules", "a", "b"], {"lora_modules": ["a", "b"]}),
        (["--lora-modules=a", "--lora-modules=b", "x"], {"lora_modules": ["a", "b"]}),
        (["x", "--lora-modules", '["a"]'], {"lora_modules": '["a"]'}),
        (["--sc.a.b", "1", "--sc", '{"c": 2}', "x"], {"sc": {"a": {"b": 1}, "c": 2}}),
        (["--sc-a", "x"], {}),
        (["--no-max-loras", "x"], {}),
    ],
)
def test_flags_that_the_command_has_not(args: list[str], values: dict[str, Any]) -> None:
    shapes = evolve(SHAPES, known=KNOWN.get)
    arguments, known = normalize(args, shapes)
    assert known == values
    assert arguments == (["x"] if values else args)
    mine = evolve(shapes, names=frozenset({"--max-loras"}))
    assert normalize(["--max-loras", "3"], mine) == (["--max-loras", "3"], {})


def test_tables_stand_before_the_double_dash() -> None:
    assert run("--hf-overrides.a=1", "--", "x") == ['--hf-overrides={"a": 1}', "--", "x"]


@pytest.mark.parametrize(
    "args",
    [
        ["--dtype.x", "1"],
        ["--max-loras.x", "1"],
        ["--max-loras"],
        ["--hf-overrides"],
        ["--hf-overrides", "[1]"],
        ["--hf-overrides.a=1", "--hf-overrides.a.b=2"],
        ["--served-model-name"],
    ],
)
def test_what_makes_no_sense_names_the_flag(args: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        normalize(args, evolve(SHAPES, known=KNOWN.get))
    assert caught.value.field == args[0].lstrip("-").split(".")[0].split("=")[0].replace("-", "_")


values = st.recursive(
    st.booleans() | st.integers() | st.text(alphabet="abc ", min_size=1),
    lambda inner: st.dictionaries(st.sampled_from("xyz"), inner, min_size=1),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from("xyz"), values, min_size=1))
def test_parts_make_the_same_value_as_the_whole(value: dict[str, Any]) -> None:
    def parts(path: str, item: Any) -> list[str]:
        if isinstance(item, dict):
            return [word for key, inner in item.items() for word in parts(f"{path}.{key}", inner)]
        return [path, json.dumps(item)]

    assert table(*parts("--hf-overrides", value)) == value
    assert table("--hf-overrides", json.dumps(value)) == value
