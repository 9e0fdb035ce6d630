"""The groups of a rollout.

`GroupSource` samples groups. `Rollout` holds the groups of this rank. `SharedGroups` distributes the completions of a
group over several ranks.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_lightning.core.ranks import Teams, interleave
from grpo_lightning.core.types import Completion, Group, Prompt, PromptVision, SamplingParams, VisionInputs
from grpo_lightning.environments.method_calls import class_name, pickling_problem
from grpo_lightning.policy.encoder import Encoder, check_length
from grpo_lightning.policy.families import is_tower_trained
from grpo_lightning.policy.sharding import Sharding
from grpo_lightning.policy.vision import encode_missing, needs_blank
from grpo_lightning.rewards.scoring import Scores, concatenate_scores
from grpo_lightning.rollout.engine import Progress, RolloutEngine

if TYPE_CHECKING:  # `conversations` imports this module
    from grpo_lightning.rollout.conversations import Conversations


class GroupSource(NamedTuple):
    """Encodes prompts and samples groups with an engine."""

    engine: RolloutEngine
    encoder: Encoder
    sharding: Sharding

    rollout_index: int
    """Number of rollouts that the policy has trained on, recorded in each group."""

    conversations: Conversations | None = None
    """Plays the completions as conversations with environments; None for completions of one turn."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: SamplingParams,
        seeds: list[int],
        progress: Progress | None = None,
        part: range | None = None,
        on_group: Callable[[Group], None] | None = None,
    ) -> list[Group]:
        """Sample G completions for each of N prompts. For the arguments, see `prepare`."""
        return self.prepare(prompts, num_generations, sampling, seeds, progress, part, on_group)()

    def prepare(
        self,
        prompts: Sequence[Prompt],
        num_generations: int,
        sampling: SamplingParams,
        seeds: list[int],
        progress: Progress | None = None,
        part: range | None = None,
        on_group: Callable[[Group], None] | None = None,
    ) -> Callable[[], list[Group]]:
        """Encode N prompts, and return a function that samples and returns their N groups.

        Asynchronous rollouts call this function in another thread. For the arguments, see `RolloutEngine.generate`.
        Image placeholder tokens, and ids for which the tokenizer has no token, are suppressed too. `on_group` is called
        with each complete group. Without conversations, it is called only if the engine's `generate` has an argument
        `on_group`.

        Raises:
            ValueError: If a prompt cannot be encoded, or is so long that no position is left for its completions.
        """
        states: list[Any] = []
        if self.conversations is not None:
            prompts, states = self.conversations.begin(prompts, seeds)
        encoded = self.encoder.fitting(prompts, sampling.max_completion_length)
        if self.conversations is not None:
            # The engine itself only sees the limit of the next turn, not that of the whole conversation.
            limit = getattr(self.engine, "max_sequence_length", None)
            for prompt, inputs in zip(prompts, encoded, strict=True):
                check_length(prompt, len(inputs.token_ids), limit, sampling.max_completion_length, is_of_engine=True)
        # If weights are sharded, all ranks run the vision tower together, even if only some ranks have images.
        vision = self.encoder.vision_inputs([prompt.vision for prompt in encoded], needs_blank=self.sharding.is_sharded)
        never = {*sampling.suppress_tokens, *self.encoder.never_sampled}

        def make_group(number: int, completions: list[Completion]) -> Group:
            return Group(
                prompt=prompts[number],
                prompt_ids=encoded[number].token_ids,
                completions=completions,
                rollout_index=self.rollout_index,
                image_views=encoded[number].image_views,
                vision=encoded[number].vision,
            )

        # Optional arguments are passed only if they are needed, because an engine may lack them.
        more: dict[str, Any] = {"vision": vision, "part": part}
        takes = inspect.signature(self.engine.generate).parameters
        if on_group is not None and (self.conversations is not None or "on_group" in takes):
            more["on_group"] = lambda number, completions: on_group(make_group(number, completions))

        params = replace(sampling, suppress_tokens=sorted(never))
        more = {name: value for name, value in more.items() if value is not None}

        def sample() -> list[Group]:
            if self.conversations is not None:
                with getattr(self.engine, "hold_weights", contextlib.nullcontext)():
                    sampled = self.conversations.play(
                        self.engine, prompts, encoded, states, num_generations, params, seeds, progress, **more
                    )
            else:
                ids = [prompt.token_ids for prompt in encoded]
                sampled = self.engine.generate(ids, num_generations, params, seeds, progress, **more)
            return [make_group(*pair) for pair in zip(range(len(prompts)), sampled, strict=True)]

        return sample


def kl_to_reference(groups: Sequence[Group]) -> Tensor:
    """KL of each completion to the reference, [N, G] in nats, as the sum of the estimate k1 over the sampled tokens.

        KL = sum over t of (rollout_logprob[t] - ref_logprob[t])

    In a conversation, t runs over the tokens that the policy sampled. In other completions, t runs over the tokens that
    are not masked, or over all tokens if all of them are masked.
    """
    return torch.tensor([[_kl(c) for c in group.completions] for group in groups], dtype=torch.float32)


