"""A line in the log for each step."""
