"""How much alike two texts are, in characters."""

from __future__ import annotations


def similarity(a: str, b: str) -> float:
    """2 * LCS / (len(a) + len(b)), LCS being the longest common subsequence in characters; 1 for two empty texts.

    LCS by bits of an integer (Hyyro 2004): as many steps as `a` has characters, each on an integer of `len(b)` bits.
    """
    total = len(a) + len(b)
    if not total:
        return 1.0
    everywhere = (1 << len(b)) - 1
    places: dict[str, int] = {}
    for position, char in enumerate(b):
        places[char] = places.get(char, 0) | 1 << position
    row = everywhere
    for char in a:
        hits = row & places.get(char, 0)
        row = ((row + hits) | (row - hits)) & everywhere
    return 2 * (len(b) - row.bit_count()) / total
