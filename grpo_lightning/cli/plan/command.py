"""`grpo-lightning plan`: what a run will do and need, before it starts. No weights are loaded."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from grpo_lightning.cli.plan.devices import ranks_of
from grpo_lightning.cli.plan.lengths import Known, check_lengths, longest_prompt

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from grpo_lightning.cli.plan.batches import BatchPlan
    from grpo_lightning.data.datamodule import PromptDataModule
    from grpo_lightning.module import GRPOLightningModule
    from grpo_lightning.policy.loading import PolicyLoader

HF_DEFAULTS = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
"""Of Hugging Face's TrainingArguments, which TRL and VLM-R1 take over."""


def run(args: list[str], module_class: type[GRPOLightningModule] | None = None) -> None:
    """Print the plan of a `fit` command line, or the translation of another trainer's script.

    Args:
        args: After the word `plan`.
        module_class: A subclass of GRPOLightningModule whose settings the recipe has.

    Raises:
        ValueError: If a setting cannot be trained or translated.
        SystemExit: With 1, after the plan, if the run does not fit or would not end in sensible time.
        FileNotFoundError: If the data are not there, neither --prompt_tokens nor data.prepare replaces them; or, after
            the arithmetic of the batches, if the policy is not.
    """
    if any(arg == "--from" or arg.startswith("--from=") for arg in args):
        from grpo_lightning.cli.plan.tables import print_translation
        from grpo_lightning.cli.plan.translate import translate

        script = parse_script(args)
        print_translation(script, translate(script))
        return
    own, fit_args = plan_parser().parse_known_args(args)
    from grpo_lightning.cli.main import instantiate, parse
    from grpo_lightning.cli.plan.tables import print_plan

    config = parse(fit_args, module_class)
    logging.getLogger("grpo_lightning").setLevel(logging.WARNING)  # the plan says it all, in order
    seed(config)
    module, data = instantiate(config, "model", "data", module_class=module_class)
    use_known_config(module.loader)
    known = find_out(config, module, data, own)
    batches = batch_plan(config, module, data, known.ranks.world_size)
    refusal = print_plan(config, module, data, known, batches)
    if refusal is not None:
        print(f"\nerror: {refusal}", file=sys.stderr)
        raise SystemExit(1)


def plan_parser() -> argparse.ArgumentParser:
    """The flags of `plan` itself; all others are those of `fit`."""
    parser = argparse.ArgumentParser(
        prog="grpo-lightning plan",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Say what a run will do and need, without loading weights: the arithmetic of its batches, its\n"
        "length, and the memory of a device part by part.\n\n"
        "  grpo-lightning plan --config recipe.yaml [any override of fit] [--devices 8] [--nodes 2]",
        epilog="The settings of another trainer's script in this package's words:\n\n"
        "  grpo-lightning plan --from trl --per_device_train_batch_size 8 --gradient_accumulation_steps 4 \\\n"
        "      --num_generations 8 --world_size 2        (grpo-lightning plan --from trl --help lists the flags)",
    )
    parser.add_argument("--devices", help="devices per node, instead of the configuration's; 8,8 for each of two nodes")
    parser.add_argument("--nodes", type=int, help="nodes, instead of the configuration's")
    parser.add_argument(
        "--device_gib", type=float, help="memory of a device, where another one than this machine's runs"
    )
    parser.add_argument(
        "--prompt_tokens", type=int, help="the longest prompt, instead of the data's; the data need not be there then"
    )
    parser.add_argument(
        "--image_tokens", type=int, help="how many of --prompt_tokens are images', instead of what the processor says"
    )
    parser.add_argument("--prepare", action="store_true", help="run data.prepare first, where the run would build data")
    return parser


