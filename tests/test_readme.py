"""The README's files, code and commands run, one after the other as a newcomer would, with a tiny model."""

import inspect
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.strategies import StrategyRegistry

from grpo_lightning.cli import instantiate, main, parse
from grpo_lightning.core.types import Completion, Group, Prompt
from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.data.dataset_entry import DatasetEntry
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rewards import Plugin
from grpo_lightning.training.strategies import FSDP2Strategy, GRPODeepSpeedStrategy
from tests.tiny_models import tiny_model, tiny_tokenizer

OURS = (FSDP2Strategy, GRPODeepSpeedStrategy)
ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()

# What makes a command short enough for a test; the last flag of a name counts.
SHORT = ["--trainer.accelerator=cpu", "--model.sampling.max_completion_length=4"]


def blocks(language: str) -> list[str]:
    """The code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def files() -> dict[str, str]:
    """The blocks that are files: each follows a line with its name."""
    return dict(re.findall(r"^`([\w.]+)`:\n```\w+\n(.*?)```", README, re.MULTILINE | re.DOTALL))


def commands() -> list[str]:
    """The `grpo-lightning` lines of the shell blocks, without comments."""
    lines = [line.partition(" #")[0].strip() for block in blocks("bash") for line in block.splitlines()]
    return [line for line in lines if line.startswith("grpo-lightning")]


def save_policy(name: str) -> None:
    """A tiny model with a chat template where the README names a model."""
    tiny_model("qwen2").save_pretrained(name)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(name)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current folder with the README's files and its model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    for name, content in files().items():
        Path(name).write_text(content)
    save_policy("Qwen/Qwen2.5-0.5B-Instruct")
    yield tmp_path
    sys.modules.pop("my_rewards", None)  # other files' tests write one of their own


def test_the_files_and_commands_are_found():
    assert list(files()) == ["rows.jsonl", "my_rewards.py", "my_run.yaml"]
    assert [command.split()[1] for command in commands()] == [
        *("fit", "recipes", "recipes", "plan", "fit"),
        *("fit", "validate", "report", "export"),
        *["fit"] * 4,
    ]


def test_the_commands_run_one_after_the_other(folder, capsys):
    for command in commands():
        _, verb, *arguments = shlex.split(command)
        if verb == "fit" and ("quickstart" in arguments or any("devices" in argument for argument in arguments)):
            parse(arguments)  # tests/test_recipes.py runs it; tests/distributed runs several processes
        elif verb in ("fit", "validate"):
            main([verb, *arguments, *SHORT, f"--trainer.max_steps={4 if 'auto' in arguments else 2}"])
        else:
            main([verb, *arguments])
    said = capsys.readouterr().out
    assert "completions per rollout" in said  # plan
    assert re.search(r"│ reward +│", said)  # validate
    assert Path("my-model/config.json").is_file()
    assert Path("my_recipe.yaml").is_file()
    run = Path("runs/my_run/version_0")
    for name in ("metrics.csv", "completions.jsonl", "config.yaml", "checkpoints"):
        assert (run / name).exists(), name
    steps = {line.split('"step": ')[1][0] for line in (run / "completions.jsonl").read_text().splitlines()}
    assert steps == {"0", "1", "2", "3"}  # the second run went on where the first stopped


def test_every_strategy_named_trains(folder):
    """Those of the commands, and those of the sentence above them."""
    for command in commands():
        _, verb, *arguments = shlex.split(command)
        if verb == "fit" and any("devices" in argument for argument in arguments):
            strategy = parse(arguments).trainer.strategy
            name = strategy if isinstance(strategy, str) else strategy.class_path.rpartition(".")[2]
            assert name in {"DDPStrategy", "GRPODeepSpeedStrategy", *names_of_strategies()}
    (sentence,) = re.findall(r"Choose a strategy with one flag, .*?\.(.*?)train to the same weights", README, re.DOTALL)
    named = set(re.findall(r"`(\w+)`", sentence))
    assert named
    assert named <= names_of_strategies()


def names_of_strategies() -> set[str]:
    """What `trainer.strategy` can be by name: ours, and DDP."""
    return {"ddp", *(name for name in StrategyRegistry if StrategyRegistry[name]["strategy"] in OURS)}


def test_the_extras_are_those_of_the_package():
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    (sentence,) = re.findall(r"The\sextras are (.*?); `all` installs all of them except `(\w+)`", README, re.DOTALL)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set(re.findall(r"`([\w-]+)`", sentence[0]))
    assert named == set(extras) - {"all", "bench", "test", "dev"}
    (everything,) = extras["all"]
    assert set(re.findall(r"[\w-]+", everything.partition("[")[2])) == named - {sentence[1]}


def test_a_package_announces_its_reward_as_it_is_written(tmp_path, monkeypatch):
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    (block,) = blocks("toml")
    ((group, points),) = tomllib.loads(block)["project"]["entry-points"].items()
    ((name, value),) = points.items()
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "rewards.py").write_text(
        "class Brevity:\n    def __call__(self, completions):\n        return [1 / len(text) for text in completions]\n"
    )
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert f"init_args: {{name: {name}}}" in README
    assert Plugin(name)(completions=["abcd"]) == [0.25]


def test_yaml_examples_are_settings(folder):
    """Each one that is no file, on top of the README's recipe."""
    examples = [block for block in blocks("yaml") if block not in files().values()]
    assert examples
    for block in examples:
        Path("more.yaml").write_text(block)
        config = parse(["--config", "my_run.yaml", "--config", "more.yaml"])
        for section, settings in yaml.safe_load(block).items():
            assert {name.removesuffix("+") for name in settings} <= set(vars(config[section]))
    (text_data,) = [block for block in examples if "exact_match]" in block]
    entries = yaml.safe_load(text_data)["data"]["datasets"]
    assert [DatasetEntry(**entry).rewards for entry in entries] == [None, ["exact_match"]]


