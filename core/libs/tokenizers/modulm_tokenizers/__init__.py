"""Tokenizers of checkpoints, and incremental detokenization."""

from modulm_tokenizers.detokenizer import Detokenizer
from modulm_tokenizers.tokenizer import load_tokenizer, open_tokenizer

__all__ = ["Detokenizer", "load_tokenizer", "open_tokenizer"]
