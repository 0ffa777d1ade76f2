"""GGUF files of every architecture and type, against transformers on the dequantized weights."""

import random
import struct
from contextlib import suppress

import gguf
import numpy as np
import pytest
import torch
from attrs import field, frozen
from gguf import quants
from samples import parametrize_sample
from tests.plugins.quantization.gguf_files import TYPES, byte_pairs, random_blocks, write_gguf
from tests.plugins.quantization.test_published import TOKENS
from transformers import AutoModel, AutoModelForCausalLM

from modulm import LLM, SamplingParams
from modulm.config import EngineConfig
from modulm.errors import CheckpointError, ModulmError
from modulm.loading import open_checkpoint
from modulm.plugins import manager
from modulm.testing.checkpoints import make_tiny
from modulm.testing.session import Session
from modulm_quant_gguf.container import open_model
from modulm_quant_gguf.loader import GGUFLoader
from modulm_quant_gguf.types import NAMED, decode, dequantize

CODED = [name for name, kind in NAMED.items() if kind.decode is not None]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("name", CODED)
def test_blocks_are_the_numbers_of_ggml(name, rng, rounds):
    """Of any bytes: the library's numbers, bit by bit; as codes to rounding."""
    kind = NAMED[name]
    for _ in range(rounds):
        seed = rng.randrange(2**32)
        raw = np.random.default_rng(seed).integers(0, 256, (5, 2 * kind.bytes), dtype=np.uint8)
        with np.errstate(all="ignore"):
            wanted = quants.dequantize(raw, TYPES[name])
        np.testing.assert_array_equal(dequantize(kind, torch.from_numpy(raw)).numpy(), wanted)


@pytest.mark.parametrize("name", CODED)
def test_codes_are_the_same_weights(name):
    raw = torch.from_numpy(random_blocks(name, (6, 512)))
    decoded = decode(NAMED[name], raw)
    exact = decoded.weight()
    for dtype, loss in ((torch.float32, 1e-6), (torch.bfloat16, 2**-10)):
        codes = decoded.codes(dtype)
        assert codes.values.element_size() == 1
        error = (codes.weight(torch.float32) - exact).abs().amax(1) / exact.abs().amax(1)
        assert error.max() < loss, (dtype, error)


def test_groups_without_a_scale_are_their_minimum():
    raw = random_blocks("Q4_1", (2, 64))
    raw.reshape(4, 20)[1:3, :2] = 0
    raw.reshape(4, 20)[2, 2:4] = 0
    decoded = decode(NAMED["Q4_1"], torch.from_numpy(raw))
    exact = decoded.weight()
    assert (exact[1, :32] == 0).all()
    assert (exact[0, 32:] != 0).all()
    torch.testing.assert_close(decoded.codes(torch.float32).weight(torch.float32), exact)


# Models.


