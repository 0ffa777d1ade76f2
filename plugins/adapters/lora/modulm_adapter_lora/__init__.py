"""LoRA adapters in PEFT's format for layers of any model (see docs/adapters.md)."""
