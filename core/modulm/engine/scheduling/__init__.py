"""Scheduling: which rows run in a step, with how many tokens, drafts, media and transfers."""
