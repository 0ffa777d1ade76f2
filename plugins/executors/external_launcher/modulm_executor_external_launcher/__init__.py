"""One model in processes that torchrun has started, each of which runs the same script."""
