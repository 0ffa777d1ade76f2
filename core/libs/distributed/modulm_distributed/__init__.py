"""Ranks that compute one model together: their groups, processes, and executors."""
