"""docs/scale.md: its commands start a run, its names are strategies, and its numbers are those of `plan`."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import StrategyRegistry
from torch.distributed.run import get_args_parser

from grpo_lightning.cli.main import main, parse
from grpo_lightning.training.strategies import FSDP2Strategy, GRPODeepSpeedStrategy
from tests.cli.plan.real_shapes import published
from tests.docs.test_docs import RECIPE
from tests.helpers.pages import blocks, read, tables
from tests.helpers.tiny_models import tiny_tokenizer

PAGE = read("scale.md")
COMMANDS = [
    line.partition("  #")[0] for block in blocks(PAGE, "bash") for line in block.replace("\\\n", " ").splitlines()
]
FITS = [line for line in COMMANDS if "grpo-lightning fit" in line]
OURS = {
    name for name in StrategyRegistry if StrategyRegistry[name]["strategy"] in (GRPODeepSpeedStrategy, FSDP2Strategy)
}

POLICIES = {
    "0.5B": "Qwen/Qwen2.5-0.5B-Instruct",
    "1.5B": "Qwen/Qwen2.5-Math-1.5B",
    "7B": "Qwen/Qwen2.5-7B-Instruct",
    "32B": "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B",
}
STRATEGIES = ["one device", "ddp", "zero2", "fsdp2", "zero3", "zero3_offload"]
"""The columns of the table of memory."""

PLANNED: dict[str, Any] = {
    "trainer": {"accelerator": "gpu", "precision": "bf16-mixed", "max_steps": 1, "accumulate_grad_batches": 8},
    "data": {"datasets": [{"json_path": "rows.jsonl"}], "batch_size": 8, "max_prompt_length": 512},
    "model": {
        "policy": {
            "class_path": "grpo_lightning.PolicyLoader",
            "init_args": {"name": "policy", "activation_checkpointing": "layers"},
        },
        "num_generations": 8,
        "sampling": {"max_completion_length": 1024},
        "rewards": [{"class_path": "grpo_lightning.rewards.Format"}],
    },
}
"""The recipe that the numbers are planned for."""

LORA = ["--model.policy.init_args.dtype=bfloat16", "--model.policy.init_args.lora={rank: 16}"]
QLORA = [*LORA, "--model.policy.init_args.quantization=4bit", "--model.optimizer=PagedAdamW8bit"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder with data."""
    monkeypatch.chdir(tmp_path)
    row = json.dumps({"prompt": "1+1="}) + "\n"
    Path("rows.jsonl").write_text(row * 64)  # a rollout of 8 devices
    return tmp_path


@pytest.mark.parametrize("command", FITS)
def test_commands_are_runs(folder, command):
    Path("my_run.yaml").write_text(yaml.safe_dump(RECIPE))
    arguments = shlex.split(command)
    config = parse(arguments[arguments.index("fit") + 1 :])
    assert int(config.trainer.devices) == 8
    kind = config.trainer.strategy if isinstance(config.trainer.strategy, str) else config.trainer.strategy.class_path
    assert kind in {"ddp"} | OURS or kind.endswith("GRPODeepSpeedStrategy")
    assert config.trainer.num_nodes == (1 if arguments[0] == "grpo-lightning" else 2)


def test_torchrun_starts_the_command_on_as_many_as_the_trainer_has():
    (command,) = [line for line in FITS if line.startswith("torchrun")]
    options = get_args_parser().parse_args(shlex.split(command)[1:])
    assert options.no_python
    assert options.training_script == "grpo-lightning"
    assert (options.nproc_per_node, options.nnodes) == ("8", "2")
    assert options.training_script_args[0] == "fit"


def test_the_job_script_has_as_many_tasks_and_the_signal_that_requeues():
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", PAGE, re.MULTILINE))
    (command,) = [line for line in FITS if line.startswith("srun")]
    assert f"--trainer.devices={asked['ntasks-per-node']} --trainer.num_nodes={asked['nodes']}" in command
    name, _, seconds = asked["signal"].partition("@")
    assert SLURMEnvironment().requeue_signal is getattr(signal, name) or SLURMEnvironment().requeue_signal is None
    assert int(seconds) > 90
    assert f"sends {name} {seconds} seconds before the time limit" in PAGE


def test_strategies_named_are_those_there_are():
    named = {name for row in tables(PAGE) if row.heading == "Which strategy" for name in row.names()}
    assert named == {"ddp"} | OURS


def planned(policy: str, strategy: str, more: list[str], capsys: pytest.CaptureFixture[str]) -> float:
    """GiB of the highest moment, as `plan` prints it."""
    published(POLICIES[policy]).save_pretrained("policy")
    tiny_tokenizer().save_pretrained("policy")
    Path("planned.yaml").write_text(yaml.safe_dump(PLANNED))
    own = ["--trainer.devices=1"]
    if strategy != "one device":
        own = ["--config", f"strategies/{strategy}", "--trainer.devices=8"]
    with contextlib.suppress(SystemExit):  # it does not fit
        main(["plan", "--config", "planned.yaml", *own, *more, "--prompt_tokens=512", "--device_gib=80"])
    (number,) = re.findall(r"fits?: ([\d.]+) of 80 GiB|not fit: ([\d.]+) of", "".join(capsys.readouterr()))
    return float(number[0] or number[1])


MEMORY = {row.cells[0]: row.cells[1:] for row in tables(PAGE) if row.cells[0].split()[0] in POLICIES}


@pytest.mark.slow
@pytest.mark.parametrize("row", MEMORY)
def test_memory_is_what_plan_says(folder, row, capsys):
    policy, _, kind = row.partition(" ")
    more = {"": [], "LoRA": LORA, "QLoRA": QLORA}[kind]
    assert len(MEMORY[row]) == len(STRATEGIES)
    for strategy, written in zip(STRATEGIES, MEMORY[row], strict=True):
        if written:  # what bitsandbytes cannot be sharded into is left out
            number = planned(policy, strategy, more, capsys)
            assert number > 80 if written == "> 80" else number == pytest.approx(int(written), abs=0.6), strategy


def test_the_table_of_memory_is_whole():
    assert {row.split()[0] for row in MEMORY} == {*POLICIES}
    assert {row.partition(" ")[2] for row in MEMORY} == {"", "LoRA", "QLoRA"}
