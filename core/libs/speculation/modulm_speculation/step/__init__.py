"""Step part of speculative decoding: planner, runner, and the values they exchange."""
