"""How settings of several files and flags come together."""

import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from pydoc import locate

import pytest
import yaml
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from grpo_lightning.cli import instantiate, parse, runs
from grpo_lightning.cli.errors import ConfigurationError
from grpo_lightning.cli.runs import MetricsLogger
from grpo_lightning.environments import Environment, Step, calculator
from tests.marks import SLOW, few

WEIGHTED = "grpo_lightning.rewards.WeightedReward"
FIRST = [
    {"class_path": WEIGHTED, "init_args": {"reward": "grpo_lightning.rewards.ExactMatch", "weight": 3.0, "name": "a"}},
    {"class_path": "grpo_lightning.rewards.Format", "init_args": {"text_after": True}},
]
SECOND = [
    {"class_path": WEIGHTED, "init_args": {"reward": "grpo_lightning.rewards.Format"}},
    {"class_path": "grpo_lightning.rewards.Format"},
]


@pytest.fixture(autouse=True)
def first(tmp_path, monkeypatch):
    """`first.yaml`, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the command line adds the current folder
    write("first", model={"policy": "some/policy", "rewards": FIRST}, data={"datasets": [{"json_path": "x.jsonl"}]})


def write(name, **sections):
    Path(f"{name}.yaml").write_text(yaml.safe_dump(sections))


def parsed(*args):
    return parse(["--config", "first.yaml", *args])


def plain(settings):
    return settings.as_dict() if hasattr(settings, "as_dict") else settings


# ---------------------------------------------------------------------------------------------------------------- lists


def alone(rewards):
    """Parse a list of rewards without a list before it."""
    write("alone", model={"policy": "some/policy", "rewards": rewards}, data={"datasets": "x"})
    return [plain(reward) for reward in parse(["--config", "alone.yaml"]).model.rewards]


@few(1, slow=True)
@pytest.mark.parametrize("form", ["file", "inline", "flag", "flag with a space"])
def test_a_later_list_replaces_an_earlier_one_of_the_same_length(form):
    write("second", model={"rewards": SECOND})
    args = {
        "file": ["--config", "second.yaml"],
        "inline": ["--config", json.dumps({"model": {"rewards": SECOND}})],
        "flag": [f"--model.rewards={json.dumps(SECOND)}"],
        "flag with a space": ["--model.rewards", json.dumps(SECOND)],
    }[form]
    assert [plain(reward) for reward in parsed(*args).model.rewards] == alone(SECOND)


def test_callbacks_take_no_settings_of_what_stood_in_their_place():
    bar = {"class_path": "RichProgressBar", "init_args": {"refresh_rate": 7}}
    checkpoint = {"class_path": "ModelCheckpoint", "init_args": {"save_top_k": 2, "monitor": "val/reward"}}
    write("second", trainer={"callbacks": [bar, checkpoint]})
    write("third", trainer={"callbacks": [{"class_path": "ModelCheckpoint"}, {"class_path": "ModelCheckpoint"}]})
    for callback in parsed("--config", "second.yaml", "--config", "third.yaml").trainer.callbacks:
        assert (callback.init_args.save_top_k, callback.init_args.monitor) == (1, None)


@SLOW
def test_a_list_deep_inside_an_object_is_replaced():
    trees = [
        [{"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 5}}],
        [{"class_path": "ModelCheckpoint", "init_args": {"dirpath": "there"}}],
    ]
    Path("holders.py").write_text(
        "from lightning.pytorch.callbacks import Callback\n\n\n"
        "class Holder(Callback):\n    def __init__(self, inner: list[Callback]):\n        pass\n"
    )
    for name, inner in zip(("second", "third"), trees, strict=True):
        write(name, trainer={"callbacks": {"class_path": "holders.Holder", "init_args": {"inner": inner}}})
    (inner,) = parsed("--config", "second.yaml", "--config", "third.yaml").trainer.callbacks.init_args.inner
    assert (inner.init_args.dirpath, inner.init_args.every_n_train_steps) == ("there", None)


@few(2, slow=True)
@pytest.mark.parametrize(
    "args",
    [
        ["--config", '{"model": {"rewards+": [{"class_path": "grpo_lightning.rewards.Format"}]}}'],
        ["--config", '{"model": {"rewards+": {"class_path": "grpo_lightning.rewards.Format"}}}'],
        ["--model.rewards+=grpo_lightning.rewards.Format"],
        ['--model.rewards+=[{"class_path": "grpo_lightning.rewards.Format"}]'],
        ["--model.rewards+", "grpo_lightning.rewards.Format"],
    ],
)
def test_a_plus_appends(args):
    appended = {"class_path": "grpo_lightning.rewards.Format"}
    assert [plain(reward) for reward in parsed(*args).model.rewards] == alone([*FIRST, appended])


def test_settings_of_the_same_class_still_add_up():
    write("second", model={"scheduler": {"class_path": "Cosine", "init_args": {"warmup_ratio": 0.3}}})
    config = parsed("--config", "second.yaml", "--model.scheduler.min_lr_ratio=0.1", "--model.scheduler.warmup_steps=2")
    assert config.model.scheduler.class_path == "grpo_lightning.schedules.Cosine"
    assert config.model.scheduler.init_args.as_dict() == {"warmup_ratio": 0.3, "warmup_steps": 2, "min_lr_ratio": 0.1}


# -------------------------------------------------------------------------------------------------------------- loggers

FOLDER = Path("runs/mine/version_0")
LOGGERS = "lightning.pytorch.loggers"
WANDB, TENSORBOARD, CSV = "WandbLogger", "TensorBoardLogger", "CSVLogger"


def in_yaml(key, value):
    return ["--config", json.dumps({"trainer": {key: value}})]


TWO = {
    "names": in_yaml("logger", [TENSORBOARD, WANDB]),
    "names, the other way": in_yaml("logger", [WANDB, TENSORBOARD]),
    "class paths": in_yaml("logger", [{"class_path": f"{LOGGERS}.{name}"} for name in (WANDB, TENSORBOARD)]),
    "with the default's save_dir": in_yaml(
        "logger", [{"class_path": TENSORBOARD, "init_args": {"save_dir": "runs"}}, {"class_path": WANDB}]
    ),
    "appended": in_yaml("logger+", {"class_path": WANDB}),
    "appended by a flag": ["--trainer.logger+=WandbLogger"],
    "a list of names in a flag": ["--trainer.logger=[WandbLogger, TensorBoardLogger]"],
    "flags": ["--trainer.logger=TensorBoardLogger", "--trainer.logger+", "WandbLogger"],
    "with CSV": in_yaml("logger", [WANDB, CSV, TENSORBOARD]),
    "true and one more": ["--trainer.logger=true", "--trainer.logger+=WandbLogger"],
}


def placed(*args):
    """The loggers of a run in `FOLDER`, as objects."""
    trainer = parsed("--run_name=mine", *args).trainer
    runs.place(trainer, FOLDER)
    parser = ArgumentParser()
    parser.add_argument("--logger", type=Logger | Iterable[Logger] | bool | None)
    build = getattr(parser, "instantiate", None) or parser.instantiate_classes  # renamed in 4.49
    made = build(Namespace(logger=trainer.logger)).logger
    return made if isinstance(made, list) else [made]


@few(3)
@pytest.mark.parametrize("form", TWO)
def test_loggers_of_which_one_is_wandb(form):
    loggers = placed(*TWO[form])
    by_name = {type(logger).__name__: logger for logger in loggers}
    assert {"TensorBoardLogger", "WandbLogger"} < by_name.keys()
    assert len(by_name) == len(loggers)
    wandb = by_name.pop("WandbLogger")
    assert (wandb._wandb_init["name"], Path(wandb.save_dir)) == ("mine", FOLDER)
    assert {Path(logger.log_dir) for logger in by_name.values()} == {FOLDER}
    assert loggers[0] is not wandb, "Lightning keeps checkpoints where the first logger says"


@pytest.mark.parametrize("args", [["--trainer.logger=true"], in_yaml("logger", True), []])
def test_true_is_the_default_loggers(args):
    loggers = placed(*args)
    assert [type(logger) for logger in loggers] == [TensorBoardLogger, MetricsLogger]
    assert {Path(logger.log_dir) for logger in loggers} == {FOLDER}


@few(3)
@pytest.mark.parametrize("name", [TENSORBOARD, CSV, WANDB])
@pytest.mark.parametrize("form", ["flag", "name", "class_path"])
def test_one_logger(name, form):
    yaml_forms = {"name": name, "class_path": {"class_path": f"{LOGGERS}.{name}"}}
    loggers = placed(*([f"--trainer.logger={name}"] if form == "flag" else in_yaml("logger", yaml_forms[form])))
    files = [logger for logger in loggers if not isinstance(logger, WandbLogger)]
    assert {Path(logger.log_dir) for logger in files} == {FOLDER}
    assert loggers[0] is files[0]
    assert [type(logger).__name__ for logger in loggers if name == type(logger).__name__] == [name]


def test_a_name_of_a_loggers_own_is_kept():
    own = [{"class_path": WANDB, "init_args": {"name": "special", "project": "p"}}, TENSORBOARD]
    (wandb,) = [logger for logger in placed(*in_yaml("logger", own)) if isinstance(logger, WandbLogger)]
    assert (wandb._wandb_init["name"], wandb._wandb_init["project"]) == ("special", "p")


def test_without_loggers_there_are_none():
    trainer = parsed("--trainer.logger=false").trainer
    runs.place(trainer, FOLDER)
    assert trainer.logger is False


# ------------------------------------------------------------------------------------------------ every key is a flag


@pytest.mark.parametrize(
    "args",
    [
        ["--model.policy.chunk_size=8", "--model.policy.lora.rank=4"],
        ["--model.policy.init_args.chunk_size=8", "--model.policy.init_args.lora.rank", "4"],
        ["--config", "{model: {policy: {chunk_size: 8, lora: {rank: 4}}}}"],
        ["--config", "{model: {policy: {class_path: PolicyLoader, init_args: {chunk_size: 8, lora: {rank: 4}}}}}"],
    ],
)
def test_settings_of_a_policy_given_by_its_name(args):
    policy = parsed(*args).model.policy
    assert policy.class_path.endswith(".PolicyLoader")
    assert (policy.init_args.name, policy.init_args.chunk_size) == ("some/policy", 8)
    assert policy.init_args.lora.rank == 4


@pytest.mark.parametrize("flag", ["--model.policy=another/policy", "--model.policy.name=another/policy"])
def test_the_name_of_a_policy_with_settings_is_changed_and_its_settings_stay(flag):
    write("second", model={"policy": {"class_path": "PolicyLoader", "init_args": {"name": "x", "chunk_size": 8}}})
    policy = parsed("--config", "second.yaml", flag).model.policy
    assert (policy.init_args.name, policy.init_args.chunk_size) == ("another/policy", 8)


def test_a_policy_by_its_name_alone_is_text():
    assert parsed("--model.policy=another/policy").model.policy == "another/policy"


def test_settings_of_the_engine_that_a_run_has_by_default():
    config = parsed("--model.engine.max_rows=4")
    assert config.model.engine.class_path == "grpo_lightning.LocalEngine"
    assert config.model.engine.init_args.max_rows == 4


@pytest.mark.parametrize(
    "args",
    [
        ["--model.engine=LocalEngine", "--model.engine.max_rows=4"],
        ["--config", "{model: {engine: {class_path: LocalEngine, init_args: {max_rows: 4}}}}"],
        ["--config", "{model: {engine: LocalEngine}}", "--model.engine.max_rows=4"],
        ["--config", "{model: {engine: {max_rows: 4}}}"],
    ],
)
def test_an_engine_by_its_name(args):
    assert parsed(*args).model.engine.init_args.max_rows == 4


OWN_ENGINES = """
from grpo_lightning.rollout.engine import RolloutEngine

