"""One model over the devices of several machines, placed and started by Ray."""
