"""Tiles of integer products call no function: their sums would go through memory at each call.

Outputs are the same then, at half the rate, so only the compiled code shows it. Read from the build
folder, since installed libraries have no symbols.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

BUILT = Path(__file__).parents[4] / "kernels" / "cpu" / "build"
TILES = re.compile(r"<(_ZN?[^>]*\d(?:quad|cached|stepped|register)_tileI[^>]*)>:")
CALL = re.compile(r"\scall\s+\S+\s+<([^@+>]*)")


def calls_of_tiles(listing: str) -> dict[str, set[str]]:
    """Return the functions that each tile of a disassembly calls, by its symbol."""
    calls: dict[str, set[str]] = {}
    tile = None
    for line in listing.splitlines():
        if line.endswith(">:"):
            match = TILES.search(line)
            tile = match and match[1]
            if tile:
                calls[tile] = set()
        elif tile and (call := CALL.search(line)):
            calls[tile].add(call[1])
    return calls


def test_calls_are_found():
    listing = "\n".join(
        [
            "00 <_ZN6modulm9quad_tileILi4ELi1EEEvi>:",
            "  12:\tcall   40 <_ZN6modulm4takeEv>",
            "  17:\tret",
            "",
            "20 <_ZN6modulm11cached_tileILi4EEEvi>:",
            "  20:\tjmp    24 <_ZN6modulm11cached_tileILi4EEEvi+0x4>",
            "",
            "40 <_ZN6modulm4takeEv>:",
            "  40:\tcall   50 <memset@plt>",
        ]
    )
    assert calls_of_tiles(listing) == {
        "_ZN6modulm9quad_tileILi4ELi1EEEvi": {"_ZN6modulm4takeEv"},
        "_ZN6modulm11cached_tileILi4EEEvi": set(),
    }


@pytest.mark.skipif(not shutil.which("objdump"), reason="objdump is not installed")
@pytest.mark.parametrize("level", ["avx512", "avx512_bf16"])
def test_tiles_call_nothing(level):
    libraries = sorted(BUILT.glob(f"*/libmodulm_cpu_{level}.so"))
    if not libraries:
        pytest.skip(f"no library of {level} was built in this checkout")
    for library in libraries:
        command = ["objdump", "-d", "--no-show-raw-insn", library]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        calls = calls_of_tiles(listing)
        assert calls, f"{library} has no symbols of tiles"
        assert {tile: called for tile, called in calls.items() if called} == {}
