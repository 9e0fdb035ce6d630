"""Rows and rewards of reasoning-gym in a run of the command line."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

pytest.importorskip("reasoning_gym")

from grpo_lightning.cli import main
from tests.tiny_models import tiny_model, tiny_tokenizer

RUN = """
trainer: {accelerator: cpu, max_steps: 2}
data:
  prepare:
    class_path: grpo_lightning.tasks.ReasoningGymTasks
    init_args:
      folder: gym
      size: 6
      heldout_size: 4
      tasks:
        TASK: {SETTING: 3}
        prime_factorization: null
  datasets:
    - {json_path: gym/train/chain_sum.jsonl}
    - {json_path: gym/train/prime_factorization.jsonl}
  val_datasets:
    - {json_path: gym/heldout/chain_sum.jsonl}
  prompt_as: text
  batch_size: 4
model:
  policy: policy
  num_generations: 4
  sampling: {max_completion_length: 4}
  rewards:
    - class_path: ReasoningGym
"""


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *, task: str = "chain_sum", setting: str = "max_terms") -> None:
    """Two steps with a tiny model that answers with noise."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    tiny_model("qwen2").save_pretrained("policy")
    tiny_tokenizer().save_pretrained("policy")
    (folder / "run.yaml").write_text(RUN.replace("TASK", task).replace("SETTING", setting))
    main(["fit", "--config", "run.yaml"])


def test_rows_are_made_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run(tmp_path, monkeypatch)
    (path,) = (tmp_path / "runs").rglob("metrics.csv")
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("reward/reasoning_gym")]
    assert rows
    assert all(0 <= float(row["reward/reasoning_gym"]) <= 1 for row in rows)
    # Noise is no product of whole numbers: its verifier raises.
    assert any(float(row["reward/reasoning_gym/verifier_failed"]) > 0 for row in rows)


@pytest.mark.parametrize(
    ("task", "setting", "message"),
    [
        ("chain_sun", "max_terms", "no task 'chain_sun' (did you mean 'chain_sum'"),
        ("chain_sum", "max_term", "tasks.chain_sum: there is no setting 'max_term' (did you mean 'max_terms'"),
    ],
)
def test_what_is_wrong_is_said_before_the_weights_load(
    task: str,
    setting: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    with pytest.raises(SystemExit):
        run(tmp_path, monkeypatch, task=task, setting=setting)
    said = " ".join("".join(capsys.readouterr()).split())
    assert message in said
    assert "Scoring path" not in said
    assert not (tmp_path / "gym").exists()
