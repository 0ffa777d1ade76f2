"""Several ranks that compute one model: their groups, their processes, executors over them."""
