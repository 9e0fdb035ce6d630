"""Arguments of environments, and of the conversations that are played in them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from grpo_lightning.core.types import Completion, Ending, Prompt, SamplingParams, Turn
from grpo_lightning.environments import (
    EnvironmentRunner,
    GuessTheNumber,
    MultiTurnFunction,
    Search,
    Step,
    ToolObject,
    Tools,
    calculator,
)
from grpo_lightning.environments.workers import Result
from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from grpo_lightning.policy.turns import TurnTokens
from grpo_lightning.rewards import EnvironmentReward, RewardWorkers
from grpo_lightning.rollout.conversations import Conversations, ConversationSettings
from tests.arguments.registry import case
from tests.environments.games import ByPromptLength, Counted, Faulty, broken, double
from tests.environments.test_swift_and_trl import Wordle, but_wait, recheck
from tests.helpers.conversation_runs import HERE, sample
from tests.helpers.module_runs import fit, make_module
from tests.helpers.tiny_models import EOS, tiny_model, tiny_tokenizer
from tests.marks import SLOW

LONG = SamplingParams(max_completion_length=60, suppress_tokens=[EOS])


def played(environment: Any = None, **limits: Any) -> list[Completion]:
    """The conversations of one prompt."""
    (row,) = sample(tiny_model("qwen2"), environment or Counted(num_turns=3), ["p"], sampling=LONG, **limits)
    return row


def num_turns(row: list[Completion]) -> int:
    return sum(turn.is_sampled for turn in row[0].turns or ())


@case(ConversationSettings, "max_turns", "max_turn_length", "max_observation_length")
def test_limits():
    short = {"max_turn_length": 5}
    assert [num_turns(played(**short, max_turns=count)) for count in (1, 2)] == [1, 2]
    turns = [played(max_turn_length=length)[0].turns[0] for length in (4, 6)]
    assert [turn.end - turn.start for turn in turns] == [4, 6]
    cut = [played(max_turn_length=5, max_observation_length=length)[0].turns[1].text for length in (2, 9)]
    assert cut == [" 1 ... (truncated)", " 1:"]


@case(ConversationSettings, "on_error", "error_value")
def test_what_happens_to_a_conversation_that_fails():
    with pytest.raises(RuntimeError, match="gone"):
        played(Faulty("raise"), max_turn_length=5)
    assert not played(Faulty("raise"), max_turn_length=5, on_error="none")[0].ending.is_scorable
    for value in (-1.0, 0.5):
        row = played(Faulty("raise"), max_turn_length=5, on_error="value", error_value=value)
        assert row[0].environment_reward == value
    row = played(Faulty("raise"), max_turn_length=5, on_error="value")
    assert row[0].environment_reward == 0


def trained(**options: Any) -> GRPOLightningModule:
    settings: dict[str, Any] = {"rewards": [EnvironmentReward()], "length": 40, "environment": ByPromptLength()}
    module = make_module(objective=Objective(beta=0.0), **(settings | options))
    fit(module, ["a b", "c d e", "f", "g h"], max_steps=1, shuffle=False)
    return module


@SLOW
@case(ConversationSettings, "turn_credit", "turn_discount")
def test_credit_of_turns():
    def credits(**changed: float) -> torch.Tensor:
        module = trained(conversation=ConversationSettings(max_turn_length=5, **changed))
        return module.run.cycle.micro_batches[0].turn_advantages

    assert credits() is None
    whole = credits(turn_credit=1.0)
    assert whole.any()
    assert torch.allclose(credits(turn_credit=2.0), 2 * whole, atol=1e-5)
    assert not torch.allclose(credits(turn_credit=1.0, turn_discount=0.0), whole)


@SLOW
@case(GRPOLightningModule, "environment", "conversation")
def test_module():
    limits = ConversationSettings(max_turn_length=5)
    rows = [
        trained(environment=Counted(num_turns=count), conversation=limits).rollout.groups[0].completions
        for count in (1, 2)
    ]
    assert [num_turns(row) for row in rows] == [1, 2]
    other = trained(environment=Counted(num_turns=2), conversation=ConversationSettings(max_turn_length=2))
    assert other.rollout.groups[0].completions[0].turns[0].end == 2


@case(EnvironmentReward, "default")
def test_the_value_without_a_reward():
    values = [EnvironmentReward(default)(["a", "b"], [None, 2.0]) for default in (0.0, 1.0, None)]
    assert values == [[0.0, 2.0], [1.0, 2.0], [None, 2.0]]


def answer(environment: Any, text: str = "a", limits: RewardWorkers | None = None, most: int = 100) -> Result:
    """Return the environment's first answer in a conversation."""
    runner = EnvironmentRunner(environment, limits or RewardWorkers(num_workers=0), most)
    state = runner.reset([Prompt("p")], [0])[0].state
    return runner.wait(runner.step(state, text, 0), state)


