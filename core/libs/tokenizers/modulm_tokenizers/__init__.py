"""Tokenizers of checkpoints, and text from token ids as they come."""

from modulm_tokenizers.detokenizer import Detokenizer
from modulm_tokenizers.tokenizer import load_tokenizer, open_tokenizer

__all__ = ["Detokenizer", "load_tokenizer", "open_tokenizer"]
