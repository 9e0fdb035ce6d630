"""LightningCLI with GRPO's module, data and defaults."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonargparse
import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from grpo_lightning.cli import diagnosis, run_folder, short_names, sources
from grpo_lightning.cli import resume as resuming
from grpo_lightning.cli.defaults import default_callbacks, default_loggers, is_saving, kind_of_default
from grpo_lightning.cli.errors import ConfigurationError, plain_refusal, rank
from grpo_lightning.cli.loggers import without_anonymous
from grpo_lightning.cli.parser import Parser
from grpo_lightning.cli.results import print_results
from grpo_lightning.cli.summary import ParameterSummary
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


class ConfigFile(SaveConfigCallback):
    """config.yaml in the run's folder; a continued run keeps the one it started with beside it."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write it."""
        folder = trainer.log_dir  # a broadcast: on every rank
        if not self.already_saved and trainer.is_global_zero and folder:
            run_folder.keep_old_config(Path(folder), self.parser.dump(self.config, skip_none=False))
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
        for action in self._subcommand_parsers[self.command]._actions:
            if action.dest == "ckpt_path":
                action.help = CKPT_PATH[self.command == "fit"]

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
                "trainer.logger": default_loggers(),
                # Its settings are keys of their own, as those of the optimizer are.
                "model.engine": {"class_path": "grpo_lightning.LocalEngine"},
                # Every optimizer step is a rollout: Lightning's 50 would hide short runs.
                "trainer.log_every_n_steps": 1,
                # Sampling from an untrained policy before training starts proves nothing and takes long.
                "trainer.num_sanity_val_steps": 0,
            }
        )
        for action in parser._actions:
            if action.dest == "trainer.max_epochs":
                action.help = "Stop after this many epochs. One, if neither max_steps nor max_time is given either."

    # --------------------------------------------------------------------------------------------------- configuration

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse, and say in a few lines what is wrong. Raises: ConfigurationError."""
        sources.check_positions(args)
        args, notices = sources.find_configs(args)
        subparser = self._subcommand_parsers[self.command]
        assert isinstance(subparser, Parser)
        given = sources.read(args, subparser.settings_flags())  # a syntax error is said with its file and line
        subparser.expands_policy = expands = short_names.has_policy_settings(source.tree for source in given)
        args = short_names.in_flags(args, expands_policy=expands)
        given = [replace(source, tree=short_names.in_tree(source.tree, expands_policy=expands)) for source in given]
        self.given = given
        if problem := diagnosis.below_one_value(subparser, given):
            raise ConfigurationError(problem)
        try:
            self.config = parser.parse_args(args)
        except jsonargparse.ArgumentError as error:
            raise ConfigurationError(diagnosis.explain(error.message, subparser, given)) from error
        settings = self.config[self.config.subcommand]
        if problem := diagnosis.taken_as_text(self._subcommand_parsers[self.command], settings):
            raise ConfigurationError(problem)
        if problem := diagnosis.unknown_name(settings.trainer):
            raise ConfigurationError(sources.with_origin(problem, given))
        settings.run_name = run_folder.run_name(settings.run_name, sources.config_files(args))
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
                runs = run_folder.runs_folder(settings.trainer, settings.run_name)
                self.continued = run_folder.version_of(Path(settings.ckpt_path), runs)
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
                diagnosis.defaults_of_null(self._subcommand_parsers[self.command]),
            ):
                log.info(said)

    def newest_checkpoint(self, settings: Namespace) -> str | None:
        """The newest complete checkpoint of the run; None if it has none yet.

        Raises:
            ConfigurationError: If there is none and nothing is trained, so that there is nothing to start afresh.
        """
        runs, to_train = run_folder.runs_folder(settings.trainer, settings.run_name), self.config.subcommand == "fit"
        elsewhere = resuming.folders_elsewhere(settings.trainer, runs)
        path, skipped = resuming.newest([*resuming.folders_of_run(runs), *elsewhere], to_train=to_train)
        self.say_found(path, skipped, runs)
        where = " or ".join([f"{runs}/version_*/checkpoints", *map(str, elsewhere)])
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
        self.trainer_defaults = {"callbacks": default_callbacks(str(self.subcommand), settings)}

    def instantiate_classes(self) -> None:
        """Take a folder for the run and point the loggers at it."""
        self.asked = self.config
        self.folder: Path | None = None
        self.stop: GracefulStop | None = None
        settings = self.asked[self.subcommand]
        if settings.trainer.get("fast_dev_run"):  # logs nothing and saves nothing
            self.instantiate_parts()
            return
        runs = run_folder.runs_folder(settings.trainer, settings.run_name)
        self.folder = self.continued or run_folder.take_next(runs)
        self.config = self.asked.clone()
        run_folder.place(self.config[self.subcommand].trainer, self.folder)
        if self.subcommand == "fit":
            self.stop = GracefulStop(self.folder / "checkpoints", is_saving=is_saving(settings.trainer))
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
            raise ConfigurationError(sources.with_origin(str(refusal), self.given)) from error

    def leave_nothing(self) -> None:
        """After a run that did nothing: remove its folder, if it is this run's own and holds no results."""
        if self.folder is not None and self.continued is None and rank() == 0:
            run_folder.remove_without_results(self.folder)

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
            print_results({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """The Trainer, with a line for a model summary."""
        # What is saved as config.yaml is what was asked for: with this run's folder in it, it could not be run again.
        self.config = self.asked
        own = self.config_init[self.subcommand].trainer.callbacks or []
        own = own if isinstance(own, list) else [own]
        # Asked before: the Trainer appends its callbacks to this very list.
        has_summary = any(isinstance(callback, ModelSummary) for callback in own)
        self.trainer_defaults["callbacks"] = [  # a recipe's own bar or log stands in for ours
            callback
            for callback in self.trainer_defaults["callbacks"]
            if not any(isinstance(other, kind_of_default(callback)) for other in own)
        ]
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (ValueError, ModuleNotFoundError) as error:  # settings that only the Trainer can judge
            raise ConfigurationError(f"trainer: {error}") from error
        except MisconfigurationException as error:
            if problem := diagnosis.missing_accelerator(self.config_init[self.subcommand].trainer.accelerator):
                raise ConfigurationError(f"trainer.accelerator: {error} {problem}") from error
            raise
        for logger in trainer.loggers:
            without_anonymous(logger)
        if self.stop is not None:
            trainer.callbacks.append(self.stop)  # type: ignore[attr-defined]
        if not has_summary:
            # Put in the place of Lightning's: handed to the Trainer, it would be reported as one that is already there.
            trainer.callbacks = [  # type: ignore[attr-defined]
                ParameterSummary() if isinstance(callback, ModelSummary) else callback
                for callback in trainer.callbacks  # type: ignore[attr-defined]
            ]
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
