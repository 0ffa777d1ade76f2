"""What plugins implement. Importing these modules does not import torch.

There is one module per kind of driver, with the values that its contract exchanges. `API` in each
module is the contract's version. A driver states the version that it was written for as a class
attribute, `api = 1` or a range `api = (1, 2)`; the plugin framework refuses drivers whose range
does not include the core's version.
"""
