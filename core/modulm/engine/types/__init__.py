"""What front ends give their callers, and what they know of their engine."""
