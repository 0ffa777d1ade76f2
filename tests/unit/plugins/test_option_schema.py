"""`plugins show` explains the options of a driver, and prints their JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Literal

import pytest
from attrs import field, frozen
from attrs.validators import ge, in_
from click.testing import CliRunner
from jsonschema import Draft202012Validator, ValidationError

from modulm_command_plugins.command import command
from modulm_command_plugins.option_schema import option_lines, schema_of


class Speed(Enum):
    SLOW = "slow"
    FAST = "fast"


@frozen
class Part:
    size: int = 1


@frozen
class Config:
    """folder: where files are; 0: nowhere. speed: how fast. limits: by name."""

    folder: str
    speed: Speed = Speed.SLOW
    mode: Literal["a", "b"] = "a"
    rate: float | None = field(default=None, metadata={"help": "Tokens per second"})
    limits: Mapping[str, int] = field(factory=dict)
    parts: tuple[Part, ...] = ()
    most: int = field(default=4, validator=ge(1))
    level: str = field(default="x", validator=in_(["x", "y"]))
    path: Path = Path()


def test_the_schema_accepts_what_the_class_does() -> None:
    schema = schema_of(Config)
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    validator.validate({"folder": "f"})
    validator.validate({
        "folder": "f", "speed": "fast", "mode": "b", "rate": 1.5, "limits": {"x": 1},
        "parts": [{"size": 2}], "most": 1, "level": "y", "path": "p",
    })  # fmt: skip
    assert schema["required"] == ["folder"]
    assert schema["properties"]["speed"] == {
        "enum": ["slow", "fast"], "description": "how fast", "default": "slow",
    }  # fmt: skip


@pytest.mark.parametrize(
    "table",
    [
        {}, {"folder": 1}, {"folder": "f", "more": 1}, {"folder": "f", "speed": "x"},
        {"folder": "f", "mode": "c"}, {"folder": "f", "rate": "1"}, {"folder": "f", "most": 0},
        {"folder": "f", "limits": {"x": "y"}}, {"folder": "f", "parts": [{"length": 1}]},
        {"folder": "f", "level": "z"},
    ],
)  # fmt: skip
def test_the_schema_refuses_what_the_class_does(table: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Draft202012Validator(schema_of(Config)).validate(table)


def test_each_option_is_explained_on_a_line() -> None:
    assert list(option_lines(Config))[:4] == [
        "folder: string  where files are; 0: nowhere",
        'speed: slow/fast = "slow"  how fast',
        'mode: a/b = "a"',
        "rate: number/null = null  Tokens per second",
    ]


def test_show_prints_them() -> None:
    done = CliRunner().invoke(command, ["show", "kv_connectors/disk"])
    assert "options       shared_storage_path: string" in done.stdout
    assert "max_bytes: integer = 17179869184  of all files in it" in done.stdout
    done = CliRunner().invoke(command, ["show", "kv_connectors/disk", "--schema"])
    (schema,) = json.loads(done.stdout).values()
    assert schema["properties"]["max_bytes"]["minimum"] == 1
