"""vLLM on a CPU in a comparison (see cases.py).

For its best figures no core is reserved for the scheduler (`VLLM_CPU_NUM_OF_RESERVED_CPU=0`).

Without AMX, oneDNN's limit covers the linear layers. Attention and small products depend on torch's
CPU detection, which is therefore patched too. vLLM's child process runs this file as well.
"""

import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from cases import LONGEST, MOST, Engine, main

if not os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX").endswith("AMX"):
    torch.cpu._is_amx_tile_supported = lambda: False


def load(checkpoint: str, weights: str) -> Engine:
    from vllm import LLM, SamplingParams

    if weights != "bf16":
        raise SystemExit(f"vLLM does not round a plain checkpoint to {weights} on a CPU")
    llm = LLM(
        model=checkpoint,
        dtype="bfloat16",
        max_model_len=LONGEST,
        max_num_seqs=MOST,
        max_num_batched_tokens=LONGEST,
        gpu_memory_utilization=0.4,
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], new: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = llm.generate(asked, params, use_tqdm=False)
        assert all(len(answer.outputs[0].token_ids) == new for answer in answers)

    return lambda case: generate


if __name__ == "__main__":
    main(load)
