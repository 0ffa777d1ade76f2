"""Weights in host memory: layers copied to the device ahead of their use, experts on the CPU."""
