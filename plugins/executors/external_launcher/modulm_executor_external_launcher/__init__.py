"""One model in processes started by torchrun, each of which runs the same script."""
