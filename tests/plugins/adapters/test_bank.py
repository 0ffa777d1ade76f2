"""The bank: mixed batches, forms of files, models of all kinds, host memory, and bad adapters."""

from __future__ import annotations

import json
import shutil
import threading

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from modulm.errors import CheckpointError, ConfigError, EngineError
from modulm.testing.adapters import AdapterSession, write_lora
from modulm.testing.checkpoints import make_tiny
from modulm_adapter_lora.files import read_adapter

PROMPTS = {0: [5, 77, 130, 9, 301], 1: [42, 8, 250], 2: [12], 3: [7, 7, 300, 41]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("bank") / "llama")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Folders of three adapters for the tiny Llama, of different ranks and targets."""
    folder = tmp_path_factory.mktemp("adapters")
    shapes = {"q_proj": (64, 64), "v_proj": (64, 32), "gate_proj": (64, 96)}
    for seed, rank in enumerate((3, 8, 2)):
        names = list(shapes)[: seed + 1]
        write_lora(folder / f"a{seed}", {f"model.layers.{i}.{_part(n)}.{n}": shapes[n]
                                        for i in range(2) for n in names}, rank, seed)  # fmt: skip
    return [folder / f"a{seed}" for seed in range(3)]


def _part(name):
    return "mlp" if name == "gate_proj" else "self_attn"


@pytest.fixture(scope="module")
def session(folder, adapters):
    session = AdapterSession(folder, max_loras=3, max_lora_rank=8)
    for slot, path in enumerate(adapters, 1):
        session.fill(slot, path.name, path)
    return session


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixed_batch_has_the_bits_of_each_alone(folder, adapters, dtype):
    session = AdapterSession(folder, flags={"dtype": dtype}, max_loras=3, max_lora_rank=8)
    for slot, path in enumerate(adapters, 1):
        session.fill(slot, path.name, path)
    slots = {0: 2, 1: 1, 2: 3, 3: 0}
    mixed = session.run(PROMPTS, slots)
    for row, prompt in PROMPTS.items():
        single = session.run({row: prompt}, slots)[row]
        assert torch.equal(mixed[row], single)
        assert (slots[row] == 0) == torch.equal(mixed[row], session.run({row: prompt}, {})[row])


def test_q_k_and_v_apart_are_the_fused_layer_together(folder, tmp_path, session):
    layer = "model.layers.0.self_attn"
    write_lora(tmp_path / "apart", {f"{layer}.q_proj": (64, 64), f"{layer}.k_proj": (64, 32)}, 4)
    tensors = load_file(tmp_path / "apart" / "adapter_model.safetensors")
    q, k = (
        [tensors[f"base_model.model.{layer}.{part}_proj.lora_{side}.weight"] for side in "AB"]
        for part in "qk"
    )
    up = torch.zeros(64 + 32 + 32, 8)
    up[:64, :4], up[64:96, 4:] = q[1], k[1]
    whole = {"A": torch.cat([q[0], k[0]]), "B": up}
    (tmp_path / "whole").mkdir()
    save_file({
        f"base_model.model.{layer}.qkv_proj.lora_{side}.weight": t for side, t in whole.items()
    }, tmp_path / "whole" / "adapter_model.safetensors")  # fmt: skip
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16}
    (tmp_path / "whole" / "adapter_config.json").write_text(json.dumps(config))
    other = AdapterSession(folder, max_loras=2, max_lora_rank=8)
    for slot, name in enumerate(("apart", "whole"), 1):
        other.fill(slot, name, tmp_path / name)
    logprobs = other.run({0: PROMPTS[0], 1: PROMPTS[0]}, {0: 1, 1: 2})
    torch.testing.assert_close(logprobs[0], logprobs[1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logprobs[0], other.run({0: PROMPTS[0]}, {})[0], atol=1e-2)


def test_experts_one_by_one_are_those_of_a_stack(tmp_path):
    """What older libraries saved expert by expert, by the names of the checkpoint's files."""
    folder = make_tiny(tmp_path / "model", "MixtralForCausalLM")
    experts, rank, hidden, inner = 4, 2, 64, 96
    torch.manual_seed(0)
    sizes = {"w1": (hidden, inner), "w3": (hidden, inner), "w2": (inner, hidden)}
    one = {
        (part, e): (torch.randn(rank, n) * 0.2, torch.randn(m, rank) * 0.2)
        for part, (n, m) in sizes.items()
        for e in range(experts)
    }
    at = "base_model.model.model.layers.0"
    path = "model.layers.0.block_sparse_moe.experts"
    write_lora(tmp_path / "each", {f"{path}.{e}.{w}": pair for (w, e), pair in one.items()}, rank)
    stack = {}
    for name, parts in (("base_layer.", ("w1", "w3")), ("", ("w2",))):
        downs = [torch.cat([one[part, e][0] for part in parts]) for e in range(experts)]
        ups = [torch.block_diag(*[one[part, e][1] for part in parts]) for e in range(experts)]
        stack[f"{at}.mlp.experts.{name}lora_A.weight"] = torch.cat(downs)
        stack[f"{at}.mlp.experts.{name}lora_B.weight"] = torch.stack(ups, -1).flatten(1)
    (tmp_path / "stack").mkdir()
    save_file(stack, tmp_path / "stack" / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank,
              "rank_pattern": {".*\\.gate_up_proj": 2 * rank},
              "alpha_pattern": {".*\\.gate_up_proj": 4 * rank}}  # fmt: skip
    (tmp_path / "stack" / "adapter_config.json").write_text(json.dumps(config))
    session = AdapterSession(folder, max_loras=2)
    for slot, name in enumerate(("each", "stack"), 1):
        session.fill(slot, name, tmp_path / name)
    logprobs = session.run({0: PROMPTS[0], 1: PROMPTS[0], 2: PROMPTS[0]}, {0: 1, 1: 2})
    torch.testing.assert_close(logprobs[0], logprobs[1], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(logprobs[0], logprobs[2], atol=1e-2)


def test_a_file_of_torch_is_read_as_one_of_safetensors(session, adapters, tmp_path):
    tensors = load_file(adapters[0] / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text((adapters[0] / "adapter_config.json").read_text())
    torch.save(tensors, tmp_path / "adapter_model.bin")
    before = session.run({0: PROMPTS[0]}, {0: 1})[0]
    session.fill(1, "torch", tmp_path)
    assert torch.equal(session.run({0: PROMPTS[0]}, {0: 1})[0], before)
    session.fill(1, "a0", adapters[0])


@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [({"quantization": "int8"}, 0.5), ({"model_impl": "transformers"}, 1e-3)],
    ids=["quantized", "bridge"],
)
def test_other_holders_of_weights_take_the_same_adapters(
    session, folder, adapters, flags, tolerance
):
    """Beside the plain model's, as near as the base weights are."""
    other = AdapterSession(folder, flags=flags, max_loras=1, max_lora_rank=8)
    other.fill(1, "a1", adapters[1])
    logprobs, plain = other.run({0: PROMPTS[0], 1: PROMPTS[0]}, {0: 1}).values()
    expected = session.run({0: PROMPTS[0]}, {0: 2})[0]
    assert (logprobs - expected).abs().mean() < tolerance
    assert (logprobs - expected).abs().mean() < (plain - expected).abs().mean() / 2


def test_a_classification_head_is_the_adapters_own(folder, tmp_path):
    """`modules_to_save` of a sequence classifier, in a pooling model."""
    import peft

    torch.manual_seed(0)
    path = tmp_path / "classifier"
    base = transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3)
    base.config.pad_token_id = 0
    base.save_pretrained(path)
    settings = peft.LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj"],
                               init_lora_weights=False)  # fmt: skip
    tuned = peft.get_peft_model(base, settings)
    for name, parameter in tuned.named_parameters():
        if "modules_to_save" in name:
            parameter.data += torch.randn_like(parameter)
    tuned.save_pretrained(tmp_path / "tuned")
    session = AdapterSession(path, flags={"runner": "pooling"}, max_loras=1)
    session.fill(1, "tuned", tmp_path / "tuned")
    with torch.inference_mode():
        expected = tuned.eval()(torch.tensor([PROMPTS[0]])).logits[0]
    assert session.model.tasks[0] == "classify"
    logprobs = session.run({0: PROMPTS[0]}, {0: 1})[0][-1]
    torch.testing.assert_close(logprobs, expected.log_softmax(-1), rtol=1e-4, atol=1e-4)


