"""Speculative decoding by prompt lookup: drafts repeat earlier text."""
