"""vLLM's command and its Python names, for scripts that were written for vLLM."""
