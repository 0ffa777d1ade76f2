"""A minimal bank of low-rank adapters, and the contract kit for adapter banks.

An adapter is a safetensors file with `NAME.down` [rank, inputs] and `NAME.up` [outputs, rank] for
each layer that it changes; a pair of expert stacks uses the name of the first.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from modulm.contracts.adapter import AdaptedExperts, AdaptedLayer, AdapterBank
from modulm.contracts.kernels import Ops
from modulm.contracts.platform import Platform
from modulm.contracts.quantization import LinearKind, LinearSpec
from modulm.errors import CheckpointError, EngineError
from modulm.ops import bind
from modulm.plugins.manager import current
from modulm.testing.session import Session

__all__ = ["AdapterSession", "FakeAdapters", "FakeAdaptersConfig", "check_bank", "write_lora"]


@frozen
class FakeAdaptersConfig:
    """`slots`: adapters per step. `rank`: of all adapters. `kinds`: layers that they change."""

    slots: int = 2
    rank: int = 2
    kinds: tuple[str, ...] = field(
        default=("linear", "lm_head", "embedding", "router", "expert"), converter=tuple
    )


class FakeAdapters(AdapterBank):
    """Adds up(down(x)) of each token's slot to the output of a layer."""

    name = "fake"
    api = 1
    Config = FakeAdaptersConfig
    config: FakeAdaptersConfig

    def __init__(self, config: object, platform: Platform, ops: Ops) -> None:
        super().__init__(config, platform, ops)
        self.current: Tensor | None = None
        self.layers: dict[str, _Pair] = {}
        self._added: dict[str, dict[str, Tensor]] = {}

    @property
    def slots(self) -> int:
        return self.config.slots

    def layer(self, spec: LinearSpec) -> AdaptedLayer | None:
        if spec.kind not in self.config.kinds or spec.kind is LinearKind.EXPERT:
            return None
        table = spec.kind is LinearKind.EMBEDDING
        inputs, outputs = (spec.outputs, spec.inputs) if table else (spec.inputs, spec.outputs)
        return self._pair(spec, inputs, outputs)

    def experts(self, gate_up: LinearSpec, down: LinearSpec) -> AdaptedExperts | None:
        if "expert" not in self.config.kinds:
            return None
        pair = self._pair(gate_up, gate_up.inputs, down.outputs)

        def changed(
            base: Callable[..., Tensor], x: Tensor, *others: object, **more: object
        ) -> Tensor:
            return pair.add(x, base(x, *others, **more))

        return changed

    def _pair(self, spec: LinearSpec, inputs: int, outputs: int) -> _Pair:
        rank, slots = self.config.rank, self.slots + 1
        dtype, device = getattr(torch, spec.dtype), self.platform.device
        down = torch.zeros(slots, rank, inputs, dtype=dtype, device=device)
        up = torch.zeros(slots, outputs, rank, dtype=dtype, device=device)
        self.layers[spec.name] = _Pair(self, down, up)
        return self.layers[spec.name]

    def add(self, name: str, path: Path) -> None:
        from safetensors.torch import load_file

        if not path.is_file():
            raise CheckpointError(f"{path}: file not found")
        tensors = load_file(path)
        for key, tensor in tensors.items():
            layer, _, side = key.rpartition(".")
            pair = self.layers.get(layer)
            if pair is None or side not in ("down", "up"):
                raise CheckpointError(f"{path}: {key}: the model has no such layer")
            expected = list((pair.down if side == "down" else pair.up).shape[1:])
            if list(tensor.shape) != expected:
                raise CheckpointError(f"{path}: {key} is {list(tensor.shape)}, not {expected}")
        self._added[name] = tensors

    def remove(self, name: str) -> None:
        self._find(name)
        del self._added[name]

    def _find(self, name: str) -> dict[str, Tensor]:
        if name not in self._added:
            raise EngineError(f"no adapter {name!r}")
        return self._added[name]

    def prepare(self, name: str) -> None:
        self._find(name)

    def fill(self, slot: int, name: str) -> None:
        tensors = self._find(name)
        for layer, pair in self.layers.items():
            for side, stacked in (("down", pair.down), ("up", pair.up)):
                tensor = tensors.get(f"{layer}.{side}")
                stacked[slot] = 0 if tensor is None else tensor.to(stacked)

    def begin(self, slots: Tensor | None) -> None:
        self.current = slots