# Host memory and slots.


def test_what_leaves_host_memory_is_read_again_and_slots_keep_theirs(folder, adapters):
    session = AdapterSession(folder, max_loras=1, max_cpu_loras=2, max_lora_rank=8)
    bank = session.bank
    for path in adapters:
        bank.add(path.name, path)
    assert bank.resident == ("a1", "a2")
    bank.prepare("a0")
    assert bank.resident == ("a2", "a0")
    bank.fill(1, "a1")
    assert "a1" in bank.resident
    before = session.run({0: PROMPTS[0]}, {0: 1})[0]
    bank.prepare("a0")
    bank.prepare("a2")
    assert torch.equal(session.run({0: PROMPTS[0]}, {0: 1})[0], before)
    bank.remove("a1")
    assert torch.equal(session.run({0: PROMPTS[0]}, {0: 1})[0], before)
    for refused in (
        lambda: bank.fill(1, "a1"),
        lambda: bank.prepare("a1"),
        lambda: bank.remove("a1"),
    ):
        with pytest.raises(EngineError, match="'a1'"):
            refused()


def test_other_files_than_those_that_were_added_are_not_read_again(folder, adapters, tmp_path):
    """Cached keys and values belong to what was added."""
    path = shutil.copytree(adapters[0], tmp_path / "mine")
    session = AdapterSession(folder, max_loras=1, max_cpu_loras=1, max_lora_rank=8)
    bank = session.bank
    bank.add("mine", path)
    bank.add("other", adapters[1])
    assert bank.resident == ("other",)
    bank.prepare("mine")
    bank.prepare("other")
    shutil.copytree(adapters[2], path, dirs_exist_ok=True)
    for again in (lambda: bank.prepare("mine"), lambda: bank.fill(1, "mine")):
        with pytest.raises(CheckpointError, match="have changed since"):
            again()
    bank.add("mine", path)
    bank.fill(1, "mine")


