"""Every installed quantization method keeps the contract: the kit that plugin authors run."""

from __future__ import annotations

import torch
from samples import parametrize_sample

from modulm.plugins import manager
from modulm.testing.quantization import check_quantization

manager.current().load_hooks()  # some declare methods
METHODS = [declared.name for declared in manager.current().names("quantization")]


def mxfp4_bytes(spec, name, param):
    """Any codes, with scales that keep weights within every dtype."""
    low, high = (115, 125) if name == "scales" else (0, 256)
    return torch.randint(low, high, param.shape(spec), dtype=torch.uint8)


def codes_in_order(spec, name, param):
    """Any codes and zero points, scales of a usual size, inputs in the order of their groups."""
    if name in ("g_idx", "index"):
        group = 128 if name == "g_idx" else spec.inputs
        return (torch.arange(spec.inputs) // group).expand(param.shape(spec)).int()
    if name in ("scale", "scales", "shifts"):
        return torch.rand(param.shape(spec)).to(getattr(torch, param.dtype)) / 64
    return torch.randint(-(2**31), 2**31 - 1, param.shape(spec), dtype=torch.int32)


def ternary(spec, name, param):
    """Codes 0 to 2, and scales of a usual size."""
    if name == "scale":
        return torch.rand(param.shape(spec)) + 0.5
    return torch.randint(3, param.shape(spec), dtype=torch.uint8)


#: What random numbers make no sense for.
FILLS = {"mxfp4": mxfp4_bytes, "gptq": codes_in_order, "awq": codes_in_order}
FILLS |= {"bitnet": ternary, "moe_wna16": codes_in_order}
FILLS |= {"mlx": codes_in_order, "metal": codes_in_order}
FILLS["compressed-tensors"] = codes_in_order
FILLS |= dict.fromkeys(
    ("auto_awq", "awq_marlin", "auto_gptq", "gptq_marlin", "inc"), codes_in_order
)
FILLS["gpt_oss_mxfp4"] = mxfp4_bytes
#: mxfp4 holds nothing without the sign of a checkpoint of its own.
SETTINGS = {name: {"quant_method": "mxfp4"} for name in ("mxfp4", "gpt_oss_mxfp4")}


@parametrize_sample("name", METHODS, every=5)
def test_contract(name):
    driver = manager.current().load("quantization", name)
    check_quantization(driver, config=SETTINGS.get(name), fill=FILLS.get(name))


@parametrize_sample("name", METHODS, every=9)
def test_contract_as_doctor_runs_it(name):
    """With the settings that the method gives, random numbers, and without what is optional."""
    check_quantization(manager.current().load("quantization", name))
