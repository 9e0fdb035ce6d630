"""The pages under docs/ describe the code as it is: keys, classes, files and links are there, and the examples run."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from grpo_lightning.cli.main import COMMANDS, instantiate, main, parse
from grpo_lightning.cli.plan.batches import translate
from grpo_lightning.cli.plan.command import parse_script
from grpo_lightning.data.batch import as_prompt
from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling
from tests.docs.newcomer import files
from tests.environments.games import Counted
from tests.helpers.background_engine import BackgroundEngine
from tests.helpers.doc_keys import keys_in, problem
from tests.helpers.module_runs import PROMPTS, SMALL, History, fit, make_module, make_source, make_trainer
from tests.helpers.pages import TableRow, blocks, broken_links, make_targets, prose, read, tables, unrendered_rows
from tests.helpers.paths import DOCS, PACKAGE, ROOT
from tests.helpers.tiny_models import tiny_classifier, tiny_model, tiny_tokenizer
from tests.marks import SLOW

pytestmark = pytest.mark.filterwarnings("ignore:[\\s\\S]*instantiate_classes")  # its name before jsonargparse 4.49

PAGES = sorted(path.name for path in DOCS.glob("*.md"))
PEERS = {"VLM-R1": "vlm-r1", "ms-swift": "ms-swift", "TRL": "trl"}

THEIRS = {
    "Dataset",
    "False",
    "GRPOConfig",
    "GRPOTrainer",
    "GRPOLightningModule",
    "LightningModule",
    "ORM",
    "PeftModel",
    "TrainingArguments",
}
"""Names on the pages that are other packages', or no setting."""

LOGGED_BY_REWARDS = {
    "reward/llm_judge/failed",
    "reward/reasoning_gym/verifier_failed",
    "reward/reward_model/too_long",
}
"""Metrics that single rewards log; tests/rewards/ has their tests."""

THEIR_FILES = {
    "grpo_jsonl.py",
    "train.py",
    "recipe.yaml",
    "make_rows.py",
    "my_rewards.py",
    "my_losses.py",
    "my_run.yaml",
    "config.yaml",
    "config_0.yaml",
    "hparams.yaml",
}


def migration_rows() -> list[TableRow]:
    """The rows of the tables of settings."""
    return tables(read("migrating.md"))


