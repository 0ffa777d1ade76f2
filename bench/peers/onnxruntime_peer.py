"""ONNX Runtime GenAI on a CPU in a comparison (see cases.py): one generator per batch.

    pip install onnxruntime-genai onnx onnx-ir transformers torch

Its model builder converts the checkpoint. It has no 16-bit types on CPUs: "bf16" runs in fp32, with
twice the bytes. int4 has blocks of 32 and 8-bit activations (`int4_accuracy_level=4`).
"""

import subprocess
import sys

from cases import LONGEST, Engine, main
from conversions import converted

FORMATS = {"bf16": "fp32", "int8": "int8", "int4": "int4"}


def load(checkpoint: str, weights: str) -> Engine:
    import onnxruntime_genai

    if weights not in FORMATS:
        raise SystemExit(f"ONNX Runtime GenAI's builder has no {weights} weights for a CPU")

    def convert(folder: str) -> None:
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", checkpoint]
        command += ["-o", folder, "-p", FORMATS[weights], "-e", "cpu", "-c", f"{folder}.cache"]
        if weights == "int4":
            command += ["--extra_options", "int4_accuracy_level=4", "int4_block_size=32"]
        subprocess.run(command, check=True)

    model = onnxruntime_genai.Model(converted(checkpoint, "onnxruntime", weights, convert))

    def generate(prompts: list[list[int]], new: int) -> None:
        length = len(prompts[0]) + new
        params = onnxruntime_genai.GeneratorParams(model)
        params.set_search_options(
            max_length=min(length, LONGEST), min_length=length, batch_size=len(prompts),
            do_sample=False,
        )  # fmt: skip
        generator = onnxruntime_genai.Generator(model, params)
        generator.append_tokens(prompts if len(prompts) > 1 else prompts[0])
        for _ in range(new):
            generator.generate_next_token()
        assert len(generator.get_sequence(0)) == length

    return lambda case: generate


if __name__ == "__main__":
    main(load)