def _kl(completion: Completion) -> float:
    """KL of one completion in nats, over its sampled tokens, even if the overlong filter has masked them."""
    if not completion.token_ids:
        return 0.0
    assert completion.ref_logprobs is not None
    differences = [own - ref for own, ref in zip(completion.logprobs, completion.ref_logprobs, strict=True)]
    if completion.turns is None:
        mask = completion.mask if completion.mask and any(completion.mask) else [True] * len(differences)
        return sum(difference for difference, is_sampled in zip(differences, mask, strict=True) if is_sampled)
    return sum(sum(differences[turn.start : turn.end]) for turn in completion.turns if turn.is_sampled)


def vision_of(
    prompts: Sequence[PromptVision | None],
    encoder: Encoder,
    policy: nn.Module,
    sharding: Sharding,
    *,
    has_policys_tower: bool = True,
) -> VisionInputs | None:
    """Vision inputs of prompts for scoring; None if the policy is text-only. Collective.

    If the weights are not sharded and the vision tower is frozen, missing image features are computed and stored. A
    reference with another vision tower (`has_policys_tower` is False) encodes the images itself.
    """
    if not encoder.is_multimodal:
        return None
    if not has_policys_tower:
        prompts = [prompt and replace(prompt, features=None) for prompt in prompts]
    elif not sharding.is_sharded and not is_tower_trained(policy):
        encode_missing(policy, prompts)
    return encoder.vision_inputs(prompts, needs_blank=needs_blank(policy, prompts, is_sharded=sharding.is_sharded))


def have_failed(groups: Sequence[Group]) -> Tensor:
    """Whether the environment of each completion failed, and `on_error` is "none": [N, G] bool."""
    return torch.tensor([[c.has_failed for c in group.completions] for group in groups], dtype=torch.bool)


def trained_lengths(groups: Sequence[Group]) -> Tensor:
    """Count the trained tokens of each completion: [N, G]."""
    return torch.tensor([[_trained_length(c) for c in group.completions] for group in groups], dtype=torch.long)


def _trained_length(completion: Completion) -> int:
    return len(completion.token_ids) if completion.mask is None else sum(completion.mask)


@dataclass
class Rollout:
    """This rank's part of a rollout. Methods of `GRPOLightningModule` fill in the fields, one after the other."""

    groups: list[Group]
    """N groups, each of a prompt and its G completions."""

    scores: Scores | None = None
    """Values of each reward, what the rewards logged, and the number of their failures."""

    rewards: Tensor | None = None
    """[N, G] float32: combined rewards. NaN where a completion is not scorable, or is excluded from its group."""

    advantages: Tensor | None = None
    """[N, G] float32."""

    def select(self, rows: Sequence[int]) -> Rollout:
        """Select groups of a scored rollout by row, in the given order."""
        assert self.scores is not None
        assert self.rewards is not None
        rows = list(rows)
        return Rollout([self.groups[row] for row in rows], self.scores.select(rows), self.rewards[rows])


def concatenate(parts: Sequence[Rollout]) -> Rollout:
    """Concatenate the groups of scored rollouts."""
    scores = [part.scores for part in parts if part.scores is not None]
    rewards = [part.rewards for part in parts if part.rewards is not None]
    return Rollout([group for part in parts for group in part.groups], concatenate_scores(scores), torch.cat(rewards))


def per_completion(values: Tensor | None, groups: Sequence[Group], *, name: str, verb: str) -> Tensor:
    """Return `values` if `values` is a tensor [N, G]. Otherwise, raise ValueError.

    `name` is the name of the values. `verb` is the name of the method that returned the values. The error message
    contains both names.
    """
    sizes = {len(group.completions) for group in groups}
    if isinstance(values, Tensor) and values.ndim == 2 and len(values) == len(groups) and sizes <= {values.shape[1]}:
        return values
    size = sizes.pop() if len(sizes) == 1 else "G"
    got = "none" if values is None else f"a {type(values).__name__}: use torch.tensor(...)"
    if isinstance(values, Tensor):
        got = f"the shape {list(values.shape)}"
    raise ValueError(
        f"`{verb}` must return the Rollout with `{name}` [{len(groups)}, {size}], one number per completion; got {got}."
    )


def check_finite(values: Tensor, *, name: str, verb: str) -> None:
    """Check that values [N, G] are finite. Raises: ValueError with the method and the number of non-finite values."""
    if num_wrong := int((~values.isfinite()).sum()):
        raise ValueError(
            f"`{verb}` returned {num_wrong} of {values.numel()} `{name}` that are nan or infinite, which would make "
            "the weights nan. The reward of a completion that is not scorable is nan: set its advantage to 0."
        )


OTHER_OBSERVATIONS = (
    "model.ranks_per_group is {}, but the ranks that share groups have different prompts: either `reset` of the "
    "environment (model.environment) returns different observations for the same row, or the training loader gives the "
    "ranks different prompts. Let `reset` depend only on the row's columns, or draw random numbers from the generators "
    "of random, numpy or torch in a `reset` that is not async, because they are seeded there. Give all ranks with the "
    "same rank // ranks_per_group the same prompts."
)
OTHER_PROMPTS = (
    "model.ranks_per_group is {}, but the training loader gives the ranks that share groups different prompts. Use a "
    "grpo_lightning.PromptSource, or give all ranks with the same rank // ranks_per_group the same prompts."
)
OWN_GROUPS = (
    "With model.ranks_per_group, `sample` must return groups of `self.generate`, which samples a part of each group on "
    "every rank; got a group from elsewhere."
)