def test_an_adapter_that_is_added_anew_is_the_new_one_in_its_slot(folder, adapters):
    session = AdapterSession(folder, max_loras=2, max_lora_rank=8)
    session.fill(1, "mine", adapters[0])
    session.fill(2, "other", adapters[1])
    first = session.run({0: PROMPTS[0]}, {0: 1})[0]
    adding = threading.Thread(target=session.bank.add, args=("mine", adapters[1]))
    adding.start()
    adding.join()
    again, other = session.run({0: PROMPTS[0], 1: PROMPTS[0]}, {0: 1, 1: 2}).values()
    assert torch.equal(again, other)
    assert not torch.equal(again, first)


def test_new_tensors_are_those_of_one_adapter_whatever_others_are_called(folder, adapters):
    session = AdapterSession(folder, max_loras=2, max_lora_rank=8)
    session.fill(1, "mine@1", adapters[0])
    session.fill(2, "mine@other@1", adapters[0])

    def answers():
        return session.run({0: PROMPTS[0], 1: PROMPTS[0]}, {0: 1, 1: 2}).values()

    before, _ = answers()
    tensors = load_file(adapters[0] / "adapter_model.safetensors")
    session.bank.replace("mine", {name: 2 * tensor for name, tensor in tensors.items()})()
    mine, other = answers()
    assert torch.equal(other, before)
    assert not torch.equal(mine, before)


def test_fewer_in_host_memory_than_in_a_step_is_an_error(folder):
    with pytest.raises(ConfigError, match="max_cpu_loras"):
        AdapterSession(folder, max_loras=3, max_cpu_loras=2)


