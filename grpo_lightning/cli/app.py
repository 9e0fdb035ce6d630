"""LightningCLI with GRPO's module, data and defaults."""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from argparse import SUPPRESS
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonargparse
import lightning as L
from jsonargparse import Namespace
from jsonargparse._actions import _ActionConfigLoad, remove_actions
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from grpo_lightning.cli import config, explain, runs
from grpo_lightning.cli import resume as resuming
from grpo_lightning.cli.errors import ConfigurationError, plain_refusal, rank
from grpo_lightning.core.messages import quiet_libraries, show_messages
from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.training.signals import GracefulStop, end_launched

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger(__name__)

PARTS = {"model": GRPOLightningModule, "data": PromptDataModule}
LIMITS = {"max_epochs": None, "max_steps": -1, "max_time": None}
# The parser's own way out is sixty lines of usage: `parse_arguments` says what is wrong. It would also take the
# beginning of a flag for the flag, which a YAML key cannot be.
PARSING = {"exit_on_error": False, "allow_abbrev": False}
DESCRIPTIONS = {
    "fit": (
        "Train. Outputs go to runs/<run_name>/version_<N>. Without trainer.max_epochs, max_steps or max_time a run has "
        "one epoch. --ckpt_path auto goes on from the newest checkpoint of runs/<run_name> that can be resumed, in its "
        "folder, or starts afresh (where the recipe sends checkpoints elsewhere, it looks there, too); from "
        "--ckpt_path FILE, or the folder of a run for its newest, a run goes on in a new folder. Settings are those of "
        "the command line, never the checkpoint's. A job that SLURM has put back into the queue goes on as by auto. "
        "Checkpoints are written at the end of every epoch and every 15 minutes, the newest of each kept, unless "
        "trainer.callbacks has a ModelCheckpoint; and when Ctrl-C or SIGTERM stops the run after its step. "
        "--model.objective.help shows the settings of one object alone, --model.scheduler.help=Cosine those of a class."
    ),
    "validate": "Evaluate on data.val_datasets. --ckpt_path takes a file, or auto: the newest of runs/<run_name>.",
    "test": "Evaluate as validate does, logged as test/... --ckpt_path takes a file, or auto.",
    "predict": "Write completions to the prompts of the data. --ckpt_path takes a file, or auto.",
}


CKPT_PATH = {
    True: "auto goes on from the newest checkpoint of the run, or starts afresh; or a file, or the folder of a run.",
    False: "auto takes the newest checkpoint of the run; or a file, or the folder of a run. Null: the policy as it is.",
}
"""What --ckpt_path takes, for `fit` and for the others."""


