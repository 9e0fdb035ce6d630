"""`grpo-lightning plan`: batch arithmetic, length and memory of a run, without loading weights."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from grpo_lightning.cli import sources
from grpo_lightning.cli.help import command_parser
from grpo_lightning.core.log_messages import nearest

if TYPE_CHECKING:
    from jsonargparse import Namespace
    from rich.console import Console

    from grpo_lightning.cli.plan.batches import BatchPlan, RunPlan
    from grpo_lightning.cli.plan.memory import MemorySettings, SamplingSize
    from grpo_lightning.cli.plan.model import ModelSizes
    from grpo_lightning.core.types import Prompt
    from grpo_lightning.data.datamodule import PromptDataModule
    from grpo_lightning.module import GRPOLightningModule
    from grpo_lightning.policy.encoder import Encoder
    from grpo_lightning.policy.loading import PolicyLoader

HF_DEFAULTS = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
"""Defaults of Hugging Face's TrainingArguments, which TRL and VLM-R1 keep."""

ASSUMED_DEVICE_GIB = 80.0
"""Device memory that `gather_for_generation: auto` assumes if --device_gib is not given and there is no GPU."""


def run(args: list[str], module_class: type[GRPOLightningModule] | None = None) -> None:
    """Print the plan of a `fit` command line, or the translation of another trainer's script.

    Raises:
        ValueError: If a setting is invalid for training or cannot be translated.
        SystemExit: With status 1, if the run does not fit. The plan is printed first.
        FileNotFoundError: If (a) the data do not exist, and neither --prompt_tokens nor data.prepare is set, or (b) the
            policy does not exist, and data.prepare is not set. In case (b), the batch arithmetic is printed first.
    """
    if any(arg == "--from" or arg.startswith("--from=") for arg in args):
        from grpo_lightning.cli.plan.batches import translate
        from grpo_lightning.cli.plan.output import print_translation

        script = parse_script(args)
        print_translation(script.trainer, *translate(script), script.ignored)
        return
    own, fit_args = parse_own(args)
    sources.check(["plan", *fit_args])
    from grpo_lightning.cli import hub

    with hub.restored_mode():
        print_plan(own, fit_args, module_class)


def print_plan(own: argparse.Namespace, fit_args: list[str], module_class: type[GRPOLightningModule] | None) -> None:
    """Print the plan of a `fit` command line. For errors, see `run`."""
    from rich.console import Console

    from grpo_lightning.cli.plan.output import print_lines
    from grpo_lightning.policy.loading import meta_model, remote_code

    console = Console(highlight=False)
    planned = set_up_run(own, fit_args, module_class)
    print_batches(console, planned)
    try:
        policy_config = planned.loader.load_config()
        model = meta_model(policy_config, **remote_code(planned.loader, policy_config))
    except FileNotFoundError as error:
        if planned.data.prepare is None:
            raise
        remedy = "data.prepare may build it: add --prepare to run it now."
        print_lines(console, "Memory", [f"Unknown: {error} {remedy}"])
        return
    refusal = print_device_memory(console, planned, model, own.device_gib)
    if refusal is not None:
        print(f"\nerror: {refusal}", file=sys.stderr)
        raise SystemExit(1)


class PlannedRun(NamedTuple):
    """Module, data, ranks and batches of a run."""

    config: Namespace
    module: GRPOLightningModule
    data: PromptDataModule
    ranks: Ranks
    prompts: Prompts
    batches: BatchPlan
    prompt_tokens: int
    """Number of tokens of the longest prompt."""

    why_tokens: str
    """How the number of tokens was found."""

    tokenizer_problem: str
    """Why the prompts could not be tokenized; empty if they were tokenized, or did not have to be."""

    @property
    def loader(self) -> PolicyLoader:
        """The loader of the policy."""
        return self.module.loader

    @property
    def is_on_cpu(self) -> bool:
        """True if the run is configured for the CPU."""
        return str(self.config.trainer.accelerator) == "cpu"


