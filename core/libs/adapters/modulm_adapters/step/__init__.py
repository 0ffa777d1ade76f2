"""Step part of adapters: planner, runner, and the values they exchange."""