class Parser(LightningArgumentParser):
    """How the settings of several files and flags come together, with short names in files.

    Objects of the same class are merged key by key; a later list replaces an earlier one, and `key+:` or `--key+`
    appends. jsonargparse merges lists of equal length entry by entry: a second list of rewards would take over the
    weights of the first. All access to the inside of jsonargparse is here.
    """

    expands_policy = False
    """Whether a policy given by its name alone is read as `PolicyLoader` with that name."""

    def _apply_actions(self, cfg: Any, parent_key: str = "", *args: Any, **kwargs: Any) -> Any:
        """Settings of a file, of an object inside one, or of the section `parent_key` (`--model m.yaml`)."""
        tree = {parent_key: cfg} if parent_key else cfg
        tree = config.in_tree(tree, expands_policy=self.expands_policy)
        return super()._apply_actions(tree[parent_key] if parent_key else tree, parent_key, *args, **kwargs)

    def keys(self) -> dict[str, config.Key]:
        """Its keys, without those that print something."""
        return {
            action.dest: config.Key(getattr(action, "_typehint", None), action.default, action.help or "")
            for action in self._actions
            if not re.search(r"^print_|^help$|\.help$", action.dest)
        }

    def settings_flags(self) -> set[str]:
        """The flags that take a file of settings as their value; for `data.datasets` a path is the value itself."""
        return {
            flag
            for flag, action in self._option_string_actions.items()
            if isinstance(action, _ActionConfigLoad)
            or (getattr(action, "_enable_path", False) and action.dest.rpartition(".")[2] not in config.MIXTURES)
        }

    def explain_key(self, key: str, text: str) -> None:
        """Say of a key what is true here."""
        for action in self._actions:
            if action.dest == key:
                action.help = text

    def _check_value_key(self, action: Any, value: Any, key: str, cfg: Any, append: bool = False) -> Any:  # noqa: FBT001, FBT002
        """One setting of a file. `cfg` has what came before: without it, nothing is merged."""
        is_replaced = cfg and not append and isinstance(cfg.get(action.dest), list)
        return super()._check_value_key(action, value, key, None if is_replaced else cfg, append)

    def add_class_arguments(self, class_type: Any, *args: Any, **kwargs: Any) -> list[str]:
        """Those of a logger need no folder: the command line gives it that of the run."""
        added = super().add_class_arguments(class_type, *args, **kwargs)
        if inspect.isclass(class_type) and issubclass(class_type, Logger):
            required: set[str] = getattr(self, "required_args", set())  # where older versions of jsonargparse keep it
            for action in self._actions:
                if action.dest == "save_dir" and (action.required or action.dest in required):
                    self.set_defaults({"save_dir": runs.SAVE_DIR})
                    action.required = False
                    required.discard(action.dest)
        return added

    def format_help(self, *args: Any) -> str:
        """The parser's own keys, then those of every object among them, and of the objects among those."""
        text = super().format_help(*args)
        described = set()
        for action in self._actions:
            hint = getattr(action, "_typehint", None)
            kind = config.settings_class(hint, action.default)
            # `data.val_datasets` has the settings of `data.datasets`, and `.help` those of its key.
            if kind is not None and kind not in described and not action.dest.endswith(".help"):
                described.add(kind)
                num_passed = config.num_call_arguments(hint)
                below = Parser(description="", add_help=False, usage=SUPPRESS)
                below.add_class_arguments(
                    kind, action.dest, fail_untyped=False, skip={num_passed} if num_passed else set()
                )
                remove_actions(below, _ActionConfigLoad)  # repeats the key itself
                text += "\n" + below.format_help()
        return text

    def parse_args(self, args: Sequence[str] | None = None, *others: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Flags: one that gives a list follows one that empties it, which leaves nothing to merge with."""
        # An action that takes `--key+` takes lists.
        lists = {flag for flag in self._option_string_actions if f"{flag}+" in self._option_string_actions}
        given = []
        for arg in args or ():
            flag = arg.partition("=")[0]
            given += [f"{flag}=[]", arg] if flag in lists else [arg]
        return super().parse_args(None if args is None else given, *others, **kwargs)


class ConfigFile(SaveConfigCallback):
    """config.yaml in the run's folder; a continued run keeps the one it started with beside it."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write it."""
        folder = trainer.log_dir  # a broadcast: on every rank
        if not self.already_saved and trainer.is_global_zero and folder and (Path(folder) / "config.yaml").is_file():
            runs.keep_old_config(Path(folder), self.parser.dump(self.config, skip_none=False))
        super().setup(trainer, pl_module, stage)


class GRPOCLI(LightningCLI):
    """LightningCLI with GRPO's module, data and defaults."""

    def __init__(self, args: Sequence[str], **kwargs: Any) -> None:
        self.command = args[0]
        super().__init__(args=list(args), **kwargs)

    @classmethod
    def of(cls, args: Sequence[str], module_class: type[GRPOLightningModule] | None = None) -> Self:
        """The command line of these arguments, run."""
        show_messages()
        if rank():  # every rank says the same
            logging.getLogger("grpo_lightning").setLevel(logging.WARNING)
        # The fields of dataclasses (objective, sampling) are described below them, which is not read by default.
        asks_for_help = any("help" in arg or arg == "-h" for arg in args)
        jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=asks_for_help)  # they take a second
        return cls(
            args,
            model_class=module_class or GRPOLightningModule,
            datamodule_class=PromptDataModule,
            save_config_callback=ConfigFile,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            auto_configure_optimizers=False,
            parser_class=Parser,
            parser_kwargs={
                **PARSING,
                "prog": "grpo-lightning",
                args[0]: {**PARSING, "description": DESCRIPTIONS[args[0]]},
            },
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The one that is given: to build the parsers of all four takes two seconds."""
        return {self.command: super().subcommands()[self.command]}

    def setup_parser(self, *args: Any, **kwargs: Any) -> None:
        """Build the parser; what Lightning says of its own arguments is not all true here."""
        super().setup_parser(*args, **kwargs)
        self.subparser.explain_key("ckpt_path", CKPT_PATH[self.command == "fit"])

    @property
    def subparser(self) -> Parser:
        """The parser of the command."""
        parser = self._subcommand_parsers[self.command]
        assert isinstance(parser, Parser)
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Defaults that suit short RL runs; a recipe or flag overrides every one."""
        parser.add_argument(
            "--run_name",
            type=str | None,
            default=None,
            help="Outputs go to runs/<run_name>/version_<N>; null takes the name of the first --config.",
        )
        parser.set_defaults(
            {
                "trainer.logger": runs.default_loggers(),
                # Its settings are keys of their own, as those of the optimizer are.
                "model.engine": {"class_path": "grpo_lightning.LocalEngine"},
                # Every optimizer step is a rollout: Lightning's 50 would hide short runs.
                "trainer.log_every_n_steps": 1,
                # Sampling from an untrained policy before training starts proves nothing and takes long.
                "trainer.num_sanity_val_steps": 0,
            }
        )
        assert isinstance(parser, Parser)
        parser.explain_key(
            "trainer.max_epochs",
            "Stop after this many epochs. One, if neither max_steps nor max_time is given either.",
        )

    # --------------------------------------------------------------------------------------------------- configuration

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, and say in a few lines what is wrong. Raises: ConfigurationError."""
        config.check_positions(args)
        args, notices = config.find_configs(args)
        subparser = self.subparser
        keys = subparser.keys()
        given = config.read(args, subparser.settings_flags())  # a syntax error is said with its file and line
        subparser.expands_policy = expands = config.has_policy_settings(source.tree for source in given)
        args = config.in_flags(args, expands_policy=expands)
        given = [replace(source, tree=config.in_tree(source.tree, expands_policy=expands)) for source in given]
        self.given = given
        if problem := explain.below_one_value(keys, given):
            raise ConfigurationError(problem)
        try:
            self.config = parser.parse_args(args)
        except jsonargparse.ArgumentError as error:
            raise ConfigurationError(explain.explain(error.message, keys, given)) from error
        settings = self.config[self.config.subcommand]
        if problem := explain.unknown_name(settings.trainer):
            raise ConfigurationError(config.with_origin(problem, given))
        settings.run_name = runs.run_name(settings.run_name, config.config_files(args))
        if self.config.subcommand == "fit" and all(
            settings.trainer.get(name) == unset for name, unset in LIMITS.items()
        ):
            # Lightning would train for 1000 epochs without a word.
            settings.trainer.max_epochs = 1
            notices.append("No trainer.max_epochs, max_steps or max_time: training for one epoch.")
        if rank() == 0:
            for notice in notices:
                log.info(notice)

    def _parse_ckpt_path(self) -> None:
        """Find the checkpoint of `auto`; take no settings from it, but say which differ.

        Lightning's own method overwrites flags by what stands in the checkpoint.
        """
        settings, to_train = self.config[self.config.subcommand], self.config.subcommand == "fit"
        self.continued: Path | None = None
        given = settings.get("ckpt_path")
        if to_train and given is None and resuming.is_requeued():
            given = "auto"
        if given == "auto":
            settings.ckpt_path = self.newest_checkpoint(settings)
            if settings.ckpt_path and to_train:
                folder = runs.runs_folder(settings.trainer, settings.run_name)
                self.continued = runs.version_of(Path(settings.ckpt_path), folder)
        elif given and (folders := resuming.folders_of_run(Path(given))):
            path, skipped = resuming.newest(folders, to_train=to_train)
            if path is None:
                reasons = "".join(f"\n  {other}: {why}" for other, why in skipped.items())
                raise ConfigurationError(f"--ckpt_path: {given} has no checkpoint that can be used.{reasons}")
            self.say_found(path, skipped, Path(given))
            settings.ckpt_path = str(path)
        resuming.check_there(settings.get("ckpt_path"), to_train=to_train)
        if settings.get("ckpt_path") and Path(settings.ckpt_path).exists() and rank() == 0:
            self._dump_config()
            if said := resuming.notice(
                Path(settings.ckpt_path),
                self.config_dump,
                config.defaults_of_null(self.subparser.keys()),
            ):
                log.info(said)

    def newest_checkpoint(self, settings: Namespace) -> str | None:
        """The newest complete checkpoint of the run; None if it has none yet.

        Raises:
            ConfigurationError: If there is none and nothing is trained, so that there is nothing to start afresh.
        """
        folder, to_train = runs.runs_folder(settings.trainer, settings.run_name), self.config.subcommand == "fit"
        elsewhere = resuming.folders_elsewhere(settings.trainer, folder)
        path, skipped = resuming.newest([*resuming.folders_of_run(folder), *elsewhere], to_train=to_train)
        self.say_found(path, skipped, folder)
        where = " or ".join([f"{folder}/version_*/checkpoints", *map(str, elsewhere)])
        if path is None and not to_train:
            raise ConfigurationError(
                f"--ckpt_path auto: there is no complete checkpoint in {where}. Give a file, name the run "
                "(--run_name), or leave --ckpt_path out for the policy as it is."
            )
        if path is None and rank() == 0:
            log.info(f"No checkpoint in {where} yet: starting afresh.")
        return None if path is None else str(path)

    def say_found(self, path: Path | None, skipped: Mapping[Path, str], folder: Path) -> None:
        """Which checkpoint is taken, and why newer ones are not."""
        said = [f"Skipped {other}: {why}." for other, why in skipped.items()]
        if path is not None:
            said.append(f"Checkpoint: {path}, the newest of {folder}.")
        if rank() == 0:
            for line in said:
                log.info(line)

    # --------------------------------------------------------------------------------------------------------- objects

    def before_instantiate_classes(self) -> None:
        """What is shown and written whatever the recipe's own callbacks are."""
        settings = self.config[self.subcommand]
        has_validation = settings.data.val_datasets is not None or settings.data.val_split is not None
        quiet_libraries(has_validation=has_validation)
        if self.subcommand != "fit":  # the callbacks of training have nothing to restore where nothing is trained
            warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks used to create")
        if settings.get("ckpt_path"):  # a run that goes on may have checkpoints in its folder, or take a new folder
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
            warnings.filterwarnings("ignore", message="The dirpath has changed from")

    def instantiate_classes(self) -> None:
        """Take a folder for the run and point the loggers at it."""
        self.asked = self.config
        self.folder: Path | None = None
        self.stop: GracefulStop | None = None
        settings = self.asked[self.subcommand]
        if settings.trainer.get("fast_dev_run"):  # logs nothing and saves nothing
            self.instantiate_parts()
            return
        folder = runs.runs_folder(settings.trainer, settings.run_name)
        self.folder = self.continued or runs.take_next(folder)
        self.config = self.asked.clone()
        runs.place(self.config[self.subcommand].trainer, self.folder)
        if self.subcommand == "fit":
            self.stop = GracefulStop(self.folder / "checkpoints", is_saving=runs.is_saving(settings.trainer))
        try:
            self.instantiate_parts()
        except BaseException:
            self.leave_nothing()
            raise
        if rank() == 0:
            log.info(f"Run folder: {self.folder}")

    def instantiate_parts(self) -> None:
        """Make model, data and Trainer. Raises: ConfigurationError, if one of them refuses a setting."""
        try:
            super().instantiate_classes()
        except Exception as error:
            refusal = plain_refusal(error)
            if refusal is None:
                raise
            raise ConfigurationError(config.with_origin(str(refusal), self.given)) from error

    def leave_nothing(self) -> None:
        """After a run that did nothing: remove its folder, if it is this run's own and holds no results."""
        if self.folder is not None and self.continued is None and rank() == 0:
            runs.remove_without_results(self.folder)

    def _run_subcommand(self, subcommand: str) -> None:
        """Run the command; a run that a signal stopped says how to go on."""
        try:
            super()._run_subcommand(subcommand)
        except SIGTERMException:
            if self.stop is None or self.stop.stopped_at is None:
                raise
            if rank() == 0:
                log.info(self.stop.last_words())
            end_launched(self.trainer, seconds=60)
            raise SystemExit(self.stop.exit_code) from None
        except BaseException:
            if self.trainer.global_step == 0:
                self.leave_nothing()
            end_launched(self.trainer, seconds=5)
            raise

    def validate(self, *, verbose: bool = True, **kwargs: Any) -> None:
        """What LightningCLI runs for `validate`: Lightning's own table breaks long names and shows 16 digits."""
        self.trainer.validate(**kwargs, verbose=False)
        self.show_results(is_shown=verbose)

    def test(self, *, verbose: bool = True, **kwargs: Any) -> None:
        """What LightningCLI runs for `test`."""
        self.trainer.test(**kwargs, verbose=False)
        self.show_results(is_shown=verbose)

    def show_results(self, *, is_shown: bool) -> None:
        """Print the numbers of an evaluation, on the first rank."""
        if is_shown and self.trainer.is_global_zero:
            runs.print_results({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """The Trainer, with a line for a model summary."""
        # What is saved as config.yaml is what was asked for: with this run's folder in it, it could not be run again.
        self.config = self.asked
        settings = self.config_init[self.subcommand]
        own = settings.trainer.callbacks or []
        callbacks = runs.default_callbacks(str(self.subcommand), settings, own if isinstance(own, list) else [own])
        self.trainer_defaults = {"callbacks": callbacks}
        if any(isinstance(callback, runs.ParameterSummary) for callback in callbacks):
            kwargs["enable_model_summary"] = False  # Lightning's own
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (ValueError, ModuleNotFoundError) as error:  # settings that only the Trainer can judge
            raise ConfigurationError(f"trainer: {error}") from error
        except MisconfigurationException as error:
            if problem := explain.missing_accelerator(settings.trainer.accelerator):
                raise ConfigurationError(f"trainer.accelerator: {error} {problem}") from error
            raise
        for logger in trainer.loggers:
            runs.without_anonymous(logger)
        if self.stop is not None:
            trainer.callbacks.append(self.stop)  # type: ignore[attr-defined]
        return trainer


class ParsedCLI(GRPOCLI):
    """Stops at the checked configuration."""

    @classmethod
    def of(cls, args: Sequence[str], module_class: type[GRPOLightningModule] | None = None) -> Self:
        """The `fit` command line of these arguments, parsed."""
        return super().of(["fit", *args], module_class)

    def _parse_ckpt_path(self) -> None:
        """A checkpoint changes nothing that is planned."""

    def _set_seed(self) -> None:
        """Leave the process's generators alone."""

    def before_instantiate_classes(self) -> None:
        """Nothing is instantiated."""

    def instantiate_classes(self) -> None:
        """Instantiate nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


def instantiate(
    config: Namespace, names: Sequence[str], module_class: type[GRPOLightningModule] | None = None
) -> tuple[Any, ...]:
    """Parts of a parsed configuration as objects: "model", "data"."""
    made, parts = [], PARTS if module_class is None else PARTS | {"model": module_class}
    for name in names:
        parser = LightningArgumentParser()
        parser.add_lightning_class_args(parts[name], name)
        # Renamed in 4.49.
        build = getattr(parser, "instantiate", None) or parser.instantiate_classes
        made.append(build(Namespace({name: config[name]}))[name])
    return tuple(made)
