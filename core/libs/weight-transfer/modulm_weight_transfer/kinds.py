"""The driver kind that this package adds: how weights come from a trainer."""

from modulm.plugins.kinds import Kind

__all__ = ["WEIGHT_TRANSFER"]

WEIGHT_TRANSFER = Kind(
    "weight_transfer",
    "weight transfer backend",
    "weights",
    "modulm_weight_transfer.contract:WeightTransferBackend",
)
