"""Rollouts with vLLM, in the training process or on an external server. vLLM is imported where it is used."""