def set_up_run(
    own: argparse.Namespace, fit_args: list[str], module_class: type[GRPOLightningModule] | None
) -> PlannedRun:
    """Instantiate module and data of a run, and check both as `fit` does.

    Raises:
        ValueError: As in `run`.
        FileNotFoundError: As in `run`.
    """
    from grpo_lightning.cli import hub
    from grpo_lightning.cli.main import instantiate, parse
    from grpo_lightning.cli.plan import vllm
    from grpo_lightning.cli.plan.batches import BatchPlan
    from grpo_lightning.core.log_messages import quiet_loggers
    from grpo_lightning.policy.transformers_internals import may_be_on_hub
    from grpo_lightning.training import checks

    config = parse(fit_args, module_class)
    logging.getLogger("grpo_lightning").setLevel(logging.WARNING)  # the plan itself reports everything, in order
    quiet_loggers()
    seed(config)
    module, data = instantiate(config, "model", "data", module_class=module_class)
    loader, engine = module.loader, module.engine
    if may_be_on_hub(loader.name) or may_be_on_hub(loader.tokenizer):
        hub.go_offline_if_unreachable()
    use_known_config(loader)

    ranks = ranks_of(config.trainer, own.devices, own.nodes, has_server=vllm.is_on_this_machine(engine))
    # The data module reads the ranks and the policy's tokenizer from its trainer.
    data.trainer = SimpleNamespace(lightning_module=module, world_size=ranks.world_size, global_rank=0)
    prompts = find_prompts(data, own)
    for known, sampling in ((prompts.train, module.sampling), (prompts.val, module.validation_sampling)):
        module.reward_set.validate_prompts(known or [])  # raise the errors that `fit` would raise
        module.reward_set.check_rows(known or [])
        check_lengths(loader, known or [], sampling.max_completion_length)
    completion_tokens = module.sampling.max_completion_length
    if own.prompt_tokens is not None:
        check_given_length(loader, own.prompt_tokens, completion_tokens)
    longest = longest_prompt(loader, data.max_prompt_length, prompts.train, own.prompt_tokens)
    vllm.check_length(engine, longest.tokens, completion_tokens, longest.why)

    batches = BatchPlan(
        batch_size=data.batch_size,
        num_generations=module.num_generations,
        accumulate_grad_batches=config.trainer.accumulate_grad_batches,
        updates_per_rollout=module.updates_per_rollout,
        num_iterations=module.num_iterations,
        world_size=ranks.world_size,
        ranks_per_group=module.ranks_per_group,
        num_prompts=None if prompts.train is None else len(prompts.train),
    )
    checks.check_teams(module.ranks_per_group, module.num_generations, engine, ranks.world_size)
    checks.check_asynchronous(module.max_staleness, engine, module.ranks_per_group)
    return PlannedRun(config, module, data, ranks, prompts, batches, *longest)


def print_batches(console: Console, planned: PlannedRun) -> None:
    """Print the batch arithmetic and the length of the run."""
    from grpo_lightning.cli.plan import output, vllm
    from grpo_lightning.data.formats import describe_prompts

    config, module, prompts, batches = planned.config, planned.module, planned.prompts, planned.batches
    lines = [
        *output.batch_lines(batches, planned.ranks.why),
        *vllm.batch_lines(module.engine, batches, module.max_staleness),
    ]
    output.print_lines(console, "Batches", [*lines, *filter(None, [planned.ranks.idle])])
    num_prompts = None if prompts.train is None else len(prompts.train)
    length = run_length(config.trainer, batches, num_prompts)
    lines = output.length_lines(config, batches, length, num_prompts, prompts.why_unknown)
    if prompts.val or num_prompts is not None:
        lines.append(output.validation_line(config.trainer, batches, length, len(prompts.val or [])))
    output.print_lines(console, "Length", lines)
    if described := list(describe_prompts(prompts.train or [])):
        output.print_lines(console, "Prompts", described)


