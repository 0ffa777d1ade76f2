"""Anthropic's API: /v1/messages with streaming, tools and thinking, and count_tokens."""
