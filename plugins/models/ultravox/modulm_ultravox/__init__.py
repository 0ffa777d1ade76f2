"""Ultravox for modulm."""
