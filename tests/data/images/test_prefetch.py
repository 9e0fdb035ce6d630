"""Images are read once per batch, ahead of time by threads, and never too many of them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lightning.core.images import ImageError, ImageRef
from grpo_lightning.core.types import Prompt
from grpo_lightning.data.images import prefetch as ahead
from grpo_lightning.data.images.prefetch import ImageReader
from grpo_lightning.data.prompt_source import PromptSource
from tests.helpers.tiny_vlms import picture


class Reads:
    """Sources of images that note how often and by whom they are read."""

    def __init__(self, count=100):
        self.count, self.threads = Counter(), set()
        self.lock = threading.Lock()
        self.sources = [self.source(number) for number in range(count)]

    def source(self, number):
        def read():
            with self.lock:
                self.count[number] += 1
                self.threads.add("main" if threading.current_thread() is threading.main_thread() else "ahead")
            return picture(number, 4, 4)

        return read

    def prompts(self, *numbers):
        """A prompt per number, or per tuple of them."""
        groups = [number if isinstance(number, tuple) else (number,) for number in numbers]
        return [Prompt(str(g), images=[ImageRef(self.sources[n], f"f:{n}") for n in g], index=g[0]) for g in groups]


def wait_until(is_true):
    deadline = time.monotonic() + 20
    while not is_true() and time.monotonic() < deadline:
        time.sleep(0.002)
    assert is_true()


def is_picture(image, number):
    return np.array_equal(np.asarray(image), np.asarray(picture(number, 4, 4)))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_image_of_several_prompts_is_read_once(num_workers):
    reads = Reads()
    batch = ImageReader(num_workers).take(reads.prompts(1, (1, 2), (2, 2, 3)))
    seen = [[image.read() for image in prompt.images] for prompt in batch]
    assert reads.count == {1: 1, 2: 1, 3: 1}
    assert all(
        is_picture(image, n)
        for row, numbers in zip(seen, [(1,), (1, 2), (2, 2, 3)], strict=True)
        for image, n in zip(row, numbers, strict=True)
    )


def test_an_image_is_let_go_when_all_have_it():
    reads = Reads()
    one, other = ImageReader().take(reads.prompts(1, 1))
    one.images[0].read()
    assert one.images[0].shared.future is not None
    other.images[0].read()
    assert one.images[0].shared.future is None
    assert is_picture(one.images[0].read(), 1), "whoever asks once more"
    assert reads.count == {1: 2}


def test_text_prompts_stay_the_objects_they_are():
    prompts = [Prompt("a"), *Reads().prompts(1)]
    batch = ImageReader().take(prompts)
    assert batch[0] is prompts[0]
    assert batch[1] == prompts[1]
    assert (batch[1].images[0].shared is not None, prompts[1].images[0].shared) == (True, None)


def test_threads_read_the_next_batch_and_the_batch_takes_what_they_read():
    reads = Reads()
    reader = ImageReader(2)
    reader.look_ahead(reads.prompts(1, (2, 1)))
    wait_until(lambda: reads.count == {1: 1, 2: 1})
    assert reads.threads == {"ahead"}
    batch = reader.take(reads.prompts((2, 1), 1))
    assert is_picture(batch[0].images[0].read(), 2)
    assert is_picture(batch[0].images[1].read(), 1)
    assert is_picture(batch[1].images[0].read(), 1)
    assert reads.count == {1: 1, 2: 1}
    assert not reader.ahead


def test_without_threads_nothing_is_read_ahead():
    reads = Reads()
    reader = ImageReader(0)
    reader.look_ahead(reads.prompts(1))
    batch = reader.take(reads.prompts(1))
    assert not reads.count
    assert is_picture(batch[0].images[0].read(), 1)
    assert reads.threads == {"main"}


def test_so_many_are_read_ahead_and_no_more(monkeypatch):
    monkeypatch.setattr(ahead, "READ_AHEAD", 3)
    reads = Reads()
    reader = ImageReader(2)
    reader.look_ahead(reads.prompts(*range(20)))
    wait_until(lambda: len(reads.count) == 6)
    time.sleep(0.02)
    assert len(reads.count) == 6
    batch = reader.take(reads.prompts(*range(20)))
    batch[0].images[0].read()
    batch[15].images[0].read()  # not begun yet
    wait_until(lambda: len(reads.count) == 8)
    assert {0, 15} < set(reads.count)
    for prompt in batch:
        if prompt.index not in (0, 15):
            assert is_picture(prompt.images[0].read(), prompt.index)
    assert set(reads.count.values()) == {1}


def test_what_was_read_for_others_is_let_go(monkeypatch):
    monkeypatch.setattr(ahead, "READ_AHEAD", 1)
    reads = Reads()
    reader = ImageReader(1)
    reader.look_ahead(reads.prompts(1))
    wait_until(lambda: reads.count == {1: 1})
    reader.look_ahead(reads.prompts(2))  # others were taken (`more`)
    wait_until(lambda: reads.count == {1: 1, 2: 1})


def test_an_error_comes_up_where_the_image_is_used():
    good = Reads().prompts(1)
    bad = [Prompt("b", images=[ImageRef(b"no image", "f:7")])]
    reader = ImageReader(1)
    reader.look_ahead([*good, *bad])
    batch = reader.take([*good, *bad])
    assert is_picture(batch[0].images[0].read(), 1)
    for _ in range(2):
        with pytest.raises(ImageError, match=r"^f:7: image"):
            batch[1].images[0].read()


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=5), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_any_batches_get_their_own_images(batches, num_workers):
    reads = Reads(10)
    reader = ImageReader(num_workers)
    for batch, upcoming in zip(batches, [*batches[1:], []], strict=True):
        prompts = reader.take(reads.prompts(*batch))
        reader.look_ahead(reads.prompts(*upcoming))
        for prompt in prompts:
            assert is_picture(prompt.images[0].read(), prompt.index)
    uses = Counter(number for batch in batches for number in set(batch))
    assert all(reads.count[number] <= uses[number] for number in reads.count), "once per batch at most"


def test_many_users_at_the_same_time():
    reads = Reads()
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            batch = ImageReader(2).take(reads.prompts(*[5] * 8))
            assert all(pool.map(lambda prompt: is_picture(prompt.images[0].read(), 5), batch * 2))


# -------------------------------------------------------------------------------------------------------- in a source


@pytest.fixture
def rows(tmp_path: Path):
    for n in range(7):
        picture(n).save(tmp_path / f"{n}.png")
    return [{"problem": str(n), "image": str(tmp_path / f"{n}.png")} for n in range(7)]


def seen(source, *, reads_images):
    """Return the batches of an epoch, images included."""
    found = []
    for batch in source:
        images = (
            [np.asarray(image.read()).tobytes() for p in batch.prompts for image in p.images] if reads_images else []
        )
        found.append(([(p.index, p.content) for p in batch.prompts], batch.position, images))
    return found


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("cycle", [1, 2])
def test_the_prompts_are_the_same_for_any_number_of_threads(rows, cycle, is_stream):
    class Stream:
        def __iter__(self):
            return iter(rows)

    def source(num_workers):
        return PromptSource(Stream() if is_stream else rows, 2, cycle=cycle, seed=3, num_workers=num_workers)

    want = seen(source(0), reads_images=True)
    assert len(want) == 4 * cycle
    for num_workers in (1, 3):
        assert seen(source(num_workers), reads_images=True) == want
        assert [b[:2] for b in seen(source(num_workers), reads_images=False)] == [b[:2] for b in want]


def test_the_next_batch_is_read_while_this_one_is_used(rows):
    source = PromptSource(rows, 2, shuffle=False, num_workers=1)
    steps = iter(source)
    next(steps)
    wait_until(lambda: len(source.images.ahead) == 2)
    assert {Path(str(key)).stem for key in source.images.coming} == {"2", "3"}
    assert [p.content for p in source.upcoming(2)] == [p.content for p in next(steps).prompts]


def test_a_resumed_cycle_shares_its_images(rows):
    source = PromptSource([rows[0], rows[0]], 2, cycle=2, shuffle=False)
    next(iter(source))
    resumed = PromptSource([rows[0], rows[0]], 2, cycle=2, shuffle=False)
    resumed.load_state_dict(source.state_dict())
    first, second = next(iter(resumed)).prompts
    assert first.images[0].shared is second.images[0].shared is not None


def test_rows_ahead_that_are_none_are_no_error_yet():
    class Stream:
        def __iter__(self):
            yield {"problem": "a", "image": b"x"}
            yield {"problem": "b"}
            yield {"text": "no row"}

    for num_workers in (0, 2):
        source = PromptSource(Stream(), 1, shuffle=False, num_workers=num_workers)
        steps = iter(source)
        assert [next(steps).prompts[0].index for _ in range(2)] == [0, 1]
