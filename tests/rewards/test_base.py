from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from jsonargparse import ArgumentError, ArgumentParser

from grpo_lightning.rewards import ByMethod, Cosine, ExactMatch, Format, Length, Reward, WeightedReward
from grpo_lightning.rewards.base import prompt_text


def plain(completions: list[str]) -> list[float | None]:
    return [1.0 for _ in completions]


async def awaited(completions: list[str], **columns: Any) -> list[float | None]:
    return [1.0 for _ in completions]


class LLMJudge:
    """A callable that is no `Reward`."""

    def __init__(self, model: str = "judge") -> None:
        self.model = model

    def __call__(self, completions: list[str], question: list[str]) -> list[float | None]:
        return [1.0 for _ in completions]


class Ranked(Reward):
    per_group = True
    name = "best_of_group"  # type: ignore[assignment]
    required_columns = ("rank",)

    def __call__(self, completions: list[list[str]], **columns: Any) -> list[list[float | None]]:
        return [[1.0 for _ in row] for row in completions]


# --- names, arguments and columns


def test_names():
    assert WeightedReward(plain).name == "plain"
    assert WeightedReward(awaited).name == "awaited"
    assert WeightedReward(functools.partial(functools.partial(plain), completions=[])).name == "plain"
    assert WeightedReward(ExactMatch()).name == ExactMatch().name == "exact_match"
    assert WeightedReward(LLMJudge()).name == "llm_judge"
    assert WeightedReward(Ranked()).name == "best_of_group"
    assert WeightedReward(plain, name="mine").name == "mine"


def test_columns_that_a_reward_cannot_do_without():
    def many(
        prompts: Any, completions: Any, answer: Any, *more: Any, log_extra: Any, label: Any, tolerance: float = 0.1
    ) -> Any: ...

    assert WeightedReward(many).required_columns == ("answer", "label")
    assert WeightedReward(functools.partial(many, label=1)).required_columns == ("answer",)
    assert WeightedReward(awaited).required_columns == ()
    assert WeightedReward(LLMJudge()).required_columns == ("question",)
    assert WeightedReward(ExactMatch("solution")).required_columns == ("solution",)
    assert WeightedReward(Ranked()).required_columns == ("rank",)


def test_whole_groups_are_asked_for_by_an_attribute():
    def grouped(completions: Any) -> Any: ...

    grouped.per_group = True  # type: ignore[attr-defined]
    assert WeightedReward(grouped).per_group is True
    assert WeightedReward(functools.partial(grouped)).per_group is True
    assert WeightedReward(Ranked()).per_group is True
    assert WeightedReward(plain).per_group is False


def test_a_call_leaves_out_what_is_not_taken():
    seen: list[Any] = []

    def few(completions: Any, answer: Any = None, *, log_metric: Any) -> None:
        seen.append((completions, answer, log_metric))

    def everything(completions: Any, **rest: Any) -> None:
        seen.append(rest)

    given = {"prompts": 1, "completions": 2, "answer": 3, "log_metric": 4}
    WeightedReward(few)(**given)
    WeightedReward(everything)(**given)
    assert seen == [(2, 3, 4), {"prompts": 1, "answer": 3, "log_metric": 4}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reward": ExactMatch}, r"got <class .*ExactMatch'>: pass an instance, ExactMatch\(\.\.\.\)"),
        ({"reward": "accuracy"}, r"got the text 'accuracy': pass the function itself, or .*reward\('accuracy'\)"),
        ({"reward": 3}, "must be a function or callable object, got 3: pass a function"),
        ({"reward": plain, "completions_as": "str"}, "completions_as must be one of auto, text, messages, got 'str'"),
        ({"reward": WeightedReward(plain)}, "'plain' is already a WeightedReward"),
        ({"reward": plain, "weight": float("nan")}, "weight of reward 'plain' must be finite, got nan"),
        ({"reward": plain, "on_error": "skip"}, "on_error must be one of raise, none, value, got 'skip'"),
        (
            {"reward": plain, "on_error": "value"},
            "error_value must be a finite number .* got on_error='value', error_value=None",
        ),
        ({"reward": plain, "on_error": "value", "error_value": float("nan")}, "error_value must be a finite number"),
        ({"reward": plain, "error_value": 0.0}, "must not be set otherwise; got on_error='raise', error_value=0.0"),
        ({"reward": eval("lambda x, /: x")}, "takes 'x' by position only; rewards are called by keyword"),
        ({"reward": dict.fromkeys}, "'fromkeys' takes 'iterable' by position"),
        ({"reward": max}, "'max' has no readable signature"),
    ],
)
def test_wrong_arguments_are_errors(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        WeightedReward(**arguments)


# --- as users write them in YAML


class Module:
    def __init__(
        self,
        rewards: list[Reward | Callable[..., list[float | None]]],
        reward_weights: list[float] | None = None,
    ) -> None:
        self.rewards = rewards
        self.reward_weights = reward_weights


def parsed(yaml: str) -> Module:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Module, "model")
    config = parser.parse_string(yaml)
    again = parser.parse_string(parser.dump(config))  # what a checkpoint or a saved config holds
    assert parser.dump(again) == parser.dump(config)
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # its name before 4.49
    module = instantiate(again).model
    assert isinstance(module, Module)
    return module