@frozen
class Case:
    """A tiny model as a file of architecture `arch`; `kinds` are the types of its matrices."""

    arch: str
    model: str
    settings: dict = field(factory=dict)
    kinds: tuple = ("Q8_0", "Q4_0", "Q5_1", "F16", "Q4_1")

    def kind(self, name, shape):
        """The type of a matrix; of gate and up the same, as all writers have it."""
        return self.kinds[sum(name.replace("up", "gate").encode()) % len(self.kinds)]


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOWS = ["sliding_attention"] * 5 + ["full_attention"]
CASES = {
    "llama": Case("llama", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": Case("llama", "MistralForCausalLM", {"sliding_window": None}),
    "mixtral": Case("llama", "MixtralForCausalLM"),
    "qwen2": Case("qwen2", "Qwen2ForCausalLM", {"use_sliding_window": False}),
    "qwen3": Case("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": Case("qwen2moe", "Qwen2MoeForCausalLM", {"mlp_only_layers": []}),
    "qwen3moe": Case("qwen3moe", "Qwen3MoeForCausalLM", {"decoder_sparse_step": 1}),
    "gemma": Case("gemma", "GemmaForCausalLM"),
    "gemma2": Case("gemma2", "Gemma2ForCausalLM", {"query_pre_attn_scalar": 24}),
    "gemma3": Case(
        "gemma3",
        "Gemma3ForCausalLM",
        {"query_pre_attn_scalar": 24, "num_hidden_layers": 6, "layer_types": WINDOWS},
    ),
    "phi3": Case("phi3", "Phi3ForCausalLM"),
    "deepseek2": Case("deepseek2", "DeepseekV2ForCausalLM"),
    "deepseek3": Case(
        "deepseek2",
        "DeepseekV3ForCausalLM",
        {"rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.8}},
    ),
    "gpt-oss": Case("gpt-oss", "GptOssForCausalLM", kinds=("Q8_0", "MXFP4")),
    "glm": Case("chatglm", "GlmForCausalLM"),
    "glm4": Case("glm4", "Glm4ForCausalLM"),
    "glm4moe": Case("glm4moe", "Glm4MoeForCausalLM"),
    "granite": Case("granite", "GraniteForCausalLM"),
    "granitemoe": Case("granitemoe", "GraniteMoeSharedForCausalLM"),
    "stablelm": Case("stablelm", "StableLmForCausalLM"),
    "falcon": Case("falcon", "FalconForCausalLM"),
    "gpt2": Case("gpt2", "GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": False}),
    "mamba": Case("mamba", "MambaForCausalLM"),
    "bert": Case("bert", "BertModel"),
}


def publish(folder, case, **more):
    """(the file, the folder it was made from, a folder of its dequantized weights)."""
    folders = [make_tiny(folder / name, case.model, **case.settings) for name in ("own", "plain")]
    write_gguf(folders[0], folder / "model.gguf", case.arch, case.kind, folders[1], **more)
    return folder / "model.gguf", *folders


def reference(case, plain):
    kind = AutoModel if case.arch == "bert" else AutoModelForCausalLM
    oracle = kind.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        outputs = oracle(torch.tensor([TOKENS]))
    return (
        outputs.last_hidden_state[0] if case.arch == "bert" else outputs.logits[0].log_softmax(-1)
    )


@parametrize_sample("name", CASES, every=11)
def test_the_numbers_of_the_dequantized_weights(tmp_path, name):
    case = CASES[name]
    file, _, plain = publish(tmp_path, case)
    session = Session(file, device="cpu", dtype="float32", block_size=16)
    run = session.hidden if case.arch == "bert" else session.step
    torch.testing.assert_close(run({0: TOKENS})[0], reference(case, plain), rtol=0, atol=1e-3)


def every_type():
    """A model whose matrices have all types there are, fused layers of several."""
    left = [*CODED, "F16", "BF16", "F32"]

    def kind(name, shape):
        return left.pop() if name != "token_embd.weight" and left else "Q6_K"

    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 4}
    return {**sizes, "tie_word_embeddings": True}, kind, left


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """(a file with all types, a folder of the dequantized weights, logits of that in fp32)."""
    folder = tmp_path_factory.mktemp("mixed")
    settings, kind, left = every_type()
    stored, plain = (
        make_tiny(folder / n, "LlamaForCausalLM", **settings) for n in ("own", "plain")
    )
    write_gguf(
        stored, folder / "model.gguf", "llama", kind, plain, vocabulary=byte_pairs(stored, "gpt-2")
    )
    assert not left, "there are more types than matrices"
    exact = Session(plain, device="cpu", dtype="float32").step({0: TOKENS})[0]
    return folder / "model.gguf", plain, exact


def test_every_type_in_fp32(mixed):
    file, _, exact = mixed
    logprobs = Session(file, device="cpu", dtype="float32").step({0: TOKENS})[0]
    torch.testing.assert_close(logprobs, exact, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("activations", "factor"), [("bf16", 1.6), ("int8", 8)])
def test_every_type_on_the_kernels(mixed, activations, factor):
    """As exact as bf16; with integers as activations, which llama.cpp has too, nearly so."""
    file, plain, exact = mixed
    chosen = {"quantization": {"gguf": {"activations": activations}}}
    session = Session(file, device="cpu", dtype="bfloat16", plugin_config=chosen)
    runs = [session, Session(plain, device="cpu", dtype="bfloat16")]
    errors = [(run.step({0: TOKENS})[0].float() - exact).abs().mean().item() for run in runs]
    assert errors[0] < factor * errors[1], errors
    session.release(0)
    few = session.step({0: TOKENS[:5]})[0]
    session.release(0)
    assert torch.equal(few, session.step({0: TOKENS})[0][:5]), "rows depend on their batch"


def test_layers_of_blocks_are_packed(mixed):
    """None is made anew in each step, and the head's weight is the table."""
    session = Session(mixed[0], device="cpu", dtype="bfloat16")
    modules = dict(session.model.named_modules())
    parts = [one for module in modules.values() for one in getattr(module, "quantized", ())]
    assert {type(one.weight).__name__ for one in parts} == {"PackedLinear"}
    assert session.model.embed.table is session.model.head.quantized[0].weight


def test_explain_says_the_type_of_each_layer(mixed):
    session = Session(mixed[0], device="cpu", dtype="bfloat16")
    lines = [d.reason for d in session.loaded.decisions if d.subject.startswith("quantization (")]
    text = " ".join(lines)
    assert all(name in text for name in (*CODED, "F16", "BF16", "F32")), text
    assert "Q6_K; model.embed_tokens" in lines
    assert "Q6_K, activations in int8; lm_head" in " ".join(lines), lines


def test_the_layers_of_a_type_are_told(tmp_path):
    case = Case("qwen3", "Qwen3ForCausalLM", {"num_hidden_layers": 4})
    folder = make_tiny(tmp_path / "own", case.model, **case.settings)

    def kind(name, shape):
        return "Q8_0" if name in ("blk.0.attn_v.weight", "blk.3.attn_v.weight") else "Q4_0"

    write_gguf(folder, tmp_path / "m.gguf", case.arch, kind)
    decisions = Session(tmp_path / "m.gguf", device="cpu", dtype="bfloat16").loaded.decisions
    reasons = [d.reason for d in decisions]
    mixed = "Q4_0 + Q8_0, activations in int8"
    assert f"{mixed}; model.layers.*.self_attn.qkv_proj of 0, 3" in reasons
    plain = " ".join(line for line in reasons if line.startswith("Q4_0, activations in int8; "))
    assert "model.layers.*.self_attn.qkv_proj of 1, 2" in plain


# Files.


def test_a_file_with_everything_is_served(tmp_path):
    case = CASES["qwen3"]
    file, _, plain = publish(
        tmp_path, case, vocabulary=byte_pairs(make_tiny(tmp_path / "v", case.model), "gpt-2")
    )
    answers, messages = [], [{"role": "user", "content": "The capital of France"}]
    for path in (plain, file):
        with LLM(str(path), dtype="float32", max_model_len=128) as llm:
            (text,) = llm.generate(["one two"], GREEDY, use_tqdm=False)
            (answer,) = llm.chat(messages, GREEDY, use_tqdm=False)
            ids = llm.get_tokenizer().encode("Hello! How are you, 12345?")
            answers.append(
                (text.outputs[0].text, answer.prompt_token_ids, answer.outputs[0].text, ids)
            )
    assert answers[0] == answers[1]
    assert len(answers[0][1]) > 10, "the chat template was not used"


def test_a_file_in_pieces_and_a_folder_with_it(tmp_path):
    case = CASES["qwen3"]
    _, folder, plain = publish(tmp_path, case, parts=3)
    pieces = sorted(tmp_path.glob("model-*-of-*.gguf"))
    assert len(pieces) > 2
    wanted = reference(case, plain)
    for path in (pieces[0], tmp_path):
        logprobs = Session(path, device="cpu", dtype="float32").step({0: TOKENS})[0]
        torch.testing.assert_close(logprobs, wanted, rtol=0, atol=1e-3)
    flags = {"device": "cpu", "dtype": "float32", "hf_config_path": str(folder)}
    logprobs = Session(pieces[0], **flags).step({0: TOKENS})[0]
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=1e-3)
    pieces[1].unlink()
    with pytest.raises(CheckpointError, match=rf"missing files of .*: {pieces[1].name}"):
        Session(pieces[0], device="cpu", dtype="float32")


