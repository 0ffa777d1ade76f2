"""Trains the demo checkpoint: `python -m modulm_demo.recipe.train --out FOLDER`.

With `--resume CHECKPOINT` a run continues from existing weights and their tokenizer, on text of
another seed.

A step reads two batches. Two single-threaded processes share it and synchronize once per step,
which is more robust to other load than one process with two threads; `--workers 1` reads both. The
same seed, steps and library versions give the same text in the same order.

The last `--int8` steps are quantization-aware: the forward pass uses int8 weights (one scale per
output channel, as in `modulm quantize --scheme w8a16`), and updates apply to the exact ones.
"""

import argparse
import contextlib
import itertools
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from .batches import Batch, batches
from .generator import MIXTURES
from .tokenizer import CONTEXT, store, train_tokenizer

PUBLISHED = Path(__file__).parents[1] / "checkpoint"
PARTS = 2
_BETAS = (0.9, 0.95)
_MATRIX_DECAY = 0.02
_WARMUP = 100
_SAVE_EVERY = 200


class Stop:
    """Set by Ctrl-C: the learning rate then decays to zero over the last steps, as usual."""

    def __init__(self) -> None:
        self.requested = False
        signal.signal(signal.SIGINT, self._ask)

    def _ask(self, *_: object) -> None:
        self.requested = True


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Build the untrained network in float32."""
    config = Qwen3Config(
        recipe="modulm-demo",  # identifies own checkpoints in modulm_demo.hooks
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=768, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
        max_position_embeddings=CONTEXT, rope_theta=10_000.0, attn_implementation="sdpa",
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def start_model(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """The untrained network, or the one to resume from."""
    if args.resume is None:
        return new_model(tokenizer)
    return Qwen3ForCausalLM.from_pretrained(
        args.resume, dtype=torch.float32, attn_implementation="sdpa"
    )


def loss_of(model: Qwen3ForCausalLM) -> Callable[..., Tensor]:
    """Return the compiled loss; logits are computed only for the picked positions."""

    def loss(ids: Tensor, positions: Tensor, owners: Tensor, picked: Tensor, targets: Tensor,
             weights: Tensor) -> Tensor:  # fmt: skip
        length = ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = (owners[:, None, :, None] == owners[:, None, None, :]) & causal
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.model(input_ids=ids, position_ids=positions, attention_mask=mask,
                                 use_cache=False).last_hidden_state  # fmt: skip
            logits = model.lm_head(hidden.flatten(0, 1)[picked])
        each = F.cross_entropy(logits.float(), targets, reduction="none")
        return (each * weights).sum() / weights.sum()

    return torch.compile(loss, dynamic=False)


def matrices_of(model: Qwen3ForCausalLM) -> list[Tensor]:
    """The matrices inside the layers."""
    return [p for p in model.model.layers.parameters() if p.ndim == 2]


@contextlib.contextmanager
def int8_weights(matrices: list[Tensor]) -> Iterator[None]:
    """Round the matrices to int8 per output channel within this context; gradients are those of the
    rounded weights, and the exact ones are restored for the optimizer.
    """
    exact = [matrix.detach().clone() for matrix in matrices]
    for matrix in matrices:
        scale = matrix.detach().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
        matrix.data.copy_((matrix.detach() / scale).round() * scale)
    yield
    for matrix, was in zip(matrices, exact, strict=True):
        matrix.data.copy_(was)


class Optimizer:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms.

    Each process updates its share of the matrices, since Muon costs a tenth of a step, and sends
    them to the others.
    """

    def __init__(self, model: Qwen3ForCausalLM, rank: int, workers: int, rate: float) -> None:
        matrices = matrices_of(model)
        known = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in known]
        self._shares = [matrices[worker::workers] for worker in range(workers)]
        self._rate = rate
        self._parts = [
            torch.optim.Muon(self._shares[rank], rate, weight_decay=_MATRIX_DECAY,
                             adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, rate, betas=_BETAS, weight_decay=0.0, fused=True),
        ]  # fmt: skip

    def step(self, factor: float) -> None:
        """Update all parameters with a fraction of the peak rate."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = self._rate * factor
            part.step()
        for worker, share in enumerate(self._shares):
            flat = torch.cat([p.detach().flatten() for p in share])
            dist.broadcast(flat, worker)
            _scatter(flat, [p.data for p in share])


def _scatter(flat: Tensor, into: list[Tensor]) -> None:
    for piece, tensor in zip(flat.split([t.numel() for t in into]), into, strict=True):
        tensor.copy_(piece.view_as(tensor))


def shared_gradients(
    parameters: list[Tensor], loss: float, stop: bool, workers: int
) -> tuple[float, bool]:
    """Average gradients and loss over the processes; any process may ask to stop."""
    grads = [p.grad for p in parameters]
    notes = torch.tensor([loss, float(stop)])
    flat = torch.cat([*(g.flatten() for g in grads), notes])
    dist.all_reduce(flat)
    flat /= workers
    _scatter(flat[:-2], grads)
    return flat[-2].item(), flat[-1].item() > 0


def rate_at(step: int, steps: int, decay: int) -> float:
    """The fraction of the peak rate: a short warm-up, constant, then a linear decay to zero."""
    return max(0.0, min((step + 1) / _WARMUP, 1.0, (steps - step) / decay))


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the checkpoint in bfloat16, with greedy decoding as its default."""
    published = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    published.load_state_dict(model.state_dict())
    published.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    published.save_pretrained(folder)
    store(tokenizer, folder)


