"""One model over several devices of a machine, a process for each."""
