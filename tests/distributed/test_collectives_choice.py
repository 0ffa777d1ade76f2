"""Ranks on CPUs of a platform that prefers symmetric memory are connected by gloo."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from modulm.config import EngineConfig
from modulm.plugins import manager
from modulm_distributed.choice import collectives_decisions, custom_sums
from modulm_distributed.torch_group import sum_in_order

RANK = """
import sys
import torch
import modulm
from modulm.plugins import manager
from modulm_distributed.mesh import RankSpec, open_mesh

Cpu = manager.current().load("platforms", "cpu")


class Preferring(Cpu):
    collectives = ("symm_mem", "nccl", "gloo")


rank = int(sys.argv[1])
spec = RankSpec(rank, 2, 1, "file:" + sys.argv[2])
group = open_mesh(spec, Preferring(), manager.current()).tensor
total = group.all_reduce(torch.arange(5.0) * (rank + 1))
print(type(group).__name__, total.tolist())
"""


def test_two_processes_fall_back_to_gloo(tmp_path):
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE)
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300)[0].decode() for rank in ranks]
    assert outputs == ["TorchGroup [0.0, 3.0, 6.0, 9.0, 12.0]\n"] * 2


def decisions(**flags):
    config = EngineConfig.from_keywords(model="demo", **flags)
    plugins = manager.current()
    platform = plugins.load("platforms", "cpu")()
    return custom_sums(config), collectives_decisions(config, platform, plugins)


def test_what_explain_shows():
    assert decisions() == (True, [])
    on, (decision,) = decisions(tensor_parallel_size=2, disable_custom_all_reduce=True)
    assert not on
    assert (decision.subject, decision.winner) == ("collectives", "cpu")
    assert decision.reason == "the first of platform cpu that connects 2 ranks"
    assert [verdict.name for verdict in decision.candidates] == ["cpu", "gloo"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_sums_are_rounded_once(dtype):
    values = [torch.full((2,), value).to(dtype) for value in (256, 1, 1)]
    total = sum_in_order(values)
    assert total.dtype == dtype
    assert total.tolist() == [258, 258]
