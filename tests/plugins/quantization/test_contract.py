"""Every installed quantization method keeps the contract: the kit that plugin authors run."""

from __future__ import annotations

import pytest
import torch

from modulm.plugins import manager
from modulm.testing.quantization import check_quantization

manager.current().load_hooks()  # some declare methods
METHODS = [declared.name for declared in manager.current().names("quantization")]


def mxfp4_bytes(spec, name, param):
    """Any codes, with scales that keep weights within every dtype."""
    low, high = (115, 125) if name == "scales" else (0, 256)
    return torch.randint(low, high, param.shape(spec), dtype=torch.uint8)


#: What random numbers make no sense for.
FILLS = {"mxfp4": mxfp4_bytes}


@pytest.mark.parametrize("name", METHODS)
def test_contract(name):
    check_quantization(manager.current().load("quantization", name), fill=FILLS.get(name))
