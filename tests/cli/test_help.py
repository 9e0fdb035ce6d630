"""Help has one screen, `fit --help-all` has every key, and a key by another name says where the setting lives."""

import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback

from grpo_lightning.cli import export, help, main, parse, recipes, report
from grpo_lightning.cli.config_errors import OTHER_NAMES
from grpo_lightning.cli.errors import ConfigurationError
from grpo_lightning.cli.main import COMMANDS, TRAINER_COMMANDS
from grpo_lightning.cli.plan.command import parse_own, parse_script
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.rewards import Reward
from grpo_lightning.rollout.vllm.vllm_engine import VLLMEngine
from grpo_lightning.schedules import Schedule
from tests.helpers.doc_keys import class_named
from tests.helpers.pages import read, tables
from tests.marks import SLOW

RECIPE = "{model: {policy: p, rewards: [grpo_lightning.rewards.ExactMatch]}, data: {datasets: x}}"


def printed(*args, module_class=None):
    """Return the help that a command line prints."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        main([*args], module_class)
    return output.getvalue()


@pytest.fixture(scope="module")
def keys():
    """The keys that `fit --help-all` explains, with what it says."""
    explained = printed("fit", "--help-all").split("\noptions:", 1)[-1]
    parts = re.split(r"^  --([\w.]+)", explained, flags=re.MULTILINE)
    assert len(parts[1::2]) == len(set(parts[1::2])), "no key is explained twice"
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("model.objective.beta", "Weight of the KL to the reference"),
        ("model.sampling.temperature", "float"),
        ("model.validation.num_generations", "int"),
        ("model.policy.lora.rank", "int"),
        ("model.policy.max_pixels", "null"),
        ("model.engine.max_rows", "Maximum number of completions that are decoded"),
        ("model.optimizer.lr", "float"),
        ("model.dynamic_sampling.max_resample_times", "int"),
        ("model.reward_workers.num_workers", "int"),
        ("model.sync_reference.every_n_steps", "int"),
        ("data.datasets.json_path", "A UTF-8 file"),
        ("trainer.max_epochs", "Defaults to 1 if max_steps"),
    ],
)
def test_nested_keys_are_explained(keys, key, said):
    assert said in " ".join(keys[key].split())


# ------------------------------------------------------------------------------------------------------- on one screen

HELPS = [["--help"], *([command, "--help"] for command in COMMANDS), ["plan", "--from", "trl", "--help"]]


@pytest.mark.parametrize("args", HELPS, ids=" ".join)
def test_every_help_is_one_screen_with_usage_and_an_example(args, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = printed(*args)
    lines = text.splitlines()
    assert lines[0].startswith("usage: grpo-lightning")
    assert len(lines) <= 41
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in text
    assert re.search(r"^(examples?:|  e\.g\. grpo-lightning)", text, re.MULTILINE)


@SLOW
@pytest.mark.parametrize("args", HELPS, ids=" ".join)
def test_the_examples_of_the_help_are_command_lines_that_parse(args, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parsers = {"export": export.parser, "report": report.parser}
    monkeypatch.setattr(recipes, "copy", lambda *_, **__: None)
    examples = re.findall(r"^  (?:e\.g\. )?grpo-lightning (.+)$", printed(*args), re.MULTILINE)
    assert examples
    for example in examples:
        command, *rest = shlex.split(example)
        if command == "recipes":
            recipes.run(rest)
        elif command in parsers:
            parsers[command]().parse_args(rest)
        elif command == "plan" and "--from" in rest:
            parse_script(rest)
        else:
            fit_args = parse_own(rest)[1] if command == "plan" else rest
            quick = ["--config", "quickstart"]
            parse(quick + [arg for arg in fit_args if arg not in ("--config", "recipe.yaml", "quickstart")])


def shown_settings():
    return [(group, name) for groups in help.GROUPS.values() for group in groups for name in (group.shown or [""])]


@pytest.mark.parametrize("key", sorted({f"{group.key}.{name}".rstrip(".") for group, name in shown_settings()}))
def test_a_setting_of_the_short_help_exists_and_is_described_as_in_the_full_help(keys, key):
    """Renaming an argument or moving a class breaks this, or reading the source does."""
    assert key in keys
    owner, _, name = key.rpartition(".")
    group = next((group for groups in help.GROUPS.values() for group in groups if group.key == owner), None)
    if group is None or name not in group.shown:
        return
    setting = help.read_settings(group.path).by_name[name]
    said = re.sub(r"[\s-]+", "", keys[key])
    assert re.sub(r"[\s-]+", "", help.REPLACED.get(key, setting.text).partition("Default:")[0]) in said
    assert setting.text
    if setting.default is None:
        assert "(required,type:" in said
    elif setting.default != "AdamW":
        assert f"default:{setting.default.replace('-', '')}".lower() in said.lower()


def test_the_short_help_shows_each_group_and_its_settings(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command in TRAINER_COMMANDS:
        lines = printed(command, "-h").splitlines()
        assert [line.split()[0] for line in lines if line.startswith(("data", "model", "trainer"))] == [
            group.key for group in help.GROUPS[command]
        ]
        for group in help.GROUPS[command]:
            start = next(i for i, line in enumerate(lines) if line.split()[:1] == [group.key])
            below = lines[start + 1 : start + 1 + len(group.shown)]
            assert tuple(line.split()[0] for line in below) == group.shown


@SLOW
def test_a_wider_terminal_shows_more_of_the_descriptions(monkeypatch):
    texts = {}
    for width in ("60", "80", "120", "300"):
        monkeypatch.setenv("COLUMNS", width)
        texts[width] = printed("fit", "--help")
    assert texts["60"] == texts["80"] != texts["120"] == texts["300"]
    assert "Dtype of the weights; adapters are always float32." in texts["120"]
    assert max(map(len, texts["120"].splitlines())) <= 120


def test_headings_are_bold_in_terminals_only(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def heading(**environment):
        for name in ("NO_COLOR", "TERM"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("sys.stdout", Terminal())
        return help.emphasize("model")

    assert heading() == heading(TERM="xterm") == "\x1b[1mmodel\x1b[0m"
    assert heading(NO_COLOR="1") == heading(TERM="dumb") == "model"


@pytest.mark.parametrize(
    ("text", "width", "said"),
    [
        ("Prompts per rank. More text.", 30, "Prompts per rank."),
        ("Prompts per rank and\nrollout; with teams, per team.", 40, "Prompts per rank and rollout."),
        ("The model to train: a name, a folder, or a model in memory.", 40, "The model to train: a name, ..."),
        ("Train low-rank adapters and freeze all others.", 30, "Train low-rank adapters and..."),
    ],
)
def test_a_description_is_cut_between_clauses(text, width, said):
    cut = help.brief(text, width)
    assert len(cut) <= width
    assert cut == said


class Mine(GRPOLightningModule):
    """A module of one's own.

    Args:
        bonus: Added to each reward.
    """

    def __init__(self, *args, bonus: float = 0.5, **kwargs):
        super().__init__(*args, **kwargs)


def test_the_settings_of_ones_own_module_are_listed():
    text = printed("fit", "--help", module_class=Mine)
    assert re.search(r"^  bonus +0\.5 +Added to each reward\.$", text, re.MULTILINE)
    assert "bonus" not in printed("fit", "--help")


# ----------------------------------------------------------------------------------------------------- below one key


@SLOW
@pytest.mark.parametrize("flags", [["--help-all", "model.policy"], ["--help-all=model.policy"]])
def test_the_settings_below_a_key(keys, flags):
    text = printed("fit", *flags)
    below = {key for key in keys if key == "model.policy" or key.startswith("model.policy.")}
    assert {*re.findall(r"^  --([\w.]+)", text, re.MULTILINE)} == below
    assert {"model.policy", "model.policy.dtype", "model.policy.lora.rank"} <= below
    assert "adapters are always float32" in text
    assert not re.search(r"^\S", text, re.MULTILINE), "no headings of other parts"


@SLOW
@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("model.polici", "Did you mean model.policy"),
        ("beta", "Did you mean model.objective.beta?"),
        ("zzz", "prints all"),
    ],
)
def test_a_key_that_help_does_not_know(key, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["fit", "--help-all", key])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ all keys


def test_the_help_of_one_object_is_announced(keys):
    assert "model.objective.help" in keys


def test_the_keys_of_migrating_are_explained_where_the_page_says(keys):
    """In `fit --help-all`, or, as arguments of a class, by the four flags that the page names."""
    page = read("migrating.md")
    by_class = {Reward: "model.rewards", Callback: "trainer.callbacks", Schedule: "model.scheduler"}
    by_class[VLLMEngine] = "model.engine"
    of_one_class = {"model.scheduler": Schedule, "model.engine": VLLMEngine}
    for row in tables(page):
        for key in row.names(1) if row.heading in ("VLM-R1", "ms-swift", "TRL", "Loss names") else ():
            if key in keys or key in ("none", "not yet") or key.endswith((".yaml", "Strategy.config")):
                continue
            owner = key.rpartition(".")[0]
            kind = of_one_class.get(owner) or class_named(owner or key)
            (flag,) = [flag for base, flag in by_class.items() if issubclass(kind, base)]
            assert f"{flag}.help" in keys
            assert f"`--{flag}.help=" in page, key


def test_ckpt_path_is_explained_as_it_is_here(keys):
    said = " ".join(keys["ckpt_path"].split())
    assert "auto" in said
    assert '"last"' not in said
    assert "registry" not in said


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_other_names_lead_to_keys_that_there_are(keys, name):
    assert OTHER_NAMES[name] in keys
    assert not any(key.rpartition(".")[2] == name for key in keys), "the key itself is found without this"


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--beta=0", "there is no key beta. Did you mean model.objective.beta?"),
        ("--model.lr=1", "there is no key model.lr. Did you mean model.optimizer.lr"),
        ("--model.temperature=1", "there is no key model.temperature. Did you mean model.sampling.temperature"),
        ("--learning_rate=1", "there is no key learning_rate. Did you mean model.optimizer.lr?"),
        ("--per_device_train_batch_size=1", "Did you mean data.batch_size?"),
        ("--model.lora_r=1", "Did you mean model.policy.lora.rank?"),
        ("--model.policy.lor.rank=1", "no key model.policy.lor. Did you mean model.policy.lora?"),
        ("--model.sampling.beta=1", "no key model.sampling.beta. Did you mean model.objective.beta?"),
        ("--trainer.strategy=zero4", "trainer.strategy 'zero4' is not known. Did you mean zero"),
        ("--trainer.strategy=mine", "zero3_offload"),
        (
            "--trainer.precision=fp16",
            "trainer.precision must be .*one of .*16-mixed.*got 'fp16'. Did you mean 16-mixed",
        ),
        ("--trainer.precision=bf16-mixd", "Did you mean bf16-mixed"),
        ("--trainer.accelerator=cud", "trainer.accelerator 'cud' is not known. Did you mean cuda"),
    ],
)
def test_a_setting_by_another_name_or_value(flag, said):
    with pytest.raises(ConfigurationError, match=f"(?s){said}") as error:
        parse(["--config", RECIPE, flag])
    assert str(error.value).startswith("on the command line: ")


def test_an_unknown_strategy_names_only_those_that_train():
    with pytest.raises(ConfigurationError, match="is not known") as error:
        parse(["--config", RECIPE, "--trainer.strategy=mine"])
    named = set(re.findall(r"[\w]+", str(error.value).partition("Known: ")[2]))
    assert {"auto", "ddp", "fsdp2", "zero1", "zero2", "zero3", "zero3_offload"} <= named
    assert not {"deepspeed", "deepspeed_stage_2", "fsdp", "fsdp_cpu_offload"} & named


@pytest.mark.parametrize("name", ["zero2", "zero3_offload", "fsdp2", "ddp", "ddp_find_unused_parameters_true", "auto"])
def test_strategies_that_there_are(name):
    assert parse(["--config", RECIPE, f"--trainer.strategy={name}"]).trainer.strategy == name


def test_a_file_without_config_in_front(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("my.yaml", "quickstart"):
        with pytest.raises(ConfigurationError, match=f"write --config {name}"):
            parse([name])
    Path("my.yaml").write_text(RECIPE)
    with pytest.raises(ConfigurationError, match=r"write --config my\.yaml"):
        parse(["my.yaml", "--trainer.max_steps=1"])
    with pytest.raises(ConfigurationError, match="'stray' does not belong to a flag"):
        parse(["--config", "my.yaml", "stray"])


def test_an_accelerator_that_the_machine_lacks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(["fit", "--config", RECIPE, "--trainer.accelerator=gpu"])
    said = capsys.readouterr().err
    assert "error: trainer.accelerator: No supported gpu backend found!" in said
    assert "cpu or auto" in said
    assert "TRACEBACK" not in said
