"""Whisper for modulm."""
