"""The compiled part of xgrammar, without its Python package.

`import xgrammar` imports torch and transformers, which compiling and matching do not need and the
process that tries constraints does not have. The files of xgrammar that declare the compiled
classes use relative imports only, so they are imported here as a package of this name.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from types import ModuleType

__all__ = ["VOCABULARIES", "core"]

_NAME = f"{__package__}.xgrammar"


def _load() -> ModuleType:
    """Return xgrammar's module of compiled classes. Raises ImportError without xgrammar."""
    spec = importlib.util.find_spec("xgrammar")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("xgrammar is not installed", name="xgrammar")
    package = ModuleType(_NAME)
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules[_NAME] = package
    for name in ("load_binding", "exception"):
        import_module(f"{_NAME}.{name}")
    return import_module(f"{_NAME}.tvm_ffi_binding._ffi_api")


#: The classes TokenizerInfo, GrammarCompiler, CompiledGrammar and GrammarMatcher.
core = _load()
#: How a vocabulary spells bytes -> xgrammar's number of it.
VOCABULARIES = {"raw": 0, "byte_fallback": 1, "byte_level": 2}
