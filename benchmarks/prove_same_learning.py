"""Proves that the quickstart learns as it does with TRL's GRPOTrainer: the sampled reward against the trained tokens.

    python benchmarks/prove_same_learning.py            # seeds 0 to 5
    python benchmarks/prove_same_learning.py --record   # also writes proofs.json, the curves and the picture
    python benchmarks/prove_same_learning.py --sides    # runs nothing: evaluates results/same_learning.json

Both sides train the model of `recipes/quickstart.yaml`. A seed's runs start from the same weights (the seed also
determines the warm-up), and get the same prompts in the same order. TRL's settings are read from the recipe: number of
steps, prompts per step, group size, maximum length, temperature, learning rate, AdamW, clipping of the gradient, and
the loss (clipped, token mean over the step, KL to the reference). Only the sampled tokens differ, because each side has
its own random numbers.

A run's reward at x trained tokens is the mean reward of the rollout that token x belongs to. The rise is the range from
0 to the smallest number of tokens that a run trains on in its first 40 steps: the reward hardly changes later. For seed
s, the difference over a range of tokens,

    d[s] = mean reward of grpo-lightning in the range - mean reward of TRL in the range,

is paired, because weights and prompts are the same. Let d be its mean over the S seeds, e = std / sqrt(S) its standard
error, and t(p) the quantile of Student's distribution with S - 1 degrees of freedom. The bars:

- equal (two one-sided tests at 5 %): |d| + t(0.95) e <= 0.05 over the rise, and <= 0.03 over the last tenth of the
  tokens that every run trains on. Noise makes these bars harder to reach.
- no difference along the curve: in each tenth of the rise, |d| <= t(1 - 0.025 / 10) e (5 % over all tenths,
  Bonferroni).
- TRL learns: its reward rises by at least 0.40 from the first tenth of the rise to the last.
- A difference is found where there is one: with half the learning rate on our side (the control), |d| > t(0.975) e over
  the rise, and the sides do not count as equal there.

The losses differ in one point: grpo-lightning clips k3, the estimate of a token's KL, at 10 nats, with a gradient of 0
beyond (`kl_divergence`). A sampled token that is rare under the policy and frequent under the reference has a larger
k3, and its gradient pulls the policy back. Therefore grpo-lightning also runs without the limit, with one more bar:

- no difference at the end: over the last tenth of the tokens, |d| <= t(0.975) e without the limit.

Exit code 1 if a bar does not hold. An error stops the proof if a step of a seed has different prompts on the two sides.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from proofs import record
from rich.console import Console
from rich.table import Table

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
RESULT = Path(__file__).parent / "results" / "same_learning.json"
"""The curves of all sides."""

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "same_learning.png"
"""Shown in docs/benchmarks.md."""

SEEDS = range(6)
TRL, OURS = "TRL", "grpo-lightning"
UNCLIPPED, CONTROL = f"{OURS}, k3 not clipped", f"{OURS}, half the learning rate"
COLORS = {TRL: "tab:orange", OURS: "tab:blue", UNCLIPPED: "tab:green", CONTROL: "tab:gray"}
RISE_STEPS = 40
NUM_PARTS = 10
"""Parts of the rise, and of all tokens, that are compared."""

NUM_DRAWN_PARTS = 100
RISE_MARGIN, END_MARGIN = 0.05, 0.03
"""Largest differences of mean rewards that count as equal, over the rise and in the last tenth of all tokens."""

LEAST_GAIN = 0.40


@dataclasses.dataclass(frozen=True)
class Curve:
    """What a run trained on: lists with one element per optimizer step."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    """Trained tokens."""

    rewards: list[float] = dataclasses.field(default_factory=list)
    """Mean reward of the completions."""

    prompts: list[list[str]] = dataclasses.field(default_factory=list)
    """The prompts, sorted."""

    def add(self, prompts: Sequence[str], rewards: Sequence[float], lengths: Sequence[int]) -> None:
        """Add a step. Args: prompts, rewards, lengths (tokens): [B] of its completions."""
        self.tokens.append(sum(lengths))
        self.rewards.append(statistics.fmean(rewards))
        self.prompts.append(sorted(set(prompts)))

    def means(self, num_tokens: float, num_parts: int) -> list[float]:
        """Mean reward in each of the equal parts of the first `num_tokens` trained tokens: [parts]."""
        steps = list(itertools.pairwise([0, *itertools.accumulate(self.tokens)]))
        width = num_tokens / num_parts
        means = []
        for part in range(num_parts):
            low, high = part * width, (part + 1) * width
            shares = [max(0.0, min(high, end) - max(low, start)) for start, end in steps]
            means.append(sum(share * reward for share, reward in zip(shares, self.rewards, strict=True)) / sum(shares))
        return means


Curves = Mapping[str, Sequence[Curve]]
"""Curves by side, one per seed."""


# ------------------------------------------------------------------------------------------------------------- the runs


def run_ours(seed: int, *flags: str) -> Curve:
    """Run the recipe with grpo-lightning, and read what it trained on from its completion log."""
    from grpo_lightning.cli import main as run_cli

    run_cli(["fit", "--config", str(RECIPE), f"--seed_everything={seed}", *flags])
    log = Path("runs/quickstart/version_0/completions.jsonl")
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    curve = Curve()
    for _, step in itertools.groupby(lines, key=lambda line: line["step"]):
        curve.add(*zip(*((line["prompt"], line["reward"], line["length"]) for line in step), strict=True))
    return curve


def run_unclipped(seed: int, *flags: str) -> Curve:
    """Run the recipe without a limit of k3, as TRL does."""
    from grpo_lightning.functional import losses

    losses.MAX_K3 = math.inf
    return run_ours(seed, *flags)


def run_control(seed: int, *flags: str) -> Curve:
    """Run the recipe with half its learning rate."""
    from grpo_lightning.cli import parse

    rate = parse(["--config", str(RECIPE)]).model.optimizer.init_args.lr
    return run_ours(seed, f"--model.optimizer.init_args.lr={rate / 2}", *flags)


def run_trl(seed: int, *flags: str) -> Curve:
    """Train with TRL's GRPOTrainer on the prompts of the recipe's steps, with the recipe's settings.

    Raises:
        ValueError: If the recipe has an objective that is not set up for TRL here.
    """
    import torch
    from datasets import Dataset
    from lightning import seed_everything
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from grpo_lightning import Objective, PromptSource, SamplingParams
    from grpo_lightning.cli import instantiate, parse

    config = parse(["--config", str(RECIPE), *flags])
    seed_everything(seed, verbose=False)
    (data,) = instantiate(config, "data")
    data.prepare_data()
    data.setup("fit")
    (module,) = instantiate(config, "model")
    objective, sampling, steps = module.objective, module.sampling, config.trainer.max_steps
    plain = Objective(beta=objective.beta, epsilon=objective.epsilon)
    if objective != plain or sampling != SamplingParams(sampling.max_completion_length, sampling.temperature):
        raise ValueError(f"{RECIPE.name} has settings that this script does not give to TRL: {objective}, {sampling}.")
    prompts = PromptSource(data.train_prompts, data.batch_size, seed=seed).upcoming(steps * data.batch_size)
    (reward,) = (reward for reward in module.reward_set.rewards if reward.weight)
    adam = module.optimizer_factory([torch.nn.Parameter(torch.zeros(1))]).defaults
    curve = Curve()

    def score(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], answer: list[str], **columns: Any
    ) -> list[float]:
        """The recipe's reward; records the step."""
        rewards: list[float] = reward(completions=completions, answer=answer)
        curve.add(prompts, rewards, [len(ids) for ids in completion_ids])
        return rewards

    trainer = GRPOTrainer(
        config.model.policy,
        reward_funcs=score,
        processing_class=AutoTokenizer.from_pretrained(config.model.policy, padding_side="left"),
        train_dataset=Dataset.from_list([{"prompt": prompt.content, **prompt.columns} for prompt in prompts]),
        args=GRPOConfig(
            output_dir="trl",
            max_steps=steps,
            per_device_train_batch_size=data.batch_size * module.num_generations,
            gradient_accumulation_steps=1,
            num_generations=module.num_generations,
            shuffle_dataset=False,
            max_completion_length=sampling.max_completion_length,
            temperature=sampling.temperature,
            loss_type="dapo",  # the mean over the tokens of the step
            beta=objective.beta,
            epsilon=objective.epsilon,
            use_bias_correction_kl=False,
            scale_rewards="group",
            optim="adamw_torch",
            learning_rate=adam["lr"],
            adam_beta1=adam["betas"][0],
            adam_beta2=adam["betas"][1],
            adam_epsilon=adam["eps"],
            weight_decay=adam["weight_decay"],
            lr_scheduler_type="constant",
            max_grad_norm=config.trainer.gradient_clip_val,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=seed,
        ),
    )
    trainer.train()
    return curve


