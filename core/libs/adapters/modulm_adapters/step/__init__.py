"""How adapters take part in steps: planner, runner, and what they tell each other."""