def test_the_first_recipe_solves_its_rows_when_the_model_answers_right(folder):
    """Its `avg@1` can rise: the reward that decides gives what a chat model writes 1, and no wrong answer."""
    sys.path.insert(0, str(folder))
    (model,) = instantiate(parse(["--config", "my_run.yaml"]), "model")
    assert model.validation.success is None
    rows = [json.loads(line) for line in files()["rows.jsonl"].splitlines()]
    for answer, solved in (("{}", 1), ("The answer is {}.", 1), ("It is **{}**.", 1), ("It is 1{}.", 0)):
        texts = [answer.format(row["answer"]) for row in rows]
        groups = [
            Group(Prompt([{"role": "user", "content": "?"}], columns=row), [1], [Completion([1], [0.0], "stop", text)])
            for row, text in zip(rows, texts, strict=True)
        ]
        scores = model.reward_set.score(groups)
        assert scores.by_reward[model.reward_set.success].flatten().tolist() == [solved] * len(rows), answer


def test_every_reward_of_the_table_exists():
    table = README[README.index("| Reward |") :].split("\n\n")[0]
    names = re.findall(r"`([A-Z]\w+)`", "\n".join(line.split("|")[1] for line in table.splitlines()))
    assert len(names) > 10
    module = __import__("grpo_lightning.rewards", fromlist=["rewards"])
    assert [name for name in names if not hasattr(module, name)] == []


def test_python_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_policy("name-or-path")
    for block in blocks("python"):
        if "def training_step" not in block:
            code = block.replace("L.Trainer(", 'L.Trainer(accelerator="cpu", logger=False, ')
            exec(compile(code, "README.md", "exec"), {})


def code_lines(text: str) -> list[str]:
    """Without comments, docstrings, assertions and annotations."""
    text = re.sub(r'""".*?"""', "", text, flags=re.DOTALL)
    text = re.sub(r"(\w+): (Any|int)", r"\1", text).replace(" -> Tensor", "")
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("assert")]


def test_the_step_shown_is_the_step():
    (shown,) = [block for block in blocks("python") if "def training_step" in block]
    real = [
        line for line in inspect.getsource(GRPOLightningModule.training_step).splitlines() if "zero_grad" not in line
    ]
    assert code_lines(shown) == code_lines("\n".join(line for line in real if not line.strip().startswith("#")))


def test_make_targets_exist():
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE):
        assert f"\n{target}:" in MAKEFILE, target


def test_files_and_settings_named_exist():
    for name in re.findall(r"(?:recipes|docs|grpo_lightning|benchmarks)/[\w/.]+\.(?:yaml|py|md|json)\b", README):
        assert (ROOT / name).is_file(), name
    for name in re.findall(r"\]\((docs/[\w.]+|notebooks)", README):
        assert (ROOT / name).exists(), name
    known = inspect.signature(PromptDataModule).parameters
    for name in ("val_split", "system_prompt", "question_template", "max_prompt_length", "overlong_prompts"):
        assert name in known