RUNS: dict[str, Callable[..., Curve]] = {
    OURS: run_ours,
    TRL: run_trl,
    UNCLIPPED: run_unclipped,
    CONTROL: run_control,
}
ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1") | {
    "HF_HUB_OFFLINE": "1",
    "ACCELERATE_USE_CPU": "1",
    "CI": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


def run(side: str, seed: int, flags: Sequence[str], cache: Path) -> Curve:
    """Run a side in a process and an empty folder of its own. Args: cache: folder of the models after the warm-up."""
    with tempfile.TemporaryDirectory() as folder:
        child = [sys.executable, str(Path(__file__).resolve()), "--child", side, "--seeds", str(seed), *flags]
        environment = os.environ | ENVIRONMENT | {"GRPO_LIGHTNING_CACHE": str(cache)}
        result = subprocess.run(child, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            raise RuntimeError(f"{side}, seed {seed}, failed:\n{result.stderr[-3000:]}")
        return Curve(**json.loads((Path(folder) / "curve.json").read_text(encoding="utf-8")))


def run_all(
    sides: Sequence[str], seeds: Sequence[int], flags: Sequence[str], num_processes: int, console: Console
) -> dict[str, Sequence[Curve]]:
    """Run the sides with every seed; a seed's sides run one after the other.

    Raises:
        RuntimeError: If a run fails, or the prompts of a step differ between the sides.
    """

    def of_seed(seed: int) -> list[Curve]:
        curves: list[Curve] = []
        for side in sides:
            start = time.monotonic()
            curves.append(run(side, seed, flags, Path(cache)))
            if curves[-1].prompts != curves[0].prompts:
                raise RuntimeError(f"{side}, seed {seed}, has other prompts than {sides[0]}.")
            rewards, tokens = curves[-1].rewards, sum(curves[-1].tokens)
            console.print(
                f"{side}, seed {seed}: reward {rewards[0]:.2f} to {rewards[-1]:.2f} in {len(rewards)} steps, "
                f"{tokens:,} tokens, {time.monotonic() - start:.0f} s"
            )
        return curves

    with tempfile.TemporaryDirectory() as cache, ThreadPoolExecutor(num_processes) as pool:
        by_seed = list(pool.map(of_seed, seeds))
    return dict(zip(sides, zip(*by_seed, strict=True), strict=True))


# ------------------------------------------------------------------------------------------------------- the comparison


@functools.cache
def student_quantile(probability: float, freedom: int) -> float:
    """Quantile, above the median, of Student's t distribution.

    With t = sqrt(freedom) tan(angle), the distribution function is 1/2 + c times the integral of cos^(freedom - 1) from
    0 to the angle. The integral is computed by Simpson's rule, and the angle by bisection.

    Args:
        probability: From 0.5 to below 1.
        freedom: Degrees of freedom, at least 1.
    """
    factor = math.gamma((freedom + 1) / 2) / (math.sqrt(math.pi) * math.gamma(freedom / 2))

    def distribution(angle: float) -> float:
        points = 400
        weights = [1, *itertools.islice(itertools.cycle((4, 2)), points - 1), 1]
        values = [math.cos(angle * point / points) ** (freedom - 1) for point in range(points + 1)]
        area = sum(weight * value for weight, value in zip(weights, values, strict=True)) * angle / points / 3
        return 0.5 + factor * area

    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if distribution(middle) < probability else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Mean of paired differences, and its standard error."""

    mean: float
    error: float
    num_pairs: int

    @classmethod
    def between(cls, ours: Sequence[float], theirs: Sequence[float]) -> Difference:
        """Compare two sides. Args: ours, theirs: [S], S >= 2 seeds."""
        values = [one - other for one, other in zip(ours, theirs, strict=True)]
        return cls(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)), len(values))

    def half_width(self, probability: float) -> float:
        """t(p) e: with p = 0.975, half the width of the 95 % confidence interval."""
        return student_quantile(probability, self.num_pairs - 1) * self.error

    @property
    def bound(self) -> float:
        """The smallest margin within which two one-sided tests at 5 % call the sides equal."""
        return abs(self.mean) + self.half_width(0.95)

    def is_significant(self, num_comparisons: int = 1) -> bool:
        """True if the mean differs from 0 at 5 %, over this number of comparisons."""
        return abs(self.mean) > self.half_width(1 - 0.025 / num_comparisons)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Mean rewards of the sides over the same trained tokens."""

    num_tokens: int
    """The first tokens, which are compared."""

    rewards: dict[str, list[list[float]]]
    """[S, NUM_PARTS] by side."""

    @classmethod
    def of(cls, curves: Curves, num_steps: int | None = None) -> Comparison:
        """Compare the tokens that every run trains on in its first `num_steps`; None compares all steps."""
        num_tokens = min(sum(curve.tokens[:num_steps]) for some in curves.values() for curve in some)
        rewards = {side: [curve.means(num_tokens, NUM_PARTS) for curve in some] for side, some in curves.items()}
        return cls(num_tokens, rewards)

    def whole(self, side: str) -> Difference:
        """The difference of a side from TRL over all tokens."""
        ours, theirs = ([statistics.fmean(parts) for parts in self.rewards[name]] for name in (side, TRL))
        return Difference.between(ours, theirs)

    def parts(self, side: str) -> list[Difference]:
        """The difference of a side from TRL in every part."""
        both = zip(zip(*self.rewards[side], strict=True), zip(*self.rewards[TRL], strict=True), strict=True)
        return [Difference.between(ours, theirs) for ours, theirs in both]


def bars_of(curves: Curves) -> dict[str, bool]:
    """Every bar, and whether it is reached."""
    rise, whole = Comparison.of(curves, RISE_STEPS), Comparison.of(curves)
    control = rise.whole(CONTROL)
    gain = statistics.fmean(parts[-1] - parts[0] for parts in rise.rewards[TRL])
    return {
        f"rise: equal within {RISE_MARGIN}": rise.whole(OURS).bound <= RISE_MARGIN,
        f"last tenth: equal within {END_MARGIN}": whole.parts(OURS)[-1].bound <= END_MARGIN,
        "each tenth of the rise: no significant difference": not any(
            part.is_significant(NUM_PARTS) for part in rise.parts(OURS)
        ),
        "k3 not clipped, last tenth: no significant difference": not whole.parts(UNCLIPPED)[-1].is_significant(),
        f"TRL's reward rises by >= {LEAST_GAIN:.2f}": gain >= LEAST_GAIN,
        "half the learning rate: a difference is found": control.is_significant() and control.bound > RISE_MARGIN,
    }


# --------------------------------------------------------------------------------------------------------------- report


def table_of(curves: Curves) -> Table:
    """Mean rewards: in each tenth of the rise, in the rise, and in the last tenth of all tokens.

    Next to them are the differences from TRL's, with half the width of their 95 % confidence intervals. Those of the
    tenths of the rise are simultaneous intervals.
    """
    others = (OURS, UNCLIPPED, CONTROL)
    table = Table("trained tokens", TRL, *(column for side in others for column in (side, "difference")))
    rise, whole = Comparison.of(curves, RISE_STEPS), Comparison.of(curves)

    def add(title: str, rewards: Mapping[str, Sequence[float]], comparisons: int = 1) -> None:
        cells = [f"{statistics.fmean(rewards[TRL]):.3f}"]
        for side in others:
            difference = Difference.between(rewards[side], rewards[TRL])
            width = difference.half_width(1 - 0.025 / comparisons)
            cells += [f"{statistics.fmean(rewards[side]):.3f}", f"{difference.mean:+.3f} +- {width:.3f}"]
        table.add_row(title, *cells)

    for part in range(NUM_PARTS):
        rewards = {side: [parts[part] for parts in some] for side, some in rise.rewards.items()}
        add(f"to {(part + 1) * rise.num_tokens / NUM_PARTS:,.0f}", rewards, NUM_PARTS)
    table.add_section()
    add("the rise", {side: [statistics.fmean(parts) for parts in some] for side, some in rise.rewards.items()})
    end = {side: [parts[-1] for parts in some] for side, some in whole.rewards.items()}
    add(f"last tenth of {whole.num_tokens:,}", end)
    return table


def draw(curves: Curves, path: Path) -> None:
    """Draw the curves (mean and seeds) on the left, and the differences in every tenth on the right."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    ranges = {"rise": Comparison.of(curves, RISE_STEPS), "all": Comparison.of(curves)}
    num_tokens = ranges["all"].num_tokens
    figure = Figure(figsize=(11.5, 4.8), layout="constrained")
    axes = figure.subplot_mosaic([["curves", "rise"], ["curves", "all"]], width_ratios=(3, 2))
    tokens = [(part + 0.5) * num_tokens / NUM_DRAWN_PARTS / 1000 for part in range(NUM_DRAWN_PARTS)]
    for side, some in curves.items():
        means = [curve.means(num_tokens, NUM_DRAWN_PARTS) for curve in some]
        for values in means:
            axes["curves"].plot(tokens, values, color=COLORS[side], linewidth=0.5, alpha=0.3)
        mean = [statistics.fmean(values) for values in zip(*means, strict=True)]
        axes["curves"].plot(tokens, mean, color=COLORS[side], linewidth=1.8, label=f"{side} (mean of {len(some)})")
    axes["curves"].axvline(ranges["rise"].num_tokens / 1000, color="black", linewidth=0.8, linestyle=":")
    axes["curves"].set(ylabel="sampled reward", ylim=(0, 1.02), title="Quickstart: same weights and prompts")
    axes["curves"].legend(frameon=False, loc="lower right")
    for name, comparison in ranges.items():
        axes[name].axhline(0, color="black", linewidth=0.8)
        width = comparison.num_tokens / NUM_PARTS / 1000
        for place, side in ((0.4, OURS), (0.6, UNCLIPPED)):
            parts = comparison.parts(side)
            centers = [(part + place) * width for part in range(NUM_PARTS)]
            errors = [part.half_width(1 - 0.025 / NUM_PARTS) for part in parts]
            axes[name].errorbar(
                centers, [part.mean for part in parts], errors, fmt=".", color=COLORS[side], capsize=2, linewidth=1
            )
        axes[name].set(ylabel="difference from TRL")
    axes["rise"].set_title("Tenths of the rise (above) and of all tokens")
    for each in axes.values():
        each.set_xlabel("thousand trained tokens")
        each.grid(alpha=0.3)
        each.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def outcome_of(curves: Curves, seeds: Sequence[int]) -> dict[str, Any]:
    """The entry of `proofs.json`."""
    rise, whole = Comparison.of(curves, RISE_STEPS), Comparison.of(curves)
    differences = {"rise": rise.whole(OURS), "last tenth": whole.parts(OURS)[-1]}
    differences |= {"k3 not clipped, rise": rise.whole(UNCLIPPED), "control, rise": rise.whole(CONTROL)}
    differences["k3 not clipped, last tenth"] = whole.parts(UNCLIPPED)[-1]
    return {
        "seeds": list(seeds),
        "steps": len(curves[TRL][0].tokens),
        "tokens_of_rise": rise.num_tokens,
        "tokens": whole.num_tokens,
        "differences": {
            name: {"mean": each.mean, "standard_error": each.error, "equal_within": each.bound}
            for name, each in differences.items()
        },
        "reward_by_tenth_of_rise": {
            side: [[round(value, 4) for value in parts] for parts in some] for side, some in rise.rewards.items()
        },
        "bars": bars_of(curves),
    }


def main() -> int:
    """Run everything, print the table, check the bars. Returns: the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[*SEEDS], help="at least two")
    parser.add_argument("--steps", type=int, help="instead of the recipe's, for a short look")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--record", action="store_true", help="write the outcome into benchmarks/proofs.json")
    sides = "sides to run; of the others, the recorded curves are taken"
    parser.add_argument("--sides", nargs="*", choices=RUNS, default=[*RUNS], metavar="SIDE", help=sides)
    parser.add_argument("--child", choices=RUNS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        flags = [] if options.steps is None else [f"--trainer.max_steps={options.steps}"]
        curve = RUNS[options.child](options.seeds[0], *flags)
        Path("curve.json").write_text(json.dumps(dataclasses.asdict(curve)), encoding="utf-8")
        return 0
    if len(options.seeds) < 2:
        parser.error(f"--seeds must be at least two, for a standard error; got {options.seeds}")
    console = Console(width=max(150, Console().width))
    flags = [] if options.steps is None else ["--steps", str(options.steps)]
    seeds, curves = options.seeds, {}
    if recorded := [side for side in RUNS if side not in options.sides]:
        stored = json.loads(RESULT.read_text(encoding="utf-8"))
        seeds = stored["seeds"]
        curves = {side: [Curve(**curve) for curve in stored["curves"][side]] for side in recorded}
    if options.sides:
        curves |= run_all(options.sides, seeds, flags, options.processes, console)
    console.print(table_of(curves))
    bars = bars_of(curves)
    for bar, holds in bars.items():
        console.print(f"{'holds' if holds else 'FAILS'}: {bar}")
    if options.record:
        draw(curves, PICTURE)
        steps = {
            side: [{"tokens": curve.tokens, "rewards": [round(value, 4) for value in curve.rewards]} for curve in some]
            for side, some in curves.items()
        }
        RESULT.write_text(json.dumps({"seeds": seeds, "curves": steps}) + "\n", encoding="utf-8")
        record("same_learning", outcome_of(curves, seeds))
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