def test_rewards_inside_others_in_yaml():
    module = parsed(
        f"""
        model:
          rewards:
            - class_path: Cosine
              init_args: {{max_len: 9, accuracy: {{class_path: ExactMatch, init_args: {{extract: boxed}}}}}}
            - {{class_path: Cosine, init_args: {{accuracy: {__name__}.plain}}}}
            - class_path: ByMethod
              init_args:
                default: judge
                methods:
                  judge: {{class_path: {__name__}.LLMJudge, init_args: {{model: large}}}}
                  own: {__name__}.plain
            - {{class_path: WeightedReward, init_args: {{reward: {__name__}.plain, completions_as: messages}}}}
            - {{class_path: SoftOverlong, init_args: {{cache_length: 8}}}}
            - {{class_path: Repetition, init_args: {{unit: tokens}}}}
        """
    )
    cosine, around_function, by_method, as_messages, *_ = module.rewards
    assert isinstance(cosine, Cosine)
    assert isinstance(cosine.accuracy.reward, ExactMatch)
    assert cosine.accuracy.reward.extract == "boxed"
    assert isinstance(around_function, Cosine)
    assert around_function.accuracy.reward is plain
    assert isinstance(by_method, ByMethod)
    assert by_method.default == "judge"
    assert isinstance(by_method.methods["judge"].reward, LLMJudge)
    assert by_method.methods["judge"].reward.model == "large"
    assert by_method.methods["own"].reward is plain
    assert isinstance(as_messages, WeightedReward)
    assert as_messages.completions_as == "messages"


def test_rewards_in_yaml():
    module = parsed(
        f"""
        model:
          rewards:
            - class_path: grpo_lightning.rewards.ExactMatch
              init_args: {{answer_column: solution, extract: hashes}}
            - grpo_lightning.rewards.Format
            - {__name__}.plain
            - {__name__}.awaited
            - class_path: {__name__}.LLMJudge
              init_args: {{model: large}}
            - class_path: grpo_lightning.rewards.WeightedReward
              init_args: {{reward: {__name__}.plain, weight: 0.5, name: half, on_error: none}}
            - class_path: grpo_lightning.rewards.WeightedReward
              init_args:
                reward: {{class_path: grpo_lightning.rewards.Length, init_args: {{max_tokens: 9}}}}
                on_error: value
                error_value: -1
          reward_weights: [1, 0.5, 0, 0, 0, 1, 1]
        """
    )
    exact, kept, function, coroutine, judge, half, length = module.rewards
    assert isinstance(exact, ExactMatch)
    assert (exact.answer_column, exact.extract) == ("solution", "hashes")
    assert isinstance(kept, Format)
    assert kept.tags == ["think", "answer"]
    assert (function, coroutine) == (plain, awaited)
    assert isinstance(judge, LLMJudge)
    assert judge.model == "large"
    assert isinstance(half, WeightedReward)
    assert (half.reward, half.weight, half.name, half.on_error) == (plain, 0.5, "half", "none")
    assert isinstance(length, WeightedReward)
    assert isinstance(length.reward, Length)
    assert (length.reward.max_tokens, length.error_value) == (9, -1)
    assert module.reward_weights == [1, 0.5, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (f"{__name__}.nowhere", "nowhere"),
        ("{class_path: grpo_lightning.rewards.ExactMatch, init_args: {column: a}}", "column"),
        ("{class_path: grpo_lightning.rewards.ExactMatch, init_args: {extract: box}}", "box"),
    ],
)
def test_wrong_yaml_is_an_error(reward: str, message: str):
    with pytest.raises(ArgumentError, match=message):
        parsed(f"model:\n  rewards:\n    - {reward}\n")


def test_the_question_is_not_the_start_of_its_answer():
    user, start = {"role": "user", "content": [{"type": "text", "text": "Why?"}]}, {"role": "assistant", "content": "I"}
    assert [prompt_text(prompt) for prompt in ("Why?", [user], [user, start], [start])] == ["Why?", "Why?", "Why?", "I"]
