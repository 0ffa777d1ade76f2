"""`modulm fit` imports torch and the packages that it asks, and nothing that takes long beside."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

#: What the estimate does not need: compilers, other libraries' models, servers, clients of the hub.
NOT_NEEDED = {
    "torch._dynamo", "torch._inductor", "sympy", "transformers", "safetensors.torch", "triton",
    "fastapi", "uvicorn", "huggingface_hub", "tokenizers", "pandas", "scipy", "PIL", "jax",
}  # fmt: skip
SCRIPT = """
import json, sys
from modulm.cli.main import main
sys.argv = ["modulm", "fit", "demo"]
try:
    main()
except SystemExit as end:
    code = end.code
print(json.dumps([code, *sys.modules]), file=sys.stderr)
"""


@pytest.mark.exhaustive
@pytest.mark.usefixtures("own_interpreters")
def test_fit_imports_what_it_needs() -> None:
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    code, *modules = json.loads(run.stderr.splitlines()[-1])
    assert not code
    assert "fits, with the whole context" in run.stdout
    assert not NOT_NEEDED & {*modules}
