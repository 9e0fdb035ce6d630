"""Tiny models and tasks of the quickstarts, built offline: `arithmetic` for text, `grounding` for images."""
