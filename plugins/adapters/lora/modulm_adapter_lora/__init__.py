"""Low-rank adapters in PEFT's format around any model's layers (see docs/adapters.md)."""
