"""Encode prompts as token ids, and their images as tensors that the policy's own processor makes.

The processor encodes one prompt at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from torch import Tensor

from grpo_lightning.core.images import ImageError, ImageRef
from grpo_lightning.core.types import EncodedPrompt, ImageView, Message, Prompt, PromptVision, VisionInputs
from grpo_lightning.policy.families import family_of
from grpo_lightning.policy.transformers_internals import num_positions, vocabulary_size

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

WORD_JOINER = "\u2060"
"""Invisible character. If a text spells out an image placeholder, this character is inserted, so that the placeholder
is tokenized as text."""

BLANK_SIDE = 56
"""Side of the blank image in pixels."""


class Encoder:
    """Encodes prompts into the policy's inputs.

    Args:
        tokenizer: The policy's tokenizer.
        processor: The processor of a multimodal policy.
        config: The policy's config; None sets no limit on positions and vocabulary.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, processor: Any = None, config: Any = None) -> None:
        self.tokenizer, self.processor, self.config = tokenizer, processor, config
        self.family = family_of(config)

    @property
    def is_multimodal(self) -> bool:
        """True if the policy takes images."""
        return self.processor is not None

    @functools.cached_property
    def media_token_ids(self) -> tuple[int, ...]:
        """Ids of the placeholder and delimiter tokens of images and videos.

        Raises:
            ValueError: If the config's `image_token_id` is not a token of the tokenizer.
        """
        if not self.is_multimodal:
            return ()
        vocabulary = self.tokenizer.get_vocab()
        image, ids = getattr(self.config, "image_token_id", None), set(vocabulary.values())
        if image is not None and image not in ids:
            raise ValueError(
                f"The policy's image_token_id is {image}, which is not among the {len(vocabulary)} tokens of its "
                "tokenizer: no prompt could contain an image. Set model.policy.tokenizer to the policy's own "
                "processor, or correct image_token_id in its config.json."
            )
        named = self.family.media_tokens if self.family else ()
        known = {vocabulary[token] for token in named if token in vocabulary}
        declared: set[Any] = {getattr(self.config, f"{kind}_token_id", None) for kind in ("image", "video")}
        return tuple(sorted(known | (declared & ids)))

    @functools.cached_property
    def never_sampled(self) -> tuple[int, ...]:
        """Ids that are never sampled: `media_token_ids`, and ids beyond the tokenizer's last token.

        Many embedding matrices have extra rows. The ids of these rows cannot be decoded to text.
        """
        size = 0 if self.config is None else vocabulary_size(self.config)
        first = 1 + max(self.tokenizer.get_vocab().values(), default=-1)
        return tuple(sorted({*self.media_token_ids, *range(first, size)}))

    @functools.cached_property
    def media_tokens(self) -> list[str]:
        """`media_token_ids` as text."""
        tokens: list[str] = self.tokenizer.convert_ids_to_tokens(list(self.media_token_ids))
        return tokens

    def __call__(self, prompt: Prompt, where: str = "") -> EncodedPrompt:
        """Encode a prompt and read its images.

        `where` is the name of the prompt in errors (by default, `prompt.label`).

        Raises:
            ValueError: If the prompt cannot be tokenized, has unreadable images, or contains something that the policy
                does not support.
        """
        self.check(prompt, where)
        if not self.is_multimodal:
            ids = tokenize(prompt, self.tokenizer, where)
            self.check_known(ids, where or prompt.label)
            return EncodedPrompt(ids)
        if not prompt.images:
            return EncodedPrompt(self.without_images(prompt, where), PromptVision())
        if prompt.token_ids is not None:
            raise ValueError(
                f"{where or prompt.label} has images and token_ids: prompts with images cannot be truncated. Remove "
                "token_ids."
            )
        return self.from_text(self.render(prompt, where), prompt.images, where or prompt.label)

    def from_text(self, text: str, images: Sequence[ImageRef], where: str) -> EncodedPrompt:
        """Encode a rendered text with one placeholder per image. Raises: ValueError for an unusable image."""
        read = [image.read() for image in images]
        encoded = self.with_images(self.process(text, read, where), read)
        assert encoded.vision is not None
        encoded.vision.sources, encoded.vision.text = images, text
        return encoded

    def check_places(self, text: str, num_images: int, where: str) -> None:
        """Raise ValueError if a rendered text does not have one placeholder per image."""
        of_one = self.template([{"role": "user", "content": [{"type": "image"}]}], {})
        found, expected = (
            sum(token in self.media_token_ids for token in self.tokenizer(each, add_special_tokens=False)["input_ids"])
            for each in (text, of_one)
        )
        if found != expected * num_images:
            raise ValueError(
                f"{where}: the chat template renders {num_images} image(s) with {found} image tokens instead of "
                f"{expected * num_images}: {text!r:.200}. Return the images in messages whose role may contain images "
                "in this template, for example 'user'."
            )

    def check(self, prompt: Prompt, where: str = "") -> None:
        """Raise ValueError if a prompt contains video or audio, or if it contains an image and the policy is text-only.

        Chat templates silently drop message parts of unknown types.
        """
        messages = () if isinstance(prompt.content, str) else prompt.content
        contents = (message.get("content") for message in messages)
        kinds = [kind_of(part) for content in contents if not isinstance(content, str) for part in content or ()]
        if others := [kind for kind in kinds if kind not in ("text", "image")]:
            raise ValueError(
                f"{where or prompt.label} has a message part of type {others[0]!r}; only 'text' and 'image' are "
                "supported (no video, no audio; image files belong in Prompt.images). Remove the part if the question "
                "can be answered without it, or remove the prompt."
            )
        if not self.is_multimodal and (prompt.images or "image" in kinds):
            raise ValueError(
                f"{where or prompt.label} has {len(prompt.images) or kinds.count('image')} image(s), and the policy "
                "is text-only: the question cannot be answered without them. Use a vision-language policy, or remove "
                "the row."
            )

    def check_known(self, ids: Sequence[int], where: str) -> None:
        """Raise ValueError if a token has no embedding."""
        size = 0 if self.config is None else vocabulary_size(self.config)
        if size and max(ids, default=0) >= size:
            token = max(ids)
            raise ValueError(
                f"{where} has the token {self.tokenizer.convert_ids_to_tokens(token)!r} (id {token}), and the policy's "
                f"vocabulary has {size} tokens. Set model.policy.tokenizer to the policy's own tokenizer, or resize "
                "the policy's embeddings (resize_token_embeddings) and train them first."
            )

    def fitting(self, prompts: Sequence[Prompt], max_completion_length: int) -> list[EncodedPrompt]:
        """Encode prompts. Raises: ValueError for a prompt that leaves no room for its completions."""
        encoded = [self(prompt) for prompt in prompts]
        limit = None if self.config is None else num_positions(self.config)
        for prompt, inputs in zip(prompts, encoded, strict=True):
            check_length(prompt, len(inputs.token_ids), limit, max_completion_length)
        return encoded

    def vision_inputs(self, prompts: Sequence[PromptVision | None], *, needs_blank: bool) -> VisionInputs | None:
        """Collect the vision inputs of encoded prompts, or return None if the policy is text-only."""
        if not self.is_multimodal:
            return None
        blank = self.blank if needs_blank and self.family is not None else None
        return VisionInputs([prompt or PromptVision() for prompt in prompts], blank)

    # -------------------------------------------------------------------------------------------------------- lengths

    def num_tokens(self, prompt: Prompt, where: str = "") -> int:
        """Length L of a prompt. Images are not decoded.

        Raises:
            ValueError: If the prompt cannot be tokenized, or contains something that the policy does not support.
            ValueError: If the size of an image cannot be read, or is not allowed.
        """
        if not prompt.images or not self.is_multimodal:
            return len(self(prompt, where).token_ids)
        self.check(prompt, where)
        text = self.tokenizer(self.render(prompt, where), add_special_tokens=False)["input_ids"]
        try:
            return len(text) + sum(self.num_more_tokens(*image.size()) for image in prompt.images)
        except ImageError:
            raise  # already names the row
        except ValueError as error:
            raise ValueError(f"{where or prompt.label}: {error}") from error

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - the encoder lives as long as the run
    def num_more_tokens(self, width: int, height: int) -> int:
        """Number of tokens that a text gains when the tokens of an image of this size replace its placeholder."""
        text = self.template([{"role": "user", "content": [{"type": "image"}]}], {})
        ids = self.process(text, [blank_image(width, height)], "an image")["input_ids"][0]
        return len(ids) - len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    # ----------------------------------------------------------------------------------------------------- the pieces

    @functools.cached_property
    def blank(self) -> dict[str, Tensor]:
        """Processor tensors of a small blank image."""
        image = blank_image(BLANK_SIDE, BLANK_SIDE)
        text = self.template([{"role": "user", "content": [{"type": "image"}]}], {})
        vision = self.with_images(self.process(text, [image], "a blank image"), [image]).vision
        assert vision is not None
        return vision.images

    def template(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> str:
        """Render messages as text that ends in an open assistant turn."""
        text: str = self.tokenizer.apply_chat_template(  # type: ignore[assignment]
            [dict(message) for message in messages], tokenize=False, **turn_settings(messages, settings)
        )
        return text

    def without_images(self, prompt: Prompt, where: str) -> list[int]:
        """Tokenize a prompt without images. Raises: ValueError if its messages contain an image placeholder."""
        ids = tokenize(self.escape_media_tokens(prompt), self.tokenizer, where)
        if stray := sorted(set(ids) & set(self.media_token_ids)):
            raise ValueError(
                f"{where or prompt.label} has no image, but its messages render as "
                f"{self.tokenizer.convert_ids_to_tokens(stray[0])!r}: add the images, or remove the part."
            )
        return ids

    def render(self, prompt: Prompt, where: str) -> str:
        """Render a prompt with images as text with one placeholder per image."""
        content = self.escape_media_tokens(prompt).content
        parts = [part for message in content if not isinstance(message, str) for part in message.get("content") or ()]
        places = sum(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)
        if isinstance(content, str) or places != len(prompt.images):
            raise ValueError(
                f"{where or prompt.label} has {len(prompt.images)} image(s) and {places} image placeholder(s): its "
                'messages need one part {"type": "image"} per image.'
            )
        try:
            return self.template(content, prompt.chat_template_kwargs)
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(
                f"{where or prompt.label}: the processor's chat template cannot render the messages: {error}."
            ) from error

    def process(self, text: str, images: list[Image], where: str) -> Any:
        """Run the processor on a text and its images."""
        try:
            return self.processor(text=[text], images=[images], add_special_tokens=False, return_tensors="pt")
        except (ValueError, IndexError) as error:  # an image that is too narrow, for example
            sizes = ", ".join(f"{image.width}x{image.height}" for image in images)
            raise ValueError(
                f"{where}: {type(self.processor).__name__} cannot process its images ({sizes} pixels): {error}"
            ) from error

    def with_images(self, outputs: Mapping[str, Tensor], images: Sequence[Image]) -> EncodedPrompt:
        """Convert the processor's outputs for a prompt with images to an encoded prompt."""
        ids = outputs["input_ids"][0]
        others = {
            name: value
            for name, value in outputs.items()
            if isinstance(value, Tensor) and name not in ("input_ids", "attention_mask")
        }
        types = {name: value[0] for name, value in others.items() if name.endswith("token_type_ids")}
        tensors = {name: value for name, value in others.items() if name not in types}
        num_image_tokens = int((ids == self.config.image_token_id).sum())
        views = [self.view(image, number, tensors) for number, image in enumerate(images)]
        return EncodedPrompt(ids.tolist(), PromptVision(tensors, types, num_image_tokens), views)

    def view(self, image: Image, number: int, tensors: Mapping[str, Tensor]) -> ImageView:
        """Make the `ImageView` of an image.

        If the processor's tensors do not contain the size after resizing (`image_grid_thw`), `seen_width` and
        `seen_height` are the original width and height.
        """
        resized = image.size
        if "image_grid_thw" in tensors:
            _, rows, columns = tensors["image_grid_thw"][number].tolist()
            patch = self.config.vision_config.patch_size
            resized = columns * patch, rows * patch
        return ImageView(*image.size, *resized, self.family.coordinates if self.family else None)

    def escape_media_tokens(self, prompt: Prompt) -> Prompt:
        """Escape image placeholders that a prompt's text spells out."""
        content = map_contents(merge_text_parts, prompt.content)
        spelled = [token for token in self.media_tokens if token in str(content)]

        def escape(text: str) -> str:
            return functools.reduce(
                lambda t, token: t.replace(token, token[0] + WORD_JOINER + token[1:]), spelled, text
            )

        def escape_parts(parts: Any) -> Any:
            if isinstance(parts, str):
                return escape(parts)
            return [{**part, "text": escape(part["text"])} if part.get("type") == "text" else part for part in parts]

        return dataclasses.replace(prompt, content=map_contents(escape_parts, content) if spelled else content)


def map_contents(change: Callable[[Any], Any], content: Any) -> Any:
    """Apply `change` to a prompt's text, or to the content of each of its messages."""
    if isinstance(content, str):
        return change(content)
    # Tool calls have no content.
    return [
        message if message.get("content") is None else {**message, "content": change(message["content"])}
        for message in content
    ]


def merge_text_parts(parts: Any) -> Any:
    """Merge adjacent text parts of a message, as templates do, to find special tokens that are split over two parts."""
    if isinstance(parts, str):
        return parts
    merged: list[Mapping[str, Any]] = []
    for part in parts:
        if merged and part.get("type") == merged[-1].get("type") == "text":
            merged[-1] = {**merged[-1], "text": merged[-1]["text"] + part["text"]}
        else:
            merged.append(part)
    return merged


def kind_of(part: Any) -> str | None:
    """The type of a message part."""
    return part.get("type") if isinstance(part, Mapping) else type(part).__name__


def blank_image(width: int, height: int) -> Image:
    """Make a gray image."""
    import PIL.Image

    return PIL.Image.new("RGB", (width, height), (127, 127, 127))


OWN_SETTINGS = ("add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "return_tensors")
"""Arguments of `apply_chat_template` that the encoder sets for each prompt."""


def check_template_settings(settings: Mapping[str, Any]) -> None:
    """Raise ValueError if `chat_template_kwargs` sets one of `OWN_SETTINGS`."""
    for name in settings:
        if name in OWN_SETTINGS:
            raise ValueError(
                f"chat_template_kwargs sets {name!r}, which follows from each prompt: a final assistant message is "
                "continued, and after any other message an assistant turn is opened. Remove it, and end prompts that "
                "should be continued with an assistant message (column 'prompt')."
            )


def turn_settings(messages: Sequence[Message], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `apply_chat_template` that continue a final assistant message, or else open an assistant turn.

    Raises:
        ValueError: If `settings` sets an argument that the encoder sets itself (`OWN_SETTINGS`).
    """
    check_template_settings(settings)
    is_prefilled = messages[-1].get("role") == "assistant"
    return {**settings, "add_generation_prompt": not is_prefilled, "continue_final_message": is_prefilled}


def tokenize(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, where: str = "") -> list[int]:
    """Tokenize a prompt.

    After messages, the template opens an assistant turn. If the last message is an assistant message (a prefilled
    answer), the completions continue this message.

    Raises:
        ValueError: If the prompt has no tokens.
        ValueError: If the tokenizer has no chat template for the messages, or the template refuses them.
        ValueError: If `chat_template_kwargs` sets an argument that the encoder sets itself (`OWN_SETTINGS`).
    """
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    if isinstance(prompt.content, str):
        ids = tokenizer(prompt.content)["input_ids"]
    else:
        if tokenizer.chat_template is None:
            if isinstance(prompt.columns.get(prompt.prompt_column), str):  # text in the data
                raise ValueError(
                    f"{where or prompt.label}: the column {prompt.prompt_column!r} becomes the user message of a chat, "
                    "but the tokenizer has no chat template. Set data.prompt_as to text to continue the column as "
                    "plain text (in Python: PromptTemplate(prompt_as='text')), use an instruction-tuned model, or put "
                    "a chat template into the tokenizer's folder."
                )
            raise ValueError(
                f"{where or prompt.label} is a list of messages, but the tokenizer has no chat template. Use "
                "an instruction-tuned model, put a chat template into the tokenizer's folder, or set data.prompt_as to "
                "text to continue questions as plain text (in Python: PromptTemplate(prompt_as='text'))."
            )
        settings = turn_settings(prompt.content, prompt.chat_template_kwargs)
        try:
            ids = tokenizer.apply_chat_template(
                [dict(message) for message in prompt.content],
                tokenize=True,
                return_dict=False,
                **settings,
            )
        # Templates raise these errors for unknown roles and contents. transformers raises them for a prefill that the
        # template drops.
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(
                f"{where or prompt.label}: the tokenizer's chat template cannot render the messages: {error}. "
                "Change or remove the row, or set another `tokenizer.chat_template`."
            ) from error
    if not ids:
        raise ValueError(f"{where or prompt.label} has no tokens: {prompt.content!r}. Remove the row.")
    return list(ids)


def check_length(
    prompt: Prompt, num_tokens: int, limit: int | None, max_completion_length: int, *, is_of_engine: bool = False
) -> None:
    """Check that a prompt plus `max_completion_length` tokens fits the model's positions, or vLLM's `max_model_len`.

    Raises:
        ValueError: If prompt and completion do not fit.
    """
    if limit is not None and num_tokens + max_completion_length > limit:
        exceeded = f"vLLM's max_model_len of {limit}. Raise it (model.engine.max_model_len, or --max-model-len of the "
        exceeded = f"{exceeded}server), lower" if is_of_engine else f"the policy's {limit} positions. Lower"
        has = "has" if prompt.observation is None else "with the first observation of its environment has"
        raise ValueError(
            f"{prompt.label} {has} {num_tokens} tokens; with sampling.max_completion_length "
            f"{max_completion_length} that exceeds {exceeded} the completion length, set "
            "data.max_prompt_length (with overlong_prompts: drop or truncate), or remove the prompt."
        )
