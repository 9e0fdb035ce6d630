"""Data: from mixtures of files and datasets to prompts."""
