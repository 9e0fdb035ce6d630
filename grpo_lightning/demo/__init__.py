"""The quickstarts' tiny models and their tasks, built offline: `arithmetic` for text, `grounding` for images."""
