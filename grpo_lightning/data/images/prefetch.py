"""Image prefetching. Threads read each image of a batch once, while the policy trains on the previous batch."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakSet

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import Prompt
from grpo_lightning.data.parallel import READ_AHEAD

if TYPE_CHECKING:
    from PIL.Image import Image


class SharedRead:
    """One image, read once for all prompts of a batch that share it, and released after its last use."""

    def __init__(self, image: ImageRef, reader: ImageReader) -> None:
        self.image, self.reader = image, reader
        self.num_users = 1
        self.future: Future[Image] | None = None
        self.lock = threading.Lock()

    def __call__(self) -> Image:
        """Get the image for one of the prompts that share it. Raises: ImageError if the image cannot be read."""
        with self.lock:  # other users wait while the first one reads
            if self.future is None or self.future.cancel():  # not being read yet
                self.future = Future()
                try:
                    self.future.set_result(self.image.decode())
                except Exception as error:  # noqa: BLE001 - raised below
                    self.future.set_exception(error)
            future = self.future
            self.num_users -= 1
            if self.num_users <= 0:  # a later user reads it again
                self.future = None
        try:
            return future.result()
        finally:
            self.reader.release(self)


class ImageReader:
    """Reads every image only once per batch of a `PromptSource`, and reads the images of the next batch in advance.

    Args:
        num_workers: Threads that read images in advance. With 0, each image is read when it is used. At most
            `READ_AHEAD` images per thread are in memory before their use.
    """

    def __init__(self, num_workers: int = 0) -> None:
        self.num_workers = num_workers
        self.has_images = False
        """True once a prompt has had images."""

        self.pool = ThreadPoolExecutor(num_workers, thread_name_prefix="images") if num_workers else None
        self.lock = threading.Lock()  # guards the attributes below
        self.coming: dict[Hashable, SharedRead] = {}
        self.waiting: deque[SharedRead] = deque()
        self.ahead: WeakSet[SharedRead] = WeakSet()  # submitted to the threads and not used yet

    def take(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts of a batch. Prompts with the same image share one `SharedRead`."""
        counts = Counter(image.key for image in _images(prompts))
        if not counts:
            return list(prompts)
        self.has_images = True
        shared: dict[Hashable, SharedRead] = {}
        with self.lock:
            for image in _images(prompts):
                if image.key not in shared:
                    read = self.coming.pop(image.key) if image.key in self.coming else SharedRead(image, self)
                    read.num_users = counts[image.key]
                    shared[image.key] = read
        return [
            replace(prompt, images=[image.shared_by(shared[image.key]) for image in prompt.images])
            if prompt.images
            else prompt
            for prompt in prompts
        ]

    def look_ahead(self, prompts: Sequence[Prompt]) -> None:
        """Start to read the images of the next prompts, and release images that were read ahead for other prompts."""
        with self.lock:
            coming: dict[Hashable, SharedRead] = {}
            for image in _images(prompts):
                if image.key not in coming:
                    coming[image.key] = self.coming.get(image.key) or SharedRead(image, self)
            for key, read in self.coming.items():
                if key not in coming and read.future is not None:
                    read.future.cancel()
                    self.ahead.discard(read)
            self.coming = coming
            self.waiting = deque(read for read in coming.values() if read.future is None)
        self._start()

    def release(self, read: SharedRead) -> None:
        """Remove a used image from `ahead`, and start to read the next waiting image."""
        with self.lock:
            self.ahead.discard(read)
        self._start()

    def _start(self) -> None:
        """Submit waiting images to the threads."""
        with self.lock:
            while self.pool is not None and self.waiting and len(self.ahead) < READ_AHEAD * self.num_workers:
                read = self.waiting.popleft()
                if not read.lock.acquire(blocking=False):  # its first user is reading it
                    continue
                if read.future is None and read.num_users > 0:
                    read.future = self.pool.submit(read.image.decode)
                    self.ahead.add(read)
                read.lock.release()


def _images(prompts: Sequence[Prompt]) -> Iterable[ImageRef]:
    """The images of all prompts."""
    return (image for prompt in prompts for image in prompt.images)
