"""Training on conversations: only what the policy wrote is trained on, and runs resume as without them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional

from grpo_lightning.callbacks import CompletionLog
from grpo_lightning.core.types import Completion, Group, Prompt, Turn
from grpo_lightning.data.datamodule import PromptDataModule
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.environments import Environment, Step, Tools
from grpo_lightning.functional import turn_credits
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.policy.loading import PolicyLoader
from grpo_lightning.rewards import ByMethod, EnvironmentReward, RewardWorkers, ToolUse, WeightedReward
from grpo_lightning.rollout.conversations import ConversationSettings
from grpo_lightning.rollout.dynamic_sampling import DynamicSampling
from grpo_lightning.rollout.groups import kl_to_reference
from grpo_lightning.rollout.overlong_filter import mask_truncated
from tests.environments.games import ByPromptLength, Counted, Faulty, double
from tests.helpers.module_runs import SMALL, History, are_equal, fit, make_module, make_trainer, vowel_share, weights_of
from tests.helpers.tiny_models import tiny_model, tiny_tokenizer
from tests.marks import SLOW, few

PROMPTS = ["a", "b c", "d e f", "g h i j k", "l", "m n", "o p q", "r s t u v"]
LIMITS = {"max_turn_length": 5}


def module_of(environment: Any = None, limits: dict[str, Any] | None = None, **options: Any) -> GRPOLightningModule:
    settings: dict[str, Any] = {
        "environment": environment or ByPromptLength(),
        "conversation": ConversationSettings(**(LIMITS if limits is None else limits)),
        "rewards": [EnvironmentReward()],
        "length": 60,
    }
    return make_module(**(settings | options))


@pytest.mark.parametrize("scoring", ["extended", "dense"])
def test_only_the_policys_tokens_are_trained_on(scoring):
    """Loss and gradient of a step, against a plain loop over the tokens that the policy wrote."""
    loader = PolicyLoader(model=tiny_model("qwen2", **SMALL), tokenizer=tiny_tokenizer(), scoring=scoring)
    module = module_of(policy=loader, tokenizer=None)
    found: dict[str, Any] = {}

    class Watched(type(module)):  # type: ignore[misc]
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            found["grads"] = {name: p.grad.clone() for name, p in self.policy.named_parameters()}
            found["rollout"] = self.rollout

    module.__class__ = Watched
    before = {name: p.detach().clone() for name, p in tiny_model("qwen2", **SMALL).named_parameters()}
    fit(module, PROMPTS, max_steps=1, shuffle=False)
    policy = tiny_model("qwen2", **SMALL).eval()
    assert all(torch.equal(before[name], p) for name, p in policy.named_parameters())
    total, count = torch.zeros(()), 0
    rollout = found["rollout"]
    masked = 0
    for group, advantages in zip(rollout.groups, rollout.advantages, strict=True):
        for completion, advantage in zip(group.completions, advantages, strict=True):
            ids = torch.tensor([group.prompt_ids + completion.token_ids])
            logits = policy(ids).logits[0, len(group.prompt_ids) - 1 : -1]
            logits = logits.masked_fill(torch.arange(logits.shape[1]) >= 97, -torch.inf)
            logprobs = -functional.cross_entropy(logits, torch.tensor(completion.token_ids), reduction="none")
            for turn in completion.turns:
                if turn.is_sampled:
                    ratio = (logprobs - logprobs.detach())[turn.start : turn.end].exp()
                    total = total - (advantage * ratio).sum()
                    count += turn.end - turn.start
                else:
                    masked += turn.end - turn.start
    assert masked > 50
    (total / count).backward()
    for name, parameter in policy.named_parameters():
        assert torch.allclose(found["grads"][name], parameter.grad, atol=2e-6), name


@SLOW
def test_metrics_of_conversations():
    history = History()
    fit(module_of(), PROMPTS, max_steps=2, shuffle=False, callbacks=[history])
    step = history.steps[0]
    assert step["rollout/turns"] == 11 / 4  # 1, 2, 3 and 5
    assert 0 < step["rollout/sampled_fraction"] < 1
    assert step["rollout/observation_tokens"] > 0
    assert step["environment/reward"] == pytest.approx(step["environment/vowels"] * 0.1, abs=1e-6)
    assert step["policy/rollout_difference_max"] < 1e-5


def test_failures_are_counted_and_not_trained_on(caplog):
    history, module = History(), module_of(Faulty("raise"), {"max_turn_length": 3, "on_error": "none"})
    fit(module, PROMPTS, max_steps=1, callbacks=[history])
    assert history.steps[0]["environment/failures/exception"] == 16
    assert "All advantages of an optimizer step are 0: all completions had a failed environment" in caplog.text
    assert module.rollout.rewards.isnan().all()
    assert not module.rollout.advantages.any()


class Once(ByPromptLength):
    """Ends with the first turn. Fails after first characters with an even number."""

    def step(self, completion: str) -> Step:
        if ord(completion[:1] or "a") % 2 == 0:
            raise KeyError("even")
        return Step(done=True, reward=float(completion.count("a")))


class One(Once):
    """Gives the same reward to all conversations that do not fail."""

    def step(self, completion: str) -> Step:
        return replace(super().step(completion), reward=1.0)


def test_failures_are_not_scorable(tmp_path):
    history, limits = History(), {"max_turn_length": 6, "on_error": "none"}
    module = module_of(One(), limits, num_generations=8)
    fit(module, PROMPTS, max_steps=1, shuffle=False, callbacks=[history, CompletionLog(dirpath=str(tmp_path))])
    step = history.steps[0]
    failed = [completion.has_failed for group in module.rollout.groups for completion in group.completions]
    assert 0 < sum(failed) < len(failed)
    assert step["reward/mean"] == step["reward/environment_reward"] == step["reward/zero_variance_groups"] == 1
    assert step["reward/not_scorable"] == sum(failed) / len(failed)
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    values = [(line["reward"], line["rewards"]["environment_reward"]) for line in lines]
    assert values == [(None, None) if has_failed else (1, 1) for has_failed in failed]


def test_failures_are_not_validated(caplog):
    module = module_of(Once(), {"max_turn_length": 6, "on_error": "none"})
    seen: list[Any] = []
    evaluate = module.evaluate

    def remembered(*args: Any, **more: Any) -> Any:
        seen.append(evaluate(*args, **more))
        return seen[-1]

    module.evaluate = remembered  # type: ignore[method-assign]
    numbers = make_trainer().validate(module, PromptSource(PROMPTS, 4), verbose=False)[0]
    sampled = [e for e in seen if e.groups[0].completions[0].logprobs][::2]
    pairs = [
        (completion, total)
        for evaluation in sampled
        for group, totals in zip(evaluation.groups, evaluation.scores.total.tolist(), strict=True)
        for completion, total in zip(group.completions, totals, strict=True)
    ]
    failed = [bool(completion.ending.failure) for completion, _ in pairs]
    assert [total != total for _, total in pairs] == failed
    assert 0 < sum(failed) < len(failed) == len(PROMPTS)
    assert numbers["val/environment_failures"] == pytest.approx(sum(failed) / len(failed))
    good = [completion.environment_reward for completion, _ in pairs if not completion.ending.failure]
    assert numbers["val/environment_reward"] == pytest.approx(sum(good) / len(good))
    assert numbers["val/turns"] == 1


def test_failures_have_no_credit():
    limits = {"max_turn_length": 6, "on_error": "none", "turn_credit": 1.0}
    module = module_of(Once(), limits, objective=Objective(beta=0.0), num_generations=8)
    fit(module, PROMPTS, max_steps=1, shuffle=False)
    num_failed = 0
    for group in module.rollout.groups:
        good = [c for c in group.completions if not c.ending.failure]
        num_failed += len(group.completions) - len(good)
        assert not any(any(c.turn_advantages) for c in group.completions if c.ending.failure)
        expected = turn_credits([[c.environment_reward] for c in good])
        assert [c.turn_advantages for c in good] == [
            pytest.approx([credit] * len(c.token_ids)) for c, (credit,) in zip(good, expected, strict=True)
        ]
    assert num_failed > 0


class Traded(Counted):
    """The first character decides which of two turns gets the reward; both together always get 1."""

    def step(self, completion: str) -> Step:
        self.turn += 1
        if self.turn == 1:
            self.first = float(ord(completion[:1] or "a") % 2)
            return Step("?", reward=self.first)
        return Step(done=True, reward=1 - self.first)


@pytest.mark.parametrize("turn_credit", [0.0, 1.0])
def test_groups_whose_turns_have_credit_are_not_sampled_again(turn_credit):
    history = History()
    limits = {"max_turn_length": 3, "turn_credit": turn_credit}
    sampling = {"dynamic_sampling": DynamicSampling(max_resample_times=1), "num_generations": 8}
    module = module_of(Traded(), limits, objective=Objective(beta=0.0), **sampling)
    fit(module, PROMPTS, max_steps=1, shuffle=False, callbacks=[history])
    assert not module.rollout.advantages.any()  # the sums are the same
    assert history.steps[0]["rollout/resample_rounds"] == (0 if turn_credit else 1)


def test_the_kl_of_a_filtered_conversation_leaves_out_observations():
    logprobs, ref_logprobs = [-1.0, -1.0, 0.0, 0.0, -2.0], [-1.5, -1.0, -5.0, -5.0, -1.0]
    turns = [
        Turn("assistant", "a", 0, 2, is_sampled=True),
        Turn("user", "b", 2, 4, is_sampled=False),
        Turn("assistant", "c", 4, 5, is_sampled=True),
    ]
    completion = Completion(
        [1, 2, 3, 4, 5], logprobs, "length", "abc", turns=turns, mask=[True, True, False, False, True]
    )
    completion.ref_logprobs = ref_logprobs
    group = Group(Prompt("p"), [1], [completion])
    assert kl_to_reference([group]).tolist() == [[-0.5]]
    mask_truncated([group])
    assert kl_to_reference([group]).tolist() == [[-0.5]]


def test_completions_jsonl_has_the_turns(tmp_path):
    fit(module_of(), PROMPTS, max_steps=1, shuffle=False, callbacks=[CompletionLog(dirpath=str(tmp_path))])
    lines = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert len(lines) == 16
    turns = lines[4]["turns"]  # of "b c"
    assert [turn["role"] for turn in turns] == ["assistant", "user", "assistant", "user"]
    assert turns[0].keys() == {"role", "text", "length", "finish_reason", "reward"}
    assert sum(turn["length"] for turn in turns) == lines[4]["length"]


class KilledError(Exception):
    """Stands in for SIGKILL."""


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_run_resumes_inside_a_cycle_bit_for_bit(tmp_path):
    def run(folder: Any, kill_at: int | None = None, ckpt_path: str | None = None) -> GRPOLightningModule:
        module = module_of(updates_per_rollout=2, dynamic_sampling=DynamicSampling(max_resample_times=2))
        saved = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")

        class Kill(History):
            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                if trainer.global_step == kill_at:
                    raise KilledError

        try:
            options = {"enable_checkpointing": True, "callbacks": [saved, Kill()], "accumulate_grad_batches": 2}
            fit(module, PROMPTS, max_steps=6, ckpt_path=ckpt_path, **options)
        except KilledError:
            pass
        return module

    whole = run(tmp_path / "whole")
    run(tmp_path / "killed", kill_at=4)
    for step in (1, 2, 3):
        resumed = run(tmp_path / f"resumed{step}", ckpt_path=str(tmp_path / "killed" / f"step={step}.ckpt"))
        assert are_equal(weights_of(whole), weights_of(resumed)), step


@SLOW
def test_validation_plays_conversations():
    module = module_of()
    trainer = make_trainer()
    numbers = trainer.validate(module, PromptSource(PROMPTS, 4), verbose=False)[0]
    assert numbers["val/environment_reward"] > 0


@SLOW
def test_credit_of_turns_reaches_their_tokens():
    module = module_of(Counted(num_turns=3), {"max_turn_length": 3, "turn_credit": 0.5}, objective=Objective(beta=0.0))

    fit(module, PROMPTS, max_steps=1)
    # All conversations get the same reward in every turn: no credit.
    assert not any(any(c.turn_advantages) for g in module.rollout.groups for c in g.completions)
    module = module_of(ByPromptLength(), {"max_turn_length": 5, "turn_credit": 0.5}, objective=Objective(beta=0.0))
    fit(module, PROMPTS, max_steps=1, shuffle=False)
    group = module.rollout.groups[2]
    batch = module.run.cycle.micro_batches[0]
    rewards = torch.tensor([[t.reward for t in c.turns if t.is_sampled] for c in group.completions])
    returns = rewards.flip(1).cumsum(1).flip(1)
    credit = (returns - returns.mean(0)) / (returns.std(0) + 1e-4)
    credit[:, returns.std(0) == 0] = 0
    for g, completion in enumerate(group.completions):
        sampled = [turn for turn in completion.turns if turn.is_sampled]
        for k, turn in enumerate(sampled):
            expected = torch.full((turn.end - turn.start,), 0.5 * credit[g, k].item())
            assert torch.tensor(completion.turn_advantages[turn.start : turn.end]).allclose(expected, atol=1e-5)
    row = next(i for i, n in enumerate(batch.prompt_index.tolist()) if batch.groups[n] == 2)
    width = batch.attention_mask[row].sum()
    own = group.completions[batch.numbers[row]]
    assert torch.equal(batch.turn_advantages[row, :width], torch.tensor(own.turn_advantages))
    assert torch.equal(batch.token_advantages, batch.advantages[:, None] + batch.turn_advantages)


def test_what_needs_an_environment_has_one():
    with pytest.raises(ValueError, match=r"model\.conversation is set, but there is no environment"):
        make_module(conversation=ConversationSettings())
    for reward, name in ((EnvironmentReward(), "environment_reward"), (ToolUse(), "tool_use")):
        for own in (reward, WeightedReward(reward)):
            with pytest.raises(ValueError, match=f"The reward '{name}' needs an environment, but there is none"):
                make_module(rewards=[own])
    with pytest.raises(ValueError, match="The reward 'tool' needs an environment, but there is none"):
        make_module(rewards=[ByMethod({"tool": ToolUse()}, default="tool")])
    with pytest.raises(
        ValueError, match=r"turn_credit is 1\.0, but model\.objective\.surrogate 'gmpo' has one advantage"
    ):
        module_of(limits={"turn_credit": 1.0}, objective=Objective(surrogate="gmpo", beta=0.0))
    averaged = r"turn_credit is 1\.0, but with model\.objective\.ratio 'sequence' .* set ratio to sequence_token"
    with pytest.raises(ValueError, match=averaged):
        module_of(limits={"turn_credit": 1.0}, objective=Objective(ratio="sequence", aggregate="sequence", beta=0.0))
    module_of(limits={"turn_credit": 1.0}, objective=Objective(surrogate=lambda ratio, advantages: -ratio * advantages))


@pytest.mark.parametrize("reward", [EnvironmentReward(), WeightedReward(EnvironmentReward(), name="won")])
def test_rewards_of_the_environment_that_are_read_are_not_named(reward, caplog):
    fit(module_of(rewards=[reward]), PROMPTS, max_steps=1)
    assert "no reward of the run reads them" not in caplog.text


def test_a_reward_that_names_turns_gets_none_without_an_environment():
    def reads(completions, turns, environment_metrics):
        seen.extend(zip(turns, environment_metrics, strict=True))
        return [0.0] * len(completions)

    seen: list[Any] = []
    fit(make_module(rewards=[reads]), PROMPTS, max_steps=1)
    assert seen == [(None, {})] * 16


@SLOW
def test_rewards_of_the_environment_that_nobody_reads_are_named(caplog):
    fit(module_of(rewards=[lambda completions: [0.0] * len(completions)]), PROMPTS, max_steps=1)
    assert "Environment 'ByPromptLength' gives rewards, but no reward of the run reads them" in caplog.text
    caplog.clear()
    fit(module_of(), PROMPTS, max_steps=1)
    assert "no reward of the run reads them" not in caplog.text


@SLOW
def test_a_module_is_not_loaded_without_its_environment(tmp_path):
    module = module_of()
    trainer = fit(module, PROMPTS, max_steps=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again = {"policy": tiny_model("qwen2", **SMALL), "tokenizer": tiny_tokenizer()}
    with pytest.raises(ValueError, match=r"pass environment=\.\.\. to load_from_checkpoint"):
        GRPOLightningModule.load_from_checkpoint(tmp_path / "a.ckpt", rewards=[vowel_share], **again)
    loaded = GRPOLightningModule.load_from_checkpoint(
        tmp_path / "a.ckpt", rewards=[EnvironmentReward()], environment=ByPromptLength(), **again
    )
    assert loaded.conversations.settings.max_turn_length == 5


def test_tools_need_chats_and_a_template_that_describes_them():
    with pytest.raises(ValueError, match="plain text, in which tools cannot be described"):
        fit(module_of(Tools([double])), PROMPTS, max_steps=1)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<eos>{% endfor %}"
    chats = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in PROMPTS]
    with pytest.raises(ValueError, match="does not describe tools to the model"):
        fit(module_of(Tools([double]), tokenizer=tokenizer), chats, max_steps=1)


def truncating_data(tmp_path) -> PromptDataModule:
    """Two rows: a prompt that is truncated, and one that is short enough."""
    rows = [json.dumps({"prompt": prompt}) for prompt in ("long " * 20, "short")]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    return PromptDataModule(
        str(tmp_path / "rows.jsonl"), max_prompt_length=9, overlong_prompts="truncate", batch_size=2
    )


def test_truncated_prompts_with_tools_are_refused(tmp_path):
    """They have token ids only, to which no description of tools can be added."""
    module = module_of(Tools([double]))
    module.loader.load = None
    with pytest.raises(ValueError, match=r"overlong_prompts is truncate, but .*\(model\.environment .* to drop, or"):
        make_trainer(max_steps=1).fit(module, datamodule=truncating_data(tmp_path))


def test_prompts_of_token_ids_to_which_tools_cannot_be_added_are_refused():
    """Before weights are loaded if the prompts are known by then, and else when completions are sampled."""
    prompt = Prompt("long", token_ids=[3, 4])
    module = module_of(Tools([double]))
    with pytest.raises(ValueError, match=r"prompt 0: the prompt is truncated .* tools of environment 'Tools'"):
        module.conversations.begin([replace(prompt, index=0)], [0])
    module.loader.load = None
    with pytest.raises(ValueError, match=r"prompt 1: the prompt is truncated .* tools of environment 'Tools'"):
        make_trainer(max_steps=1).fit(module, PromptSource(["short", prompt], 2))


class Shows(Environment):
    """Shows the observation in the prompts whose text begins with `start`."""

    in_process = True

    def __init__(self, start: str) -> None:
        self.start = start

    def reset(self, prompt: str) -> str | None:
        return "look" if prompt.startswith(self.start) else None

    def step(self, completion: str) -> Step:
        return Step(done=True, reward=1.0)


def test_an_observation_in_a_truncated_prompt_is_an_error(tmp_path):
    """The prompt has token ids only, to which no observation can be added."""
    message = (
        r"rows\.jsonl.*: the prompt is truncated \(data\.overlong_prompts is truncate\), and `reset` of environment "
        r"'Shows' .*Set data\.overlong_prompts to drop, or return None"
    )
    with pytest.raises(ValueError, match=message):
        make_trainer(max_steps=1, limit_val_batches=0).fit(
            module_of(Shows("long")), datamodule=truncating_data(tmp_path)
        )


def test_prompts_to_which_an_environment_adds_nothing_may_be_truncated(tmp_path):
    lengths = {}

    class Records(L.Callback):
        def on_rollout(self, trainer, pl_module, rollout):
            lengths.update({group.prompt.content[:5]: len(group.prompt_ids) for group in rollout.groups})

    module = module_of(Shows("short"))
    make_trainer(max_steps=1, limit_val_batches=0, callbacks=[Records()]).fit(
        module, datamodule=truncating_data(tmp_path)
    )
    assert lengths["long "] == 9
    assert lengths["short"] == len("short") + len("look")


class Remembers(ByPromptLength):
    """A reward reads what it remembers."""

    def step(self, completion: str) -> Step:
        self.last = completion
        return super().step(completion)


def remembered(completions: list[Any], turns: list[Any], environments: list[Any]) -> list[float]:
    """1 where the environment's object has the text of the policy's last turn."""
    sampled = [[turn for turn in each if turn.is_sampled] for each in turns]
    return [float(e.last == t[-1].text) for e, t in zip(environments, sampled, strict=True)]


def remembered_as_in_trl(environments: list[Any], turns: list[Any], **columns: Any) -> list[float]:
    """The same with the signature of TRL's rewards, which take all other arguments too."""
    return remembered(columns["completions"], turns, environments)


@few(1)
@pytest.mark.parametrize("reward", [remembered, remembered_as_in_trl])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_rewards_get_turns_and_the_environment_at_the_end(num_workers, reward):
    workers = RewardWorkers(num_workers=num_workers)
    module = module_of(Remembers(), rewards=[reward], reward_workers=workers)
    fit(module, PROMPTS, max_steps=1)
    assert (module.rollout.rewards == 1).all()
