"""Speculative decoding with a checkpoint's multi-token-prediction (MTP) layers."""
