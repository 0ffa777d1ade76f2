"""CTranslate2 on a CPU in a comparison (see cases.py). It has no prefix cache and no int4.

    pip install ctranslate2 transformers torch

Its converter for transformers reads the checkpoint. Weights are int8 or bfloat16; where its build
cannot compute in bfloat16 on this processor it computes, and holds bfloat16 weights, in float32.
"""

import json
from pathlib import Path

from cases import Engine, main
from conversions import converted

#: Format -> (stored type, types to compute in, the best that the build supports first).
FORMATS = {
    "bf16": ("bfloat16", ("bfloat16", "float32")),
    "int8": ("int8", ("int8_bfloat16", "int8_float32")),
}


def load(checkpoint: str, weights: str) -> Engine:
    import ctranslate2

    if weights not in FORMATS:
        raise SystemExit(f"CTranslate2 has no {weights} weights on a CPU")
    stored, types = FORMATS[weights]
    able = ctranslate2.get_supported_compute_types("cpu")

    def convert(folder: str) -> None:
        converter = ctranslate2.converters.TransformersConverter(checkpoint)
        converter.convert(folder, quantization=stored)

    folder = converted(checkpoint, "ctranslate2", weights, convert)
    vocabulary = json.loads((Path(folder) / "vocabulary.json").read_text())
    compute = next(each for each in types if each in able)
    generator = ctranslate2.Generator(folder, device="cpu", compute_type=compute)

    def generate(prompts: list[list[int]], new: int) -> None:
        answers = generator.generate_batch(
            [[vocabulary[token] for token in prompt] for prompt in prompts],
            max_length=new,
            min_length=new,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        assert all(len(answer.sequences_ids[0]) == new for answer in answers)

    return lambda case: generate


if __name__ == "__main__":
    main(load)