@frozen(eq=False)
class _Pair(AdaptedLayer):
    """down: [slots, rank, inputs]; up: [slots, outputs, rank]."""

    bank: FakeAdapters
    down: Tensor
    up: Tensor

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        """Add the adapters' output to `out`; x: [tokens, inputs], out: [tokens, outputs]."""
        slots = self.bank.current
        if slots is None:
            return out
        narrow = torch.einsum("tri,ti->tr", self.down[slots], x.to(self.down.dtype))
        return out + torch.einsum("tor,tr->to", self.up[slots], narrow).to(out.dtype)

    def apply(
        self, base: Callable[[Tensor, Tensor | None], Tensor], x: Tensor, bias: Tensor | None
    ) -> Tensor:
        return self.add(x, base(x, bias))

    def embed(self, base: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
        slots, out = self.bank.current, base(ids)
        if slots is None:
            return out
        narrow = self.down[slots, :, ids]
        return out + torch.einsum("tor,tr->to", self.up[slots], narrow)


class AdapterSession(Session):
    """An fp32 session with a bank of adapters; each row of a step uses a slot.

    bank: name of the driver; options: its settings. flags: those of the engine.
    """

    def __init__(self, path: str | Path, *, bank: str = "lora", flags: Any = None, **options: Any):
        tables = {"adapters": {bank: options}}
        settings = {"device": "cpu", "dtype": "float32", **(flags or {})}
        super().__init__(path, plugin_config=tables, **settings)
        if self.loaded.adapters is None:
            raise EngineError("the session has no bank")
        self.bank: AdapterBank = self.loaded.adapters

    def fill(self, slot: int, name: str, path: Path) -> None:
        """Add an adapter and load it into a slot."""
        self.bank.add(name, path)
        self.bank.fill(slot, name)

    @torch.inference_mode()
    def run(self, work: Mapping[int, Sequence[int]], slots: Mapping[int, int]) -> dict[int, Tensor]:
        """Run prompts with their rows' slots: row -> log probabilities [tokens, vocabulary]."""
        each = [slots.get(row, 0) for row, tokens in work.items() for _ in tokens]
        token_slots = torch.tensor(each, dtype=torch.int32) if any(each) else None
        self.bank.begin(token_slots)
        hidden = self.hidden(work)
        for row in work:
            self.release(row)
        self.bank.begin(token_slots)
        logits = self.model.logits(torch.cat(list(hidden.values())))
        counts = [len(tokens) for tokens in work.values()]
        logprobs = torch.split(logits.float().log_softmax(-1), counts)
        return dict(zip(work, logprobs, strict=True))


def write_lora(
    path: Path,
    modules: Mapping[str, tuple[int, int] | tuple[Tensor, Tensor]],
    rank: int,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a PEFT folder: module -> (inputs, outputs) for random tensors, or its two tensors."""
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, (first, second) in modules.items():
        down, up = first, second
        if isinstance(first, int) and isinstance(second, int):
            down = 0.3 * torch.randn(rank, first, generator=draw)
            up = 0.3 * torch.randn(second, rank, generator=draw)
        tensors[f"base_model.model.{name}.lora_A.weight"] = torch.as_tensor(down)
        tensors[f"base_model.model.{name}.lora_B.weight"] = torch.as_tensor(up)
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, **config}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return path


def check_bank(
    driver: type[AdapterBank], *, sample: Callable[[Path, str, int], Path] | None = None
) -> None:
    """Run the contract kit for banks: layers without adapters are unchanged, adapters change the
    tokens of their slots and no others, and errors are specific.

    `sample(folder, layer, seed)` writes an adapter for one layer, of 8 inputs and 10 outputs, and
    returns what `add` reads. Without it, and without the static method `kit_sample` on the class,
    LoRA adapters in PEFT's format are tried. Raises AssertionError with what was expected.
    """
    bank = driver(driver.Config(), current().load("platforms", "cpu")(), bind())
    bank.open(lambda name, tensor: [(name, tensor)])
    assert bank.slots >= 1, "a bank has slots"
    for kind in ("linear", "lm_head", "router", "embedding"):
        names = f"model.{kind}.a", f"model.{kind}.b"
        spec = LinearSpec(f"model.{kind}", 8, (6, 4), False, "float32", kind, part_names=names)
        _check_layer(bank, spec)
    gate_up, down = (
        LinearSpec(
            f"model.experts.{name}", inputs, parts, False, "float32", "expert", 3,
            part_names=(f"model.experts.0.{name}",),
            expert_names=(f"model.experts.{{expert}}.{name}",),
        )
        for name, inputs, parts in (("gate_up", 8, (12,)), ("down", 6, (8,)))
    )  # fmt: skip
    around = bank.experts(gate_up, down)
    if around is not None:
        x, out = torch.randn(4, 8), torch.randn(4, 8)
        for slots in (None, torch.zeros(4, dtype=torch.int32)):
            bank.begin(slots)
            result = around(lambda *_, **__: out.clone(), x, x, x, gate_up, down)
            assert torch.equal(result, out), "experts must be unchanged for tokens without adapters"
    wrong: tuple[tuple[Callable[[], None], type[Exception]], ...] = (
        (lambda: bank.add("a", Path("no such folder")), CheckpointError),
        (lambda: bank.fill(1, "a"), EngineError),
        (lambda: bank.remove("a"), EngineError),
    )
    for ask, expected in wrong:
        try:
            ask()
        except expected:
            continue
        raise AssertionError(f"{expected.__name__} was expected for an unknown adapter")
    write = sample or getattr(driver, "kit_sample", None) or _write_one
    with tempfile.TemporaryDirectory() as folder:
        _check_adapters(driver, [write(Path(folder, str(seed)), _LAYER, seed) for seed in (1, 2)])


#: The layer that the kit's adapters change.
_LAYER = "model.proj"


def _write_one(folder: Path, layer: str, seed: int) -> Path:
    return write_lora(folder, {layer: (8, 10)}, 2, seed)


def _check_adapters(driver: type[AdapterBank], paths: Sequence[Path]) -> None:
    """Check that tokens get their slot's adapter, and only that."""
    bank = driver(driver.Config(), current().load("platforms", "cpu")(), bind())
    spec = LinearSpec(_LAYER, 8, (10,), False, "float32", "linear", part_names=(_LAYER,))
    around = bank.layer(spec)
    if around is None:
        return
    weight, x = torch.randn(10, 8), torch.randn(4, 8)
    base = partial(_linear, weight)
    around.finish(base)
    bank.open(lambda name, tensor: [(name, tensor)])
    try:
        bank.add("a", paths[0])
    except CheckpointError:
        return  # of another format: only what needs no adapter is checked
    plain = base(x, None)

    def run(slots: Sequence[int]) -> Tensor:
        bank.begin(torch.tensor(slots, dtype=torch.int32))
        return around.apply(base, x, None).clone()

    assert torch.equal(run([0] * 4), plain), "an adapter that is in no slot changes tokens"
    bank.fill(1, "a")
    first = run([0, 1, 0, 1])
    assert torch.equal(first[[0, 2]], plain[[0, 2]]), "tokens of slot 0 are changed by an adapter"
    assert not torch.allclose(first[[1, 3]], plain[[1, 3]]), "a slot's adapter changes nothing"
    reverse = run([1, 0, 1, 0])
    whole = run([1] * 4)
    assert torch.allclose(whole[[1, 3]], first[[1, 3]], atol=1e-5), (
        "a token's result depends on the slots of others"
    )
    assert torch.allclose(whole[[0, 2]], reverse[[0, 2]], atol=1e-5), (
        "a token's result depends on the slots of others"
    )
    bank.add("a", paths[1])
    second = run([1] * 4)
    assert not torch.allclose(second, whole), "a slot keeps the old values of a replaced adapter"
    if bank.slots > 1:
        bank.add("b", paths[0])
        bank.fill(2, "b")
        mixed = run([1, 2, 1, 2])
        assert torch.allclose(mixed[[1, 3]], whole[[1, 3]], atol=1e-5), "slots get mixed up"
        assert torch.allclose(mixed[[0, 2]], second[[0, 2]], atol=1e-5), "slots get mixed up"
    bank.remove("a")
    try:
        bank.fill(1, "a")
    except EngineError:
        return
    raise AssertionError("remove() leaves the adapter: EngineError was expected from fill()")


def _linear(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


def _check_layer(bank: AdapterBank, spec: LinearSpec) -> None:
    around = bank.layer(spec)
    if around is None:
        return
    weight, bias = torch.randn(spec.outputs, spec.inputs), torch.randn(spec.outputs)
    table, x = spec.kind is LinearKind.EMBEDDING, torch.randn(4, spec.inputs)
    ids = torch.tensor([3, 1, 0, 9])
    around.finish(weight.__getitem__ if table else partial(_linear, weight))
    for slots in (None, torch.zeros(4, dtype=torch.int32)):
        bank.begin(slots)
        if table:
            result, expected = around.embed(weight.__getitem__, ids), weight[ids]
        else:
            expected = _linear(weight, x, bias)
            result = around.apply(partial(_linear, weight), x, bias)
        assert torch.equal(result, expected), (
            f"{spec.kind}: must be unchanged for tokens without adapters"
        )
