"""Prompts of known number: read when asked for, in the order of the seed."""

import pytest

from grpo_lightning.core.types import Prompt
from grpo_lightning.data.listed import LazyPrompts, ListedOrder


def test_lazy_prompts_are_a_sequence():
    prompts = LazyPrompts(["a", "b", "c"], lambda row, number: Prompt(row, index=number))
    assert len(prompts) == 3
    assert [(p.content, p.index) for p in prompts] == [("a", 0), ("b", 1), ("c", 2)]
    assert (prompts[-1].content, prompts[-1].index) == ("c", 2)
    assert [p.content for p in prompts[1:]] == [p.content for p in prompts.head(3)][1:] == ["b", "c"]
    with pytest.raises(IndexError):
        prompts[3]


def test_the_beginning_is_read_once():
    read = []
    prompts = LazyPrompts(["a", "b", "c"], lambda row, number: read.append(row) or Prompt(row, index=number))
    prompts.head(2).clear()
    assert [p.content for p in prompts.head(2)] == ["a", "b"]
    assert read == ["a", "b"]


def test_the_order_is_pinned():
    # A resumed run of another release must go on in the same order: these numbers never change.
    prompts = [Prompt(f"p{i}") for i in range(6)]
    order = ListedOrder(prompts, 7)
    assert order.take(0, 6) == ([3, 0, 1, 5, 2, 4], 6)
    assert order.take(4, 6) == ([2, 4], 6)
    assert order.share([4, 2]) == [prompts[4], prompts[2]]
    assert list(ListedOrder(prompts, None).take(1, 2)[0]) == [1, 2]
