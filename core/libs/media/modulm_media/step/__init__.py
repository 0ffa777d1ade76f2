"""The step part of media: planner, runner, and the values they exchange."""
