"""Mirrors the package: the tests of `functional/losses.py` are in `tests/functional/test_losses.py`."""
