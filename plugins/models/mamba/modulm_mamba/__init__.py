"""Mamba 1 and 2, Falcon Mamba and Jamba for modulm."""
