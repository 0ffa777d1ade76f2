"""Structured output through xgrammar (https://github.com/mlc-ai/xgrammar)."""
