"""How speculative decoding takes part in steps: the planner beside the scheduler, the runner in each worker."""
