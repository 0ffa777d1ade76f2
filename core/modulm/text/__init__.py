"""Text on its way to tokens and back: tokenizer, chat templates, detokenizer, stop strings."""
