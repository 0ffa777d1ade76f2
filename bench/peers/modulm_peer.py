"""modulm in a comparison (see cases.py)."""

from cases import LONGEST, MOST, Engine, main


def load(checkpoint: str, weights: str) -> Engine:
    from modulm import LLM, SamplingParams
    from modulm.config.schema.known import known_flags

    # An earlier modulm had no drafts by default, and no flag.
    flags = {"speculative": "off"} if "speculative" in known_flags() else {}
    llm = LLM(
        model=checkpoint,
        dtype="bfloat16",
        quantization=None if weights == "bf16" else weights,
        max_model_len=LONGEST,
        max_num_seqs=MOST,
        max_num_batched_tokens=LONGEST,
        kv_cache_memory_bytes=2 << 30,
        **flags,
    )

    def generate(prompts: list[list[int]], new: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = llm.generate(asked, params, use_tqdm=False)
        assert all(len(answer.outputs[0].token_ids) == new for answer in answers)

    return lambda case: generate


if __name__ == "__main__":
    main(load)
