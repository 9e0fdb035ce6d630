"""Tests of the pages under docs/, the README, CONTRIBUTING.md and the notebooks: their text, examples and numbers."""
