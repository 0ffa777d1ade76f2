"""The values that cross between front ends and the engine."""
