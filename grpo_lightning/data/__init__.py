"""Data: mixtures of files in, prompts out."""
