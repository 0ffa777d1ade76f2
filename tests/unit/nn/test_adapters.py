"""The seam of adapters: each row gets its own, whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from modulm.errors import CheckpointError
from modulm.plugins import manager
from modulm.testing.adapters import FakeAdapters
from modulm.testing.checkpoints import make_tiny
from modulm.testing.session import Session

#: What each row of the batch uses; slot 0 is the model as it is.
SLOTS = {0: 0, 1: 1, 2: 2}
PROMPTS = {0: [5, 77, 130, 9, 301], 1: [42, 8, 250], 2: [12]}
KINDS = ("linear", "lm_head", "embedding", "router", "expert")


@pytest.fixture(autouse=True)
def offered():
    plugins = manager.PluginManager()
    plugins.register("adapters", "fake", FakeAdapters)
    with manager.using(plugins):
        yield


def open_session(folder, kinds=None):
    tables = {} if kinds is None else {"adapters": {"fake": {"kinds": list(kinds)}}}
    return Session(folder, device="cpu", dtype="float32", kernels=["none"], plugin_config=tables)


@torch.inference_mode()
def step(session, slots, work):
    """One step of rows that use these slots, as a worker would run it."""
    bank = session.loaded.adapters
    each = [slots[row] for row, tokens in work.items() for _ in tokens]
    bank.begin(torch.tensor(each, dtype=torch.int32))
    states = {}
    for row, hidden in session.hidden(work).items():
        session.release(row)
        bank.begin(torch.full((len(hidden),), slots[row], dtype=torch.int32))
        states[row] = session.model.logits(hidden).log_softmax(-1)
    return states


def write_adapter(bank, path, seed):
    torch.manual_seed(seed)
    tensors = {}
    for name, pair in bank.layers.items():
        for side, weight in (("down", pair.down), ("up", pair.up)):
            tensors[f"{name}.{side}"] = 0.3 * torch.randn(weight.shape[1:])
    save_file(tensors, path)
    return path


def filled(folder, target, kinds):
    session = open_session(folder, kinds)
    bank = session.loaded.adapters
    for slot in (1, 2):
        bank.add(f"a{slot}", write_adapter(bank, target / f"a{slot}.safetensors", slot))
        bank.fill(slot, f"a{slot}")
    return session


@pytest.mark.parametrize("kind", KINDS)
def test_a_mixed_batch_gives_each_row_what_it_gives_alone(tmp_path, kind):
    folder = make_tiny(tmp_path / "model", "MixtralForCausalLM")
    plain = open_session(folder).step(PROMPTS)
    session = filled(folder, tmp_path, [kind])
    mixed = _mixed(session, SLOTS)
    for row in PROMPTS:
        (single,) = _mixed(session, SLOTS, [row]).values()
        torch.testing.assert_close(mixed[row], single, rtol=1e-4, atol=1e-4)
        same = torch.allclose(mixed[row], plain[row], rtol=1e-4, atol=1e-4)
        assert same == (SLOTS[row] == 0)
    swapped = _mixed(session, {0: 0, 1: 2, 2: 1})
    assert not torch.allclose(swapped[1], mixed[1], atol=1e-2)


def _mixed(session, slots, rows=tuple(PROMPTS)):
    return step(session, slots, {row: PROMPTS[row] for row in rows})


def test_a_refilled_slot_is_the_other_adapter(tmp_path):
    session = filled(make_tiny(tmp_path / "model"), tmp_path, ["linear"])
    before = _mixed(session, {0: 1, 1: 2, 2: 0})
    session.loaded.adapters.fill(1, "a2")
    session.loaded.adapters.remove("a1")
    after = _mixed(session, {0: 1, 1: 2, 2: 0})
    assert not torch.allclose(after[0], before[0], atol=1e-2)
    torch.testing.assert_close(after[1], before[1], rtol=1e-4, atol=1e-4)


def test_every_layer_passes_the_seam(tmp_path):
    bank = open_session(make_tiny(tmp_path, "MixtralForCausalLM"), KINDS).loaded.adapters
    first = {name.removeprefix("model.layers.0.") for name in bank.layers if "layers.0" in name}
    assert len(first) == 4, first  # q, k and v as one, the output, the router, the experts
    assert {"model.embed_tokens", "lm_head"} <= set(bank.layers)


def test_without_a_bank_layers_call_their_method_itself(tmp_path):
    folder = make_tiny(tmp_path, "MixtralForCausalLM")
    for session in (open_session(folder), open_session(folder, [])):
        layer = session.model.layers[0]
        methods = {type(m.method).__name__ for m in session.model.modules() if hasattr(m, "method")}
        assert methods == {"Plain"}
        assert layer.mlp.fused_experts == session.loaded.ops.fused_experts


def test_an_adapter_of_another_shape_is_named(tmp_path):
    bank = open_session(make_tiny(tmp_path / "model"), ["linear"]).loaded.adapters
    name = "model.layers.0.self_attn.o_proj.down"
    save_file({name: torch.zeros(2, 3)}, tmp_path / "bad.safetensors")
    with pytest.raises(CheckpointError, match=r"bad\.safetensors: .*o_proj\.down is \[2, 3\]"):
        bank.add("bad", tmp_path / "bad.safetensors")
