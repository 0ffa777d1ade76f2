"""A decoder cut into pipeline stages, run one after the other, gives the same bits as whole."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from modulm.errors import UnsupportedError
from modulm.parallel import Mesh, ProcessGroup
from modulm.testing.checkpoints import make_tiny
from modulm.testing.session import Session

WORK = {0: [5, 77, 130, 9, 301], 1: [42, 8, 250]}
NEXT = {0: [7], 1: [11, 12]}


def open_session(folder, monkeypatch, rank=0, ranks=1):
    mesh = Mesh(pipeline=ProcessGroup(rank, ranks))
    monkeypatch.setattr("modulm.loading.model.Mesh", lambda: mesh)
    return Session(folder, device="cpu", dtype="float32", kernels=["none"])


class Stage:
    """A session's model in the middle of others: takes and keeps what is carried."""

    def __init__(self, session, before=None, last=False):
        self.model, self.before, self.last, self.carried = session.model, before, last, ()
        session.model = self

    def forward(self, batch):
        batch = evolve(batch, carried=self.before.carried if self.before else ())
        if self.last:
            return self.model.forward(batch)
        self.carried = self.model.carry(batch)
        return self.carried[0]


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [("LlamaForCausalLM", {}), ("Qwen3ForCausalLM", {"tie_word_embeddings": True}),
     ("PhiForCausalLM", {})],
)  # fmt: skip
@pytest.mark.parametrize("ranks", [2, 3])
def test_stages_give_the_same_bits(tmp_path, monkeypatch, architecture, settings, ranks):
    folder = make_tiny(tmp_path, architecture, num_hidden_layers=4, **settings)
    whole = open_session(folder, monkeypatch)
    sessions = [open_session(folder, monkeypatch, rank, ranks) for rank in range(ranks)]
    assert [len(s.model.layers) for s in sessions] == ([2, 2] if ranks == 2 else [1, 2, 1])
    stage = None
    for session in sessions:
        assert len(session.model.caches) == len(session.model.layers)
        stage = Stage(session, stage, last=session is sessions[-1])
    for work in (WORK, NEXT):
        expected = whole.hidden(work)
        for session in sessions:
            hidden = session.hidden(work)
        for row in work:
            assert torch.equal(hidden[row], expected[row])
            logits = stage.model.logits(hidden[row])
            assert torch.equal(logits, whole.model.logits(expected[row]))


def test_each_stage_loads_its_own_weights_only(tmp_path, monkeypatch):
    folder = make_tiny(tmp_path, num_hidden_layers=4)
    whole = open_session(folder, monkeypatch).loaded.weight_bytes
    halves = [open_session(folder, monkeypatch, rank, 2).loaded.weight_bytes for rank in (0, 1)]
    assert sum(halves) == whole


def test_a_model_with_a_forward_of_its_own_is_refused(tmp_path, monkeypatch):
    folder = make_tiny(tmp_path, "OPTForCausalLM")
    with pytest.raises(
        UnsupportedError, match="pipeline parallelism: not supported yet: OPTForCausalLM"
    ):
        open_session(folder, monkeypatch, 0, 2)