def test_modules_that_are_left_out_are_as_without_the_adapter(folder, adapters, session):
    only = AdapterSession(folder, max_loras=1, max_lora_rank=8, lora_target_modules=["q_proj"])
    only.fill(1, "a2", adapters[2])
    whole = session.run({0: PROMPTS[0]}, {0: 3})[0]
    logprobs, plain = only.run({0: PROMPTS[0], 1: PROMPTS[0]}, {0: 1}).values()
    assert not torch.allclose(logprobs, whole, atol=1e-3)
    assert not torch.allclose(logprobs, plain, atol=1e-3)


# Bad ones.

LAYER = "model.layers.0.self_attn.q_proj"
KEY = f"base_model.model.{LAYER}"


def no_config(path, tensors):
    (path / "adapter_config.json").unlink()


def broken_config(path, tensors):
    (path / "adapter_config.json").write_text("{")


def other_kind(path, tensors):
    (path / "adapter_config.json").write_text('{"peft_type": "LOHA", "r": 4}')


def no_rank(path, tensors):
    (path / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def residual(path, tensors):
    (path / "adapter_config.json").write_text('{"r": 4, "init_lora_weights": "pissa"}')


def no_weights(path, tensors):
    (path / "adapter_model.safetensors").unlink()


def truncated(path, tensors):
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-50])


def code_in_the_file(path, tensors):
    (path / "adapter_model.safetensors").unlink()
    torch.save({"x": threading.Thread}, path / "adapter_model.bin")


def changed(path, tensors, **new):
    names = {name.replace("_DOT_", "."): tensor for name, tensor in new.items()}
    save_file({**tensors, **names}, path / "adapter_model.safetensors")


def wrong_inputs(path, tensors):
    changed(path, tensors | {f"{KEY}.lora_A.weight": torch.zeros(4, 63)})


def wrong_outputs(path, tensors):
    changed(path, tensors | {f"{KEY}.lora_B.weight": torch.zeros(65, 4)})


def wrong_rank(path, tensors):
    changed(
        path,
        {f"{KEY}.lora_A.weight": torch.zeros(5, 64), f"{KEY}.lora_B.weight": torch.zeros(64, 5)},
    )


def large_rank(path, tensors):
    changed(
        path,
        {f"{KEY}.lora_A.weight": torch.zeros(9, 64), f"{KEY}.lora_B.weight": torch.zeros(64, 9)},
    )
    (path / "adapter_config.json").write_text('{"r": 9, "lora_alpha": 1}')


