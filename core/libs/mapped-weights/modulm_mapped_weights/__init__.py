"""Weights on CPUs mapped from files in the form that kernels hold, for modulm."""
