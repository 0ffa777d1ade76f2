"""Look up known vulnerabilities of the locked packages with pip-audit: audit.py

Where pip-audit cannot be fetched, or reaches no database, nothing is checked, and the output says
so.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UV = str(Path(sys.executable).with_name("uv"))
_SECONDS = 120


def main() -> int:
    """Return 1 if a package has a known vulnerability."""
    files = [("-r", str(path)) for path in sorted((ROOT / "tools/locks").glob("*.txt"))]
    try:
        done = subprocess.run(
            [UV, "tool", "run", "--quiet", "pip-audit", "--no-deps", "--disable-pip",
             "--format", "json", *(part for file in files for part in file)],
            capture_output=True, text=True, timeout=_SECONDS, check=False,
        )  # fmt: skip
        packages = json.loads(done.stdout)["dependencies"]
    except (OSError, ValueError, LookupError, subprocess.TimeoutExpired) as error:
        print(f"audit: skipped, pip-audit gives no answer here ({type(error).__name__})")
        return 0
    known = [package for package in packages if "skip_reason" not in package]
    if not known:
        print("audit: skipped, this index has no data about vulnerabilities")
        return 0
    found = [package for package in known if package["vulns"]]
    for package in found:
        ids = ", ".join(one["id"] for one in package["vulns"])
        print(f"audit: {package['name']} {package['version']}: {ids}")
    print(f"audit: {len(known)} of {len(packages)} packages, {len(found)} with vulnerabilities")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
