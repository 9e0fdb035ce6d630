"""Seeds follow from names alone."""

import itertools
import subprocess
import sys

from grpo_lightning.core.seeding import derived_seed, run_seed


def test_every_part_matters():
    parts = [(0, "rollout", 0, 1), (1, "rollout", 0, 1), (0, "order", 0, 1), (0, "rollout", 1, 1), (0, "rollout", 0, 2)]
    # What a sum or a join of the parts would confuse:
    parts += [
        (0, "rollout", 1, 0),
        (0, "rollout", 0),
        (0, "rollout", 0, "1"),
        (0, "rollout", "0, 1"),
        (),
        (12, 3),
        (1, 23),
    ]
    assert len({derived_seed(*part) for part in parts}) == len(parts)


def test_seeds_fit_a_torch_generator_and_spread():
    seeds = [derived_seed(0, "x", i) for i in range(200)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len(set(seeds)) == 200
    for bit in (0, 31, 62):  # neighbors share no bits
        assert 60 < sum(seed >> bit & 1 for seed in seeds) < 140
    assert sum(a < b for a, b in itertools.pairwise(seeds)) in range(60, 140)


def test_the_same_in_every_process():
    """Python's own hash is salted per process; two ranks would disagree about the order of the data."""
    command = "from grpo_lightning.core.seeding import derived_seed; print(derived_seed(3, 'order', 1))"
    output = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout
    assert int(output) == derived_seed(3, "order", 1)


def test_the_seed_of_the_run(monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert (run_seed(None), run_seed(7), run_seed(0)) == (0, 7, 0)
    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    assert (run_seed(None), run_seed(7), run_seed(0)) == (5, 7, 0)
    monkeypatch.setenv("PL_GLOBAL_SEED", "")
    assert run_seed(None) == 0
