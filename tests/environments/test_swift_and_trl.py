"""Multi-turn functions as ms-swift documents them, and environments as TRL documents them, run unchanged."""

import copy
import functools
import pickle
import random

import pytest

from grpo_lightning.environments import MultiTurnFunction, Step, Tools, as_environment
from grpo_lightning.environments.method_calls import EnvironmentCalls
from grpo_lightning.environments.swift_and_trl import ToolObject
from tests.environments.games import Counted, Locked, double


def recheck(inputs):
    """In the form that ms-swift documents: a message is appended, once."""
    hint = "It seems that is wrong. Check it again."
    for each in inputs:
        is_right = each["messages"][-1]["content"] == each["solution"]
        told = any(message["content"] == hint for message in each["messages"])
        if is_right or told:
            each["finished"] = True
        else:
            each["messages"].append({"role": "user", "content": hint})
            each["finished"] = False
    return inputs


def but_wait(inputs):
    """In the form that ms-swift documents: the answer is cut out, and the model's own message goes on."""
    words = "But wait... "
    for each in inputs:
        content = each["messages"][-1]["content"]
        if each["solution"] in content or words in content:
            each["finished"] = True
            continue
        if "<answer>" in content:
            content = content[: content.index("<answer>")]
        each["messages"][-1]["content"] = content + words
        each["finished"] = False
    return inputs


def test_an_appended_message_is_the_observation():
    environment = as_environment(recheck)
    assert isinstance(environment, MultiTurnFunction)
    environment.reset(prompt=[{"role": "user", "content": "1+1?"}], solution="2")
    step = pickle.loads(pickle.dumps(environment)).step("3")
    assert step.observation == [{"role": "user", "content": "It seems that is wrong. Check it again."}]
    assert environment.step("2").done
    environment.reset(prompt="1+1?", solution="2")
    environment.step("3")
    assert environment.step("4").done  # it was told once


def test_a_changed_message_goes_on_behind_what_is_unchanged():
    environment = MultiTurnFunction(but_wait)
    environment.reset(prompt="1+1?", solution="42")
    step = environment.step("So it is <answer>3</answer>")
    assert (step.observation, step.keep) == ("But wait... ", len("So it is "))
    last = environment.step("<answer>2</answer>")
    assert last.done
    assert environment.messages[-1]["content"] == "So it is But wait... <answer>2</answer>"


def ends(inputs, text):
    """Change the last message, and end the conversation."""
    inputs[0]["messages"][-1]["content"] = text
    return [{**inputs[0], "finished": True}]


def test_the_last_message_of_a_conversation_may_be_cut_off():
    environment = MultiTurnFunction(lambda inputs: ends(inputs, "So it is"))
    for text, step in (("So it is 2", Step("", done=True, keep=len("So it is"))), ("So it is", Step(done=True))):
        environment.reset(prompt="1+1?")
        assert environment.step(text) == step


def counts_turns(inputs):
    """Counts turns in a key of its own, and copies the keys that ms-swift needs to new dicts."""
    (each,) = inputs
    turns = each.get("turns", 0) + 1
    kept = {name: each[name] for name in ("index", "finish_reason")}
    observation = {"role": "user", "content": f"{each['finish_reason']} {each['index']} {each['solution']}"}
    return [{**kept, "messages": [*each["messages"], observation], "turns": turns, "finished": turns == 2}]


def test_keys_are_kept_between_turns_and_appended_messages_of_the_last_turn_are_logged():
    calls, seen = EnvironmentCalls(MultiTurnFunction(counts_turns), 100), []
    state, _ = calls.call("reset", None, {"prompt": "1+1?", "solution": "2"})
    for finish_reason in ("length", "stop"):
        state, step = calls.call("step", state, ("3", finish_reason))
        seen.append((step.observation[0]["content"], step.done))
    assert seen == [("length 0 2", False), ("stop 0 2", True)]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda inputs: None, "must return the list of dicts"),
        (lambda inputs: [{"messages": inputs[0]["messages"]}], "must set 'finished'"),
        (lambda inputs: [{**inputs[0], "finished": False}], "has added nothing"),
        (lambda inputs: [{**inputs[0], "messages": [], "finished": False}], "has changed other messages"),
        (lambda inputs: ends(inputs, "a."), "has added text to the policy's message, and has set 'finished' to True"),
    ],
)
def test_other_functions_are_refused(function, message):
    environment = MultiTurnFunction(function)
    environment.reset(prompt="?")
    with pytest.raises(ValueError, match=message):
        environment.step("a")


