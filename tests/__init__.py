"""Mirrors the package: the tests of `functional/losses.py` are in `tests/functional/test_losses.py`.

CONTRIBUTING.md lists the folders that mirror no folder of the package.
"""
