"""How KV connectors take part in steps: which blocks are loaded and saved, and when."""

from modulm_kv_transfer.part import TransfersPart

__all__ = ["TransfersPart"]