def as_tensors(batch: Batch) -> list[Tensor]:
    """The fields of a batch in the order of the loss's arguments."""
    return [torch.from_numpy(array) for array in vars(batch).values()]


def work(rank: int, meeting: str, args: argparse.Namespace) -> None:
    """Run one of the processes, which reads every `workers`-th batch."""
    workers, batches_here = args.workers, PARTS // args.workers
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=workers)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.out)
    model = start_model(args, tokenizer)
    parameters, matrices = list(model.parameters()), matrices_of(model)
    compute, stop = loss_of(model), Stop()
    optimizer = Optimizer(model, rank, workers, args.rate)
    mine = itertools.islice(batches(tokenizer, args.seed, args.mixture), rank, None, workers)
    began, tokens, step, steps, recent = time.monotonic(), 0, 0, args.steps, []
    while step < steps:
        total, rounded = 0.0, steps - step <= args.int8
        with int8_weights(matrices) if rounded else contextlib.nullcontext():
            for batch in itertools.islice(mine, batches_here):
                loss = compute(*as_tensors(batch)) / batches_here
                loss.backward()
                total += loss.item()
                tokens += workers * int((batch.owners > 0).sum())
        mean, stopping = shared_gradients(parameters, total, stop.requested, workers)
        if stopping:
            stop.requested, steps = False, min(steps, step + args.decay)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step(rate_at(step, steps, args.decay))
        model.zero_grad()
        step, recent = step + 1, [*recent[-24:], mean]
        if rank == 0 and step % 25 == 0:
            print(f"step {step}/{steps} loss {sum(recent) / len(recent):.4f} tokens about "
                  f"{tokens:,} seconds {time.monotonic() - began:.0f}", flush=True)  # fmt: skip
        if rank == 0 and (step % _SAVE_EVERY == 0 or step == steps):
            save(model, tokenizer, args.out)


def main() -> None:
    """Parse the options, build the tokenizer, and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PUBLISHED, help="folder of the checkpoint")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2289)
    parser.add_argument("--decay", type=int, default=500, help="last steps, with a falling rate")
    parser.add_argument("--rate", type=float, default=2.5e-3, help="peak learning rate")
    parser.add_argument("--resume", type=Path, help="checkpoint whose weights the run goes on from")
    parser.add_argument("--mixture", choices=MIXTURES, default="second")
    parser.add_argument("--workers", type=int, choices=(1, 2), default=2)
    parser.add_argument("--int8", type=int, default=0, help="last steps, with weights as in int8")
    args = parser.parse_args()
    known = args.resume and AutoTokenizer.from_pretrained(args.resume)
    store(known or train_tokenizer(args.seed, mixture=args.mixture), args.out)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (f"file://{folder}/meeting", args), nprocs=args.workers)


if __name__ == "__main__":
    main()
