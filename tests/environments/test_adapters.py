"""Multi-turn functions as ms-swift documents them, and environments as TRL documents them, run unchanged."""

import pickle

import pytest

from grpo_lightning.environments import MultiTurnFunction, Tools, as_environment
from grpo_lightning.environments.adapters import ToolObject
from tests.environments.games import double


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
    assert environment.messages[-1]["content"] == "So it is But wait... "


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda inputs: None, "must return the list of dicts"),
        (lambda inputs: [{"messages": inputs[0]["messages"]}], "must set 'finished'"),
        (lambda inputs: [{**inputs[0], "finished": False}], "has added nothing"),
        (lambda inputs: [{**inputs[0], "messages": [], "finished": False}], "has changed other messages"),
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


def test_what_becomes_an_environment():
    assert isinstance(as_environment([double]), Tools)
    with pytest.raises(ValueError, match=r"must be an object: write Tools\(...\)"):
        as_environment(Tools)
    with pytest.raises(ValueError, match="must be an object with a method `step`"):
        as_environment("game")  # type: ignore[arg-type]
