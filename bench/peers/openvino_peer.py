"""OpenVINO GenAI on a CPU in a comparison (see cases.py): its pipeline with continuous batching.

    pip install openvino-genai "optimum-intel[openvino,nncf]"

`optimum-cli` converts the checkpoint. int8 and int4 are its weight formats (int4 with groups of
128); bf16 is stored as fp16 and computed in bf16 where the processor has it, and the KV cache has
the same type, not OpenVINO's default of 8 bits, unless the weights are quantized.
"""

import subprocess
import sys

from cases import LONGEST, MOST, Engine, main
from conversions import converted

FORMATS = {"bf16": "fp16", "int8": "int8", "int4": "int4"}


def load(checkpoint: str, weights: str) -> Engine:
    import numpy as np
    import openvino
    import openvino_genai

    if weights not in FORMATS:
        raise SystemExit(f"OpenVINO has no {weights} weights on a CPU")

    def convert(folder: str) -> None:
        command = [sys.executable, "-m", "optimum.commands.optimum_cli", "export", "openvino"]
        command += ["--model", checkpoint]
        command += ["--task", "text-generation-with-past", "--weight-format", FORMATS[weights]]
        subprocess.run([*command, folder], check=True)

    folder = converted(checkpoint, "openvino", weights, convert)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = MOST
    scheduler.max_num_batched_tokens = LONGEST
    scheduler.cache_size = 2
    scheduler.enable_prefix_caching = True
    properties = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "bf16"}
    if weights == "bf16":
        properties["KV_CACHE_PRECISION"] = "bf16"
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], new: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = new, True, False
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        answers = pipeline.generate(tensors, [config] * len(tensors))
        assert all(len(answer.m_generation_ids[0]) == new for answer in answers)

    return lambda case: generate


if __name__ == "__main__":
    main(load)
