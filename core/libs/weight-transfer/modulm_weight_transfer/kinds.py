"""The driver kind that this package adds: weight-transfer backends."""

from modulm.plugins.kinds import Kind

__all__ = ["WEIGHT_TRANSFER"]

WEIGHT_TRANSFER = Kind(
    "weight_transfer",
    "weight transfer backend",
    "weights",
    "modulm_weight_transfer.contract:WeightTransferBackend",
    kit="modulm_weight_transfer.testing:check_weight_transfer",
)
