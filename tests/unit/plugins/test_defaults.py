"""What is chosen when nothing is asked for, and what is said about the rest."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from modulm.contracts.attention import AttentionBackend, AttentionSpec
from modulm.contracts.decision import Decision, Verdict
from modulm.contracts.kernels import KernelProvider
from modulm.contracts.loader import WeightLoader
from modulm.contracts.platform import Platform, Probe
from modulm.contracts.quantization import CheckpointInfo, QuantizationMethod
from modulm.errors import CheckpointError, ConfigError, UnsupportedError
from modulm.ops import bind
from modulm.plugins import Choice, PluginManager, defaults, hookimpl
from modulm.plugins.selection import Selection
from modulm_command_explain.text import as_data, render

SPEC = AttentionSpec(4, 2, 16, 0.25, "float32", "float32")


def driver(base: type, name: str, **answers: Any) -> type:
    """A driver class whose class methods give fixed answers."""
    methods = {
        key: classmethod(lambda cls, *args, value=value: value) for key, value in answers.items()
    }
    api = import_module(base.__module__).API
    return type(name.title(), (base,), {"name": name, "api": api, **methods})


class Chip(Platform):
    name = "chip"
    api = 1
    attention = ("first", "absent", "second")
    kernels = ("fast", "absent", "slow")


PLATFORM: Any = Chip


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> PluginManager:
    """Nothing installed but a broken plugin of each kind."""
    manager = PluginManager(Selection())
    monkeypatch.setattr(manager, "_installed", ())
    for kind in ("attention", "quantization", "kernels", "loaders", "platforms"):
        manager.register(kind, "broken", "no_such_package:Driver")
    return manager


def reasons(decision: Decision) -> dict[str, str | None]:
    return {verdict.name: verdict.reason for verdict in decision.candidates}


def test_attention_by_the_platforms_order(plugins: PluginManager) -> None:
    plugins.register("attention", "first", driver(AttentionBackend, "first", rejects="too old"))
    plugins.register("attention", "second", driver(AttentionBackend, "second", rejects=None))
    plugins.register("attention", "another", driver(AttentionBackend, "another", rejects=None))
    chosen = defaults.choose_attention(plugins, SPEC, PLATFORM, bind())
    assert chosen.driver.name == chosen.decision.winner == "second"
    by_name = reasons(chosen.decision)
    assert by_name["first"] == "too old"
    assert by_name["absent"] == "not installed"
    assert "no_such_package" in str(by_name["broken"])
    assert by_name["another"] is None


def test_a_backend_that_the_platform_does_not_know_is_better_than_none(
    plugins: PluginManager,
) -> None:
    plugins.register("attention", "another", driver(AttentionBackend, "another", rejects=None))
    assert defaults.choose_attention(plugins, SPEC, PLATFORM, bind()).decision.winner == "another"


def test_no_backend(plugins: PluginManager) -> None:
    plugins.register("attention", "first", driver(AttentionBackend, "first", rejects="too old"))
    with pytest.raises(UnsupportedError, match="first: too old"):
        defaults.choose_attention(plugins, SPEC, PLATFORM, bind())
    with pytest.raises(UnsupportedError, match="attention backend 'first' cannot be used: too old"):
        defaults.choose_attention(plugins, SPEC, PLATFORM, bind(), "first")


def test_a_plugins_choice_must_be_acceptable(plugins: PluginManager) -> None:
    class Chooser:
        @hookimpl
        def modulm_choose_attention(self, spec: Any, platform: Any) -> Choice:
            return Choice("first", "I like it")

    plugins.register("attention", "first", driver(AttentionBackend, "first", rejects="too old"))
    plugins.register("attention", "second", driver(AttentionBackend, "second", rejects=None))
    plugins.add(Chooser())
    with pytest.raises(UnsupportedError, match="Chooser chose first"):
        defaults.choose_attention(plugins, SPEC, PLATFORM, bind())


def method(name: str, claims: str | None) -> type:
    return driver(QuantizationMethod, name, claims=claims, rejects=None)


def test_quantization_by_claims(plugins: PluginManager) -> None:
    plugins.register("quantization", "none", method("none", "nothing is quantized"))
    plugins.register("quantization", "other", method("other", None))
    plain = CheckpointInfo({})
    assert defaults.choose_quantization(plugins, plain, PLATFORM).decision.winner == "none"
    plugins.register("quantization", "files", method("files", "it has my files"))
    assert defaults.choose_quantization(plugins, plain, PLATFORM).decision.winner == "files"


def test_two_claimants(plugins: PluginManager) -> None:
    plugins.register("quantization", "one", method("one", "mine"))
    plugins.register("quantization", "two", method("two", "mine"))
    stored = CheckpointInfo({}, {"quant_method": "two"})
    assert defaults.choose_quantization(plugins, stored, PLATFORM).decision.winner == "two"
    with pytest.raises(ConfigError, match="one and two match the checkpoint"):
        defaults.choose_quantization(plugins, CheckpointInfo({}), PLATFORM)


def test_nobody_claims(plugins: PluginManager) -> None:
    stored = CheckpointInfo({}, {"quant_method": "odd"})
    with pytest.raises(UnsupportedError, match=r"odd: not installed\)$"):
        defaults.choose_quantization(plugins, stored, PLATFORM)
    known = CheckpointInfo({}, {"quant_method": "mxfp4"})
    with pytest.raises(UnsupportedError, match="not installed; pip install modulm-quant-mxfp4"):
        defaults.choose_quantization(plugins, known, PLATFORM)


def test_kernels(plugins: PluginManager) -> None:
    plugins.register("kernels", "fast", driver(KernelProvider, "fast", probe=Probe(0, "no AVX")))
    plugins.register("kernels", "slow", driver(KernelProvider, "slow", probe=Probe(1, "always")))
    chosen = defaults.choose_kernels(plugins, PLATFORM)
    assert [provider.name for provider in chosen.driver] == ["slow"]
    assert reasons(chosen.decision)["fast"] == "no AVX"
    assert defaults.choose_kernels(plugins, PLATFORM, ()).decision.winner == "torch"


def test_loader(plugins: PluginManager) -> None:
    plugins.register("loaders", "opens", driver(WeightLoader, "opens", opens="it can"))
    assert defaults.choose_loader(plugins, Path()).decision.reason == "it can"
    plugins.register("loaders", "opens2", driver(WeightLoader, "opens2", opens=None))
    assert defaults.choose_loader(plugins, Path(), "opens2").decision.winner == "opens2"


def test_no_loader(plugins: PluginManager) -> None:
    with pytest.raises(CheckpointError, match="no weights that an installed loader reads"):
        defaults.choose_loader(plugins, Path("somewhere"))


def test_rendering() -> None:
    decisions = [
        Decision("device", (Verdict("chip"), Verdict("other", "not here")), "chip", "it is best"),
        Decision("kernels", (Verdict("a"), Verdict("b"), Verdict("cc", "no")), "a, b", "order"),
    ]
    assert render(decisions).splitlines() == [
        "device: chip (it is best)",
        "kernels: a, b (order)",
        "2 candidates were rejected: --all shows them, with reasons",
    ]
    assert render(decisions, everything=True).splitlines() == [
        "device: chip (it is best)",
        "  other  not here",
        "kernels: a, b (order)",
        "  cc  no",
    ]
    assert as_data(decisions)[0]["candidates"][1] == {"name": "other", "reason": "not here"}
