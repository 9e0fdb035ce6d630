"""Seeds. Every random choice is derived from the run's seed and a name for its purpose, never from global state.

A resumed run therefore samples what the uninterrupted run would have sampled, and no random state has to be saved.
"""

from __future__ import annotations

import hashlib
import os


def run_seed(seed: int | None) -> int:
    """Return `seed`, or the default seed if `seed` is None.

    The default seed is the seed of `lightning.seed_everything` (CLI: `--seed_everything`). If no such seed is set,
    the default seed is 0.
    """
    return int(os.environ.get("PL_GLOBAL_SEED") or 0) if seed is None else seed


def derived_seed(*parts: int | str) -> int:
    """A seed in [0, 2^63) that depends on every part."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
