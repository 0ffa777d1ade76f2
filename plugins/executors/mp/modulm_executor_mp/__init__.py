"""One model over several devices of a machine, one process each."""
