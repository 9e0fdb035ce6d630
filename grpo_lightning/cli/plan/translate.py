"""The batch settings of a TRL, ms-swift or VLM-R1 script in this package's words.

Those trainers count completions per device and micro-step; here `batch_size` counts prompts per rank and rollout, and
accumulation only cuts them up. So what has to agree is the number of prompts per rollout and of completions per update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from grpo_lightning.cli.plan.batches import BatchPlan

Trainer = Literal["trl", "ms-swift", "vlm-r1"]
TRAINERS: tuple[Trainer, ...] = ("trl", "ms-swift", "vlm-r1")

FIRST_WITH_ACCUMULATION: dict[Trainer, tuple[int, ...]] = {"trl": (0, 17), "ms-swift": (3, 4)}
"""From these versions on, groups may spread over the micro-steps of an update; VLM-R1 never took that up."""


@dataclass(frozen=True)
class OtherScript:
    """The flags of a script that decide its batches, by their own names.

    Args:
        trainer: Whose they are.
        per_device_train_batch_size: b, completions per device and micro-step.
        num_generations: G.
        gradient_accumulation_steps: A, micro-steps per optimizer step.
        world_size: W, processes that train.
        steps_per_generation: S, micro-steps served by one generation; None is A.
        generation_batch_size: The same in completions over all processes, b x W x S; give one of the two.
        num_iterations: Passes over a generation.
        version: Of TRL or ms-swift; None is the newest rule.

    Raises:
        ValueError: If the script would not start: with the rule of its version, and the values it allows.
    """

    trainer: Trainer
    per_device_train_batch_size: int = 8
    num_generations: int = 8
    gradient_accumulation_steps: int = 1
    world_size: int = 1
    steps_per_generation: int | None = None
    generation_batch_size: int | None = None
    num_iterations: int = 1
    version: str | None = None

    def __post_init__(self) -> None:
        """Check ranges, then the rule of the version."""
        if self.trainer not in TRAINERS:
            raise ValueError(f"--from must be one of {', '.join(TRAINERS)}, got {self.trainer!r}.")
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "world_size", "num_iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}.")
        if self.num_generations < 2:
            raise ValueError(
                f"--num_generations must be at least 2, got {self.num_generations}: a lone completion has "
                "no group to be compared with."
            )
        given = [n for n in ("steps_per_generation", "generation_batch_size") if getattr(self, n) is not None]
        if len(given) == 2:
            raise ValueError(
                "Give --steps_per_generation or --generation_batch_size, not both: one follows from the other."
            )
        if given and not self.has_accumulated_groups:
            raise ValueError(f"--{given[0]} is not there in {self.whose}: leave it out.")
        if given and getattr(self, given[0]) < 1:
            raise ValueError(f"--{given[0]} must be at least 1, got {getattr(self, given[0])}.")
        self.check_divisible()

    def check_divisible(self) -> None:
        """Check the rule of the version. Raises: ValueError naming the values it allows."""
        if self.generation_batch_size is not None and self.generation_batch_size % self.completions_per_step:
            raise ValueError(
                f"--generation_batch_size ({self.generation_batch_size}) must be a multiple of per_device_train_batch_"
                f"size x world_size ({self.completions_per_step})."
            )
        words, size = self.group_batch
        if size % self.num_generations:
            allowed = [str(g) for g in range(2, size + 1) if size % g == 0]
            raise ValueError(
                f"{self.whose} would not start: {words} = {size} must be a multiple of num_generations "
                f"({self.num_generations}). Valid values of --num_generations: {', '.join(allowed) or 'none'}."
            )

    @property
    def whose(self) -> str:
        """The trainer and its version, in words."""
        return f"{self.trainer} {self.version}" if self.version else self.trainer

    @property
    def has_accumulated_groups(self) -> bool:
        """True where only a whole generation must divide into groups, not each micro-step."""
        first = FIRST_WITH_ACCUMULATION.get(self.trainer)
        return first is not None and (self.version is None or parse_version(self.version) >= first)

    @property
    def completions_per_step(self) -> int:
        """Of one micro-step, over all processes: b x W."""
        return self.per_device_train_batch_size * self.world_size

    @property
    def micro_steps(self) -> int:
        """S: micro-steps served by one generation. Where generations belong to micro-steps, those of an update."""
        if self.generation_batch_size is not None:
            return self.generation_batch_size // self.completions_per_step
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def group_batch(self) -> tuple[str, int]:
        """What must divide into groups, in words and completions."""
        words = "per_device_train_batch_size x world_size"
        if not self.has_accumulated_groups:
            return words, self.completions_per_step
        name = (
            "gradient_accumulation_steps"
            if self.micro_steps == self.gradient_accumulation_steps
            else ("steps_per_generation")
        )
        return f"{words} x {name}", self.completions_per_step * self.micro_steps

    @property
    def completions_per_update(self) -> int:
        """What an optimizer step trains on: b x W x A."""
        return self.completions_per_step * self.gradient_accumulation_steps

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts sampled with the same weights, over all processes.

        A generation that serves less than an update (S < A) is drawn several times before the weights change: together
        they are one rollout.
        """
        micro_steps = max(self.micro_steps, self.gradient_accumulation_steps)
        return self.completions_per_step * micro_steps // self.num_generations