def alpha_that_is_no_number(path, tensors):
    (path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": NaN}')


def pattern_without_bound(path, tensors):
    settings = '{"r": 4, "lora_alpha": 8, "alpha_pattern": {"q_proj": Infinity}}'
    (path / "adapter_config.json").write_text(settings)


def not_a_number(path, tensors):
    changed(path, tensors | {f"{KEY}.lora_B.weight": torch.full((64, 4), torch.nan)})


def no_layer(path, tensors):
    name = KEY.replace("layers.0", "layers.7")
    changed(
        path,
        {f"{name}.lora_A.weight": torch.zeros(4, 64), f"{name}.lora_B.weight": torch.zeros(64, 4)},
    )


def no_pair(path, tensors):
    changed(path, {f"{KEY}.lora_A.weight": torch.zeros(4, 64)})


def short_norm(path, tensors):
    changed(path, tensors | {"base_model.model.model.norm.weight": torch.ones(63)})


def unknown_norm(path, tensors):
    changed(path, tensors | {"base_model.model.model.layers.0.ln.weight": torch.ones(64)})


def other_tensor(path, tensors):
    changed(path, tensors | {f"{KEY}.boft_R": torch.ones(4)})


def other_head(path, tensors):
    changed(path, tensors | {"base_model.model.lm_head.weight": torch.ones(600, 64)})


def test_damaged_adapters_are_read_or_refused_by_name(tmp_path, rng, rounds):
    write_lora(tmp_path, {LAYER: (8, 8)}, 4)
    whole = {file: file.read_bytes() for file in tmp_path.iterdir()}
    refused = []
    for _ in range(120 * rounds):
        file = rng.choice(sorted(whole))
        content = bytearray(whole[file])
        for _ in range(rng.choice((1, 1, 3))):
            at = rng.randrange(min(len(content), 400))
            content[at : at + rng.randrange(4)] = rng.randbytes(rng.randrange(4))
        file.write_bytes(content)
        try:
            read_adapter(tmp_path)
        except CheckpointError as error:
            refused.append((file.name, str(error)))
        file.write_bytes(whole[file])
    assert len(refused) > 40
    assert all(name in message for name, message in refused)
    read_adapter(tmp_path)


BAD = {
    no_config: r"there is no adapter_config\.json",
    broken_config: r"adapter_config\.json: cannot be read",
    other_kind: r"adapter_config\.json: peft_type is 'LOHA', not LORA",
    no_rank: r"adapter_config\.json: r, lora_alpha or a pattern",
    residual: r"adapter_config\.json: init_lora_weights is 'pissa'",
    no_weights: r"there is no adapter_model\.safetensors or adapter_model\.bin",
    truncated: r"adapter_model\.safetensors: .*truncated",
    code_in_the_file: r"adapter_model\.bin: truncated, or not what its name says",
    wrong_inputs: r"safetensors: .*q_proj\.lora_A\.weight: is for \[64, 63\], .* \[64, 64\]",
    wrong_outputs: r"safetensors: .*q_proj\.lora_B\.weight: is for \[65, 64\], .* \[64, 64\]",
    wrong_rank: r"lora_A\.weight: the rank is 5, adapter_config\.json says 4",
    large_rank: r"lora_A\.weight: the rank 9 is more than max_lora_rank 8",
    alpha_that_is_no_number: r"adapter_config\.json: lora_alpha is not finite",
    pattern_without_bound: r"adapter_config\.json: alpha_pattern is not finite",
    not_a_number: r"q_proj\.lora_B\.weight contains NaN",
    no_layer: r"layers\.7\.self_attn\.q_proj\.lora_A\.weight: the model has no layer",
    no_pair: r"model\.layers\.0\.self_attn\.q_proj has no lora_B",
    short_norm: r"model\.norm\.weight: is for \[63\], the model's layer is \[64\]",
    unknown_norm: r"layers\.0\.ln\.weight: the model has no norm .* merge_and_unload",
    other_tensor: r"boft_R is not a known part of a LoRA adapter",
    other_head: r"lm_head\.weight: is for \[600, 64\], the model's layer is \[512, 64\]",
}


@pytest.mark.parametrize("spoil", BAD, ids=lambda spoil: spoil.__name__)
def test_a_bad_adapter_is_named_and_hurts_nobody(session, tmp_path, spoil):
    path = tmp_path / "bad"
    write_lora(path, {LAYER: (64, 64)}, 4)
    spoil(path, load_file(path / "adapter_model.safetensors"))
    slots = {0: 1, 1: 2, 2: 3}
    before = session.run(PROMPTS, slots)
    with pytest.raises(CheckpointError, match=BAD[spoil]) as raised:
        session.bank.add("bad", path)
    assert str(path) in str(raised.value)
    with pytest.raises(EngineError, match="no adapter 'bad'"):
        session.bank.fill(1, "bad")
    after = session.run(PROMPTS, slots)
    assert all(torch.equal(before[row], after[row]) for row in PROMPTS)


def test_a_layer_whose_weight_is_taken_apart_is_refused(tmp_path):
    folder = make_tiny(tmp_path / "model", "DeepseekV3ForCausalLM")
    session = AdapterSession(folder, max_loras=1)
    up = next(s for n, s in session.bank.specs.items() if n.endswith("kv_b_proj"))
    write_lora(tmp_path / "bad", {up.name: (up.inputs, up.outputs)}, 4)
    with pytest.raises(CheckpointError, match="takes this layer's weight apart: not supported yet"):
        session.bank.add("bad", tmp_path / "bad")