def opened(path, **flags):
    return open_checkpoint(EngineConfig.from_keywords(model=str(path), **flags), manager.current())


def test_the_flags_that_name_the_format(tmp_path):
    folder = make_tiny(tmp_path / "own", "Qwen3ForCausalLM")
    write_gguf(folder, tmp_path / "m.gguf", "qwen3", lambda name, shape: "Q8_0")
    flags = {"load_format": "gguf", "quantization": "gguf", "hf_config_path": str(folder)}
    session = Session(tmp_path / "m.gguf", device="cpu", dtype="bfloat16", **flags)
    assert session.loaded.model.layers[0].mlp.down.quantized[0].weight.format == "int8"


def test_several_files_in_a_folder(tmp_path):
    folder = make_tiny(tmp_path / "own", "Qwen3ForCausalLM")
    for name in ("a.gguf", "b.gguf"):
        write_gguf(folder, tmp_path / name, "qwen3", lambda name, shape: "Q8_0")
    with pytest.raises(CheckpointError, match=r"must have exactly one GGUF file.*a\.gguf, b\.gguf"):
        opened(tmp_path)


# Bad input.


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    root = tmp_path_factory.mktemp("good")
    folder = make_tiny(root / "own", "Qwen3ForCausalLM", num_hidden_layers=1)
    vocabulary = byte_pairs(folder, "gpt-2")
    write_gguf(folder, root / "m.gguf", "qwen3", lambda n, s: "Q8_0", vocabulary=vocabulary)
    return (root / "m.gguf").read_bytes()


def patched(data, after, form, value, skip=0):
    """The bytes with a number behind a text replaced."""
    at = data.index(after) + len(after) + skip
    raw = struct.pack(form, value)
    return data[:at] + raw + data[at + len(raw) :]


