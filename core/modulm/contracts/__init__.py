"""What a plugin implements. No module in this package imports torch when it is loaded.

One module per kind of driver; the values that cross a contract live beside the contract that
hands them out. `API` in each module is the version of that contract: a driver states the version
it was written for as a class attribute `api = 1` (or a range, `api = (1, 2)`), and the plugin
framework refuses a driver whose range does not hold the core's version.
"""
