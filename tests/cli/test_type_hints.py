"""Types in words, and what they take."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch

from grpo_lightning.cli.type_hints import arguments, imported, is_accepted, named, num_call_arguments, takes_objects
from grpo_lightning.optimizers import AdamW, OptimizerFactory
from grpo_lightning.rewards.base import Reward


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (int, "a whole number"),
        (float | None, "a number or null"),
        (Literal["a", "b"], "one of a, b"),
        (list[str], "a list of text"),
        (tuple[float, float], "a list of 2 values"),
        (Callable[[int], int], "an import path (module.name)"),
        (Reward, "Reward"),
    ],
)
def test_words(hint, words):
    assert named(hint) == words


def test_values_are_judged_as_the_parser_judges_them():
    assert is_accepted(1, float)
    assert is_accepted("anything", Any)
    assert not is_accepted("x", int | None)


def test_arguments_of_a_class_and_of_what_takes_any():
    assert list(arguments(AdamW)) == ["params", "lr", "betas", "eps", "weight_decay"]
    assert arguments(AdamW)["lr"] is float
    assert arguments(lambda **columns: 0) is None
    assert num_call_arguments([OptimizerFactory]) == 1
    assert num_call_arguments([Callable[..., float], int]) == 0


def test_objects_are_told_from_plain_values():
    assert takes_objects([str, Reward])
    assert takes_objects([Callable[..., Any]])
    assert not takes_objects([str, int, list[int], type(None)])


def test_imports_by_path_and_by_the_name_of_a_subclass():
    assert imported("torch.optim.SGD", []) is torch.optim.SGD
    assert imported("ExactMatch", [Reward]).__name__ == "ExactMatch"
    assert imported("nowhere.f", []) is None
    assert imported("NoSuchClass", [Reward]) is None
