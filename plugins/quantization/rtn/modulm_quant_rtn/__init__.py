"""Quantize plain weights while loading, by rounding to nearest, for modulm."""
