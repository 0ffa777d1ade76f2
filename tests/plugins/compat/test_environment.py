"""vLLM's environment variables: each is read or has a note with the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from modulm.config import EngineConfig
from modulm.config.schema.catalog import catalog
from modulm.config.sources import draft, environment
from modulm.errors import ConfigError
from modulm_vllm import environment as vllm

#: The variables of vLLM 0.33, a line each.
NAMES = (Path(__file__).parent / "vllm_variables.txt").read_text(encoding="utf-8").split()
TEXTS = {
    "VLLM_CPU_KVCACHE_SPACE": ("0.5", 1 << 29),
    "VLLM_CPU_OMP_THREADS_BIND": ("0-3|4-7,9", ("0-3", "4-7,9")),
    "VLLM_LOGGING_LEVEL": ("DEBUG", "debug"),
    "VLLM_LORA_RESOLVER_HF_REPO_LIST": ("a/b, c/*", ("a/b", "c/*")),
    "VLLM_PP_LAYER_PARTITION": ("2,3", (2, 3)),
    "VLLM_TARGET_DEVICE": ("cpu", "cpu"),
    "VLLM_API_KEY": ("secret", ("secret",)),
}
SWITCHES = ("ALLOW_RUNTIME_LORA_UPDATING", "BATCH_INVARIANT", "MEDIA_URL_ALLOW_REDIRECTS",
            "SERVER_DEV_MODE", "USE_MODELSCOPE")  # fmt: skip


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    table: dict[str, str] = {}
    monkeypatch.setattr(vllm, "variables", lambda: table)
    return table


def test_each_variable_is_read_or_has_a_reason(variables: dict[str, str]) -> None:
    unread = [name for names in vllm.reasons().values() for name in names]
    assert len(unread) == len(set(unread))
    assert not set(unread) & set(vllm.VARIABLES)
    assert set(NAMES) <= set(unread) | set(vllm.VARIABLES)
    variables.update(dict.fromkeys([*unread, "VLLM_ANYTHING", "OTHER"], "1"))
    noted = [line.partition(" ")[0] for line in vllm.notes()]
    assert noted == sorted([*unread, "VLLM_ANYTHING"])


def test_reasons_name_flags_that_exist() -> None:
    words = " ".join(vllm.reasons()).replace("`", " ").replace(",", " ").split()
    flags = {word.removeprefix("--") for word in words if word.startswith("--")}
    known = {spec.option.removeprefix("--") for group in catalog().groups for spec in group.flags}
    known |= {name.replace("_", "-") for name in catalog().tables}
    assert len(flags) > 20
    assert {part for flag in flags for part in flag.split(".")} <= known


def test_read_variables_set_their_flags(variables: dict[str, str]) -> None:
    """Under the names that modulm reads, and for an engine in the caller's process."""
    for name, variable in vllm.VARIABLES.items():
        switch = name.removeprefix("VLLM_") in SWITCHES
        text, value = TEXTS.get(name, ("true", True) if switch else ("7", None))
        variables.clear()
        variables[name] = text
        if name == "VLLM_TORCH_PROFILER_DIR":
            values = environment(vllm.rewritten() | variables).values
            assert json.loads(values["profiler_config"]) == {
                "profiler": "torch", "torch_profiler_dir": "7"}  # fmt: skip
            EngineConfig.from_keywords(**vllm.from_environment())
            continue
        written = draft(environment(vllm.rewritten() | variables))
        spec = catalog().spec(variable.flag)
        assert spec is not None, name
        value = "7" if value is None and spec.kinds == (str,) else 7 if value is None else value
        group = next(g for g in catalog().groups if spec in g.flags)
        assert getattr(written.config.group(group.cls), variable.flag) in (value, str(value)), name
        assert not written.notices, name
        if not variable.server:
            offline = EngineConfig.from_keywords(**vllm.from_environment())
            assert offline.group(group.cls) == written.config.group(group.cls), name
        variables[f"MODULM_{variable.flag.upper()}"] = text
        assert f"MODULM_{variable.flag.upper()}" not in vllm.rewritten()


def test_values_that_set_nothing_or_are_wrong(variables: dict[str, str]) -> None:
    variables |= {"VLLM_CPU_OMP_THREADS_BIND": "auto", "VLLM_TARGET_DEVICE": "empty",
                  "VLLM_API_KEY": ""}  # fmt: skip
    assert vllm.from_environment() == {}
    assert list(vllm.rewritten()) == ["MODULM_METRICS_PREFIX"]
    for name, text in {"VLLM_BATCH_INVARIANT": "perhaps", "VLLM_CPU_KVCACHE_SPACE": "4 GiB",
                       "VLLM_PP_LAYER_PARTITION": "2,x"}.items():  # fmt: skip
        variables.clear()
        variables[name] = text
        with pytest.raises(ConfigError, match=f"{name}: .*{text}.* --"):
            vllm.rewritten()
