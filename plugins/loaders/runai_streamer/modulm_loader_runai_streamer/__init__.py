"""Safetensors files, read ahead by several threads."""
