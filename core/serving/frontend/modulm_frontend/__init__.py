"""The consumer's side: prompts to requests, tokens to text."""
