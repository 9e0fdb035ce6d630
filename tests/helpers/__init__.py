"""Modules that tests of several folders import: tiny models, short runs, pages of the documentation, paths."""
