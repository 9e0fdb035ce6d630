"""How often a training step reads, preprocesses and encodes its images."""

from __future__ import annotations

from typing import Any

COUNTS = ("read", "preprocessed", "encoded by the policy", "encoded by the reference")


class ImageCounts:
    """Counts images, from the construction on."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(COUNTS, 0)
        self.watch_files_and_processor()

    def watch_files_and_processor(self) -> None:
        """Count the images opened and preprocessed, for the rest of the process."""
        import PIL.Image
        import transformers as tf

        opened, preprocess = PIL.Image.open, tf.Qwen2VLImageProcessor.preprocess

        def counted_open(*arguments: Any, **options: Any) -> Any:
            self.counts["read"] += 1
            return opened(*arguments, **options)

        def counted_preprocess(owner: Any, images: Any, *arguments: Any, **options: Any) -> Any:
            nested = isinstance(images, list) and isinstance(images[0], list)
            self.counts["preprocessed"] += sum(map(len, images)) if nested else len(images)
            return preprocess(owner, images, *arguments, **options)

        PIL.Image.open = counted_open
        tf.Qwen2VLImageProcessor.preprocess = counted_preprocess  # type: ignore[method-assign]

    def watch_towers(self, policy: Any, reference: Any = None) -> None:
        """Count the images that the policy, and the reference if there is one, encode."""

        def watch(model: Any, name: str) -> None:
            def count(module: Any, arguments: Any, options: Any) -> None:
                self.counts[name] += len(options["grid_thw"])

            model.model.visual.register_forward_pre_hook(count, with_kwargs=True)

        watch(policy, "encoded by the policy")
        if reference is not None:
            watch(reference, "encoded by the reference")

    def reset(self) -> None:
        """Begin at 0 again."""
        self.counts = dict.fromkeys(COUNTS, 0)
