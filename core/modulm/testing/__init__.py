"""Test support for plugin authors: tiny checkpoints, fakes and a contract kit per kind of
driver.
"""
