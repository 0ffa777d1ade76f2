"""GPTQ and AWQ mixtures of experts as the method moe_wna16, for modulm."""
