"""Trains the drafter of the demo checkpoint: `python -m modulm_demo.recipe.drafter --out FOLDER`.

An EAGLE head (Li et al. 2024, arXiv:2401.15077): one Llama layer that reads the model's last hidden
state at a place and the embedding of the token after it, and foretells the next hidden state. The
model's own head turns that into tokens, so neither embedding nor head are in the checkpoint. Half
of the loss is on the head's second step, which reads what the first foretold (as HASS does,
arXiv:2408.15766), since that is what it meets when it drafts several tokens.

One process of one thread; the text is the recipe's, of a seed that the model was not trained on.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, Qwen3ForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from .batches import Batch, batches
from .train import PUBLISHED as MODEL
from .train import Stop, as_tensors, rate_at

PUBLISHED = Path(__file__).parents[1] / "drafter"
PICKED = 640
_BETAS = (0.9, 0.95)
_MATRIX_DECAY = 0.02
_STATES_SHARE = 0.5
_SAVE_EVERY = 100


def head_config(model: Qwen3ForCausalLM) -> LlamaConfig:
    """The config of the head: one layer of the model's width."""
    of = model.config
    return LlamaConfig(
        architectures=["EagleLlamaForCausalLM"], recipe="modulm-demo", vocab_size=of.vocab_size,
        hidden_size=of.hidden_size, intermediate_size=of.intermediate_size, num_hidden_layers=1,
        num_attention_heads=of.num_attention_heads, head_dim=of.head_dim,
        num_key_value_heads=of.num_key_value_heads, rms_norm_eps=of.rms_norm_eps,
        max_position_embeddings=of.max_position_embeddings, rope_theta=10_000.0,
        bos_token_id=None, eos_token_id=of.eos_token_id, pad_token_id=of.pad_token_id,
        attn_implementation="sdpa", dtype="bfloat16",
    )  # fmt: skip


class Head(nn.Module):
    """(hidden states, embeddings of the next tokens), both [rows, length, width] -> the states that
    follow. Names of parameters are those of published EAGLE checkpoints.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([LlamaDecoderLayer(config, 0)])
        self.layers[0].input_layernorm = nn.Identity()
        self._turns = LlamaRotaryEmbedding(config)
        for matrix in (p for p in self.parameters() if p.ndim == 2):
            nn.init.normal_(matrix, std=config.initializer_range)

    def forward(self, hidden: Tensor, embedded: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        mixed = self.fc(torch.cat([embedded, hidden], dim=-1))
        turns = self._turns(mixed, positions)
        return self.layers[0](mixed, attention_mask=mask, position_embeddings=turns)


def _shifted(tensor: Tensor, by: int) -> Tensor:
    """Shift positions by `by`; those without a source do not count."""
    return tensor.roll(by, dims=1)


class Losses:
    """Computes loss and agreement of a head with its model, on batches of the recipe."""

    def __init__(self, model: Qwen3ForCausalLM, head: Head) -> None:
        self._model, self._head = model.eval().requires_grad_(False), head
        self._table = model.get_input_embeddings().weight

    def __call__(self, batch: Batch) -> tuple[Tensor, list[float]]:
        """Return (loss, top-1 agreement with the model for the first and the second step)."""
        ids, positions, owners, picked, _, weights = as_tensors(batch)
        identity = torch.eye(ids.shape[1], dtype=torch.bool)
        causal = torch.ones_like(identity).tril()
        mask = (owners[:, None, :, None] == owners[:, None, None, :]) & causal
        picked, weights = picked[:PICKED], weights[:PICKED]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            hidden = self._model.model(input_ids=ids, position_ids=positions, use_cache=False,
                                       attention_mask=mask).last_hidden_state  # fmt: skip
            goal = hidden.flatten(0, 1)[picked]
            wanted = F.linear(goal, self._table).float()
        embedded = F.embedding(ids, self._table)
        losses, agreements, states = [], [], hidden
        for ahead in (1, 2):
            # Positions `ahead` steps back are in the same conversation or do not count.
            counts = positions >= ahead
            weights = weights * counts.flatten()[picked]
            seen = (mask & counts[:, None, None, :]) | identity
            with torch.autocast("cpu", torch.bfloat16):
                drafted = self._head(_shifted(states, 1), embedded, positions, seen)
                selected = drafted.flatten(0, 1)[picked]
                logits = F.linear(selected, self._table).float()
            each = F.cross_entropy(logits, wanted.softmax(-1), reduction="none")
            each = each + _STATES_SHARE * F.smooth_l1_loss(
                selected.float(), goal.float(), reduction="none"
            ).mean(-1)
            losses.append((each * weights).sum() / weights.sum())
            same = (logits.argmax(-1) == wanted.argmax(-1)) & (weights == 1)
            agreements.append(float(same.sum() / (weights == 1).sum()))
            states = drafted.detach()
        return sum(losses) / len(losses), agreements


def optimizers(head: Head, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for the norms, as for the model."""
    matrices = [p for p in head.parameters() if p.ndim == 2]
    others = [p for p in head.parameters() if p.ndim != 2]
    return [
        torch.optim.Muon(matrices, rate, weight_decay=_MATRIX_DECAY,
                         adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, rate, betas=_BETAS, weight_decay=0.0),
    ]  # fmt: skip


def save(head: Head, config: LlamaConfig, folder: Path) -> None:
    """Write the head in bfloat16, in the layout of published EAGLE checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(config.to_diff_dict(), indent=2, sort_keys=True)
    (folder / "config.json").write_text(text + "\n")


def main() -> None:
    """Parse the options and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint to draft for")
    parser.add_argument("--out", type=Path, default=PUBLISHED, help="folder of the head")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1488)
    parser.add_argument("--decay", type=int, default=800, help="last steps, with a falling rate")
    parser.add_argument("--rate", type=float, default=2.5e-3, help="peak learning rate")
    parser.add_argument("--resume", type=Path, help="head whose weights the run goes on from")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = Qwen3ForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    config = head_config(model)
    head = Head(config)
    if args.resume:
        head.load_state_dict(load_file(args.resume / "model.safetensors"))
    losses, parts, stop = Losses(model, head), optimizers(head, args.rate), Stop()
    source = batches(AutoTokenizer.from_pretrained(args.model), args.seed)
    began, step, steps, recent = time.monotonic(), 0, args.steps, []
    while step < steps:
        loss, agreements = losses(next(source))
        loss.backward()
        if stop.requested:
            stop.requested, steps = False, min(steps, step + args.decay)
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for part in parts:
            for group in part.param_groups:
                group["lr"] = args.rate * rate_at(step, steps, args.decay)
            part.step()
            part.zero_grad()
        step, recent = step + 1, [*recent[-24:], [loss.item(), *agreements]]
        if step % 25 == 0:
            mean = torch.tensor(recent).mean(0).tolist()
            print(f"step {step}/{steps} loss {mean[0]:.4f} first {mean[1]:.3f} second "
                  f"{mean[2]:.3f} seconds {time.monotonic() - began:.0f}", flush=True)  # fmt: skip
        if step % _SAVE_EVERY == 0 or step == steps:
            save(head, config, args.out)


if __name__ == "__main__":
    main()
