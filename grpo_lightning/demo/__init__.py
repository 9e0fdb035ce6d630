"""Tiny models and tasks of the quickstarts, built offline: text (`arithmetic`, `reasoning_gym`) and images."""
