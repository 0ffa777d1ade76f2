"""Thinking budgets: `thinking_token_budget` of a request."""
