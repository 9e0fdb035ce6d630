"""Rollouts: prompts in, sampled completions out."""
