"""LightningCLI with GRPO's module, data and defaults."""

from __future__ import annotations

import inspect
import logging
import os
import re
import signal
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

from grpo_lightning.cli import config, config_errors, help, resume, runs, sources
from grpo_lightning.cli.errors import (
    ConfigurationError,
    InterruptedFailureError,
    has_failed_before,
    plain_refusal,
    rank,
)
from grpo_lightning.core.log_messages import quiet_libraries, quiet_loggers, show_messages
from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.report.non_default_settings import CLI_DEFAULTS
from grpo_lightning.training.checkpoint_saving import check_ranks
from grpo_lightning.training.failed_ranks import end_launched
from grpo_lightning.training.signals import GracefulStop, words_without_checkpoint

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger(__name__)

PARTS = {"model": GRPOLightningModule, "data": PromptDataModule}
LIMITS = {"max_epochs": None, "max_steps": -1, "max_time": None}
# With `exit_on_error` off, the parser raises errors, and `parse_arguments` formats a short message. Abbreviated flags
# are off, because YAML keys cannot be abbreviated.
PARSING = {"exit_on_error": False, "allow_abbrev": False}


class Parser(LightningArgumentParser):
    """Parser that merges the settings of several files and flags.

    If the same key is set twice to an object of the same class, the settings of the object are merged key by key. A
    later list replaces an earlier list, but `key+:` or `--key+` appends to the earlier list. jsonargparse itself would
    merge two lists of equal length item by item. All access to private parts of jsonargparse is in this class.
    """

    expands_policy = False
    """True if `policy: x` is expanded to the `PolicyLoader` settings `name: x`."""

    def _apply_actions(self, cfg: Any, parent_key: str = "", *args: Any, **kwargs: Any) -> Any:
        """Expand short names (`optimizer: AdamW`) in settings `cfg` of a file or section."""
        tree = {parent_key: cfg} if parent_key else cfg
        tree = config.in_tree(tree, expands_policy=self.expands_policy)
        return super()._apply_actions(tree[parent_key] if parent_key else tree, parent_key, *args, **kwargs)

    def keys(self) -> dict[str, config.Key]:
        """Keys of the parser, without those of help and print flags."""
        return {
            action.dest: config.Key(getattr(action, "_typehint", None), action.default, action.help or "")
            for action in self._actions
            if not re.search(r"^print_|^help$|\.help$", action.dest)
        }

    def settings_flags(self) -> set[str]:
        """Flags whose value may be a settings file, except the flags of datasets (`config.MIXTURES`)."""
        return {
            flag
            for flag, action in self._option_string_actions.items()
            if isinstance(action, _ActionConfigLoad)
            or (getattr(action, "_enable_path", False) and action.dest.rpartition(".")[2] not in config.MIXTURES)
        }

    def explain_key(self, key: str, text: str) -> None:
        """Replace the help text of a key."""
        for action in self._actions:
            if action.dest == key:
                action.help = text

    def _check_value_key(self, action: Any, value: Any, key: str, cfg: Any, append: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Check one setting of a file. For a list, ignore the earlier settings `cfg` to prevent a merge."""
        is_replaced = cfg and not append and isinstance(cfg.get(action.dest), list)
        return super()._check_value_key(action, value, key, None if is_replaced else cfg, append)

    def add_class_arguments(self, class_type: Any, *args: Any, **kwargs: Any) -> list[str]:
        """Add the arguments of a class. A logger's `save_dir` becomes optional."""
        added = super().add_class_arguments(class_type, *args, **kwargs)
        if inspect.isclass(class_type) and issubclass(class_type, Logger):
            required: set[str] = getattr(self, "required_args", set())  # older versions of jsonargparse
            for action in self._actions:
                if action.dest == "save_dir" and (action.required or action.dest in required):
                    self.set_defaults({"save_dir": runs.SAVE_DIR})
                    action.required = False
                    required.discard(action.dest)
        return added

    def format_help(self, *args: Any) -> str:
        """Help of the parser's keys, and recursively of the keys below them."""
        text = super().format_help(*args)
        described = set()
        for action in self._actions:
            hint = getattr(action, "_typehint", None)
            kind = config.settings_class(hint, action.default)
            # Describe each class once (`data.val_datasets` repeats `data.datasets`), and skip the `.help` flags.
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
        """Parse flags. Before a flag that sets a list, insert a flag that empties the list, to prevent a merge."""
        # Actions with a `--key+` form take lists.
        lists = {flag for flag in self._option_string_actions if f"{flag}+" in self._option_string_actions}
        given = []
        for arg in args or ():
            flag = arg.partition("=")[0]
            given += [f"{flag}=[]", arg] if flag in lists else [arg]
        return super().parse_args(None if args is None else given, *others, **kwargs)


class ConfigFile(SaveConfigCallback):
    """Writes config.yaml into the run's folder. A resumed run keeps the earlier file under another name."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write the file."""
        folder = trainer.log_dir  # a collective: call it on every rank
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
        """Run the command line with these arguments."""
        show_messages()
        if rank():  # all ranks would log the same
            logging.getLogger("grpo_lightning").setLevel(logging.WARNING)
        # Parsing attribute docstrings of dataclasses (objective, sampling) takes a second, so it is done only for help.
        wants_help = any("help" in arg or arg == "-h" for arg in args)
        jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=wants_help)
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
                args[0]: {**PARSING, "usage": help.usage(args[0]), "description": help.DESCRIPTIONS[args[0]]},
            },
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Only the given command, because building the parsers of all commands takes seconds."""
        return {self.command: super().subcommands()[self.command]}

    def setup_parser(self, *args: Any, **kwargs: Any) -> None:
        """Build the parser, and replace help texts."""
        super().setup_parser(*args, **kwargs)
        self.subparser.explain_key("ckpt_path", help.CKPT_PATH[self.command == "fit"])
        for key, text in help.REPLACED.items():
            self.subparser.explain_key(key, text)

    @property
    def subparser(self) -> Parser:
        """The parser of the command."""
        parser = self._subcommand_parsers[self.command]
        assert isinstance(parser, Parser)
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Set defaults for short RL runs."""
        parser.add_argument(
            "--run_name",
            type=str | int | float | None,  # YAML reads a name such as 2024 as a number
            default=None,
            help=help.RUN_NAME,
        )
        parser.set_defaults(
            {
                "trainer.logger": runs.default_loggers(),
                **CLI_DEFAULTS,
            }
        )

    def _set_seed(self) -> None:
        """Seed all random state. Loggers are silenced first, because seeding logs messages."""
        quiet_loggers()
        super()._set_seed()

    # --------------------------------------------------------------------------------------------------- configuration

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments, or print the help of settings.

        Raises:
            ConfigurationError: If the arguments are not valid.
        """
        if (key := help.asked_key(args)) is not None:
            text = self.subparser.format_help()
            print(help.settings_below(text, key) if key else text)
            raise SystemExit
        sources.check_positions(args)
        args, notices = sources.find_configs(sources.files_first(args))
        subparser = self.subparser
        keys = subparser.keys()
        given = sources.read(args, subparser.settings_flags())  # raises syntax errors with file and line
        subparser.expands_policy = expands = config.has_policy_settings(source.tree for source in given)
        args = config.in_flags(args, expands_policy=expands)
        given = [replace(source, tree=config.in_tree(source.tree, expands_policy=expands)) for source in given]
        self.given = given
        if problem := config_errors.below_one_value(keys, given):
            raise ConfigurationError(problem)
        try:
            self.config = parser.parse_args(args)
        except jsonargparse.ArgumentError as error:
            raise ConfigurationError(config_errors.explain(error.message, keys, given)) from error
        settings = self.config[self.config.subcommand]
        if problem := config_errors.unknown_name(settings.trainer):
            raise ConfigurationError(sources.with_origin(problem, given))
        if problem := config.unset_argument(settings):
            raise ConfigurationError(sources.with_origin(problem, given))
        if self.config.subcommand == "fit" and (problem := config.trains_nothing(settings.trainer)):
            raise ConfigurationError(sources.with_origin(problem, given))
        settings.run_name = runs.run_name(settings.run_name, sources.config_files(args))
        if self.config.subcommand == "fit" and all(
            settings.trainer.get(name) == unset for name, unset in LIMITS.items()
        ):
            # Lightning would silently train for 1000 epochs.
            settings.trainer.max_epochs = 1
            notices.append("No trainer.max_epochs, max_steps or max_time: training for one epoch.")
        if rank() == 0:
            for notice in notices:
                log.info(notice)

    def _parse_ckpt_path(self) -> None:
        """Find the checkpoint if `--ckpt_path` is `auto` or a folder.

        Lightning's own method would replace the settings of the command line by those in the checkpoint.
        """
        settings, to_train = self.config[self.config.subcommand], self.config.subcommand == "fit"
        self.continued: Path | None = None
        given = settings.get("ckpt_path")
        if given is not None:
            given = settings.ckpt_path = os.path.expanduser(given)
        if to_train and given is None and resume.is_requeued():
            given = "auto"
        if not to_train and given is None:
            self.log_unused(settings)
        self.is_auto = given == "auto"
        if self.is_auto:
            settings.ckpt_path = self.newest_checkpoint(settings)
            if settings.ckpt_path and to_train:
                folder = runs.runs_folder(settings.trainer, settings.run_name)
                self.continued = resume.version_of(Path(settings.ckpt_path), folder)
        elif given and (folders := resume.folders_of_run(Path(given))):
            path, skipped = resume.newest(folders, to_train=to_train)
            if path is None:
                reasons = "".join(f"\n  {other}: {why}" for other, why in skipped.items())
                raise ConfigurationError(f"--ckpt_path: {given} has no checkpoint that can be used.{reasons}")
            self.log_found(path, skipped, Path(given))
            settings.ckpt_path = str(path)
        resume.check_there(settings.get("ckpt_path"), to_train=to_train)
        if settings.get("ckpt_path") and Path(settings.ckpt_path).exists() and rank() == 0:
            self._dump_config()
            if notice := resume.notice(
                Path(settings.ckpt_path),
                self.config_dump,
                config.defaults_of_null(self.subparser.keys()),
            ):
                log.info(notice)

    def newest_checkpoint(self, settings: Namespace) -> str | None:
        """Find the newest complete checkpoint of the run; None if there is none and the command is `fit`.

        Raises:
            ConfigurationError: If the run has no complete checkpoint and the command is not `fit`.
        """
        folder, to_train = runs.runs_folder(settings.trainer, settings.run_name), self.config.subcommand == "fit"
        elsewhere = resume.folders_elsewhere(settings.trainer, folder)
        own = resume.folders_of_run(folder)
        path, skipped = resume.newest(own, elsewhere=elsewhere, runs=folder, to_train=to_train)
        self.log_found(path, skipped, folder)
        where = " or ".join([f"{folder}/version_*/checkpoints", *map(str, elsewhere)])
        if path is None and not to_train:
            raise ConfigurationError(
                f"--ckpt_path auto: there is no complete checkpoint in {where}. Give a file, name the run "
                "(--run_name), or remove --ckpt_path to use the untrained policy."
            )
        if path is None and rank() == 0:
            lacks = " This run saves none either (enable_checkpointing or fast_dev_run), so it cannot be resumed."
            log.info(
                f"No checkpoint in {where} yet: starting a new run.{'' if runs.is_saving(settings.trainer) else lacks}"
            )
        return None if path is None else str(path)

    def log_unused(self, settings: Namespace) -> None:
        """Log that no checkpoint is used, although there are checkpoints."""
        folder = runs.runs_folder(settings.trainer, settings.run_name)
        path, _ = resume.newest(resume.folders_of_run(folder))
        if path is not None and rank() == 0:
            log.info(
                f"Using model.policy without a checkpoint. To use the newest checkpoint of {folder}, add "
                "--ckpt_path auto."
            )

    def log_found(self, path: Path | None, skipped: Mapping[Path, str], folder: Path) -> None:
        """Log which checkpoint is used, and why newer ones are skipped."""
        messages = [f"Skipped {other}: {why}." for other, why in skipped.items()]
        if path is not None:
            messages.append(f"Checkpoint: {path}, the newest of {folder}.")
        if rank() == 0:
            for message in messages:
                log.info(message)

    # --------------------------------------------------------------------------------------------------------- objects

    def before_instantiate_classes(self) -> None:
        """Silence warnings that do not apply to the command."""
        settings = self.config[self.subcommand]
        has_validation = settings.data.val_datasets is not None or settings.data.val_split is not None
        quiet_libraries(has_validation=has_validation)
        if self.subcommand != "fit":  # training callbacks have nothing to restore here
            warnings.filterwarnings("ignore", message="Be aware that when using `ckpt_path`, callbacks used to create")
        if settings.get("ckpt_path"):  # a resumed run may have checkpoints in its folder, or use a new folder
            warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")
            warnings.filterwarnings("ignore", message="The dirpath has changed from")

    def instantiate_classes(self) -> None:
        """Create the run's folder, and instantiate model, data and Trainer."""
        self.requested = self.without_auto()
        self.folder: Path | None = None
        self.stop: GracefulStop | None = None
        settings = self.config[self.subcommand]
        if settings.trainer.get("fast_dev_run"):  # logs and saves nothing
            self.instantiate_parts()
            return
        folder = runs.runs_folder(settings.trainer, settings.run_name)
        self.folder = self.continued or runs.take_next(folder)
        self.config = self.config.clone()
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
            log.info(runs.describe_devices(self.trainer))

    def without_auto(self) -> Namespace:
        """The settings for config.yaml. With `fit --ckpt_path auto`, they lack the checkpoint that was found.

        A `fit` with these settings then starts a new run.
        """
        requested = self.config.clone()
        if self.is_auto and self.subcommand == "fit":
            requested[self.subcommand].ckpt_path = None
        return requested

    def instantiate_parts(self) -> None:
        """Instantiate model, data and Trainer. Raises: ConfigurationError if one of them refuses a setting."""
        try:
            super().instantiate_classes()
        except Exception as error:
            refusal = plain_refusal(error)
            if refusal is None:
                raise
            raise ConfigurationError(sources.with_origin(str(refusal), self.given)) from error

    def leave_nothing(self) -> None:
        """Remove the run's folder if this run created it and wrote no results."""
        if self.folder is not None and self.continued is None and rank() == 0:
            runs.remove_without_results(self.folder)

    def _run_subcommand(self, subcommand: str) -> None:
        """Run the command. Ctrl-C while a run ends must not hide the error that ended the run."""
        try:
            self._run_to_end(subcommand)
        except KeyboardInterrupt as error:
            if self.stop is None or self.stop.trainer is None:  # before training, or another command than `fit`
                raise
            if has_failed_before(error):
                raise InterruptedFailureError from error
            raise SystemExit(128 + signal.SIGINT) from error

    def _run_to_end(self, subcommand: str) -> None:
        """Run the command. A run stopped by a signal logs how to resume it."""
        try:
            super()._run_subcommand(subcommand)
        except SIGTERMException:
            if self.stop is None or self.stop.stopped_at is None:
                raise
            if rank() == 0:
                log.info(self.stop.last_words())
            end_launched(self.trainer, seconds=60)
            raise SystemExit(self.stop.exit_code) from None
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and self.stop and self.stop.stopped_at is not None and rank() == 0:
                log.info(self.stop.last_words())
            if self.trainer.global_step == 0:
                self.leave_nothing()
            end_launched(self.trainer, seconds=5)
            if self.is_interrupted_early(error):
                raise KeyboardInterrupt from error
            if self.stop is not None and self.stop.is_interrupted and rank() == 0:
                log.info(words_without_checkpoint(self.trainer.global_step, self.newest_of_this_run()))
            raise

    def is_interrupted_early(self, error: BaseException) -> bool:
        """True if Ctrl-C interrupted `fit` before training. Lightning then exits with code 1."""
        is_by_lightning = isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt)
        return is_by_lightning and self.stop is not None and self.stop.trainer is None

    def newest_of_this_run(self) -> Path | None:
        """Find the newest checkpoint of this run from which it can resume."""
        if self.folder is None:
            return None
        trainer, folder = self.requested[str(self.subcommand)].trainer, self.folder.parent
        own, elsewhere = resume.folders_of_run(self.folder), resume.folders_elsewhere(trainer, folder)
        return resume.newest(own, elsewhere=elsewhere, runs=folder, to_train=True)[0]

    def before_fit(self) -> None:
        """Before the weights are loaded, refuse a checkpoint from which this number of ranks cannot resume."""
        if path := self.config_init[self.subcommand].get("ckpt_path"):
            try:
                check_ranks(self.trainer, Path(path))
            except ValueError as error:
                raise ConfigurationError(f"--ckpt_path: {error}") from error

    def validate(self, *, verbose: bool = True, **kwargs: Any) -> None:
        """Run `validate`, and print a table. Lightning's own table breaks long names and shows 16 digits."""
        self.trainer.validate(**kwargs, verbose=False)
        self.show_results(is_shown=verbose)

    def test(self, *, verbose: bool = True, **kwargs: Any) -> None:
        """Run `test`, and print a table."""
        self.trainer.test(**kwargs, verbose=False)
        self.show_results(is_shown=verbose)

    def show_results(self, *, is_shown: bool) -> None:
        """Print the metrics of an evaluation on rank 0."""
        if is_shown and self.trainer.is_global_zero:
            validation = self.model.validation
            success = validation.success or self.model.reward_set.success
            runs.print_results(
                {name: float(value) for name, value in self.trainer.callback_metrics.items()},
                solved=f"{success} is at least {validation.success_value:g} (model.validation.success)",
            )

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        """Instantiate the Trainer with the default callbacks."""
        # config.yaml gets the settings without this run's folder, so that another run can use the file.
        self.config = self.requested
        settings = self.config_init[self.subcommand]
        own = settings.trainer.callbacks or []
        callbacks = runs.default_callbacks(str(self.subcommand), settings, own if isinstance(own, list) else [own])
        self.trainer_defaults = {"callbacks": callbacks}
        if any(isinstance(callback, runs.ParameterSummary) for callback in callbacks):
            kwargs["enable_model_summary"] = False  # Lightning's own
        try:
            trainer = super().instantiate_trainer(**kwargs)
        except (TypeError, ValueError, ModuleNotFoundError) as error:  # settings that only the Trainer checks
            got = f" (trainer.devices is {settings.trainer.devices!r})" if isinstance(error, TypeError) else ""
            raise ConfigurationError(f"trainer: {error}{got}") from error
        except MisconfigurationException as error:
            if problem := config_errors.missing_accelerator(settings.trainer.accelerator):
                raise ConfigurationError(f"trainer.accelerator: {error} {problem}") from error
            raise
        for logger in trainer.loggers:
            runs.without_anonymous(logger)
        if self.stop is not None:
            trainer.callbacks.append(self.stop)  # type: ignore[attr-defined]
        return trainer


class ParsedCLI(GRPOCLI):
    """CLI that only parses and validates the configuration."""

    @classmethod
    def of(cls, args: Sequence[str], module_class: type[GRPOLightningModule] | None = None) -> Self:
        """Parse a `fit` command line."""
        return super().of(["fit", *args], module_class)

    def _parse_ckpt_path(self) -> None:
        """Ignore the checkpoint, which does not affect `plan`."""

    def _set_seed(self) -> None:
        """Leave global random state alone."""

    def before_instantiate_classes(self) -> None:
        """Do nothing."""

    def instantiate_classes(self) -> None:
        """Instantiate nothing."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""


def instantiate(
    config: Namespace, names: Sequence[str], module_class: type[GRPOLightningModule] | None = None
) -> tuple[Any, ...]:
    """Instantiate parts ("model", "data") of a parsed configuration."""
    made, parts = [], PARTS if module_class is None else PARTS | {"model": module_class}
    for name in names:
        parser = LightningArgumentParser()
        parser.add_lightning_class_args(parts[name], name)
        # jsonargparse 4.49 renamed this method.
        build = getattr(parser, "instantiate", None) or parser.instantiate_classes
        made.append(build(Namespace({name: config[name]}))[name])
    return tuple(made)