def section(text: str, heading: str) -> str:
    """The part of a page below a heading of the second level."""
    return re.split(r"^## ", text.partition(f"## {heading}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a tiny policy, a tiny reward model and the files that examples name."""
    monkeypatch.chdir(tmp_path)
    tiny_model("qwen2").save_pretrained("name-or-path")
    tiny_classifier("qwen2").save_pretrained("reward-model")
    for name in ("name-or-path", "reward-model"):
        tiny_tokenizer().save_pretrained(name)
    own = [block for block in blocks(read("rewards.md"), "python") if "class Graded" in block]
    Path("my_rewards.py").write_text("\n".join([files()["my_rewards.py"], *own]))
    Path("my_losses.py").write_text(blocks(read("grpo.md"), "python")[0])
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name in ("my_rewards", "my_losses"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name in ("my_rewards", "my_losses"):
        sys.modules.pop(name, None)


# -------------------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("peer", [*PEERS, "Loss names"])
def test_every_row_of_a_table_leads_somewhere(peer):
    rows = [row for row in migration_rows() if row.heading == peer]
    assert len(rows) > 5
    for row in rows:
        here, why = row.cells[1], row.cells[-1]
        if here in ("none", "not yet"):
            assert why, row
        else:
            assert row.names(1), row
            assert [found for name in row.names(1) if (found := problem(name))] == [], row


def test_no_flag_stands_twice_in_a_table():
    for peer in PEERS:
        names = [name for row in migration_rows() if row.heading == peer for name in row.names()]
        assert sorted(names) == sorted(set(names)), peer


def test_classes_named_beside_are_there():
    named = {name for row in migration_rows() for name in row.names(-1) if re.fullmatch(r"[A-Z]\w+(\.\w+)?", name)}
    assert {"ByMethod", "SoftOverlong", "WeightedReward.weight"} <= named
    assert [found for name in sorted(named - THEIRS) if (found := problem(name))] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_key_named_in_a_text_exists(page):
    keys = keys_in(prose(read(page)))
    assert keys
    assert [found for key in sorted(keys) if (found := problem(key))] == []


def test_methods_named_exist():
    named = {name for page in PAGES for name in re.findall(r"`module\.(\w+)[`(]", read(page))}
    assert {"sample", "score_rewards", "compute_advantages", "split_rollout", "update"} <= named
    assert [name for name in sorted(named) if not hasattr(GRPOLightningModule, name)] == []


@SLOW
def test_metrics_named_are_logged():
    """Those of a run with a reference, experts and validation; an example's own and `time/...` are none of ours."""
    objective = Objective(rollout_correction="token_truncate", top_entropy_fraction=0.5)
    policy = tiny_model("qwen3_moe", **SMALL)
    options = {"num_iterations": 2, "dynamic_sampling": DynamicSampling(), "length": 20}  # some stop by themselves
    module = make_module(policy=policy, objective=objective, **options)
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, make_source(module), PromptSource(PROMPTS[:2], 2))
    pattern = r"`((?:reward|policy|rollout|val)/[\w/]+)`"
    named = {name for page in PAGES for name in re.findall(pattern, prose(read(page)))}
    asynchronous = History()
    fit(make_module(engine=BackgroundEngine(), max_staleness=1), max_steps=1, callbacks=[asynchronous])
    assert "rollout/staleness" in named & {*asynchronous.steps[0]}
    named -= {"rollout/staleness"}
    played = History()
    fit(make_module(environment=Counted(), length=40), max_steps=1, callbacks=[played])
    of_turns = {name for name in played.steps[0] if name.startswith("rollout/")} - {*trainer.callback_metrics}
    assert of_turns == {"rollout/turns", "rollout/observation_tokens", "rollout/sampled_fraction"} <= named
    named -= of_turns
    assert {"reward/mean", "policy/kl", "val/reward"} <= named
    assert sorted(named - {*trainer.callback_metrics} - LOGGED_BY_REWARDS) == []
    table = section(read("logs.md"), "What is logged")
    rows = [re.sub(r"<\w+>", ".+", re.escape(name)) for name in re.findall(r"`([\w/<>@.]+)`", table)]
    logged = [name for name in trainer.callback_metrics if "/" in name]
    assert [name for name in logged if not any(re.fullmatch(row, name) for row in rows)] == []


@pytest.mark.parametrize(
    "name",
    [
        "model.objective.betta",
        "trainer.max_step",
        "data.datasets.path",
        "model.rewardz",
        "Kosine",
        "Cosine.length",
        "beta",
    ],
)
def test_the_checker_finds_what_is_not_there(name):
    assert problem(name)


def test_the_checker_reads_short_and_long_keys():
    text = (
        "`objective.scale: none` and `policy.chunk_size`, `model.engine.max_rows`; not `policy/kl` or `module.sample`"
    )
    assert keys_in(text) == {"model.objective.scale", "model.policy.chunk_size", "model.engine.max_rows"}


# ------------------------------------------------------------------------------------------------------------ examples


@SLOW
@pytest.mark.parametrize(
    ("page", "number"), [(page, n) for page in PAGES for n in range(len(blocks(read(page), "python")))]
)
def test_python_examples_run(folder, page, number):
    block = blocks(read(page), "python")[number]
    quiet = 'L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False, '
    exec(compile(block.replace("L.Trainer(", quiet), page, "exec"), {"__name__": "example"})


RECIPE = {
    "model": {"policy": "name-or-path", "rewards": [{"class_path": "grpo_lightning.rewards.Format"}]},
    "data": {"datasets": [{"json_path": "rows.jsonl"}]},
}


def parsed(block: str) -> Any:
    """The settings of a tiny recipe with an example on top."""
    Path("base.yaml").write_text(yaml.safe_dump(RECIPE))
    Path("example.yaml").write_text(block)
    return parse(["--config", "base.yaml", "--config", "example.yaml"])


@SLOW
@pytest.mark.parametrize(
    ("page", "number"), [(page, n) for page in PAGES for n in range(len(blocks(read(page), "yaml")))]
)
def test_yaml_examples_are_recipes(folder, page, number):
    config = parsed(blocks(read(page), "yaml")[number])
    module, data = instantiate(config, "model", "data")
    assert isinstance(module, GRPOLightningModule)
    assert isinstance(data, PromptDataModule)


@SLOW
@pytest.mark.parametrize("peer", PEERS)
def test_a_worked_example_is_what_plan_says(folder, capsys, peer):
    """The script's flags, the `plan` command and the recipe agree."""
    text = section(read("migrating.md"), peer)
    script, command = (shlex.split(block.replace("\\\n", " ")) for block in blocks(text, "bash"))
    assert command[:4] == ["grpo-lightning", "plan", "--from", PEERS[peer]]
    flags = dict(zip(command[4::2], command[5::2], strict=True))
    flags.pop("--version", None)
    assert flags.items() <= dict(itertools.pairwise(script)).items()
    plan, differences = translate(parse_script(command[2:]))
    assert differences == []
    config = parsed(blocks(text, "yaml")[0])
    assert (config.data.batch_size, config.trainer.accumulate_grad_batches) == (
        plan.batch_size,
        plan.accumulate_grad_batches,
    )
    model = config.model
    assert (model.num_generations, model.updates_per_rollout, model.num_iterations) == (
        plan.num_generations,
        plan.updates_per_rollout,
        plan.num_iterations,
    )
    main(command[1:])
    assert f"batch_size: {plan.batch_size}" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["../README.md", "../CONTRIBUTING.md", *PAGES])
def test_make_targets_named_exist(page):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    missing = [target for target in sorted(make_targets(read(page))) if f"\n{target}:" not in makefile]
    assert missing == []


def test_make_targets_are_found():
    assert make_targets("`make a`, `make b c X=d`\nmake e\n```bash\nmake f  # g\n```\n") == {"a", "b", "c", "f"}


@pytest.mark.parametrize("page", PAGES)
def test_commands_named_exist(page):
    for command in re.findall(r"`?grpo-lightning ([a-z]+)", read(page)):
        assert command in COMMANDS, command


def test_rows_shown_are_read():
    rows = [json.loads(line) for block in blocks(read("migrating.md"), "json") for line in block.splitlines()]
    assert len(rows) == 7
    for number, row in enumerate(rows):
        prompt = as_prompt(row, number)
        assert prompt.content
        assert "5" in str(prompt.columns.get("answer", prompt.columns.get("solution")))


# --------------------------------------------------------------------------------------------------- files and links


@pytest.mark.parametrize("page", PAGES)
def test_files_named_exist(page):
    names = set(re.findall(r"`([\w./-]+\.(?:py|yaml|md)|[\w./-]+/)`", read(page))) - THEIR_FILES
    places = [ROOT, PACKAGE, DOCS]
    assert [name for name in sorted(names) if not any((place / name).exists() for place in places)] == []


@pytest.mark.parametrize("page", [*PAGES, "../README.md", "../CONTRIBUTING.md", "../CHANGELOG.md"])
def test_tables_render(page):
    assert unrendered_rows(read(page)) == []


def test_unrendered_tables_are_found():
    assert unrendered_rows("| a | b |\n|---|---|\n| `1\\|2` | 3 |\n\n| c |\n|---|\n| 4 |") == []
    assert unrendered_rows("| a | b ||\n|---|---|\n| 1 | 2 |\n| 3 |") == ["| a | b ||", "| 3 |"]


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page):
    assert broken_links(read(page), DOCS / page) == []


def test_broken_links_are_found():
    text = "[a](grpo.md) [b](nothing.md) [c](grpo.md#nothing) [d](#questions) [e](https://example.org/x)"
    assert broken_links(text, DOCS / "grpo.md") == ["nothing.md", "grpo.md#nothing"]


@SLOW
def test_the_command_line_drives_a_subclass(folder, monkeypatch):
    (block,) = [block for block in blocks(read("lightning.md"), "python") if "module_class" in block]
    Path("rows.jsonl").write_text('{"prompt": "1+1="}\n')
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    Path("own_module.py").write_text(block)
    monkeypatch.syspath_prepend(folder)
    own = importlib.import_module("own_module")
    flags = ["--model.sampling.max_completion_length=4", "--trainer.accelerator=cpu", "--trainer.max_steps=1"]
    cli = main(["fit", "--config", "recipe.yaml", *flags], module_class=own.MyModule)
    assert type(cli.model) is own.MyModule
    assert cli.trainer.global_step == 1


def test_any_optimizer_can_be_named(folder):
    block = "model: {optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.5}}}"
    (module,) = instantiate(parsed(block), "model")
    optimizer = module.optimizer_factory([torch.nn.Parameter(torch.zeros(1))])
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.defaults["lr"] == 0.5
