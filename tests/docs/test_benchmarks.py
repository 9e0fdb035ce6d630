"""docs/benchmarks.md and the front page: dates, versions and numbers are those that are recorded."""

from __future__ import annotations

import json
import re
import statistics
from typing import Any

import pytest

from tests.docs.newcomer import README
from tests.helpers.pages import TableRow, read, tables
from tests.helpers.paths import ROOT

PAGE = read("benchmarks.md")
ROWS = tables(PAGE)
PROOFS: dict[str, Any] = json.loads((ROOT / "benchmarks" / "proofs.json").read_text(encoding="utf-8"))
VERSUS: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "versus_trl.json").read_text(encoding="utf-8"))
CURVES: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "curves.json").read_text(encoding="utf-8"))
WORKLOADS = {name.partition(",")[0]: outcome for name, outcome in VERSUS.items()}
SIDE_BY_SIDE = ("w1", "w2", "w3", "w4")
RECORDED = [row for row in ROWS if row.heading == "Benchmarks and proofs"]
WHEN = ("before", "after")
WITHOUT_ROW = {"wheel", "unchanged"}
"""Checks of the build, which measure nothing."""


def numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", text)]


CURVE_ROWS = dict(zip(CURVES, [row for row in ROWS if row.heading.startswith("Cost against")], strict=True))


def row_of(heading: str, begin: str) -> TableRow:
    (found,) = [row for row in ROWS if row.heading == heading and row.cells[0].startswith(begin)]
    return found


def mean(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.mean(run[key] for run in runs)


def shown(value: float, digits: int = 3) -> str:
    return f"{value + 1e-12:.{digits}f}"


def test_every_proof_has_a_row():
    assert {row.names(5)[0] for row in RECORDED} == PROOFS.keys() - WITHOUT_ROW


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: row.names(5)[0])
def test_date_versions_and_command_are_those_recorded(row: TableRow):
    proof = PROOFS[row.names(5)[0]]
    torch = proof["versions"]["torch"].partition("+")[0]
    assert row.cells[2:5] == (proof["date"], torch, proof["versions"]["transformers"])
    script = re.search(r"benchmarks/\w+\.py", proof["command"])[0]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    command = row.names(1)[0]
    target = command.removeprefix("make ")
    recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE) if target != command else None
    assert script in (command if recipe is None else recipe[1])


@pytest.mark.parametrize("axis", CURVES)
def test_the_curves_are_those_recorded(axis: str):
    values, trl, ours, ratios, date = CURVE_ROWS[axis].cells[1:]
    points = CURVES[axis]["points"].values()
    assert values.split(", ") == [*CURVES[axis]["points"]]
    assert trl.split(", ") == [shown(point["trl"], 2) for point in points]
    assert ours.split(", ") == [shown(point["ours"], 2) for point in points]
    assert ratios.strip("*").split(", ") == [shown(point["ratio"], 1) for point in points]
    assert min(point["ratio"] for point in points) >= 1.5
    assert date == CURVES[axis]["date"]
    assert f"images/cost_{axis}.png" in PAGE


@pytest.mark.parametrize("name", SIDE_BY_SIDE)
def test_the_ratios_to_trl_are_those_recorded(name: str):
    outcome = WORKLOADS[name]
    summary, ratio = outcome["summary"], outcome["summary"]["ratio"]
    cells = [row for row in ROWS if row.heading == "A training step against TRL" and row.names() == [name]]
    speed, phases = cells[0].cells, cells[1].cells
    assert numbers(speed[5]) == [float(shown(ratio[key], 2)) for key in ("median", "min", "max")]
    assert numbers(speed[6]) == [outcome["workload"]["required_ratio"]]
    for column, side in ((3, "trl"), (4, "ours")):
        assert speed[column] == shown(summary[side]["ms_per_token"]["median"], 2)
    for column, side in ((7, "trl"), (8, "ours")):
        assert numbers(speed[column]) == [round(summary[side]["peak_mib"])]
    assert summary["ours"]["peak_mib"] <= summary["trl"]["peak_mib"]
    spent = summary["ours"]["phases"]
    total = sum(spent.values())
    for column, phase in enumerate(("sampling", "reference", "update forward", "update backward"), start=1):
        assert numbers(phases[column])[0] == pytest.approx(100 * spent[phase] / total, abs=1)
    assert numbers(phases[5])[0] == pytest.approx(100 * summary["ours"]["padding"], abs=0.6)
    assert phases[6] == shown(summary["floor"]["step_over_floor"]["median"], 1)
    assert outcome["losses"]["gradient_difference"] < 5e-7
    assert (outcome["date"], outcome["versions"]["trl"]) == ("2026-11-24", "1.16.0")
    assert "recorded on 2026-11-24" in " ".join(PAGE.split())


