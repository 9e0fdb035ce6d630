"""Sandbox for untrusted programs, with kernel isolation, limits, and expected answers that programs cannot reach."""
