"""What speculators are written with, the flags that choose one, and how much it drafts."""

from modulm_speculation.speculator import Options, Speculator
from modulm_speculation.target import Target

__all__ = ["Options", "Speculator", "Target"]
