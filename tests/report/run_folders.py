"""Folders as runs leave them, written by hand: what the tests of the report share."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'> {{DATA}} {{TITLE}} \u2028 <!--"
)
"""Text that would end the page's data, run a script, or be replaced as a part of the template."""


def line(rollout: int, number: int, **fields: Any) -> dict[str, Any]:
    """A line of `completions.jsonl`: completion `number` of 4 in each group, two groups per rollout."""
    reward = float((rollout + number) % 2)
    group = number // 4
    own = {
        "step": 2 * rollout,
        "epoch": 0,
        "rollout": rollout,
        "rank": 0,
        "source": "train",
        "prompt_index": 2 * rollout + group,
        "row": f"train.jsonl:{2 * rollout + group + 1}",
        "prompt": f"question {2 * rollout + group}",
        "columns": {"answer": f"solution {2 * rollout + group}"},
        "completion": f"answer {number} of rollout {rollout}",
        "length": 3 + number,
        "finish_reason": "length" if number == 3 else "stop",
        "reward": reward,
        "rewards": {"accuracy": reward, "format": 1.0},
        "advantage": 1.0 if reward else -1.0,
    }
    return own | fields


def lines(num_rollouts: int = 3) -> list[dict[str, Any]]:
    """The lines of a short run."""
    return [line(rollout, number) for rollout in range(num_rollouts) for number in range(8)]


def write_run(folder: Path, completions: Sequence[Mapping[str, Any]] | None = None, **files: Any) -> Path:
    """Write a run: completions, metrics (rows), tokens (records), config, record and summary."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {"completions": lines() if completions is None else completions, "tokens": files.get("tokens", ())}
    for name, records in written.items():
        if records:
            text = "".join(json.dumps(record) + "\n" for record in records)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    rows = files.get(
        "metrics", [{"step": 2 * i, "epoch": 0, "reward/mean": i / 4, "time/rollout": 2.0} for i in range(3)]
    )
    if rows:
        with (folder / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
            writer.writeheader()
            writer.writerows(rows)
    if "config" in files:
        (folder / "config.yaml").write_text(yaml.safe_dump(files["config"]))
    for name, content in (("run.json", files.get("record")), ("summary.json", files.get("summary"))):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


def tokens_of(rollout: int, completion: int, *texts: str) -> dict[str, Any]:
    """A line of `tokens.jsonl`: the updates raise the log-prob of every token by 0.5."""
    return {
        "rollout": rollout,
        "completion": completion,
        "tokens": list(texts),
        "old_logprobs": [-1.0] * len(texts),
        "logprobs": [-0.5] * len(texts),
    }


def turns() -> list[dict[str, Any]]:
    """The turns of a conversation: the policy, the environment, the policy."""
    return [
        {"role": "assistant", "text": "is it 5?", "length": 2, "finish_reason": "stop", "reward": 0.25},
        {"role": "user", "text": "higher", "length": 1},
        {"role": "assistant", "text": "7", "length": 1, "finish_reason": "stop", "reward": None},
    ]


RECORD = {
    "status": "failed",
    "started": 1000.0,
    "ended": 1060.0,
    "step": 6,
    "seed": 3,
    "versions": {"python": "3.11", "torch": "2.11.0"},
    "device": {
        **{"accelerator": "cpu", "name": "x86", "num_devices": 1, "num_nodes": 1, "world_size": 1},
        **{"strategy": "SingleDeviceStrategy", "precision": "32-true", "num_threads": 1},
    },
    "commit": "0123456789abcdef",
    "has_changes": True,
    "command": ["grpo-lightning", "fit"],
    "error": {"type": "RuntimeError", "message": "out of memory", "traceback": "Traceback: out of memory"},
}