def print_device_memory(console: Console, planned: PlannedRun, model: Any, given_gib: float | None) -> str | None:
    """Print how much memory the run needs on one device, part by part.

    If `given_gib` is None, the capacity of this machine's GPU is used.

    Returns:
        An error message if the run does not fit. None if the run can fit, if no capacity is known, or if the run is on
        the CPU and `given_gib` is None.
    """
    from grpo_lightning.cli.plan import memory, output, vllm
    from grpo_lightning.cli.plan.model import sizes_of

    module, loader, engine, batches = planned.module, planned.loader, planned.module.engine, planned.batches
    vllm.check_run(engine, loader, [module.sampling, module.validation_sampling], planned.ranks.world_size)
    sizes = sizes_of(model, loader)
    settings, remarks = memory_settings(planned, model, sizes)
    device = output.device_bytes(given_gib)
    capacity = Capacity(ASSUMED_DEVICE_GIB, is_assumed=True) if device is None else Capacity(device / memory.GIB)
    settings, more = resolve_gathering(settings, sizes, engine, None if planned.is_on_cpu else capacity)
    reward_parts, not_counted = memory.reward_parts(module.reward_set.rewards)
    size = vllm.size_of(engine, model, sizes, settings, batches, device)
    parts = vllm.with_vllm(memory.memory_parts(sizes, settings), sizes, settings, size)
    remarks = [*model_remarks(sizes, loader), *vllm.remarks(engine, size), *remarks, *more, *not_counted]
    lines = [*output.token_lines(settings, planned.why_tokens), *filter(None, [planned.tokenizer_problem])]
    output.print_lines(console, "Tokens", lines)
    uses_device = given_gib is not None or not planned.is_on_cpu
    parts += reward_parts
    return output.print_memory(console, sizes, settings, parts, remarks, given_gib, size, uses_device=uses_device)


# ---------------------------------------------------------------------------------------------------------- arguments


def plan_parser() -> argparse.ArgumentParser:
    """Make the parser of the flags of `plan` itself."""
    parser = command_parser(
        "plan",
        "Show the batch arithmetic, the length and the device memory of a run, part by part, without loading weights. "
        "All flags of fit are accepted too. With --from trl, ms-swift or vlm-r1, translate the batch settings of "
        "another trainer's script instead (grpo-lightning plan --from trl --help lists the flags).",
        ["plan --config quickstart --devices 2 --data.batch_size=8", "plan --from trl --per_device_train_batch_size 8"],
    )
    parser.add_argument("--devices", type=int, help="devices per node; default: as configured")
    parser.add_argument("--nodes", type=int, help="nodes; default: as configured")
    parser.add_argument("--device_gib", type=float, help="memory of a device in GiB; default: this machine's")
    parser.add_argument(
        "--prompt_tokens",
        type=int,
        help="length of the longest prompt, including images; default: measured on the data. Without data, set this",
    )
    parser.add_argument(
        "--prepare", action="store_true", help="run data.prepare first, if the run would build its data"
    )
    return parser