@pytest.mark.parametrize(
    ("quickstart", "proof", "key"),
    [
        ("`quickstart`", "learning", "accuracy"),
        ("`quickstart_grounding`", "grounding", "iou"),
        ("`quickstart_reasoning_gym`", "reasoning_gym", "reasoning_gym"),
    ],
)
def test_what_the_quickstarts_learn_is_recorded(quickstart: str, proof: str, key: str):
    row, spread = row_of("Learning", quickstart + " "), PROOFS[proof]["spread"]
    expected = [spread["mean"][f"{key}_before"], spread["mean"][f"{key}_after"], spread["least"][f"{key}_after"]]
    expected += [spread[of]["greedy_after"] for of in ("mean", "least")]
    assert [*row.cells[2:]] == [shown(value) for value in expected]
    assert len(PROOFS[proof]["runs"]["trained"]) == 8


@pytest.mark.parametrize(
    ("control", "proof", "name", "key"),
    [
        ("`quickstart`, rewards shuffled", "learning", "shuffled rewards", "accuracy"),
        ("`quickstart`, advantages", "learning", "flipped advantages", "accuracy"),
        ("`quickstart`, learning rate 0", "learning", "learning rate 0", "accuracy"),
        ("`quickstart_grounding`, all images blank", "grounding", "blank images", "iou"),
        ("`quickstart_grounding`, training boxes", "grounding", "shuffled boxes", "iou"),
        ("`quickstart_reasoning_gym`, random", "reasoning_gym", "random values", "reasoning_gym"),
        ("`quickstart_reasoning_gym`, advantages", "reasoning_gym", "flipped advantages", "reasoning_gym"),
        ("`quickstart_reasoning_gym`, learning rate 0", "reasoning_gym", "learning rate 0", "reasoning_gym"),
    ],
)
def test_the_controls_are_recorded(control: str, proof: str, name: str, key: str):
    runs = PROOFS[proof]["runs"][name]
    assert row_of("Learning", control).cells[1:] == tuple(shown(mean(runs, f"{key}_{when}")) for when in WHEN)


@pytest.mark.parametrize(
    ("begin", "game", "tools"),
    [
        ("trained, mean", "trained", "trained"),
        ("observations blanked", "blank observations", "a calculator that says 0"),
        ("rewards shuffled", "shuffled rewards", "shuffled rewards"),
        ("advantages", "flipped advantages", "flipped advantages"),
        ("learning rate 0", "learning rate 0", "learning rate 0"),
    ],
)
def test_the_conversations_are_recorded(begin: str, game: str, tools: str):
    runs = {"environment_reward": PROOFS["game"]["runs"][game], "accuracy": PROOFS["tools"]["runs"][tools]}
    expected = [shown(mean(runs[key], f"{key}_{when}")) for key in runs for when in WHEN]
    assert [*row_of("Conversations", begin).cells[1:]] == expected


def test_the_worst_seeds_and_the_use_of_the_calculator_are_recorded():
    worst = row_of("Conversations", "trained, worst").cells
    assert worst[2] == shown(PROOFS["game"]["spread"]["least"]["environment_reward_after"])
    assert worst[4] == shown(PROOFS["tools"]["spread"]["least"]["accuracy_after"])
    used = PROOFS["tools"]["spread"]["mean"]
    assert f"rises from {shown(used['tool_use_before'])} to {shown(used['tool_use_after'])}" in " ".join(PAGE.split())


@pytest.mark.parametrize(
    ("begin", "rise", "end"),
    [
        ("grpo-lightning", "rise", "last tenth"),
        ("grpo-lightning, k3 not clipped", "k3 not clipped, rise", "k3 not clipped, last tenth"),
        ("grpo-lightning, half", "control, rise", None),
    ],
)
def test_the_differences_from_trl_are_recorded(begin: str, rise: str, end: str | None):
    row = next(row for row in ROWS if row.heading == "The same learning as TRL" and row.cells[0].startswith(begin))
    differences = PROOFS["same_learning"]["differences"]
    for cell, name in ((row.cells[2], rise), (row.cells[4], end)):
        if name is not None:
            assert numbers(cell)[0] == pytest.approx(differences[name]["mean"], abs=5.1e-4)


