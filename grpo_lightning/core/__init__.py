"""Shared by every other part: types, ranks, seeds, messages, files."""
