"""Write the hashes of what others publish and `modulm[cpu]` needs: lock.py

`tools/locks/third-party.txt` has every package with its version of `constraints.txt`, the hashes
of its files on the index, and the systems that need it; `tools/locks/torch.txt` has torch and the
libraries of its CUDA build, which a CPU build from torch's own index replaces. Run it after
`constraints.txt` or a requirement changes; it needs an index and the kernels that setup builds.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "tools/locks"
UV = str(Path(sys.executable).with_name("uv"))
#: Packages of torch's builds.
_TORCH = re.compile("(torch|triton|nvidia-.*|cuda-.*)")


def entries(text: str) -> dict[str, str]:
    """Split a lock into its entries, by name."""
    found = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    return {canonicalize_name(re.split(r"[=\[ ]", entry, maxsplit=1)[0]): entry for entry in found}


def main() -> int:
    """Resolve for Python 3.11 and later on all systems; write both files."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for command in (
            [sys.executable, str(ROOT / "tools/wheels.py"), temporary, "--kernels", "built"],
            [UV, "pip", "compile", "--quiet", "--universal", "--python-version", "3.11",
             "--generate-hashes", "--no-annotate", "--no-header", "--output-file", "lock.txt",
             "--constraints", "constraints.txt", "third-party.txt"],
        ):  # fmt: skip
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        locked = entries((folder / "lock.txt").read_text())
    LOCKS.mkdir(exist_ok=True)
    for file, of_torch in (("torch.txt", True), ("third-party.txt", False)):
        own = [entry for name, entry in locked.items() if bool(_TORCH.fullmatch(name)) is of_torch]
        (LOCKS / file).write_text("".join(own))
        print(f"lock: {len(own)} packages in tools/locks/{file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
