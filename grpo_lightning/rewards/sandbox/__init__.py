"""Sandbox for untrusted programs."""
