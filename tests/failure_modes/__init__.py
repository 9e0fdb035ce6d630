"""Eighteen ways in which GRPO runs of other projects failed without a word: each goes wrong here, and ours does not.

Every test does one check twice: on a small version of what went wrong, which must fail it, and on this package, which
must pass. Where the small version would hang, it does so in a process that is killed.
"""
