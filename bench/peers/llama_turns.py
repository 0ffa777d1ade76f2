"""llama.cpp alternating with another engine on one GGUF file (see bench/quantized.py).

    python llama_turns.py CHECKPOINT KIND FOLDER [serve]

FOLDER/KIND.gguf is converted from the checkpoint with llama.cpp's quantization if missing. With
`serve`, each JSON input line {"prompts": [[token]], "new": output tokens, "length": maximum
sequence length} is answered by a line with the seconds it took.
"""

import ctypes
import json
import os
import sys
import time
from pathlib import Path

import gguf_file
import llama_cpp
from llama_peer import Sequences, _silent

#: From llama.h.
FTYPES = {"Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M}


def file_of(checkpoint: Path, kind: str, folder: Path) -> Path:
    """The checkpoint as a GGUF file with types chosen by llama.cpp; created if missing."""
    path = folder / f"{kind}.gguf"
    if path.exists():
        return path
    plain = folder / "bf16.gguf"
    if not plain.exists():
        gguf_file.write(checkpoint, plain)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = FTYPES[kind]
    if llama_cpp.llama_model_quantize(
        str(plain).encode(), str(path).encode(), ctypes.byref(params)
    ):
        raise SystemExit(f"llama.cpp cannot quantize to {kind}")
    return path


def main() -> None:
    checkpoint, kind, folder = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    path = file_of(checkpoint, kind, folder)
    if len(sys.argv) == 4:
        return
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
    made: dict[int, Sequences] = {}
    print(json.dumps({"threads": os.cpu_count(), "file": str(path)}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompts, new = asked["prompts"], asked["new"]
        count = len(prompts)
        if count not in made:
            made[count] = Sequences(model, asked["length"], count)
        start = time.perf_counter()
        made[count].generate(prompts, new)
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main()
