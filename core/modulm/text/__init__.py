"""Text processing: tokenizer, detokenizer, stop strings."""
