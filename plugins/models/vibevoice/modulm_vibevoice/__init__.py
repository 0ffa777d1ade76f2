"""VibeVoice for modulm."""
