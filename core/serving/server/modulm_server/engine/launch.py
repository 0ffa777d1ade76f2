"""Starts the engine's process: loads torch's largest library beside the first imports.

That is a seventh of `import torch`. It needs no Python, so it runs in a thread. No garbage is
collected meanwhile: looking for it is a tenth of the imports, and finds none.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import sys
import threading
from importlib import import_module
from pathlib import Path

__all__ = ["load_library", "main"]


def main(name: str, *arguments: str) -> int:
    """Run the function `main` of the module `name`, and return the exit code."""
    if "loads-model" in arguments and "torch" not in sys.modules:
        threading.Thread(target=load_library, name="modulm-torch", daemon=True).start()
    code: int = import_module(name).main(*arguments)
    return code


def load_library() -> bool:
    """Load torch's library where it is; returns whether it is loaded. `import torch` uses it then.

    Without an effect where it cannot be found: importing torch reports what is missing.
    """
    spec = importlib.util.find_spec("torch")
    if not sys.platform.startswith("linux") or spec is None or spec.origin is None:
        return False
    library = Path(spec.origin).parent / "lib" / "libtorch_cpu.so"
    if not library.is_file():
        return False
    # A call of a C function, unlike ctypes' own loading, lets other threads run meanwhile.
    load = ctypes.CDLL(None).dlopen
    load.restype, load.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
    return bool(load(os.fsencode(library), os.RTLD_NOW))


if __name__ == "__main__":
    gc.disable()  # until `engine_process` has imported what it needs
    sys.exit(main(*sys.argv[1:]))
