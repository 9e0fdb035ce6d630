"""The images of a batch: each read once, by threads while the policy still trains on the batch before."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakSet

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Prompt
from grpo_lightning.data.parallel import READ_AHEAD

if TYPE_CHECKING:
    from PIL.Image import Image


class SharedRead:
    """One image, read once for all prompts of a batch that have it, and let go when the last of them has got it."""

    def __init__(self, image: ImageRef, reader: ImageReader) -> None:
        self.image, self.reader = image, reader
        self.num_users = 1
        self.future: Future[Image] | None = None
        self.lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        """True if everybody has it: it must not be read ahead any more."""
        return self.num_users <= 0

    def read(self, *, is_ahead: bool = False) -> Future[Image]:
        """Read it, unless somebody does so already. Returns: what will have it."""
        with self.lock:
            if self.future is not None:
                return self.future
            future: Future[Image] = Future()
            if is_ahead and self.is_over:
                return future
            self.future = future
        try:
            future.set_result(self.image.decode())
        except Exception as error:  # noqa: BLE001 - raised again where the image is used
            future.set_exception(error)
        return future

    def __call__(self) -> Image:
        """The image, for one of its users. Raises: ImageError if it cannot be read."""
        future = self.read()
        with self.lock:
            self.num_users -= 1
            if self.is_over:  # whoever asks once more has it read once more
                self.future = None
        try:
            return future.result()
        finally:
            self.reader.done_with(self)


class ImageReader:
    """Reads the images of a source's prompts: each image of a batch once, and those of the next batch ahead of time.

    Args:
        num_workers: Threads that read ahead; 0 reads an image when it is used. `READ_AHEAD` images per thread wait to
            be used at most, which bounds the memory: a megapixel has 3 MB.
    """

    def __init__(self, num_workers: int = 0) -> None:
        self.num_workers = num_workers
        self.has_images = False
        """True once a prompt had some."""

        self.lock = threading.Lock()  # of all below
        self.coming: dict[Hashable, SharedRead] = {}
        self.waiting: deque[SharedRead] = deque()
        self.ahead: WeakSet[SharedRead] = WeakSet()  # read, and not used yet; or dropped with their batch
        self.num_threads = 0

    def take(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """A batch's prompts: what was read ahead for them is used, and an image that several have is read once."""
        counts = Counter(image.key for image in _images(prompts))
        if not counts:
            return list(prompts)
        self.has_images = True
        shared: dict[Hashable, SharedRead] = {}
        with self.lock:
            for image in _images(prompts):
                if image.key not in shared:
                    read = self.coming.pop(image.key, None) or SharedRead(image, self)
                    read.num_users = counts[image.key]
                    shared[image.key] = read
        return [_sharing(prompt, shared) for prompt in prompts]

    def look_ahead(self, prompts: Sequence[Prompt]) -> None:
        """Begin to read the images of the prompts that come next; what was read for others is let go."""
        with self.lock:
            coming: dict[Hashable, SharedRead] = {}
            for image in _images(prompts):
                if image.key not in coming:
                    coming[image.key] = self.coming.get(image.key) or SharedRead(image, self)
            self.coming = coming
            self.waiting = deque(read for read in coming.values() if read not in self.ahead)
        self._go_on()

    def done_with(self, read: SharedRead) -> None:
        """An image was used: there is room for another one."""
        with self.lock:
            self.ahead.discard(read)
        self._go_on()

    def _go_on(self) -> None:
        """See to it that threads are at work, if there is any."""
        with self.lock:
            begun = min(self.num_workers - self.num_threads, len(self.waiting), self._room())
            begun = max(0, begun)
            self.num_threads += begun
        for _ in range(begun):
            threading.Thread(target=self._work, name="images", daemon=True).start()

    def _work(self) -> None:
        """Read one image after the other, as long as there is room; `_go_on` calls for another thread later."""
        while True:
            with self.lock:
                if not self.waiting or self._room() <= 0:
                    self.num_threads -= 1
                    return
                read = self.waiting.popleft()
                self.ahead.add(read)
            read.read(is_ahead=True)
            with self.lock:
                if read.is_over:
                    self.ahead.discard(read)

    def _room(self) -> int:
        """How many more images may be read ahead."""
        return READ_AHEAD * self.num_workers - len(self.ahead)


def _images(prompts: Sequence[Prompt]) -> Iterable[ImageRef]:
    """The images of all prompts."""
    return (image for prompt in prompts for image in prompt.images)


def _sharing(prompt: Prompt, shared: dict[Hashable, SharedRead]) -> Prompt:
    """The prompt with images read by `shared`."""
    images = [image.shared_by(shared[image.key]) for image in prompt.images]
    return replace(prompt, images=images) if images else prompt
