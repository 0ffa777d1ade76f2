"""How speculative decoding takes part in steps: planner, runner, and what they tell each other."""