@case(EnvironmentRunner, "environment", "limits", "max_characters")
def test_runner():
    here = RewardWorkers(num_workers=0)
    assert answer(Counted(1), limits=here).value.done
    assert not answer(Counted(2), limits=here).value.done
    assert isinstance(answer(Counted(2), limits=RewardWorkers(num_workers=1)).state, bytes)  # it was in a worker
    assert answer(Counted(2), limits=here, most=1).value.observation == " "


@case(Step, "observation", "done", "reward", "keep", "metrics")
def test_step():
    class Says(Counted):
        def step(self, completion: str) -> Step:
            return steps.pop(0)

    def first(*given: Step) -> Completion:
        steps[:] = [*given * 3, *[Step(done=True)] * 3]
        return played(Says(), max_turn_length=5)[0]

    steps: list[Step] = []
    plain = first(Step("x"))
    assert plain.turns[1].text == "x"
    assert first(Step("y")).turns[1].text == "y"
    assert num_turns([first(Step("x", done=True))]) == 1
    assert first(Step("x", reward=2.0)).environment_reward == 2.0
    assert first(Step("x", keep=2)).turns[0].end == 2
    assert first(Step("x", metrics={"n": 1.0})).ending.metrics == {"n": 1.0}


@case(Tools, "tools", "format", "max_calls")
def test_tools():
    call = "[double(number=3)]"
    assert Tools([double]).step(call).observation[0]["content"] == "6"
    assert "no tool 'double'" in Tools([broken]).step(f"<tool_call>{call}</tool_call>").observation[0]["content"]
    assert Tools([double], format="json").step(call).done
    twice = "[double(number=3), double(number=4)]"
    assert [len(Tools([double], max_calls=n).step(twice).metrics) for n in (1, 2)] == [4, 3]


class Other(Wordle):
    """Another object with tools."""

    def give_up(self) -> str:
        """Give up."""
        return "It was a word."


@case(ToolObject, "factory", "format", "max_calls")
def test_an_object_with_tools():
    names = [[tool.__name__ for tool in ToolObject(factory).tools] for factory in (Wordle, Other)]
    assert names == [["guess"], ["give_up", "guess"]]

    def said(text: str, **options: Any) -> Step:
        environment = ToolObject(Wordle, **options)
        environment.reset(secret="cat")
        return environment.step(text)

    call = '[guess(word="cot")]'
    assert not said(call).done
    assert said(call, format="json").done
    twice = '[guess(word="cot"), guess(word="cat")]'
    assert "only the first 1 calls" in said(twice, max_calls=1).observation[-1]["content"]


@case(MultiTurnFunction, "function")
def test_a_multi_turn_function():
    steps = []
    for function in (recheck, but_wait):
        environment = MultiTurnFunction(function)
        environment.reset(prompt="1+1?", solution="2")
        steps.append(environment.step("It is <answer>3</answer>"))
    assert [step.keep for step in steps] == [None, len("It is ")]


@case(Search, "path", "top_k")
def test_search(tmp_path):
    for name, words in (("one", "red"), ("two", "blue")):
        texts = [f"a {words} house", f"a {words} door", "bread"]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    one, two = (str(tmp_path / f"{name}.jsonl") for name in ("one", "two"))
    assert "red" in Search(one)("house")
    assert "blue" in Search(two)("house")
    assert [len(Search(one, top_k=count)("red house").splitlines()) for count in (1, 2)] == [1, 2]


@case(GuessTheNumber, "max_guesses", "higher", "lower", "unreadable")
def test_the_number_game():
    def answers(**changed: Any) -> list[Any]:
        game = GuessTheNumber(**changed)
        game.reset(5)
        return [game.step(guess).observation for guess in ("3", "7", "?", "1")]

    plain = answers()
    assert plain == ["higher", "lower", "Write a number.", None]
    assert answers(max_guesses=3) == ["higher", "lower", None, "higher"]
    assert answers(higher="+") == ["+", *plain[1:]]
    assert answers(lower="-")[1] == "-"
    assert answers(unreadable="!")[2] == "!"


def test_the_calculator_is_a_tool():
    assert Tools([calculator]).step('[calculator(expression="2*3")]').observation[0]["content"] == "6"


def test_a_conversation_without_reward_has_none():
    turn = Turn("assistant", "a", 0, 1, is_sampled=True)
    completion = Completion([1], [0.0], "stop", turns=[turn], ending=Ending(b""))
    assert (completion.environment_reward, completion.num_sampled) == (None, 1)


@case(Prompt, "observation")
def test_what_a_prompt_of_a_resumed_cycle_ends_with():
    conversations = Conversations(EnvironmentRunner(ByPromptLength(), HERE, 100), ConversationSettings())
    conversations.connect(TurnTokens(tiny_tokenizer(), [EOS]))
    (begun,), _ = conversations.begin([Prompt("p", index=3)], [0])
    assert (begun.content, begun.observation) == ("p!", "!")
    for observation, content in ((None, "p"), ("!", "p!")):
        saved = Prompt("p!", index=3, observation=observation)
        (resumed,) = conversations.resume_prompts([Prompt("p", index=3)], {saved.key: saved.observation})
        assert resumed.content == content