def test_the_tokens_of_dynamic_sampling_are_recorded():
    runs = PROOFS["dapo"]["runs"]
    rows = [row for row in ROWS if row.heading == "Dynamic sampling"]
    assert len(rows) == len(runs["GRPO"])
    for row, plain, loss, dapo in zip(rows, runs["GRPO"], runs["DAPO's loss alone"], runs["DAPO"], strict=True):
        assert numbers(" ".join(row.cells)) == [
            *(plain["seed"], plain["accuracy"], plain["tokens"], loss["tokens"], dapo["tokens"]),
            float(shown(dapo["tokens"] / plain["tokens"], 2)),
        ]


def test_resuming_and_ranks_are_as_recorded():
    assert (PROOFS["resume"]["runs"], PROOFS["resume"]["equal"]) == (10, 10)
    killed = PROOFS["ranks_resume"]["runs"]
    assert (len(killed), all(run["equal"] for run in killed)) == (9, True)
    assert {run["strategy"] for run in killed} == {"ddp", "fsdp2", "zero2", "zero3", "zero3, LoRA"}
    equality = PROOFS["ranks_equality"]
    largest = max(equality[name]["weights"] for name in ("ddp", "fsdp2", "zero3"))
    assert f"at most {largest:.1e}".replace("e-0", "e-") in " ".join(PAGE.split())
    assert all(equality[name]["steps_with_equal_completions"] == 20 for name in ("ddp", "fsdp2", "zero3"))
    learned = PROOFS["ranks_learning"]
    sampled, greedy = shown(learned["accuracy_after"]), shown(learned["greedy_after"])
    assert f"a sampled accuracy of {sampled} and a greedy accuracy of {greedy}" in " ".join(PAGE.split())


def test_vllm_is_as_recorded():
    rows = [row for row in ROWS if row.heading == "vLLM"]
    for row, (run,) in zip(rows, PROOFS["vllm"]["runs"].values(), strict=True):
        keys = ("accuracy_before", "accuracy_after", "greedy_after")
        assert [*row.cells[1:4]] == [shown(run[key]) for key in keys]
        assert numbers(row.cells[4])[0] == pytest.approx(run["rollout_difference"], rel=0.02)


def test_the_memory_is_as_recorded():
    rows = [row for row in ROWS if row.heading == "Memory"]
    measured = [*PROOFS["loss_memory"]["tokens_per_slice"].values()]
    measured += PROOFS["checkpointing_memory"]["activation_checkpointing"].values()
    for row, outcome in zip(rows, measured, strict=True):
        assert numbers(row.cells[1]) == [outcome["peak_mib"]]
        assert numbers(row.cells[2])[0] == pytest.approx(100 * outcome["share"], abs=0.51)


# ------------------------------------------------------------------------------------------------------- the front page


def claim(begin: str) -> str:
    """The measured cell of a row of the front page."""
    (row,) = [row for row in tables(README) if row.cells[0].startswith(begin)]
    return row.cells[1]


def test_the_front_page_has_the_ratios_recorded():
    ratio = {name: shown(WORKLOADS[name]["summary"]["ratio"]["median"], 1) for name in SIDE_BY_SIDE}
    text = claim("A prompt is computed once")
    assert re.findall(r"\*\*([\d.]+)\*\*", text) == [ratio["w1"], ratio["w2"], ratio["w4"]]
    assert re.findall(r"\*\*([\d.]+)\*\*", claim("An image is read")) == [ratio["w3"]]
    theirs, ours = (row.cells[1] for row in ROWS if row.heading == "A training step against TRL" and _is_image(row))
    assert f"{ours} times in a step" in claim("An image is read")
    assert f"{theirs} times by TRL" in claim("An image is read")


def _is_image(row: TableRow) -> bool:
    return len(row.cells) == 5 and row.cells[0] in ("TRL 1.16", "grpo-lightning")


def test_the_front_page_has_the_proofs_recorded():
    rise = next(row for row in ROWS if row.cells[0] == "grpo-lightning" and "+-" in row.cells[2]).cells[2]
    assert rise in claim("It learns the same")
    assert claim("A run that is killed and resumed").startswith("10 of 10 runs on one device, 9 of 9 on two ranks")
    spread, runs = PROOFS["learning"]["spread"]["mean"], PROOFS["learning"]["runs"]
    text = claim("Each quickstart is tested")
    assert f"{shown(spread['accuracy_before'], 2)} to {shown(spread['accuracy_after'], 2)}" in text
    before, after = (shown(mean(runs["shuffled rewards"], f"accuracy_{when}"), 2) for when in WHEN)
    assert f"{before} to {after} with shuffled rewards" in text
    before, after = (f"{100 * spread[f'accuracy_{when}']:.0f} %" for when in WHEN)
    sentence = f"Before training, {before} of the sampled answers to held-out problems are right, and {after} after"
    assert sentence in " ".join(README.split())
