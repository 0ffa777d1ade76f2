"""One compute thread per test process: tests run side by side, and two threads that wait for each
other on a busy core are many times slower than one."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MODULM_CPU_THREADS", "1")
