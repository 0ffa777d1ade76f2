"""Seed-OSS for modulm."""
