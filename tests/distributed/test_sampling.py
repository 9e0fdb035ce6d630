"""The local engine samples the same from shards as on one device, whichever rank has which prompts."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import sampling
from tests.distributed.harness import run_ranks
from tests.marks import only, selected


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the policies are, and what they draw on one device."""
    folder = tmp_path_factory.mktemp("sampling")
    sampling.save_policies(folder)
    run_ranks("tests.distributed.sampling", "one", folder, *selected(request, "family"), world_size=1)
    return folder


@pytest.fixture(scope="module", params=only([], ["fsdp2", "zero3"]))
def strategy(request: pytest.FixtureRequest, folder: Path) -> str:
    """A strategy that shards, once all cases have run under it on two ranks."""
    families = selected(request, "family", strategy=request.param)
    run_ranks("tests.distributed.sampling", request.param, folder, *families, timeout=400)
    return request.param


def loaded(folder: Path, strategy: str, family: str) -> list[dict[Any, Any]]:
    """Return the results of both ranks, by case and step."""
    return [torch.load(folder / f"{strategy}-{family}-{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("family", only(["qwen2"], sampling.CASES))
def test_prompts_get_the_completions_of_one_device(folder: Path, strategy: str, family: str):
    ranks = loaded(folder, strategy, family)
    expected = next(iter(torch.load(folder / f"one-{family}-0.pt").values()))["found"]
    lengths = {len(ids) for group in expected.values() for ids, _ in group}
    assert len(lengths) > 3, "completions must end at different steps"
    assert ranks[0].keys() == ranks[1].keys()
    for case, step in ranks[0]:
        for rank, own in enumerate(sampling.SPREADS[case[0]]):
            drawn = ranks[rank][case, step]["found"]
            assert list(drawn) == own
            for index, group in drawn.items():
                assert [ids for ids, _ in group] == [ids for ids, _ in expected[index]], f"{case}, prompt {index}"
                for (_, logprobs), (_, want) in zip(group, expected[index], strict=True):
                    assert logprobs == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("family", only(["qwen2"], sampling.CASES))
def test_ranks_are_in_step_only_where_they_must(folder: Path, strategy: str, family: str):
    ranks = loaded(folder, strategy, family)
    for case in sampling.CASES[family]:
        first, second = (rank[case, 0]["calls"] for rank in ranks)
        spread, max_rows, gathers = case
        if not gathers:
            assert first == second, case
            if (spread, max_rows) == ("uneven", 4):  # no more than the rank with the longest completions needs
                assert first == ranks[0][(spread, max_rows, True), 0]["calls"]
        elif spread == "a rank without prompts":
            assert first == 0 < second, case
        elif (spread, max_rows) == ("uneven", 4):
            assert first > second, case


@pytest.mark.parametrize("family", only(["qwen2"], sampling.CASES))
def test_gathered_weights_are_sharded_again(folder: Path, strategy: str, family: str):
    for rank in loaded(folder, strategy, family):
        for (case, _), result in rank.items():
            assert not case[2] or not result["whole"], case
