"""transformers in a comparison (see cases.py): `generate` with its KV cache and padded batches."""

from cases import Engine, main


def load(checkpoint: str, weights: str) -> Engine:
    import torch
    from transformers import AutoModelForCausalLM

    if weights != "bf16":
        raise SystemExit(f"transformers has no {weights} weights on a CPU here")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None

    def generate(prompts: list[list[int]], new: int) -> None:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new,
                pad_token_id=0,
            )
        assert found.shape[1] == ids.shape[1] + new

    return lambda case: generate


if __name__ == "__main__":
    main(load)
