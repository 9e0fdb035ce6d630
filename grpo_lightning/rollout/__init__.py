"""Rollouts: sampling completions of prompts."""
