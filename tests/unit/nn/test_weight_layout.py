"""Each rank's share of every kind of parameter is the slice of the whole that it should be."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from modulm.contracts.quantization import INPUTS, OUTPUTS, PARTS, LinearSpec, ParamSpec, fixed
from modulm.errors import UnsupportedError
from modulm.nn.weight_layout import layout
from modulm.nn.weight_slots import Slot
from modulm.ops import bind
from modulm.parallel import ProcessGroup
from modulm.plugins import manager
from modulm.testing.formats import FakeFormat, FakeFormatConfig, encode, stored_weight

CPU = torch.device("cpu")


def spec(parts, inputs, rank=0, ranks=1, *, rows=False, experts=0):
    """A layer of which rank `rank` of `ranks` has its outputs, or with `rows` its inputs."""
    group = ProcessGroup(rank, ranks)
    cut, whole = group.shard, ProcessGroup().shard
    shards = tuple((whole if rows else cut)(size, "") for size in parts)
    input_shard = (cut if rows else whole)(inputs, "")
    return LinearSpec(
        "moe.stack" if experts else "layer",
        input_shard.size,
        tuple(shard.size for shard in shards),
        False,
        "float32",
        kind="expert" if experts else "linear",
        experts=experts,
        shards=shards,
        input_shard=input_shard,
    )


def paths(layer):
    names = [f"part{i}" for i in range(len(layer.parts))]
    return [f"experts.{{expert}}.{name}" if layer.experts else name for name in names]


def fill(layer, name, param, stored):
    """The parameter, taken from the first way that the stored tensors are laid out in."""
    module = torch.nn.Module()
    shape = param.shape(layer)
    empty = torch.empty(shape, device="meta")
    module.register_parameter(name, torch.nn.Parameter(empty, requires_grad=False))
    ways = layout(param, param.stored or name, layer, paths(layer))
    slot = Slot(module, name, shape, getattr(torch, param.dtype), ways)

    def fits(part):
        try:
            part.view(stored[part.name])
        except (KeyError, RuntimeError, ValueError):
            return False
        return True

    way = next(way for way in ways if all(map(fits, way)))
    for part in way:
        slot.fill(part, stored[part.name], CPU)
    return module.get_parameter(name).detach()


def weight_of(layer, stored):
    """The weight that a layer in the fake format stands for, on this rank."""
    method = FakeFormat(FakeFormatConfig(), manager.current().load("platforms", "cpu")(), bind())
    module = torch.nn.Module()
    for name, param in method.create(layer).items():
        if name != "input_scale":
            stored_as = {
                key.replace("_scale_inv", "_scale"): value for key, value in stored.items()
            }
            tensor = fill(layer, name, param, stored_as)
            module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    method.finish(module, layer)
    return method.dequantize(module, layer)


def tables(layer, per_part):
    return {
        f"{path}.{key}": value
        for path, table in zip(paths(layer), per_part, strict=True)
        for key, value in table.items()
    }


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("parts", [(576,), (576, 64, 320), (128, 256)])
def test_parts_of_a_rank(parts, rank, rows):
    torch.manual_seed(0)
    exponent = torch.randint(-1, 2, (96,), dtype=torch.int32)
    per_part = [encode(size, 96, exponent) for size in parts]
    layer = spec(parts, 96, rank, 2, rows=rows)
    weights = [stored_weight(table) for table in per_part]
    shares = [w.chunk(2, dim=int(rows))[rank] for w in weights]
    assert torch.equal(weight_of(layer, tables(layer, per_part)), torch.cat(shares))


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("scales", [1, 3])
def test_one_tensor_for_all_parts(rank, rows, scales):
    torch.manual_seed(0)
    parts = (144, 48, 240)
    stored = encode(432, 96, torch.zeros(96, dtype=torch.int32), parts=scales)
    layer = spec(parts, 96, rank, 2, rows=rows)
    sizes = parts if scales == 3 else ()
    weight = stored_weight(stored, sizes)
    pieces = weight.chunk(2, 1)[rank] if rows else weight
    shares = pieces.split(parts) if rows else [p.chunk(2)[rank] for p in weight.split(parts)]
    whole = {f"layer.{key}": value for key, value in stored.items()}
    assert torch.equal(weight_of(layer, whole), torch.cat(tuple(shares)))


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_stacks_of_experts(rank, stacked):
    torch.manual_seed(0)
    layer = spec((160, 160), 96, rank, 2, experts=3)
    exponents = torch.randint(-1, 2, (3, 96), dtype=torch.int32)
    each = [[encode(160, 96, exponent) for _ in range(2)] for exponent in exponents]
    stored = {
        f"experts.{e}.part{p}.{key}": value
        for e, pair in enumerate(each)
        for p, table in enumerate(pair)
        for key, value in table.items()
    }
    if stacked:
        stored = {
            f"experts.part{p}.{key}": torch.stack([each[e][p][key] for e in range(3)])
            for p in range(2)
            for key in each[0][0]
        }
        # Each expert's scale is one of [experts, parts].
        stored |= {name: t[:, None] for name, t in stored.items() if name.endswith(".scale")}
    stack = weight_of(layer, stored)
    for e, pair in enumerate(each):
        shares = [stored_weight(table).chunk(2)[rank] for table in pair]
        assert torch.equal(stack[e], torch.cat(shares))


#: Layouts of published formats: parameter, shape of a part in the file (out 64, in 96).
KNOWN = {
    "AWQ qweight": (ParamSpec((INPUTS, OUTPUTS.packed(8)), "int32"), (96, 8)),
    "AWQ qzeros": (ParamSpec((INPUTS.blocks(16), OUTPUTS.packed(8)), "int32"), (6, 8)),
    "GPTQ 3 bit": (ParamSpec((INPUTS.packed(32, 3), OUTPUTS), "int32"), (9, 64)),
    "GPTQ g_idx": (ParamSpec((INPUTS,), "int32"), (96,)),
    "GGUF Q8_0": (ParamSpec((OUTPUTS, INPUTS.packed(32, 34)), "uint8"), (64, 102)),
    "bitsandbytes": (
        ParamSpec((OUTPUTS, INPUTS.packed(2)), "uint8", transform=lambda t: t.view(-1, 48)),
        (64 * 48, 1),
    ),
    "channel scales": (ParamSpec((OUTPUTS,), "float32"), (64, 1)),
    "MXFP4": (ParamSpec((OUTPUTS, INPUTS.packed(32), fixed(16)), "uint8"), (64, 3, 16)),
    "weight_shape": (ParamSpec((PARTS, fixed(2)), "int64"), (2,)),
}


@pytest.mark.parametrize("known", KNOWN)
def test_known_layouts(known):
    """Two parts of 64 outputs: what a rank has is the chunk of what one rank alone has."""
    param, shape = KNOWN[known]
    size = torch.Size(shape).numel()
    both = [torch.arange(size).reshape(shape) % 251 + i for i in range(2)]
    along = [axis.along for axis in param.axes]
    if along == ["inputs"]:
        both[1] = both[0]
    stored = {f"part{i}.w": t.to(getattr(torch, param.dtype)) for i, t in enumerate(both)}
    param = evolve(param, stored="w")
    unsplit = fill(spec((64, 64), 96), "w", param, stored)
    for rank in range(2):
        cut = fill(spec((64, 64), 96, rank, 2), "w", param, stored)
        dim = along.index("outputs") if "outputs" in along else None
        halves = (
            [unsplit] if dim is None else [h.chunk(2, dim)[rank] for h in unsplit.chunk(2, dim)]
        )
        assert torch.equal(cut, torch.cat(halves, dim or 0))
    if "32" in known or "3 bit" in known or known in ("GGUF Q8_0", "MXFP4"):
        with pytest.raises(
            UnsupportedError,
            match=r"layer: 48 inputs from 0 cannot be sliced "
            r"from",
        ):
            fill(spec((64, 64), 96, 0, 2, rows=True), "w", param, stored)
        return
    dim = along.index("inputs") if "inputs" in along else None
    for rank in range(2):
        cut = fill(spec((64, 64), 96, rank, 2, rows=True), "w", param, stored)
        assert torch.equal(cut, unsplit if dim is None else unsplit.chunk(2, dim)[rank])


def test_a_parameter_of_one_part():
    """Parts that are stored in different forms have parameters of their own."""
    layer = evolve(spec((64, 32), 96), part_names=("part0", "part1"))
    narrow = ParamSpec((OUTPUTS, INPUTS.packed(2)), "uint8", stored="weight", part=1)
    stored = {"part1.weight": torch.randint(256, (32, 48), dtype=torch.uint8)}
    assert torch.equal(fill(layer, "weight_1", narrow, stored), stored["part1.weight"])


def test_how_many_outputs_share_an_entry_of_blocks():
    assert spec((1536, 576), 8).output_block(128) == 128
    assert spec((576, 1536), 8).output_block(128) == 64
    assert ParamSpec((OUTPUTS.blocks(128),), "float32").shape(spec((1536, 576), 8)) == (17,)
    assert spec((576,), 8, rank=1, ranks=2).output_block(128) == 32
    assert spec((8,), 256, rank=1, ranks=2, rows=True).input_block(96) == 32
