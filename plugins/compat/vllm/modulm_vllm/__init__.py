"""vLLM's command and Python names, for scripts that were written for vLLM."""