TENSOR = b"blk.0.ffn_up.weight"
BAD = {
    "another magic": (lambda d: b"GGML" + d[4:], "m.gguf: not a GGUF file: it begins with b'GGML'"),
    "version 1": (
        lambda d: d[:4] + struct.pack("<I", 1) + d[8:],
        r"version 1; supported versions: \(2, 3\)",
    ),
    "big-endian": (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], "big-endian"),
    "2^60 tensors": (lambda d: d[:8] + struct.pack("<Q", 2**60) + d[16:], "tensors do not fit"),
    "2^60 entries": (
        lambda d: d[:16] + struct.pack("<Q", 2**60) + d[24:],
        "entries of metadata do",
    ),
    "2^60 tokens": (
        lambda d: patched(d, b"tokenizer.ggml.tokens", "<Q", 2**60, 8),
        "values of tokenizer.ggml.tokens do not fit",
    ),
    "an unknown value": (
        lambda d: patched(d, b"qwen3.block_count", "<I", 77),
        "qwen3.block_count: unknown value type 77",
    ),
    "a missing key": (
        lambda d: d.replace(b"qwen3.block_count", b"qwen3.block_kount"),
        "block_count: is",
    ),
    "a key of another kind": (
        lambda d: patched(d, b"qwen3.block_count", "<I", 6),
        "qwen3.block_count: must be an integer",
    ),
    "an unknown architecture": (
        lambda d: d.replace(b"qwen3", b"qwenX"),
        "general.architecture: 'qwenX' is not supported yet; supported: bert",
    ),
    "five dimensions": (lambda d: patched(d, TENSOR, "<I", 5), "ffn_up.weight: 5 dimensions"),
    "2^60 columns": (lambda d: patched(d, TENSOR, "<Q", 2**60, 4), "ffn_up.weight: Q8_0 of shape"),
    "half a block": (
        lambda d: patched(d, TENSOR, "<Q", 40, 4),
        "blocks of 32, not 40 columns",
    ),
    "an unknown type": (
        lambda d: patched(d, TENSOR, "<I", 99, 20),
        "unknown type 99; supported:",
    ),
    "outside the file": (
        lambda d: patched(d, TENSOR, "<Q", 2**40, 24),
        "ffn_up.weight: Q8_0 .* truncated",
    ),
    "overlapping": (lambda d: patched(d, TENSOR, "<Q", 0, 24), "overlaps"),
    "cut short": (lambda d: d[:-1000], "takes .* bytes from .*, but the file has"),
    "cut in the header": (lambda d: d[:900], "truncated|do not fit|exceeds the remaining bytes"),
    "a missing tensor": (
        lambda d: d.replace(TENSOR, b"blk.0.ffn_un.weight"),
        "missing weights: model.layers.0.mlp.up_proj.ggml",
    ),
    "an unknown tokenizer": (
        lambda d: d.replace(b"\x05\0\0\0\0\0\0\0gpt-2", b"\x05\0\0\0\0\0\0\0gpt-9"),
        "tokenizer.ggml.pre: 'gpt-9' is not supported yet; supported: default",
    ),
}


def started(file):
    """What reads all of a file."""
    Session(file, device="cpu", dtype="float32")
    return GGUFLoader(file).tokenizer()


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_with_a_file_is_said(tmp_path, good, what):
    spoil, message = BAD[what]
    file = tmp_path / "m.gguf"
    file.write_bytes(spoil(good))
    assert file.read_bytes() != good
    with pytest.raises(CheckpointError, match=message) as caught:
        started(file)
    assert "m.gguf" in str(caught.value)


def test_spoilt_files_are_errors_of_ours(tmp_path, good, rng, rounds):
    """Bytes of the header changed at random: it opens, or the error is one that is meant."""
    end = good.index(TENSOR) + 1200
    for _ in range(rounds):
        data = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            data[rng.randrange(end)] = rng.choice((0, 1, 255, rng.randrange(256)))
        file = tmp_path / f"{random.Random(bytes(data)).getrandbits(32)}.gguf"
        file.write_bytes(data)
        with suppress(ModulmError):
            opened(file)
            loader = GGUFLoader(file)
            loader.tokenizer()
            assert len(loader.index()) <= len(loader.model.tensors)
        file.unlink()


def test_the_size_of_blocks_is_the_library_s():
    for name, kind in NAMED.items():
        assert gguf.GGML_QUANT_SIZES[TYPES[name]] == (kind.block, kind.bytes)
        assert TYPES[name] == kind.number


def test_a_file_may_be_read_twice(tmp_path, good):
    (tmp_path / "m.gguf").write_bytes(good)
    assert open_model(tmp_path / "m.gguf") is open_model(tmp_path / "m.gguf")