def parse_own(args: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Split the arguments into flags of `plan` and flags of `fit`.

    Raises:
        ValueError: If --devices, --nodes or --device_gib is not positive, or if an argument for `fit` looks like a
            misspelled flag of `plan`.
    """
    parser = plan_parser()
    own, fit_args = parser.parse_known_args(args)
    for name in ("devices", "nodes", "device_gib"):
        if (value := getattr(own, name)) is not None and not value > 0:
            raise ValueError(f"--{name} must be above 0, got {value:g}.")
    flags = [f"--{name}" for name in vars(own)]
    for arg in fit_args:
        if near := nearest(arg.partition("=")[0], flags, n=1, cutoff=0.8):
            raise ValueError(f"There is no flag {arg.partition('=')[0]}. Did you mean {near[0]}?")
    return own, fit_args


SIMILAR_FLAGS = ("--per_device_eval_batch_size", "--num_generations_eval", "--eval_accumulation_steps")
"""Flags of other trainers that are neither translated nor misspellings of translated flags."""


def parse_script(args: list[str]) -> argparse.Namespace:
    """Parse the batch flags of another trainer's script. Raises: SystemExit if a value is missing or invalid."""
    parser = command_parser(
        "plan",
        "Translate the batch settings of a TRL, ms-swift or VLM-R1 script to this package's settings.",
        ["plan --from trl --per_device_train_batch_size 8 --world_size 2"],
    )
    parser.add_argument(
        "--from", dest="trainer", required=True, choices=("trl", "ms-swift", "vlm-r1"), help="trainer of the script"
    )
    parser.add_argument(
        "--version", type=parse_version, help="version of TRL or ms-swift, such as 0.16 or 3.3.1; default: the newest"
    )
    flags: dict[str, tuple[int | None, int]] = {"world_size": (1, 1), "num_generations": (8, 2)}
    flags |= {"num_iterations": (1, 1), "steps_per_generation": (None, 1), "generation_batch_size": (None, 1)}
    flags |= {"sleep_level": (0, 0)} | dict.fromkeys(HF_DEFAULTS, (None, 1))
    for name, (default, _) in flags.items():
        text = f"as in the script (default {HF_DEFAULTS.get(name, default)})".replace(" (default None)", "")
        parser.add_argument(f"--{name}", type=int, default=default, help=text, metavar="N")
    script, others = parser.parse_known_args(args)
    names = [arg.partition("=")[0] for arg in others if arg.startswith("--")]
    for name in names:
        if name == "--config":
            parser.error("--from takes the flags of another trainer's script, and --config is a flag of fit")
        near = nearest(name, [f"--{flag}" for flag in flags], n=1, cutoff=0.8)
        if near and name not in SIMILAR_FLAGS:
            parser.error(f"there is no flag {name}. Did you mean {near[0]}?")
    script.ignored = [*names, "--sleep_level"] if script.sleep_level else names
    for name, (_, least) in flags.items():
        if (value := getattr(script, name)) is not None and value < least:
            parser.error(f"--{name} must be at least {least}, got {value}")
    missing = [name for name in HF_DEFAULTS if getattr(script, name) is None]
    if missing and script.trainer == "ms-swift":
        parser.error(
            f"set {' and '.join(f'--{name}' for name in missing)}: ms-swift has its own defaults (one completion "
            "per device, and a computed number of micro-steps), which depend on its version. Its log shows them."
        )
    vars(script).update((name, HF_DEFAULTS[name]) for name in missing)
    return script


def parse_version(text: str) -> tuple[int, ...]:
    """Parse `0.17.2` to (0, 17)."""
    try:
        return tuple(int(part) for part in text.split(".")[:2])
    except ValueError:
        raise argparse.ArgumentTypeError(f"must look like 0.17 or 3.3.1, got {text!r}") from None


def seed(config: Namespace) -> None:
    """Set the run's seed, which `random:N` and `data.prepare` depend on."""
    import lightning as L

    value = config.get("seed_everything")
    if value is not None and value is not False:
        L.seed_everything(0 if value is True else value, verbose=False)


def use_known_config(loader: PolicyLoader) -> None:
    """If the config of a published policy cannot be loaded, use this package's copy."""
    from grpo_lightning.cli.plan.model import known_config

    if loader.model is not None or loader.name is None or (config := known_config(loader.name)) is None:
        return
    try:
        loader.load_config()
    except FileNotFoundError:
        loader.model = config
        print(f"{loader.name} cannot be loaded here: using the sizes known to this package.")


# -------------------------------------------------------------------------------------------------------------- ranks


class Ranks(NamedTuple):
    """The ranks of a run."""

    world_size: int
    why: str
    idle: str = ""
    """A message about devices without a rank."""


def ranks_of(trainer: Namespace, devices: int | None, nodes: int | None, *, has_server: bool = False) -> Ranks:
    """Compute the number of ranks, which is `devices` (per node) x `nodes`.

    If `devices` or `nodes` is None, the value in the trainer's config is used. `has_server` is true if a vLLM server
    runs on this machine. The server needs devices that have no rank.

    Raises:
        ValueError: If the number of devices or nodes is below 1, or if the cluster's nodes have unequal numbers of
            devices.
    """
    import torch

    from grpo_lightning.cli.plan.vllm import devices_line

    check_environment(os.environ)
    num_nodes = trainer.num_nodes if nodes is None else nodes
    count = count_devices(trainer.devices) if devices is None else devices
    here = torch.cuda.device_count() if str(trainer.accelerator) in ("auto", "gpu", "cuda") else 0
    why = f"{count} per node x {num_nodes} node(s)"
    if count is None:
        count = max(1, here)
        why = f"trainer.devices is {trainer.devices}: {count} on this machine; set another number with --devices N"
    if count < 1 or num_nodes < 1:
        raise ValueError(f"A run needs at least one device and one node, got {count} and {num_nodes}.")
    idle, rest = "", here - count
    if devices is None and here and has_server:
        idle = devices_line(max(0, rest), here)
    elif devices is None and rest > 0:
        idle = (
            f"{rest} of this machine's {here} devices {'is' if rest == 1 else 'are'} idle: trainer.devices is "
            f"{trainer.devices}. Set it to {here} or auto to use all of them."
        )
    return Ranks(count * num_nodes, why, idle)


def count_devices(given: Any) -> int | None:
    """Count the devices per node in `trainer.devices`; None for all available."""
    if isinstance(given, str):
        given = given.strip()
        with suppress(ValueError):
            given = int(given)
    if isinstance(given, str) and given != "auto":
        given = [part for part in given.split(",") if part.strip()]
    if isinstance(given, list | tuple):
        return len(given)
    return None if given in ("auto", -1) else int(given)


def check_environment(environment: Mapping[str, str]) -> None:
    """Check that all nodes have the same number of processes. Raises: ValueError if not."""
    unequal = "Every node must have the same number of devices, because Lightning has devices x num_nodes ranks:"
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):  # "8(x2),4" is 8, 8 and 4
        counts = {re.sub(r"\(x\d+\)", "", part).strip() for part in environment.get(name, "").split(",")}
        if len(counts) > 1 and all(count.isdigit() for count in counts):
            raise ValueError(f"{unequal} {name} is {environment[name]}. Use {min(map(int, counts))} on each node.")
    world, local = (environment.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world.isdigit() and local.isdigit() and int(local) and int(world) % int(local):
        raise ValueError(
            f"{unequal} WORLD_SIZE={world} is no multiple of LOCAL_WORLD_SIZE={local}, the processes of this node. "
            "Start torchrun with the same --nproc-per-node on every node."
        )


# ------------------------------------------------------------------------------------------------------------ prompts

MEASURED_PROMPTS = 256
"""Number of prompts with the longest texts that are tokenized. The prompt with the most tokens is almost always among
them."""

MEASURED_IMAGES = 10_000
"""Maximum number of prompts whose images are opened to read their sizes."""

LARGEST_IMAGES = 32
"""Number of prompts that are tokenized because they have the largest images."""

ASSUMED_PROMPT_TOKENS = 512


class Prompts(NamedTuple):
    """The prompts of a run.

    `train` and `val` are None if the prompts are streamed, or if the data cannot be read yet. Without validation data,
    `val` is None.
    """

    train: list[Prompt] | None
    val: list[Prompt] | None
    why_unknown: str = ""


def find_prompts(data: PromptDataModule, own: argparse.Namespace) -> Prompts:
    """Set up the data as `fit` does.

    If the tokenizer for `max_prompt_length` is not found, no error is raised, but the data are not read.

    Raises:
        FileNotFoundError: If the data do not exist, and neither --prompt_tokens nor data.prepare is set.
    """
    why = "the data are streamed"
    if own.prepare:
        data.prepare_data()
    try:
        data.setup("fit")
    except FileNotFoundError as error:
        reason = "the data do not exist"
        if not has_tokenizer(data):
            reason = f"data.max_prompt_length {data.max_prompt_length} needs a tokenizer to measure the prompts"
        elif data.prepare is None and own.prompt_tokens is None:
            raise FileNotFoundError(
                f"{str(error).rstrip('.')}. To plan without the data, set --prompt_tokens: --prompt_tokens 300."
            ) from error
        why = f"{reason} ({str(error).rstrip('.')})"
        if data.prepare is not None:
            why = f"data.prepare has not built the files yet ({error}) Add --prepare to build them now."
    train, val = (prompts if isinstance(prompts, list) else None for prompts in (data.train_prompts, data.val_prompts))
    return Prompts(train, val, why)


def has_tokenizer(data: PromptDataModule) -> bool:
    """True if the tokenizer for `max_prompt_length` can be loaded or is not needed."""
    try:
        data.length_limit()
    except FileNotFoundError:
        return False
    return True


class PromptLength(NamedTuple):
    """Number of tokens of the longest training prompt."""

    tokens: int
    why: str
    """How the number of tokens was found."""

    tokenizer_problem: str = ""
    """Why the prompts could not be tokenized; empty if they were tokenized, or did not have to be."""


def longest_prompt(
    loader: PolicyLoader, max_prompt_length: int | None, prompts: list[Prompt] | None, given: int | None
) -> PromptLength:
    """Find the number of tokens of the longest training prompt.

    The result is the first number in this list that is known:

    - `given`
    - the number of tokens that `measure_longest` returns for `prompts`
    - `max_prompt_length`
    - `ASSUMED_PROMPT_TOKENS`
    """
    if given is not None:
        return PromptLength(given, "set by --prompt_tokens")
    why, problem = "the prompts are not known yet", ""
    try:
        encoder = loader.load_encoder()
        if prompts:
            return measure_longest(prompts, encoder)
    except (OSError, ImportError) as error:  # a folder with only a config can be planned for, too
        why = "the policy's tokenizer cannot be loaded"
        problem = f"The tokenizer: {str(error).strip().partition(chr(10))[0]}"
    if max_prompt_length is not None:
        limit = f"the limit data.max_prompt_length, because {why}" if problem else "data.max_prompt_length"
        return PromptLength(max_prompt_length, limit, problem)
    return PromptLength(
        ASSUMED_PROMPT_TOKENS,
        f"assumed, without images, because {why}; set another length with --prompt_tokens N",
        problem,
    )


def measure_longest(prompts: list[Prompt], encoder: Encoder) -> PromptLength:
    """Tokenize the prompts with the longest texts and the largest images."""
    chosen, largest = longest_texts(prompts), largest_images(prompts)
    tokens = max(encoder.num_tokens(prompt) for prompt in [*chosen, *largest])
    among = f", among the {len(chosen)} longest texts and {len(largest)} largest images" * (len(chosen) < len(prompts))
    return PromptLength(tokens, f"the longest of all {len(prompts):,} prompts, with the policy's tokenizer{among}")


def longest_texts(prompts: list[Prompt]) -> list[Prompt]:
    """The prompts with the longest texts."""
    return sorted(prompts, key=lambda prompt: len(str(prompt.content)), reverse=True)[:MEASURED_PROMPTS]


def largest_images(prompts: list[Prompt]) -> list[Prompt]:
    """The prompts with the most pixels, according to the headers of their images."""
    with_images = [prompt for prompt in prompts if prompt.images]
    opened = with_images[:: -(-len(with_images) // MEASURED_IMAGES) or 1]
    sizes = [(sum(width * height for width, height in (image.size() for image in p.images)), p) for p in opened]
    return [prompt for _, prompt in sorted(sizes, key=lambda pair: pair[0], reverse=True)[:LARGEST_IMAGES]]


def positions(loader: PolicyLoader) -> int | None:
    """Number of positions of the policy; None if unlimited or unknown."""
    from grpo_lightning.policy.transformers_internals import num_positions

    try:
        return num_positions(loader.load_config())
    except FileNotFoundError:
        return None


def check_lengths(loader: PolicyLoader, prompts: list[Prompt], max_completion_length: int) -> None:
    """Check, as `fit` does, that prompts and completions fit the policy's positions. Raises: ValueError if not."""
    from grpo_lightning.policy.encoder import check_length
    from grpo_lightning.training.data_checks import TEMPLATE_TOKENS, num_bytes

    limit = positions(loader)
    if limit is None:
        return
    # A text has no more tokens than bytes, so most prompts need not be tokenized.
    most = limit - TEMPLATE_TOKENS - max_completion_length
    long = [prompt for prompt in longest_texts(prompts) if num_bytes(prompt) > most]
    checked = [*long, *largest_images(prompts)]
    if not checked:
        return
    with suppress(OSError):  # without a tokenizer, lengths are assumed, and the plan reports it
        encoder = loader.load_encoder()
        for prompt in checked:
            check_length(prompt, encoder.num_tokens(prompt), limit, max_completion_length)


def check_given_length(loader: PolicyLoader, prompt_tokens: int, max_completion_length: int) -> None:
    """Check --prompt_tokens.

    Raises:
        ValueError: If --prompt_tokens is less than 1.
        ValueError: If --prompt_tokens plus `max_completion_length` exceeds the policy's number of positions.
    """
    if prompt_tokens < 1:
        raise ValueError(f"--prompt_tokens must be at least 1, got {prompt_tokens}.")
    limit = positions(loader)
    if limit is not None and prompt_tokens + max_completion_length > limit:
        raise ValueError(
            f"--prompt_tokens {prompt_tokens} plus sampling.max_completion_length {max_completion_length} are more "
            f"than the policy's {limit} positions: `fit` would refuse such a prompt. Lower one of them."
        )


def run_length(trainer: Namespace, batches: BatchPlan, num_prompts: int | None) -> RunPlan:
    """The run's length under the trainer's limits. The limit `max_time` is ignored."""
    from grpo_lightning.cli.plan.batches import plan_run

    if trainer.fast_dev_run:  # Lightning sets these limits; the run rounds them up to a full cycle
        steps = int(trainer.fast_dev_run)
        return plan_run(batches, num_prompts, max_steps=steps, max_epochs=1, limit_train_batches=steps)
    return plan_run(
        batches,
        num_prompts,
        max_steps=trainer.max_steps,
        max_epochs=trainer.max_epochs,
        limit_train_batches=trainer.overfit_batches or trainer.limit_train_batches,
    )


# ------------------------------------------------------------------------------------------------------------- memory


def memory_settings(planned: PlannedRun, model: Any, sizes: ModelSizes) -> tuple[MemorySettings, list[str]]:
    """Collect the settings that determine the memory of a device.

    Returns: (settings, remarks). `resolve_gathering` decides `gathers_for_sampling`, which is False here.
    """
    from grpo_lightning.cli.plan import memory
    from grpo_lightning.policy.probe import dense_reason

    config, module, loader, batches = planned.config, planned.module, planned.loader, planned.batches
    # The scoring path is chosen without weights. The probe at the start of a run may still choose the dense path.
    path: Literal["dense", "extended"] = "dense" if loader.scoring == "dense" or dense_reason(model) else "extended"
    division = memory.division_of(config.trainer.strategy, planned.ranks.world_size)
    precision = memory.precision_of(config.trainer.precision, loader.dtype)
    width = 4 if division.stage or sizes.num_adapters else precision.weights
    optimizer_bytes, remarks = memory.optimizer_bytes(module.optimizer_factory, config.model.get("optimizer"), width)
    completion_tokens = module.sampling.max_completion_length
    worst = batches.shapes(planned.prompt_tokens, completion_tokens)[0]
    settings = memory.MemorySettings(
        memory.ScoredBatch(
            *worst,
            planned.prompt_tokens,
            completion_tokens,
            path,
            # All completions have the maximum length, so the cost of a pass, which depends on the device, does not
            # matter.
            chunk_size=loader.choose_chunks(model.config, "cpu", is_sharded=False),
            head_chunk_size=loader.head_chunk_size,
        ),
        precision,
        optimizer_bytes,
        division,
        sampling=sampling_size(module.engine, batches, shares_prompts=sizes.shares_prompts),
        checkpointing=loader.activation_checkpointing,
        has_float32_head=loader.head_dtype == "float32",
        is_eager="eager" in (loader.attention, model.config._attn_implementation),
        has_reference=module.objective.needs_reference,
        accumulates=batches.accumulate_grad_batches > 1,
        offloaded=frozenset(module.offload),
    )
    return settings, remarks


def sampling_size(engine: Any, batches: BatchPlan, *, shares_prompts: bool) -> SamplingSize:
    """The largest numbers of rows and prompts in memory during sampling. For an external engine, all numbers are 0.

    A row is one completion that is being decoded. If completions share the KV cache of their prompt, the newest prompt
    has G rows, and every other prompt in memory has at least one row. So at most 1 + max_rows - G prompts are in
    memory.
    """
    from grpo_lightning.cli.plan.memory import SamplingSize
    from grpo_lightning.rollout.local_engine import LocalEngine

    if not isinstance(engine, LocalEngine):
        return SamplingSize()
    prompts = batches.prompts_per_team[0]
    of_prompt = batches.completions_per_rank // prompts
    if engine.max_rows is None:
        return SamplingSize(prompts * of_prompt, prompts, prompts)
    prefilled = min(prompts, max(1, engine.max_rows // of_prompt))
    if not shares_prompts:  # decoded in waves
        return SamplingSize(prefilled * of_prompt, prefilled, prefilled)
    rows = min(prompts * of_prompt, max(engine.max_rows, of_prompt))
    return SamplingSize(rows, min(prompts, 1 + rows - of_prompt), prefilled)


class Capacity(NamedTuple):
    """Memory capacity of a device."""

    gib: float
    is_assumed: bool = False

    def __str__(self) -> str:
        """Format the capacity."""
        return f"{self.gib:,.0f} GiB{' (assumed; set it with --device_gib N)' * self.is_assumed}"


def resolve_gathering(
    settings: MemorySettings, model: ModelSizes, engine: Any, device: Capacity | None
) -> tuple[MemorySettings, list[str]]:
    """Decide whether sharded weights are gathered for sampling. Returns: (settings, remarks).

    If `device` is None, memory counts as unlimited.
    """
    import dataclasses

    from grpo_lightning.cli.plan.memory import GIB, peak, state_parts
    from grpo_lightning.rollout.gathered_weights import LARGEST_SHARE

    if not settings.division.gathers_layers or not settings.sampling.rows:
        return settings, []
    choice, remarks = engine.gather_for_generation, []
    everything = model.num_weights * settings.widths.compute / GIB
    if choice == "auto" and device is None:
        choice = True
    elif choice == "auto":
        assert device is not None
        free = max(0.0, device.gib - peak(state_parts(model, settings), "sampling") / GIB)
        choice = everything <= LARGEST_SHARE * free
        remarks = [
            f"the full weights, {everything:,.1f} GiB, {'are gathered' if choice else 'stay sharded'} while sampling "
            f"(engine.gather_for_generation auto), because about {free:,.0f} of a device's {device} are free then; "
            "the run decides by the measured free memory"
        ]
    if not choice:
        remarks.append(
            f"sampling is slow: every device gathers all {everything:,.1f} GiB of weights, layer by layer, for each of "
            f"up to {settings.batch.completion_length:,} tokens"
        )
    return dataclasses.replace(settings, gathers_for_sampling=choice), remarks


def model_remarks(model: ModelSizes, loader: PolicyLoader) -> list[str]:
    """Remarks on memory that is not counted, and on the vision tower."""
    remarks = []
    if model.num_adapters:
        remarks.append(
            "activations of the adapters are not counted: 32-bit adapters in a 16-bit model add up to half of the "
            "activations above"
        )
    if model.num_linear_layers:
        remarks.append(f"{model.num_linear_layers} layers keep a recurrent state, which is not counted")
    if model.num_vision_weights:
        how = "frozen, because policy.lora trains the language model only" if loader.lora else "frozen"
        if model.has_trained_tower or loader.freeze_vision_modules:
            how = f"{'trained' if model.has_trained_tower else 'frozen'} (policy.freeze_vision_modules)"
        remarks.append(f"{model.num_vision_weights:,} of the weights belong to the vision tower and projector: {how}")
    return remarks
