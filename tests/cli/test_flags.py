"""Options made from the schema: states of documented flags, help by topic, errors by name."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import attrs
import click
import pytest
from click.testing import CliRunner, Result
from samples import parametrize_sample

from modulm.config.schema import Flag, Kind, catalog
from modulm.config.sources import Draft
from modulm.plugins.manager import PluginManager, using
from modulm_cli import FlagCommand
from modulm_cli.flags import FlagOption
from modulm_command_config.page import markdown
from modulm_fleet.flags import FleetConfig
from modulm_parsing import parse
from modulm_server.flags import ServerConfig

ROOT = Path(__file__).parents[2]
LISTED = [
    line.rsplit(" ", 1)
    for line in (Path(__file__).parent / "flags.txt").read_text().splitlines()
    if not line.startswith("#")
]


def command(*names: str) -> click.Command:
    """A command as `modulm` finds it, by its words."""
    (point,) = entry_points(group="modulm.commands", name=names[0])
    node: Any = point.load()
    for name in names[1:]:
        node = node.commands[name]
    assert isinstance(node, click.Command)
    return node


def options(path: str) -> dict[str, click.Option]:
    selected = command(*path.split())
    params = selected.get_params(click.Context(selected))
    return {
        name: param
        for param in params
        if isinstance(param, click.Option)
        for name in (*param.opts, *param.secondary_opts)
    }


@pytest.mark.parametrize("path", sorted({name for name, _ in LISTED}))
def test_every_documented_flag_is_an_option_or_known(path: str) -> None:
    known = options(path)
    takes_known = any(isinstance(option, FlagOption) for option in known.values())
    missing = [flag for name, flag in LISTED if name == path and flag not in known]
    if takes_known:
        missing = [flag for flag in missing if known_flag(flag) is None]
    # Only servers run replicas and read requests' own data: commands that make an engine of their
    # own have none of those flags.
    names = {f"--{field.name.replace('_', '-')}" for field in attrs.fields(FleetConfig)}
    names |= {"--io-processor-plugin", "--default-mm-loras"}
    servers = {flag for flag, option in options("serve").items() if names & {*option.opts}}
    assert not set(missing) - servers
    assert path != "serve" or not missing


def known_flag(option: str) -> Flag | None:
    name = option.removeprefix("--").replace("-", "_") if option.startswith("--") else option
    return catalog().known(name) or catalog().known(name.removeprefix("no_"))


TOLD = sorted({flag for _, flag in LISTED if known_flag(flag) is not None and flag != "-O"})


@parametrize_sample("option", TOLD, every=4)
def test_a_documented_flag_that_nothing_reads_is_told(option: str) -> None:
    """With a value that asks for something it is an error or a note, in the words of its state."""
    spec = known_flag(option)
    assert spec is not None
    result, draft = run("m", *asking(spec, option), server=True)
    if spec.state.kind in (Kind.NO_EFFECT, Kind.RENAMED):
        assert draft is not None, result.output
        assert [(n.flag, spec.state.reason in n.message) for n in draft.notices] == [
            (spec.option, True)
        ]
    else:
        assert draft is None
        assert str(spec.state) in " ".join(result.output.split())


def asking(spec: Flag, option: str) -> list[str]:
    """The option with a value that is not its default."""
    if spec.is_switch:
        return ["--no-" + spec.option.removeprefix("--") if spec.default is True else spec.option]
    if spec.is_table:
        return [f"{option}.key", "1"]
    if spec.choices:
        return [option, next(choice for choice in spec.choices if choice != spec.default)]
    if spec.name == "guided_decoding_backend":
        return [option, "xgrammar"]
    return [option, "7"]


def catch(**attributes: Any) -> tuple[FlagCommand, list[Draft]]:
    drafts: list[Draft] = []

    @click.command("catch", cls=FlagCommand, **attributes)
    @click.argument("model_tag", required=False)
    @click.option("--own", type=int, default=1)
    @click.option("-q", "--quick")
    def caught(draft: Draft, model_tag: str | None, own: int, quick: str | None) -> None:
        drafts.append(draft)
        click.echo(f"own={own} quick={quick}")

    return caught, drafts


def run(*args: str, **attributes: Any) -> tuple[Result, Draft | None]:
    caught, drafts = catch(**attributes)
    result = CliRunner().invoke(caught, list(args))
    return result, drafts[0] if drafts else None


def draft_of(*args: str) -> Draft:
    result, draft = run(*args, server=True)
    assert result.exit_code == 0, result.output
    assert draft is not None
    return draft


def test_all_forms_of_a_flag_at_once() -> None:
    draft = draft_of(
        "some/model", "--max_model_len", "25.6k", "-tp", "1", "-O3", "--no-enable-prefix-caching",
        "--hf-overrides.a.b=1", "--served-model-name", "x", "y", "--api-key", "k",
        "--structured-outputs-config.backend=auto", "--hf-token", "--allowed-origins", '["a","b"]',
    )  # fmt: skip
    config = draft.config
    assert config.model.model == "some/model"
    assert config.model.max_model_len == 25_600
    assert config.value("optimization_level") == 3
    assert config.cache.enable_prefix_caching is False
    assert config.model.hf_overrides == {"a": {"b": 1}}
    assert config.model.served_model_name == ("x", "y")
    assert config.model.hf_token is True
    assert config.group(ServerConfig).api_key == ("k",)
    assert config.group(ServerConfig).allowed_origins == ("a", "b")
    assert draft.origins["max_model_len"] == "--max-model-len"
    assert draft.notices == ()


def test_an_own_wins_its_short_name() -> None:
    result, draft = run("-q", "hello", "--quantization", "none")
    assert "quick=hello" in result.output
    assert draft is not None
    assert draft.config.model.quantization == "none"


def test_a_file_fills_flags_and_owns(tmp_path: Path) -> None:
    path = tmp_path / "flags.yaml"
    path.write_text("own: 7\nmodel: from-file\nseed: 5\ndtype: float32\n")
    result, draft = run("--config", str(path), "--seed", "6")
    assert "own=7" in result.output
    assert draft is not None
    assert (draft.config.model.seed, draft.config.model.dtype) == (6, "float32")
    assert draft.config.model.model == "from-file"
    result, draft = run("named", f"--config={path}")
    assert draft is not None
    assert draft.config.model.model == "named"


@pytest.mark.parametrize(
    ("args", "phrases"),
    [
        (["--max-model-len", "much"], ["--max-model-len", "whole number"]),
        (["--dtype", "fp8"], ["--dtype", "bfloat16"]),
        (["--max-modl-len", "3"], ["--max-modl-len", "--max-model-len"]),
        (["--enable-elastic-ep"], ["--enable-elastic-ep", "not supported yet"]),
        (["--rope-theta", "3"], ["--rope-theta", "--hf-overrides"]),
        (["--config", "none.yaml"], ["--config", "none.yaml"]),
        (["--hf-overrides", "{"], ["--hf-overrides", "JSON"]),
        (["a", "--model", "b"], ["--model", "twice"]),
        (["--port", "3"], ["--port"]),
        (["--quantization", "nf5"], ["--quantization", "nf5", "no installed plugin"]),
        (["--plugins", "no-such-plugin"], ["--plugins", "no-such-plugin"]),
    ],
)
def test_errors_name_the_flag(args: list[str], phrases: list[str]) -> None:
    result, draft = run(*args)
    assert draft is None
    assert result.exit_code == 2
    assert all(phrase in result.output for phrase in phrases), result.output


def test_every_wrong_flag_is_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("nope: 3\nblock-size: many\n")
    monkeypatch.setenv("MODULM_MAX_NUM_SEQS", "x")
    arguments = ("--config", str(file), "--dtype", "foo", "--wat", "3", "--seed", "7", "--nope2=1")
    result, _ = run(*arguments)
    assert result.exit_code == 2
    for part in (
        "No such option '--wat'", "No such option '--nope2'", "--dtype: 'foo'",
        "--nope: is not a flag", "'many' is not a whole number (8192, 8k, 8K, 25.6k) (from file",
        "'x' is not a whole number (8192, 8k, 8K, 25.6k) (from MODULM_MAX_NUM_SEQS)",
    ):  # fmt: skip
        assert part in result.output, part
    assert "--seed" not in result.output


@pytest.mark.parametrize(
    ("topic", "phrases", "absent"),
    [
        ("CacheConfig", ["--block-size"], "--dtype"),
        ("cacheconfig", ["--block-size"], "--dtype"),
        ("max-model-len", ["--max-model-len", "tokens"], "--dtype"),
        ("--max_model_len", ["--max-model-len"], "--dtype"),
        ("all", ["--block-size", "--dtype", "--port", "[refused:"], "nothing-like-this"),
        (
            "elsewhere",
            ["--engram-config", "[not supported yet:", "[no effect:", "[refused:"],
            "\n  --dtype",
        ),
        ("max-loras", ["--max-loras", "different adapters"], "--dtype"),
        (
            "engram-config",
            ["--engram-config", "[not supported yet: models with memory tables"],
            "--dtype",
        ),
        ("parser", ["--tool-call-parser", "--reasoning-parser"], "--dtype"),
    ],
)
def test_help_by_topic(topic: str, phrases: list[str], absent: str) -> None:
    result, _ = run(f"--help={topic}", server=True)
    assert result.exit_code == 0
    assert all(phrase in result.output for phrase in phrases)
    assert absent not in result.output


def test_help_for_an_unknown_topic_suggests() -> None:
    result, _ = run("--help=CachConfig")
    assert result.exit_code == 2
    assert "cacheconfig" in result.output


def test_server_flags_only_where_there_is_a_server() -> None:
    result, _ = run("--help")
    assert "Frontend" not in result.output
    assert "--own" in result.output
    assert "--help=all" in result.output


def test_choices_complete_from_plugins_and_lists() -> None:
    caught, _ = catch(server=True)
    ctx = click.Context(caught)
    params = {param.name: param for param in caught.get_params(ctx)}
    offered = params["dtype"].type.shell_complete(ctx, params["dtype"], "bf")
    assert [item.value for item in offered] == ["bfloat16"]
    parsers = params["tool_call_parser"].type.shell_complete(ctx, params["tool_call_parser"], "her")
    assert [item.value for item in parsers] == ["hermes"]


def test_help_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "from modulm.cli.main import cli\n"
        "for arguments in (['--help'], ['serve', '--help'], ['serve', '--help=all']):\n"
        "    cli.main(arguments, standalone_mode=False)\n"
        "    heavy = {'torch', 'transformers', 'fastapi', 'numpy', 'httpx'} & set(sys.modules)\n"
        "    assert not heavy, (arguments, heavy)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_page_of_flags_is_current() -> None:
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == markdown(), (
        "run `modulm config docs > docs/config.md`"
    )


FILE = """
import modulm
from modulm.contracts.parser import Content, ToolParser

class Shout(ToolParser):
    name = "shout"
    api = 1
    examples = ()

    def feed(self, text, ids=()):
        return [Content(text.upper())]

    def finish(self):
        return []

modulm.register("tool_parsers", "shout", Shout)
"""


def test_a_file_may_bring_a_parser(tmp_path: Path) -> None:
    path = tmp_path / "shout.py"
    path.write_text(FILE)
    with using(PluginManager()):
        draft = draft_of("--tool-parser-plugin", str(path), "--tool-call-parser", "shout")
        assert draft.config.tool_calls.tool_call_parser == "shout"
        assert parse("hello", tool_parser="shout").content == "HELLO"


@pytest.mark.parametrize(
    ("text", "message"), [(None, "not a Python file"), ("1/0", "ZeroDivision")]
)
def test_a_file_that_fails_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "broken.py"
    if text is not None:
        path.write_text(text)
    result, draft = run("--tool-parser-plugin", str(path), server=True)
    assert draft is None
    assert "--tool-parser-plugin" in result.output
    assert message in result.output
