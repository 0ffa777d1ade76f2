"""A folder with the files of a Whisper checkpoint, as far as words go: tokenizer and settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from modulm.testing.checkpoints import make_tiny, make_tokenizer

__all__ = ["CODES", "HEADS", "VOCABULARY", "whisper_words", "write_whisper"]

#: Languages that the checkpoint knows.
CODES = ("en", "zh", "de")
_TASKS = ("translate", "transcribe")
#: Keys of config.json that name tokens.
_TOKENS = ("decoder_start_token_id", "eos_token_id", "bos_token_id", "pad_token_id",
           "begin_suppress_tokens")  # fmt: skip
#: Tokens with all languages.
VOCABULARY = 512 + 10 + 1501
#: (layer, head) of the decoder that are said to follow what is heard.
HEADS = [[0, 3], [1, 0], [1, 2], [2, 1]]
_REST = ("startoflm", "startofprev", "nospeech", "notimestamps")


def whisper_words(
    folder: Path, *, languages: bool = True, with_generation_config: bool = True
) -> dict[str, int]:
    """Write the files; token -> id."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_tokenizer(folder, vocab=512))
    names = ["startoftranscript", *(CODES if languages else ()), *_TASKS, *_REST]
    special = [f"<|{name}|>" for name in names]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    tokenizer.add_tokens([f"<|{step * 0.02:.2f}|>" for step in range(1501)])
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("endoftext", *names)}
    config: dict[str, Any] = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "vocab_size": len(tokenizer),
        "max_target_positions": 448,
        "decoder_start_token_id": ids["startoftranscript"],
        "eos_token_id": ids["endoftext"],
        "bos_token_id": ids["endoftext"],
        "pad_token_id": ids["endoftext"],
        "begin_suppress_tokens": [ids["endoftext"]],
    }
    file = folder / "config.json"
    model = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**config, **model} | {key: config[key] for key in _TOKENS}))
    generation: dict[str, Any] = {"suppress_tokens": [5, 6], "alignment_heads": HEADS}
    if with_generation_config:
        generation |= {
            "is_multilingual": languages,
            "no_timestamps_token_id": ids["notimestamps"],
            "max_initial_timestamp_index": 25,
            "begin_suppress_tokens": [7, ids["endoftext"]],
        }
        if languages:
            generation["lang_to_id"] = {f"<|{code}|>": ids[code] for code in CODES}
            generation["task_to_id"] = {task: ids[task] for task in _TASKS}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return ids


def write_whisper(folder: Path, seconds: int = 4) -> dict[str, int]:
    """A whole tiny checkpoint with its processor, which hears so many seconds; token -> id."""
    from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperProcessor

    sizes = {"max_target_positions": 448, "max_source_positions": 50 * seconds}
    make_tiny(folder, "WhisperForConditionalGeneration", vocab_size=VOCABULARY, **sizes)
    ids = whisper_words(folder)
    hears = WhisperFeatureExtractor(feature_size=16, chunk_length=seconds)
    WhisperProcessor(hears, AutoTokenizer.from_pretrained(folder)).save_pretrained(folder)
    return ids
