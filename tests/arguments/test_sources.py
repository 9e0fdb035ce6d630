"""Arguments of sources and streams: other prompts, another order, or read by others."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Prompt
from grpo_lightning.data.lengths import LengthLimit, Measured
from grpo_lightning.data.prompt_source import PromptSource
from grpo_lightning.data.shuffling import PromptStream, source_names
from grpo_lightning.data.templates import PromptTemplate
from grpo_lightning.policy.encoder import Encoder
from tests.arguments.registry import case
from tests.helpers.tiny_models import tiny_tokenizer
from tests.helpers.tiny_vlms import picture

TEXTS = [f"p{i}" for i in range(6)]


def contents(source: Iterable[Any]) -> list[list[Any]]:
    """The prompts of every micro-step of an epoch."""
    return [[prompt.content for prompt in batch.prompts] for batch in source]


class Rows:
    """A data set without length, that notes which threads read it."""

    def __init__(self, count: int = 6) -> None:
        self.count, self.readers = count, set[str]()

    def __iter__(self) -> Iterator[dict[str, str]]:
        for number in range(self.count):
            self.readers.add("main" if threading.current_thread() is threading.main_thread() else "ahead")
            yield {"prompt": f"p{number}"}


# ------------------------------------------------------------------------------------------------------- PromptSource


@case(PromptSource, "prompts", "batch_size", "cycle", "shuffle", "rank")
def test_source():
    ordered = functools.partial(PromptSource, shuffle=False)
    assert contents(ordered(TEXTS, 3)) == [TEXTS[:3], TEXTS[3:]]
    assert contents(ordered(TEXTS[:4], 3)) == [TEXTS[:3], TEXTS[3:4]]
    assert contents(ordered(TEXTS, 4)) == [TEXTS[:4], TEXTS[4:]]
    assert contents(ordered(TEXTS, 3, cycle=2)) == [TEXTS[:3], TEXTS[:3], TEXTS[3:], TEXTS[3:]]
    assert contents(PromptSource(TEXTS, 3, shuffle=True)) != [TEXTS[:3], TEXTS[3:]]
    assert contents(ordered(TEXTS, 3, world_size=2, rank=0)) == [TEXTS[0::2]]
    assert contents(ordered(TEXTS, 3, world_size=2, rank=1)) == [TEXTS[1::2]]


@case(PromptSource, "ranks_per_group")
def test_ranks_that_share_groups_get_the_same_prompts():
    sources = [PromptSource(TEXTS, 2, shuffle=False, rank=rank, world_size=4, ranks_per_group=2) for rank in range(4)]
    first, second, third, fourth = ([p.content for p in next(iter(source)).prompts] for source in sources)
    assert first == second == TEXTS[0:4:2]
    assert third == fourth == TEXTS[1:4:2]
    (alone,) = contents(PromptSource(TEXTS, 2, shuffle=False, rank=0, world_size=4))
    assert alone == TEXTS[0::4]


@case(PromptSource, "takes_more")
def test_a_source_that_draws_more():
    assert PromptSource(TEXTS, 3).has_length
    assert not PromptSource(TEXTS, 3, takes_more=True).has_length


@case(PromptSource, "seed", "world_size", "template")
def test_seed_world_size_and_template():
    orders = [contents(PromptSource(TEXTS, 6, seed=seed)) for seed in range(3)]
    assert len({tuple(order) for (order,) in orders}) > 1
    assert [len(PromptSource(TEXTS, 1, world_size=size)) for size in (1, 2, 3)] == [6, 3, 2]
    asked = PromptSource(["p"], 1, template=PromptTemplate(question_template="Q: {question}"))
    assert contents(asked) == [["Q: p"]]
    assert contents(PromptSource(["p"], 1)) == [["p"]]


@case(PromptSource, "shuffle_buffer", "num_workers")
def test_source_of_a_stream():
    kept, mixed = (contents(PromptSource(Rows(), 6, shuffle_buffer=size))[0] for size in (1, 6))
    assert kept == TEXTS != mixed
    for num_workers, reader in ((0, "main"), (1, "ahead")):
        rows = Rows()
        assert contents(PromptSource(rows, 6, num_workers=num_workers)) == contents(PromptSource(Rows(), 6))
        assert rows.readers == {reader}


@case(PromptSource, "num_workers")
def test_images_of_a_source():
    readers: set[str] = set()

    def read() -> Any:
        readers.add("main" if threading.current_thread() is threading.main_thread() else "ahead")
        return picture(0, 4, 4)

    prompts = [Prompt("a", images=[ImageRef(picture(0, 4, 4))], index=0), Prompt("b", images=[ImageRef(read)], index=1)]
    for num_workers, reader in ((0, "main"), (1, "ahead")):
        readers.clear()
        before = set(threading.enumerate())
        steps = iter(PromptSource(prompts, 1, shuffle=False, num_workers=num_workers))
        next(steps)
        started, deadline = set(threading.enumerate()) - before, time.monotonic() + 20
        while started and not readers and time.monotonic() < deadline:
            time.sleep(0.001)
        next(steps).prompts[0].images[0].read()
        assert readers == {reader}


# ------------------------------------------------------------------------------------------------------- PromptStream


def part(rows: Any, limit: LengthLimit | None = None) -> Any:
    """A part of a stream."""

    def convert(row: Any, number: int) -> Any:
        prompt = Prompt(row["prompt"], index=number)
        return Measured(prompt) if limit is None else limit.measure(prompt, f"row {number}")

    return lambda: ((row, convert) for row in rows)


def streamed(stream: PromptStream, seed: int | None = None) -> list[Any]:
    """Its prompts."""
    prompts, _ = stream.order(seed).take(0, 100)
    return [prompt.content for prompt in prompts]


@case(PromptStream, "parts", "shuffle_buffer", "num_workers")
def test_stream():
    assert streamed(PromptStream([part(Rows())])) == TEXTS
    assert streamed(PromptStream([part(Rows(2)), part(Rows(1))])) == ["p0", "p1", "p0"]
    assert streamed(PromptStream([part(Rows())], shuffle_buffer=1), seed=0) == TEXTS
    assert streamed(PromptStream([part(Rows())], shuffle_buffer=6), seed=0) != TEXTS
    for num_workers, reader in ((0, "main"), (2, "ahead")):
        rows = Rows()
        assert streamed(PromptStream([part(rows)], num_workers=num_workers)) == TEXTS
        assert rows.readers == {reader}


@case(PromptStream, "limit")
def test_the_limit_of_a_stream(caplog):
    for limit, said in ((LengthLimit(Encoder(tiny_tokenizer()), 1, "drop"), True), (None, False)):
        caplog.clear()
        parts = [part(Rows(), LengthLimit(Encoder(tiny_tokenizer()), 1, "drop"))]
        assert streamed(PromptStream(parts, limit=limit)) == []
        assert ("6 of 6 prompts of the stream have more than 1 tokens and are dropped" in caplog.text) == said


@case(PromptStream, "check_head")
def test_the_check_of_the_head_of_a_stream():
    checked, parts = [], [part(Rows(2)), part(Rows(1))]
    for check_head in (None, checked.append):
        stream = PromptStream(parts, check_head=check_head)
        assert streamed(stream) == ["p0", "p1", "p0"]
        assert checked == []
        for _ in range(2):
            assert len(stream.head()) == 3
    assert [[prompt.content for prompt in head] for head in checked] == [["p0", "p1", "p0"]]


@case(PromptStream, "sources")
def test_the_sources_of_a_stream():
    rows = Rows()
    assert source_names(PromptStream([part(rows)], sources=["easy", "hard"])) == ["easy", "hard"]
    assert rows.readers == set(), "known without reading"
    assert source_names(PromptStream([part(rows)])) == [""]