@dataclass(frozen=True)
class Translation:
    """A script's batches here, and what differs."""

    batches: BatchPlan
    differences: tuple[str, ...]
    """Why the numbers are not those of the script; empty where they are."""

    notes: tuple[str, ...]
    """What is the same in number and differs in kind."""

    @property
    def is_exact(self) -> bool:
        """True if an update trains on as many prompts and completions as the script's."""
        return not self.differences


def translate(script: OtherScript) -> Translation:
    """The nearest settings here.

        batch_size = b S / G,   updates_per_rollout = S / A,   accumulate_grad_batches = A

    (S at least A). Where the prompts of a rollout do not divide among the ranks, `batch_size` is rounded, to at least
    one prompt per rank: a group is never spread over ranks, so the smallest update is W x G completions.
    """
    A, S, W, G = script.gradient_accumulation_steps, script.micro_steps, script.world_size, script.num_generations
    differences: list[str] = []
    updates, rest = divmod(S, A)
    if S < A and A % S == 0 and script.num_iterations == 1:
        updates = 1  # several generations per update, all drawn from the same weights: one rollout
    elif rest or S < A:
        updates = max(1, round(S / A))
        differences.append(
            f"A generation serves {S} micro-steps{times(script.num_iterations)} and an update takes {A}: there, some "
            "updates begin inside a generation and end in the next. Here a rollout is divided over whole updates; "
            f"updates_per_rollout is the nearest, {updates}."
        )
    prompts = script.prompts_per_rollout if not differences else updates * A * script.completions_per_step // G
    batch_size = max(1, round(prompts / W))
    if batch_size * W != prompts:
        differences.append(rounding(script, prompts, batch_size))
    batches = BatchPlan(batch_size, G, A, updates, script.num_iterations, W)
    return Translation(batches, tuple(differences), tuple(kind_notes(script, batches)))


def rounding(script: OtherScript, prompts: int, batch_size: int) -> str:
    """Why the prompts of a rollout cannot be the same, and what would make them so."""
    W, G = script.world_size, script.num_generations
    ranks = max(rank for rank in range(1, W + 1) if prompts % rank == 0)
    accumulate = script.gradient_accumulation_steps * W // ranks
    keep_small = f" and trainer.accumulate_grad_batches {accumulate} (equally small micro-batches)" * (W % ranks == 0)
    return (
        f"A rollout has {prompts} prompts there, which {W} ranks cannot share evenly: here a prompt's {G} completions "
        f"stay on one rank, so the smallest rollout is {W} x {G} = {W * G} completions. The nearest batch_size is "
        f"{batch_size}: {batch_size * W} prompts per rollout. The same number is had on {ranks} rank(s), with "
        f"data.batch_size {prompts // ranks}{keep_small}."
    )


def kind_notes(script: OtherScript, batches: BatchPlan) -> list[str]:
    """What agrees in number and not in kind."""
    notes, updates = [], batches.updates_per_rollout
    if updates > 1:
        notes.append(
            f"{script.trainer} shuffles the completions of a generation over its updates; here {shares(batches)}."
        )
    if script.micro_steps < script.gradient_accumulation_steps:
        notes.append("The generations of one update are drawn from the same weights: here they are one rollout.")
    if script.trainer == "vlm-r1" and script.gradient_accumulation_steps > 1:
        notes.append("VLM-R1 samples before every micro-step of an update; here all of it is drawn at once.")
    return notes


def shares(batches: BatchPlan) -> str:
    """What each update of a rollout trains on, as `split_updates` divides it."""
    prompts, updates = batches.batch_size, batches.updates_per_rollout
    has_groups = prompts >= updates
    units = prompts if has_groups else prompts * batches.num_generations
    whole = "an update trains on whole groups" if has_groups else "the completions of a group are divided in order"
    noun = "prompts" if has_groups else "completions"
    return whole + (
        f", and {units} {noun} per rank over {updates} updates give unequal ones" if units % updates else ""
    )


def times(num_iterations: int) -> str:
    """Passes, in words."""
    return f" x {num_iterations} passes" if num_iterations > 1 else ""


def parse_version(version: str) -> tuple[int, ...]:
    """`0.17.2` to (0, 17, 2). Raises: ValueError if it does not begin with numbers."""
    numbers = []
    for part in version.removeprefix("v").split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    if not numbers:
        raise ValueError(f"--version must look like 0.17 or 3.3.1, got {version!r}.")
    return tuple(numbers)