class {0}({1}):
    def __init__(self, url="", seconds=1): ...
    def connect(self, policy, tokenizer, sharding): ...
    def sync_weights(self, policy): ...
    def generate(self, prompts, num_generations, sampling, seeds, progress=None): ...
"""


def test_an_engine_of_ones_own_may_lack_optional_arguments():
    Path("first_engine.py").write_text(OWN_ENGINES.format("Own", "RolloutEngine"))
    config = parsed("--model.engine=first_engine.Own", "--model.engine.seconds=2")
    assert plain(config.model.engine) == {"class_path": "first_engine.Own", "init_args": {"url": "", "seconds": 2}}


def test_a_class_that_is_no_engine_is_named():
    Path("second_engine.py").write_text(OWN_ENGINES.format("Own", "object"))
    with pytest.raises(ConfigurationError, match=r"model.engine: second_engine.Own is not a subclass of RolloutEngine"):
        parsed("--model.engine=second_engine.Own")


@SLOW
def test_settings_of_a_schedule_need_one_and_say_so():
    config = parsed("--model.scheduler=Cosine", "--model.scheduler.warmup_ratio=0.1")
    assert config.model.scheduler.init_args.warmup_ratio == 0.1
    for args in (["--model.scheduler.warmup_ratio=0.1"], ["--config", "{model: {scheduler: {warmup_ratio: 0.1}}}"]):
        with pytest.raises(ConfigurationError, match=r"^model.scheduler has no class yet, .*warmup_ratio.* Cosine,"):
            parsed(*args)


# ------------------------------------------------------------------------------------- settings in the place of values


@few(5)
@pytest.mark.parametrize(
    "value",
    [
        "{class_path: PolicyLoader, init_args: {name: another/policy}}",
        "{name: another/policy}",
        "{init_args: {name: another/policy, dtype: bfloat16}}",
        "{name: another/policy, dtype: bfloat16}",
    ],
)
@pytest.mark.parametrize("form", ["flag", "flag with a space", "file", "section", "config"])
def test_a_policy_by_its_settings(value, form):
    Path("p.yaml").write_text(value)
    args = {
        "flag": [f"--model.policy={value}"],
        "flag with a space": ["--model.policy", value],
        "file": ["--model.policy=p.yaml"],
        "section": [f"--model={{policy: {value}}}"],
        "config": ["--config", f"{{model: {{policy: {value}}}}}"],
    }[form]
    policy = parsed(*args).model.policy
    assert policy.class_path.endswith(".PolicyLoader")
    assert policy.init_args.name == "another/policy"
    assert ("bfloat16" in value) == (policy.init_args.dtype == "bfloat16")


MODEL = """\
policy: another/policy
optimizer: AdamW
scheduler: {class_path: Cosine, init_args: {warmup_ratio: 0.3}}
"""


@pytest.mark.parametrize("form", ["file", "inline"])
def test_short_names_in_the_settings_of_a_section(form):
    Path("m.yaml").write_text(MODEL)
    value = {"file": "m.yaml", "inline": json.dumps(yaml.safe_load(MODEL))}[form]
    model = parsed("--model", value, "--model.policy.chunk_size=8").model
    assert (model.policy.init_args.name, model.policy.init_args.chunk_size) == ("another/policy", 8)
    assert model.optimizer.class_path == "grpo_lightning.optimizers.AdamW"
    assert model.scheduler.class_path == "grpo_lightning.schedules.Cosine"
    assert model.scheduler.init_args.warmup_ratio == 0.3


@pytest.mark.parametrize("value", ["{class_path: AdamW, init_args: {lr: 0.5}}", "o.yaml"])
def test_a_short_name_in_the_settings_of_one_object(value):
    Path("o.yaml").write_text("class_path: AdamW\ninit_args:\n  lr: 0.5\n")
    optimizer = parsed(f"--model.optimizer={value}").model.optimizer
    assert (optimizer.class_path, optimizer.init_args.lr) == ("grpo_lightning.optimizers.AdamW", 0.5)


@SLOW
def test_loggers_in_the_settings_of_the_trainer():
    Path("t.yaml").write_text("logger: true\n")
    assert [logger.class_path for logger in parsed("--trainer", "t.yaml").trainer.logger] == [
        logger.class_path for logger in parsed().trainer.logger
    ]


@pytest.mark.parametrize(
    ("flag", "text", "key"),
    [
        ("--data", "batch_size: 1\nbatch_size: 2\n", "batch_size"),
        ("--model", "policy: x\nsampling: {top_p: 0.9,\n  top_p: 0.8}\n", "top_p"),
        ("--trainer", "max_steps: 1\nmax_steps: 2\n", "max_steps"),
        ("--model.objective", "beta: 0.1\nbeta: 0.2\n", "beta"),
        ("--model.optimizer", "class_path: AdamW\nclass_path: Muon\n", "class_path"),
        ("--model.policy", "name: x\nname: y\n", "name"),
    ],
)
def test_a_key_given_twice_in_the_file_of_a_flag(flag, text, key):
    Path("s.yaml").write_text(text)
    for args in ([flag, "s.yaml"], [f"{flag}=s.yaml"]):
        with pytest.raises(ConfigurationError, match=rf"^s\.yaml has the key {key} twice, in lines \d and \d\. Keep"):
            parsed(*args)


@pytest.mark.parametrize(
    ("flag", "value", "key"),
    [
        ("--model.sampling", "{temperature: 1, temperature: 0.5}", "temperature"),
        ("--model", "{num_generations: 2, num_generations: 4}", "num_generations"),
        ("--model.policy", "{name: x, name: y}", "name"),
        ("--model.policy.lora", "{rank: 4, rank: 8}", "rank"),
        ("--data.datasets", "[{json_path: x.jsonl, json_path: y.jsonl}]", "json_path"),
    ],
)
def test_a_key_given_twice_in_the_settings_of_a_flag(flag, value, key):
    with pytest.raises(ConfigurationError, match=rf"^{flag} has the key {key} twice, in line 1\. Keep one"):
        parsed(flag, value)


def test_text_with_a_word_twice_is_text():
    text = "Rule: be short\nRule: be right"
    assert parsed("--data.system_prompt", text).data.system_prompt == text


def test_what_is_wrong_in_the_file_of_a_flag_is_named_with_the_file():
    Path("m.yaml").write_text("sampling: {temprature: 1}\n")
    with pytest.raises(ConfigurationError, match=r"^m\.yaml: there is no key model\.sampling\.temprature\."):
        parsed("--model", "m.yaml")


@SLOW
def test_a_file_that_is_a_value_is_no_settings():
    Path("mix.yaml").write_text("datasets: [{json_path: x.jsonl}]\n")
    assert parsed("--data.datasets", "mix.yaml").data.datasets == "mix.yaml"
    Path("train.jsonl").write_text('{"a": 1}\n{"a": 1}\n')
    assert parsed("--data.datasets=train.jsonl").data.datasets == [{"json_path": "train.jsonl"}]


@few(6, slow=True)
@pytest.mark.parametrize("key", ["datasets", "val_datasets", "test_datasets"])
@pytest.mark.parametrize("form", ["flag", "flag with a space", "appended", "section", "file", "config"])
def test_the_path_of_a_data_file_is_never_read_as_settings(key, form):
    rows = {"a.csv": "question,answer\nq,1\n", "a.json": '[{"question": "q"}]', "a.jsonl": '{"question": "q"}'}
    for path, text in rows.items():
        Path(path).write_text(text)
        Path("section.yaml").write_text(f"{key}: {path}\n")
        args = {
            "flag": [f"--data.{key}={path}"],
            "flag with a space": [f"--data.{key}", path],
            "appended": [f"--data.{key}=[b.csv]", f"--data.{key}+={path}"],
            "section": ["--data", f"{{{key}: {path}}}"],
            "file": ["--data", "section.yaml"],
            "config": ["--config", f"{{data: {{{key}: {path}}}}}"],
        }[form]
        before = [{"json_path": "b.csv"}] if form == "appended" else []
        assert parsed(*args).data[key] == [*before, {"json_path": path}]


@pytest.mark.parametrize("key", ["datasets", "val_datasets", "test_datasets"])
def test_what_is_wrong_in_an_entry_is_named_with_its_own_list(key):
    config = parsed(f"--data.{key}=[{{json_path: x.jsonl, spilt: train}}]")
    with pytest.raises(ValueError, match=rf"^{key}, entry 1: unknown keys 'spilt' \(did you mean 'split'\?\)"):
        instantiate(config, "data")


@SLOW
@pytest.mark.parametrize("key", ["datasets", "val_datasets", "test_datasets"])
@pytest.mark.parametrize("form", ["flag", "section", "config"])
def test_data_files_in_a_list(key, form):
    Path("train.jsonl").write_text('{"prompt": "a"}\n')  # there or not, and beside an entry
    args = {
        "flag": [f"--data.{key}=[train.jsonl, nowhere.jsonl, {{json_path: x.jsonl}}]"],
        "section": ["--data", f"{{{key}: [train.jsonl, nowhere.jsonl, {{json_path: x.jsonl}}]}}"],
        "config": ["--config", f"{{data: {{{key}: [train.jsonl, nowhere.jsonl, {{json_path: x.jsonl}}]}}}}"],
    }[form]
    config = parsed(*args)
    assert config.data[key] == [{"json_path": name} for name in ("train.jsonl", "nowhere.jsonl", "x.jsonl")]
    (data,) = instantiate(config, "data")
    assert [entry.json_path for entry in getattr(data, key)] == ["train.jsonl", "nowhere.jsonl", "x.jsonl"]


@pytest.mark.parametrize(
    "args",
    [
        ["--data.datasets+=b.jsonl"],
        ["--data.datasets+=[b.jsonl]"],
        ["--config", "{data: {datasets+: b.jsonl}}"],
        ["--config", "{data: {datasets+: [b.jsonl]}}"],
    ],
)
def test_a_data_file_is_appended(args):
    assert parsed(*args).data.datasets == [{"json_path": "x.jsonl"}, {"json_path": "b.jsonl"}]


@pytest.mark.parametrize("form", ["flag", "config"])
@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("3", r"data\.datasets\[0\] must be settings \(key: value\), got 3\.$"),
        (
            "openai/gsm8k",
            r"^data\.datasets, entry 1: 'openai/gsm8k' is not a data file .* write {dataset: openai/gsm8k}",
        ),
        (
            "mix.yaml",
            r"^data\.datasets, entry 1: 'mix\.yaml' is not a data file .* give a YAML file of entries on its own",
        ),
    ],
)
def test_what_is_no_entry_is_told_what_to_write(entry, said, form):
    flag, config = [f"--data.datasets=[{entry}]"], ["--config", f"{{data: {{datasets: [{entry}]}}}}"]
    with pytest.raises(ConfigurationError, match=said):
        parsed(*(flag if form == "flag" else config))


# ------------------------------------------------------------------------------------------- arguments without a type


class Untyped:
    """A reward whose required argument has no annotation."""

    def __init__(self, bonus, scale=None):
        self.values = (bonus, scale)

    def __call__(self, completions, **columns):
        return [1.0 for _ in completions]


class Derived(Untyped):
    """A reward that inherits the argument."""

    def __init__(self, *, factor: float = 1.0, **kwargs):
        super().__init__(**kwargs)


class Nullable:
    """A reward whose required argument may be null."""

    def __init__(self, bonus: float | None):
        self.bonus = bonus

    def __call__(self, completions, **columns):
        return [1.0 for _ in completions]


def path_of(kind):
    return f"{kind.__module__}.{kind.__qualname__}"


@pytest.mark.parametrize("kind", [Untyped, Derived])
@pytest.mark.parametrize("form", ["name", "class", "weighted"])
def test_a_required_argument_without_a_type_must_have_a_value(kind, form):
    alone = {"class_path": path_of(kind)}
    weighted = {"class_path": WEIGHTED, "init_args": {"reward": alone, "name": "own"}}
    reward = {"name": path_of(kind), "class": alone, "weighted": weighted}[form]
    place = r"model\.rewards\[1\]" + (r"\.init_args\.reward" if form == "weighted" else "")
    said = rf"{place}: .*\.{kind.__name__} requires the argument 'bonus', which has no value\. Set it: init_args: "
    remedy = r".*annotate the argument in Untyped.__init__, for example `bonus: float \| None`"
    with pytest.raises(ConfigurationError, match=said + remedy):
        parsed(f"--model.rewards={json.dumps([FIRST[1], reward])}")


@SLOW
@pytest.mark.parametrize(
    ("kind", "given", "values"),
    [(Untyped, {"bonus": 3}, {"bonus": 3, "scale": None}), (Nullable, {"bonus": None}, {"bonus": None})],
)
def test_a_given_value_or_an_annotated_null_is_taken(kind, given, values):
    rewards = json.dumps([{"class_path": path_of(kind), "init_args": given}])
    (reward,) = parsed(f"--model.rewards={rewards}").model.rewards
    assert plain(reward)["init_args"] == values


def brief(completions, **columns):
    """A reward that is a function."""
    return [1.0 for _ in completions]


def reward_maker(value=1.0):
    """A function that creates a reward."""
    return lambda completions, **columns: [value for _ in completions]


@pytest.mark.parametrize("form", ["flag", "config"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_reward_function_given_as_a_class_is_named_with_what_to_write(form, is_weighted):
    path = path_of(brief)
    reward, key, alone = {"class_path": path}, "model.rewards[1]", f"- {path}"
    if is_weighted:
        reward, key, alone = {"class_path": WEIGHTED, "init_args": {"reward": reward}}, f"{key}.init_args.reward", path
    rewards = [FIRST[1], reward]
    write("second", model={"rewards": rewards})
    args = {"flag": [f"--model.rewards={json.dumps(rewards)}"], "config": ["--config", "second.yaml"]}[form]
    with pytest.raises(ConfigurationError) as error:
        parsed(*args)
    where = {"flag": "on the command line", "config": "second.yaml"}[form]
    assert str(error.value).startswith(f"{where}: {key}: {path} is a function: write `{alone}`. ")


def test_a_function_that_creates_a_reward_is_taken():
    rewards = json.dumps([{"class_path": path_of(reward_maker), "init_args": {"value": 2.0}}])
    (reward,) = parsed(f"--model.rewards={rewards}").model.rewards
    assert plain(reward) == {"class_path": path_of(reward_maker), "init_args": {"value": 2.0}}


# --------------------------------------------------------------------------------------------------------- environments

TOOLS = "grpo_lightning.environments.Tools"
CALCULATOR = "grpo_lightning.environments.calculator"


class Bench(Environment):
    """An environment with texts that are no functions."""

    def __init__(self, tools: list[str]) -> None:
        self.names = tools

    def step(self, completion):
        return Step(done=True)


@pytest.mark.parametrize("form", ["flag", "config"])
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"class_path": TOOLS, "init_args": {"tools": ["grpo_lightning.environments.calculatorr"]}},
            f".init_args.tools[0]: grpo_lightning.environments has no 'calculatorr'. Did you mean {CALCULATOR}?",
        ),
        (
            {"class_path": "Tools", "init_args": {"tools": [CALCULATOR, "mytoolz.area"]}},
            ".init_args.tools[1]: there is no module 'mytoolz' for mytoolz.area. Searched ",
        ),
        (["mytoolz.area"], "[0]: there is no module 'mytoolz' for mytoolz.area. Searched "),
    ],
)
def test_a_tool_that_cannot_be_imported_is_named(form, environment, said):
    write("second", model={"environment": environment})
    args = {"flag": [f"--model.environment={json.dumps(environment)}"], "config": ["--config", "second.yaml"]}[form]
    with pytest.raises(ConfigurationError) as error:
        parsed(*args)
    where = {"flag": "on the command line", "config": "second.yaml"}[form]
    assert str(error.value).startswith(f"{where}: model.environment{said}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("form", ["flag", "config", "section"])
@pytest.mark.parametrize(
    ("environment", "class_path"),
    [
        ("GuessTheNumber", "grpo_lightning.environments.games.GuessTheNumber"),
        ({"class_path": "GuessTheNumber"}, "grpo_lightning.environments.games.GuessTheNumber"),
        ({"class_path": "Tools", "init_args": {"tools": [CALCULATOR]}}, TOOLS),
    ],
)
def test_an_environment_by_its_name(form, environment, class_path):
    write("second", model={"environment": environment})
    write("section", environment=environment)
    args = {
        "flag": [f"--model.environment={json.dumps(environment).strip(chr(34))}"],
        "config": ["--config", "second.yaml"],
        "section": ["--model=section.yaml"],
    }[form]
    assert locate(parsed(*args).model.environment.class_path) is locate(class_path)


def test_tools_by_their_names():
    search = {"class_path": "Search", "init_args": {"path": "rows.jsonl"}}
    given = {"class_path": "Tools", "init_args": {"tools": ["calculator", search, CALCULATOR, "os.getcwd"]}}
    write("second", model={"environment": given})
    first, second, *others = parsed("--config", "second.yaml").model.environment.init_args.tools
    assert [first, *others] == [calculator, calculator, os.getcwd]
    assert (second.class_path, second.init_args.path) == ("grpo_lightning.environments.Search", "rows.jsonl")
    write("third", model={"environment": ["calculator"]})
    assert parsed("--config", "third.yaml").model.environment == [calculator]


def test_an_unknown_argument_of_a_tool_is_named_with_those_of_the_tool():
    search = {"class_path": "grpo_lightning.environments.Search", "init_args": {"pth": "rows.jsonl"}}
    write("second", model={"environment": {"class_path": TOOLS, "init_args": {"tools": [search]}}})
    with pytest.raises(
        ConfigurationError, match=r"init_args\.pth\. Did you mean .*\.tools\[0\]\.init_args\.path\?"
    ) as error:
        parsed("--config", "second.yaml")
    assert str(error.value).endswith("Keys of model.environment.init_args.tools[0].init_args: path, top_k.")


def test_a_text_in_a_class_of_ones_own_is_no_tool():
    write("second", model={"environment": {"class_path": path_of(Bench), "init_args": {"tools": ["calculator"]}}})
    assert parsed("--config", "second.yaml").model.environment.init_args.tools == ["calculator"]


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ("GuesTheNumber", "GuessTheNumber?"),
        ({"class_path": "Tools", "init_args": {"tools": ["calculatorr"]}}, f"Did you mean {CALCULATOR}?"),
        ({"init_args": {"tools": ["calculator"]}}, f"Did you mean {CALCULATOR}?"),
    ],
)
def test_a_name_like_that_of_an_environment_or_tool_is_suggested(environment, said):
    write("middle", model={"environment": {"class_path": "Tools", "init_args": {"tools": [CALCULATOR]}}})
    write("second", model={"environment": environment})
    with pytest.raises(ConfigurationError) as error:
        parsed("--config", "middle.yaml", "--config", "second.yaml")
    assert said in str(error.value)
    assert str(error.value).startswith("second.yaml: model.environment")
