"""How much alike two texts are, in characters."""

from __future__ import annotations

from rapidfuzz.distance import Indel


def similarity(a: str, b: str) -> float:
    """2 * LCS / (len(a) + len(b)), LCS being the longest common subsequence in characters; 1 for two empty texts.

    What the packages Levenshtein and rapidfuzz call `ratio`, as a share.
    """
    return Indel.normalized_similarity(a, b)
