"""Arguments of what belongs to reasoning-gym: its rows, its reward, its quickstart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("reasoning_gym")

from grpo_lightning.data.reasoning_gym import ReasoningGymTasks, entries, row
from grpo_lightning.demo import reasoning_gym as demo
from grpo_lightning.demo.reasoning_gym import GymRecipe, ReasoningGymQuickstart, build_model, build_tokenizer
from grpo_lightning.rewards import ReasoningGym
from tests.arguments.registry import case
from tests.marks import SLOW

TINY: dict[str, Any] = {"num_warm_up": 30, "num_train": 6, "num_heldout": 2, "batch_size": 4}
TINY |= {"target_loss": 100.0, "num_decay_steps": 2, "num_hasty_steps": 2}  # learned after one step


@case(ReasoningGymTasks, "tasks", "folder", "size", "heldout_size", "seed")
def test_tasks(tmp_path):
    def lines(folder: str, **changed: Any) -> dict[str, list[str]]:
        """Return the lines of every file of rows."""
        given = {"tasks": {"chain_sum": None}, "folder": str(tmp_path / folder), "size": 3, "heldout_size": 2}
        ReasoningGymTasks(**given | {"seed": 0} | changed)()
        root = tmp_path / folder
        return {str(path.relative_to(root)): path.read_text().splitlines() for path in root.rglob("*.jsonl")}

    plain = lines("a")
    assert {name: len(found) for name, found in plain.items()} == {
        "train/chain_sum.jsonl": 3,
        "heldout/chain_sum.jsonl": 2,
    }
    assert lines("b") == plain
    assert (tmp_path / "b").is_dir()
    assert len(lines("a", size=4)["train/chain_sum.jsonl"]) == 4
    assert len(lines("a", heldout_size=4)["heldout/chain_sum.jsonl"]) == 4
    assert lines("a", seed=1)["train/chain_sum.jsonl"] != plain["train/chain_sum.jsonl"]
    assert lines("a", tasks={"gcd": {}}).keys() == {"train/gcd.jsonl", "heldout/gcd.jsonl"}


@case(ReasoningGym, "failed_value", "evaluate_answers")
def test_reward():
    def value(task: str, text: str, **options: Any) -> float | None:
        (entry,) = entries(task, {}, 0, range(1))
        columns = row(task, {}, entry)
        given = {name: [columns[name]] for name in ("task", "task_config", "entry")}
        return ReasoningGym(**options)(completions=[text or entry["answer"]], **given)[0]

    assert value("prime_factorization", "two") is None
    assert value("prime_factorization", "two", failed_value=0.25) == 0.25
    with pytest.raises(ValueError, match="executes the policy's answers"):
        value("string_insertion", "")
    assert value("string_insertion", "", evaluate_answers=True) == 1


@case(GymRecipe, "num_warm_up", "num_train", "num_heldout", "seed")
def test_questions_of_the_quickstart(tmp_path):
    def sizes(**changed: Any) -> list[int]:
        recipe = GymRecipe(**TINY | changed)
        recipe.write(tmp_path)
        train, heldout = (
            len((tmp_path / part / "gcd.jsonl").read_text().splitlines()) for part in ("train", "heldout")
        )
        return [len(recipe.warm_up["gcd"]), train, heldout]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "TASKS", {"gcd": {}})
        assert sizes() == [30, 6, 2]
        assert sizes(num_warm_up=31) == [31, 6, 2]
        assert sizes(num_train=7) == [30, 7, 2]
        assert sizes(num_heldout=3) == [30, 6, 3]
        assert GymRecipe(**TINY, seed=1).train != GymRecipe(**TINY).train


@SLOW
@case(
    *(GymRecipe, "batch_size", "target_loss", "max_worked_steps", "num_decay_steps"),
    *("num_hasty_steps", "hasty_share", "learning_rate"),
)
def test_warm_up_of_the_quickstart(monkeypatch):
    steps: list[tuple[int, int]] = []
    loss = demo._Corpus.loss

    def note(corpus: Any, model: Any, num_hasty: int) -> torch.Tensor:
        assert len(steps) < 10, "the steps have no end"
        steps.append((corpus.batch_size, num_hasty))
        return loss(corpus, model, num_hasty)

    def warmed_up(**changed: Any) -> tuple[list[tuple[int, int]], float]:
        """(Batch and hasty rows of every step, a weight after them)."""
        steps.clear()
        tokenizer = build_tokenizer()
        model = build_model(tokenizer)
        demo.warm_up(model, tokenizer, GymRecipe(**TINY | changed), show_progress=False)
        return list(steps), model.lm_head.weight.sum().item()

    monkeypatch.setattr(demo._Corpus, "loss", note)
    plain, weight = warmed_up()
    assert plain == [(4, 0), (4, 0), (4, 0), (4, 3), (4, 3)]
    assert warmed_up(batch_size=8)[0] == [(8, 0), (8, 0), (8, 0), (8, 6), (8, 6)]
    assert warmed_up(num_decay_steps=1)[0] == [(4, 0), (4, 0), (4, 3), (4, 3)]
    assert warmed_up(num_hasty_steps=1)[0] == [(4, 0), (4, 0), (4, 0), (4, 3)]
    assert warmed_up(hasty_share=0.5)[0] == [(4, 0), (4, 0), (4, 0), (4, 2), (4, 2)]
    assert warmed_up(max_worked_steps=2)[0] == plain
    for max_worked_steps in (2, 3):
        with pytest.raises(RuntimeError, match=f"after {max_worked_steps} steps and should be 0.0"):
            warmed_up(target_loss=0.0, max_worked_steps=max_worked_steps)
        assert steps == [(4, 0)] * max_worked_steps
    assert warmed_up(learning_rate=1e-2)[0] == plain
    assert warmed_up()[1] == weight != warmed_up(learning_rate=1e-2)[1]


@case(ReasoningGymQuickstart, "folder", "num_threads")
def test_quickstart(tmp_path, monkeypatch):
    recipe = GymRecipe(**TINY)
    built = recipe.prepare(0, tmp_path / "cache", show_progress=False).folder
    threads: list[int] = []
    monkeypatch.setattr(ReasoningGymQuickstart, "recipe", staticmethod(lambda: recipe))
    monkeypatch.setenv("GRPO_LIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    train = Path("train") / "chain_sum.jsonl"
    for name in ("one", "two"):
        ReasoningGymQuickstart(str(tmp_path / name))()
        assert (tmp_path / name / train).read_text() == (built / train).read_text()
    ReasoningGymQuickstart(str(tmp_path / "one"), num_threads=2)()
    assert threads == [1, 1, 2]
    assert json.loads((tmp_path / "one" / "recipe.json").read_text())["num_train"] == 6
