"""Resolve adapter names to subfolders of a folder."""