def parse_script(args: Sequence[str]) -> Any:
    """The flags of another trainer's script."""
    from grpo_lightning.cli.plan.translate import TRAINERS, OtherScript

    parser = argparse.ArgumentParser(
        prog="grpo-lightning plan --from",
        allow_abbrev=False,
        description="The batch settings of a TRL, ms-swift or VLM-R1 script in this package's words.",
    )
    parser.add_argument("--from", dest="trainer", required=True, choices=TRAINERS)
    parser.add_argument("--version", help="of TRL or ms-swift: 0.16, 3.3.1; the newest rule without it")
    parser.add_argument("--world_size", type=int, default=1, help="processes that train (devices x nodes)")
    for name, value in HF_DEFAULTS.items():
        says = f"as the script has it (default {value}; ms-swift's script must give it)"
        parser.add_argument(f"--{name}", type=int, help=says)
    numbers = {
        "num_generations": 8,
        "steps_per_generation": None,
        "generation_batch_size": None,
        "num_iterations": 1,
    }
    for name, default in numbers.items():
        says = "as the script has it" + ("" if default is None else f" (default {default})")
        parser.add_argument(f"--{name}", type=int, default=default, help=says)
    flags = vars(parser.parse_args(args))
    if missing := [f"--{name}" for name in HF_DEFAULTS if flags[name] is None and flags["trainer"] == "ms-swift"]:
        raise ValueError(
            f"Give {' and '.join(missing)}: ms-swift has defaults of its own (one completion per device, and as many "
            "micro-steps as it finds fit), which depend on its version. Its log says what it took."
        )
    return OtherScript(**flags | {name: value for name, value in HF_DEFAULTS.items() if flags[name] is None})


def use_known_config(loader: PolicyLoader) -> None:
    """Where a published policy's config cannot be read, as without a network, take it from the package."""
    from grpo_lightning.cli.plan.known_models import known_config

    if loader.model is not None or loader.name is None or (config := known_config(loader.name)) is None:
        return
    try:
        loader.load_config()
    except FileNotFoundError:
        loader.model = config
        print(f"{loader.name} cannot be read here: its sizes are those that this package knows.")


def seed(config: Namespace) -> None:
    """The run's seed: `random:N` and what `data.prepare` builds follow from it."""
    import lightning as L

    value = config.get("seed_everything")
    if value is not None and value is not False:
        L.seed_everything(0 if value is True else value, verbose=False)


def find_out(config: Namespace, module: GRPOLightningModule, data: PromptDataModule, own: argparse.Namespace) -> Known:
    """Ranks, prompts and the longest prompt."""
    ranks = ranks_of(config.trainer, own.devices, own.nodes)
    if own.prepare:
        data.prepare_data()
    # The data module asks its trainer for ranks and for the policy's tokenizer.
    data.trainer = SimpleNamespace(lightning_module=module, world_size=ranks.world_size, global_rank=0)  # type: ignore[assignment]
    why_no_prompts = ""
    try:
        data.setup("fit")
    except FileNotFoundError as error:
        if data.prepare is not None:
            why_no_prompts = f"data.prepare has not built the files yet ({error}) Add --prepare to build them now."
        elif own.prompt_tokens is not None:
            why_no_prompts = f"the data are not here ({error})"
        else:
            raise FileNotFoundError(
                f"{error} To plan without the data, say how long the prompts are: --prompt_tokens 300."
            ) from error
    train, val = (prompts if isinstance(prompts, list) else None for prompts in (data.train_prompts, data.val_prompts))
    if train is None and not why_no_prompts:
        why_no_prompts = "the data are streamed"
    for prompts in (train, val):  # what `fit` refuses is not planned
        module.reward_set.validate_prompts(prompts or [])
        module.reward_set.check_rows(prompts or [])
    _, validation = module.validation.draw(module.sampling, is_greedy=False)
    for prompts, sampling in ((train, module.sampling), (val, validation)):
        check_lengths(module, prompts or [], sampling)
    longest = longest_prompt(module, data, train, own.prompt_tokens, own.image_tokens)
    return Known(ranks, train, val, longest, why_no_prompts, own.device_gib)


def batch_plan(config: Namespace, module: GRPOLightningModule, data: PromptDataModule, world_size: int) -> BatchPlan:
    """The cycle's arithmetic."""
    from grpo_lightning.cli.plan.batches import BatchPlan

    return BatchPlan(
        batch_size=data.batch_size,
        num_generations=module.num_generations,
        accumulate_grad_batches=config.trainer.accumulate_grad_batches,
        updates_per_rollout=module.updates_per_rollout,
        num_iterations=module.num_iterations,
        world_size=world_size,
    )
