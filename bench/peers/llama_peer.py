"""llama.cpp through llama-cpp-python in a comparison (see cases.py).

Uses its C API, so that several sequences share a batch as in its server. A GGUF file of the
checkpoint is written next to it once (gguf_file.py); llama.cpp converts that to Q8_0 and Q4_0,
which are compared with int8 and int4.
"""

import ctypes
import os
from pathlib import Path

import gguf_file
import llama_cpp
from cases import LENGTHS, SEQUENCES, Engine, Generate, main

KINDS = {"int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}
#: Maximum tokens per call.
CHUNK = 512


def model_file(checkpoint: str, weights: str) -> Path:
    """The GGUF file with these weights; created if missing."""
    plain = Path(checkpoint) / "model-bf16.gguf"
    if not plain.exists():
        gguf_file.write(Path(checkpoint), plain)
    if weights == "bf16":
        return plain
    path = plain.with_name(f"model-{weights}.gguf")
    if not path.exists():
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = KINDS[weights]
        source, target = str(plain).encode(), str(path).encode()
        if llama_cpp.llama_model_quantize(source, target, ctypes.byref(params)):
            raise SystemExit(f"llama.cpp cannot quantize to {weights}")
    return path


class Sequences:
    """Up to `sequences` concurrent prompts. A prompt reuses the longest common prefix of the
    previous one, as in a slot of llama.cpp's server.
    """

    def __init__(self, model: ctypes.c_void_p, length: int, sequences: int) -> None:
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = length * sequences
        settings.n_batch = settings.n_ubatch = CHUNK
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = os.cpu_count()
        self.context = llama_cpp.llama_init_from_model(model, settings)
        vocabulary = llama_cpp.llama_model_get_vocab(model)
        self.width = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)
        self.memory = llama_cpp.llama_get_memory(self.context)
        self.known: list[int] = []

    def put(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Decode a batch. rows: (token, position, sequence, whether to compute logits)."""
        for at, (token, position, sequence, wanted) in enumerate(rows):
            self.batch.token[at] = token
            self.batch.pos[at] = position
            self.batch.n_seq_id[at] = 1
            self.batch.seq_id[at][0] = sequence
            self.batch.logits[at] = wanted
        self.batch.n_tokens = len(rows)
        if llama_cpp.llama_decode(self.context, self.batch):
            raise SystemExit("llama_decode failed")

    def best(self, at: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, at)
        return int(argmax(logits, self.width))

    def generate(self, prompts: list[list[int]], new: int) -> None:
        shared = self.reuse(prompts[0]) if len(prompts) == 1 else self.forget()
        rows = [
            (token, at, sequence, at == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
            if at >= shared
        ]
        tokens = [0] * len(prompts)
        for start in range(0, len(rows), CHUNK):
            part = rows[start : start + CHUNK]
            self.put(part)
            for at, (_, _, sequence, wanted) in enumerate(part):
                if wanted:
                    tokens[sequence] = self.best(at)
        for step in range(new - 1):
            self.put([(token, len(prompts[s]) + step, s, True) for s, token in enumerate(tokens)])
            tokens = [self.best(at) for at in range(len(tokens))]

    def reuse(self, prompt: list[int]) -> int:
        """The number of cached prompt tokens to reuse; the last token is always computed."""
        shared = 0
        for mine, theirs in zip(prompt[:-1], self.known, strict=False):
            if mine != theirs:
                break
            shared += 1
        llama_cpp.llama_memory_seq_rm(self.memory, 0, shared, -1)
        self.known = prompt
        return shared

    def __del__(self) -> None:
        llama_cpp.llama_batch_free(self.batch)
        llama_cpp.llama_free(self.context)

    def forget(self) -> int:
        llama_cpp.llama_memory_clear(self.memory, True)
        self.known = []
        return 0


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: int) -> None:
    """Drop llama.cpp's log messages."""


def argmax(values: object, size: int) -> int:
    import numpy

    return int(numpy.ctypeslib.as_array(values, shape=(size,)).argmax())


def check_amx() -> None:
    """Raise SystemExit if AMX must not be used but this build has it."""
    limited = not os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX").endswith("AMX")
    if limited and b"AMX_INT8 = 1" in llama_cpp.llama_print_system_info():
        raise SystemExit("this llama.cpp was built with AMX; see bench/compare.py")


def load(checkpoint: str, weights: str) -> Engine:
    check_amx()
    path = model_file(checkpoint, weights)
    llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)

    def engine(case: str) -> Generate:
        return Sequences(model, LENGTHS[case], SEQUENCES[case]).generate

    return engine


if __name__ == "__main__":
    main(load)
