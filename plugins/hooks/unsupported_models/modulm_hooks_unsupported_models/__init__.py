"""Errors that say what kind of model cannot run, and what to use instead."""
