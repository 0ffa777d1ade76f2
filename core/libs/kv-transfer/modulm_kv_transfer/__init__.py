"""KV transfers: the step part that loads and saves blocks with a KV connector."""

from modulm_kv_transfer.part import TransfersPart

__all__ = ["TransfersPart"]
