"""Attention over paged memory on GPUs for modulm, by its kernels in Triton."""
