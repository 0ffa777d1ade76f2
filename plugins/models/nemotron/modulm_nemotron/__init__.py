"""Nemotron 3, 4 and Nemotron-H for modulm."""