def sending_problem(ranks_per_group: int, environments: Iterable[Any]) -> str | None:
    """The error message for the first environment that cannot be pickled; None if all environments can be pickled."""
    for environment in environments:
        if reason := pickling_problem(environment):
            return (
                f"model.ranks_per_group is {ranks_per_group}, but the environment {class_name(environment)!r} "
                f"(model.environment) cannot be pickled ({reason}), and the ranks that share a group send each other "
                "the environments of their completions. Remove what cannot be pickled from the object, for example "
                "with a method __getstate__, or set model.ranks_per_group to 1."
            )
    return None


class SharedGroups:
    """Collects the groups that a team has sampled, and spreads their completions over the team for training.

    A team is the `ranks_per_group` ranks that share the same prompts. Every member samples its part of the completions
    of each prompt (`Teams.part`). The first member then holds the complete groups for rewards and advantages. For
    log-probs and training, each member gets its part back.
    """

    def __init__(self, teams: Teams) -> None:
        self.teams = teams
        self._sampled: list[Group] = []
        """This rank's part of each group of this cycle. The parts keep the vision inputs, which are not sent between
        ranks."""

    def collect(self, parts: list[Group]) -> list[Group]:
        """Make N complete groups from the parts of all members of the team. Collective over the team.

        Args:
            parts: [N], this member's part of each group.

        Returns:
            The N complete groups on the first member; an empty list on the other members.

        Raises:
            ValueError: On every member, if the members have different prompts or if environments cannot be sent.
        """
        if not self.teams.is_shared:
            return parts
        first = len(self._sampled)
        self._sampled += parts
        endings = (completion.ending for part in parts for completion in part.completions)
        states = (ending.state for ending in endings if ending is not None)
        self.teams.check(sending_problem(self.teams.ranks_per_group, states))
        of_members = self.teams.gather([(part.prompt_ids, part.completions) for part in parts])
        own = [part.prompt_ids for part in parts]
        differs = any([ids for ids, _ in member] != own for member in of_members)
        is_begun = any(part.prompt.observation is not None for part in parts)
        message = OTHER_OBSERVATIONS if is_begun else OTHER_PROMPTS
        self.teams.check(message.format(self.teams.ranks_per_group) if differs else None)
        # The other members get no groups.
        return [
            replace(part, completions=interleave([member[i][1] for member in of_members]), number=first + i)
            for i, part in enumerate(parts)
            if of_members
        ]

    def spread(self, rollout: Rollout) -> Rollout:
        """Give each member its part of the completions and advantages of N groups. Collective over the team.

        Only the first member's `rollout` has groups.

        Raises:
            ValueError: On every member, if a group does not come from `GRPOLightningModule.generate`.
        """
        if not self.teams.is_shared:
            return rollout
        self.teams.check(OWN_GROUPS if any(group.number < 0 for group in rollout.groups) else None)
        of_members = [self._part_of(rollout, member) for member in range(self.teams.ranks_per_group)]
        numbers, completions, advantages = self.teams.scatter(of_members)
        groups = [
            replace(self._sampled[number], completions=own, number=number)
            for number, own in zip(numbers, completions, strict=True)
        ]
        return Rollout(groups, advantages=advantages)

    def return_ref_logprobs(self, groups: Sequence[Group], parts: Sequence[Group]) -> None:
        """Copy the reference log-probs of the members' `parts` into the first member's complete `groups`.

        Collective over the team.
        """
        if not self.teams.is_shared:
            return
        of_members = self.teams.gather([[c.ref_logprobs for c in part.completions] for part in parts])
        for i, group in enumerate(groups):
            logprobs = interleave([member[i] for member in of_members])
            for completion, values in zip(group.completions, logprobs, strict=True):
                completion.ref_logprobs = values

    def forget(self) -> None:
        """Free this rank's parts of the groups. Call this only after the micro-batches have been made from them."""
        self._sampled = []

    def _part_of(self, rollout: Rollout, member: int) -> tuple[list[int], list[list[Completion]], Tensor | None]:
        """Group numbers [N], completions [N][part] without environments, and advantages [N, part] of one member."""
        parts = [self.teams.part(len(group.completions), member) for group in rollout.groups]
        completions = [
            [_without_environment(group.completions[i]) for i in part]
            for group, part in zip(rollout.groups, parts, strict=True)
        ]
        advantages = rollout.advantages
        if advantages is not None and parts:
            advantages = advantages[:, list(parts[0])]
        return [group.number for group in rollout.groups], completions, advantages


def _without_environment(completion: Completion) -> Completion:
    """A copy of a completion without the environment at its end."""
    if completion.ending is None:
        return completion
    return replace(completion, ending=replace(completion.ending, state=None))