class Wordle:
    """In the form that TRL documents: public methods are tools."""

    def reset(self, secret: str, **kwargs) -> str:
        self.secret, self.done = secret, False
        return "Guess the word."

    def guess(self, word: str) -> str:
        """Guess.

        Args:
            word: The word.

        Returns:
            What is right.
        """
        self.done = word == self.secret
        return "".join(a if a == b else "_" for a, b in zip(word, self.secret, strict=True))

    def get_reward(self) -> float:
        return float(self.done)

    @property
    def left(self) -> int:
        raise AssertionError("a property is no tool, and is not read")


def test_an_environment_of_trl():
    environment = as_environment(Wordle)
    assert isinstance(environment, ToolObject)
    assert [tool.__name__ for tool in environment.tools] == ["guess"]
    assert environment.reset(secret="cat", prompt="?") == "Guess the word."
    environment = pickle.loads(pickle.dumps(environment))
    step = environment.step('<tool_call>{"name": "guess", "arguments": {"word": "cot"}}</tool_call>')
    assert step.observation == [{"role": "tool", "content": "c_t", "name": "guess"}]
    environment = pickle.loads(pickle.dumps(environment))
    environment.step('{"name": "guess", "arguments": {"word": "cat"}}')
    assert environment.step("It is cat.").reward == 1.0


def test_functions_join_an_environment_of_trl_as_static_methods():
    class Doubling(Wordle):
        double = staticmethod(double)

    environment = ToolObject(Doubling)
    assert [tool.__name__ for tool in environment.tools] == ["double", "guess"]
    assert environment.step('{"name": "double", "arguments": {"number": 3}}').observation[0]["content"] == "6"


class NoReward:
    """An object with a tool, and nothing else."""

    def look(self) -> str:
        """Look."""
        return "nothing"


def test_an_environment_that_a_limit_ends_is_asked_for_its_reward():
    environment = ToolObject(Wordle)
    environment.reset(secret="cat")
    assert environment.step('[guess(word="cat")]').reward is None
    assert environment.end() == 1.0
    assert ToolObject(NoReward).end() is None


def test_rewards_get_the_object():
    environment = ToolObject(Wordle)
    assert environment.for_rewards is environment.object
    assert isinstance(environment.for_rewards, Wordle)


def test_an_object_that_cannot_be_copied_is_made_again():
    environment = ToolObject(Locked)
    environment.reset(secret="cat")
    one, other = copy.deepcopy(environment), copy.deepcopy(environment)
    assert one.step('[guess(word="cat")]').observation[0]["content"] == "right"
    assert other.step('[guess(word="cot")]').observation[0]["content"] == "wrong"
    assert (one.end(), other.end()) == (1.0, 0.0)
    assert other.step("It is cot.").reward == 0.0
    with pytest.raises(TypeError, match="pickle"):
        pickle.dumps(environment)


def test_copies_share_no_state():
    class Noting(ToolObject):
        def step(self, completion: str):
            self.notes.append(completion)
            return super().step(completion)

    environment = Noting(Locked)
    environment.notes = []
    environment.reset(secret="cat")
    copied = copy.deepcopy(environment)
    copied.step("It is cat.")
    assert (environment.notes, copied.notes) == ([], ["It is cat."])


def test_an_object_that_begins_differently_each_time_cannot_be_made_again():
    class Random(Locked):
        def reset(self, **columns) -> str:
            return str(random.random())

    environment = ToolObject(Random)
    environment.reset()
    with pytest.raises(RuntimeError, match=r"its `reset` answers differently .* method __deepcopy__"):
        copy.deepcopy(environment)


def make_wordle(length: int = 3) -> Wordle:
    return Wordle()


@pytest.mark.parametrize("factory", [Wordle, make_wordle, functools.partial(make_wordle, length=4)])
def test_factories(factory):
    environment = as_environment(factory)
    assert isinstance(environment, ToolObject)
    assert isinstance(environment.object, Wordle)


def test_what_becomes_an_environment():
    assert isinstance(as_environment([double]), Tools)
    assert isinstance(as_environment(functools.partial(lambda hint, inputs: inputs, "hint")), MultiTurnFunction)
    for unclear in (lambda *inputs: inputs, lambda inputs, hint: inputs):
        with pytest.raises(ValueError, match=r"write MultiTurnFunction\(function\) .* or ToolObject\(factory\)"):
            as_environment(unclear)
    with pytest.raises(ValueError, match=r"got a dict of factories: 'a', 'b'\. All rows of a run have one environment"):
        as_environment({"a": Wordle, "b": Wordle})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="made a Counted, which is an environment itself"):
        as_environment(lambda: Counted(num_turns=2))
    with pytest.raises(ValueError, match="made a int, which has no public methods"):
        ToolObject(lambda: 3)
    with pytest.raises(ValueError, match=r"must be an object: write Tools\(...\)"):
        as_environment(Tools)
    with pytest.raises(ValueError, match="must be an object with a method `step`"):
        as_environment("game")  # type: ignore[arg-type]
