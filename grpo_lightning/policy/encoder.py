"""Prompts to what the policy takes: token ids, and of images the tensors of the policy's own processor.

Every prompt goes through the processor alone and once, however many completions it gets: what is made of it is never
cut out of a batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError
from torch import Tensor

from grpo_lightning.core.images import ImageError
from grpo_lightning.core.types import EncodedPrompt, ImageView, Message, Prompt, PromptVision, VisionInputs
from grpo_lightning.policy.families import family_of
from grpo_lightning.policy.hf import num_positions, vocabulary_size

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

WORD_JOINER = "\u2060"
"""Invisible: put into texts that spell a token which stands for an image."""

BLANK_SIDE = 56
"""Pixels of the blank image: processors make it a few tokens."""


class Encoder:
    """Turns prompts into what a policy takes.

    Args:
        tokenizer: The policy's.
        processor: The policy's, if it sees images: tokenizer and image processor in one.
        config: The policy's; None knows no limit of positions.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, processor: Any = None, config: Any = None) -> None:
        self.tokenizer, self.processor, self.config = tokenizer, processor, config
        self.family = family_of(config)

    @property
    def sees_images(self) -> bool:
        """True if the policy takes images."""
        return self.processor is not None

    @functools.cached_property
    def media_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that stand for images and videos, or frame them.

        Raises:
            ValueError: If the tokenizer has no token that stands for an image.
        """
        if not self.sees_images:
            return ()
        vocabulary = self.tokenizer.get_vocab()
        image, ids = getattr(self.config, "image_token_id", None), set(vocabulary.values())
        if image is not None and image not in ids:
            raise ValueError(
                f"The policy's image_token_id is {image}, and its tokenizer has {len(vocabulary)} tokens without that "
                "one: no prompt could show an image. Give model.policy.tokenizer the policy's own processor, or "
                "correct image_token_id in its config.json."
            )
        named = self.family.media_tokens if self.family else ()
        known = {vocabulary[token] for token in named if token in vocabulary}
        declared: set[Any] = {getattr(self.config, f"{kind}_token_id", None) for kind in ("image", "video")}
        return tuple(sorted(known | (declared & ids)))

    @functools.cached_property
    def never_sampled(self) -> tuple[int, ...]:
        """Ids that no completion has: those that stand for images, and those behind the tokenizer's last token.

        Embeddings are padded to a round number of rows: what is sampled there is no text, and cannot be given back.
        """
        size = 0 if self.config is None else vocabulary_size(self.config)
        first = 1 + max(self.tokenizer.get_vocab().values(), default=-1)
        return tuple(sorted({*self.media_token_ids, *range(first, size)}))

    @functools.cached_property
    def media_tokens(self) -> list[str]:
        """The same as text."""
        tokens: list[str] = self.tokenizer.convert_ids_to_tokens(list(self.media_token_ids))
        return tokens

    def __call__(self, prompt: Prompt, where: str = "") -> EncodedPrompt:
        """Encode a prompt; its images are read now.

        Args:
            prompt: Text or messages, with images or without.
            where: What to call it in errors; by default by its `label`.

        Raises:
            ValueError: If it cannot be tokenized, has images that cannot be read, or something that the policy does not
                take.
        """
        self.check(prompt, where)
        if not self.sees_images:
            ids = tokenize(prompt, self.tokenizer, where)
            self.check_known(ids, where or prompt.label)
            return EncodedPrompt(ids)
        if not prompt.images:
            return EncodedPrompt(self.without_images(prompt, where), PromptVision())
        if prompt.token_ids is not None:
            raise ValueError(
                f"{where or prompt.label} has images and token_ids: what its images become cannot be cut. Leave the "
                "token_ids out."
            )
        images = [image.read() for image in prompt.images]
        outputs = self.processed(self.rendered(prompt, where), images, where or prompt.label)
        return self.with_images(outputs, images)

    def check(self, prompt: Prompt, where: str = "") -> None:
        """Raise ValueError if a prompt has a video or sound, or an image that this policy cannot see.

        Chat templates render what they do not know as nothing, or as a token that nothing stands behind.
        """
        messages = () if isinstance(prompt.content, str) else prompt.content
        contents = (message.get("content") for message in messages)
        kinds = [kind_of(part) for content in contents if not isinstance(content, str) for part in content or ()]
        if others := [kind for kind in kinds if kind not in ("text", "image")]:
            raise ValueError(
                f"{where or prompt.label} has a message part of type {others[0]!r}, and policies are given parts of "
                "type 'text' and 'image' only (no video, no sound; an image's file goes into Prompt.images). Remove "
                "the part if the question can be answered without it, or leave the prompt out."
            )
        if not self.sees_images and (prompt.images or "image" in kinds):
            raise ValueError(
                f"{where or prompt.label} has {len(prompt.images) or kinds.count('image')} image(s), and the policy "
                "takes text only: without them the question has no answer. Take a vision-language policy, or leave the "
                "row out."
            )

    def check_known(self, ids: Sequence[int], where: str) -> None:
        """Raise ValueError if a token has no embedding in the policy: its tokenizer is another's, or was extended."""
        size = 0 if self.config is None else vocabulary_size(self.config)
        if size and max(ids, default=0) >= size:
            token = max(ids)
            raise ValueError(
                f"{where} has the token {self.tokenizer.convert_ids_to_tokens(token)!r} (id {token}), and the policy's "
                f"vocabulary has {size} tokens. Give model.policy.tokenizer the policy's own, or resize the policy's "
                "embeddings (resize_token_embeddings) and train them first."
            )

    def fitting(self, prompts: Sequence[Prompt], max_completion_length: int) -> list[EncodedPrompt]:
        """Encode prompts that leave room for their completions. Raises: ValueError naming one that does not."""
        encoded = [self(prompt) for prompt in prompts]
        limit = None if self.config is None else num_positions(self.config)
        for prompt, found in zip(prompts, encoded, strict=True):
            check_length(prompt, len(found.token_ids), limit, max_completion_length)
        return encoded

    def vision_inputs(self, prompts: Sequence[PromptVision | None], *, needs_blank: bool) -> VisionInputs | None:
        """The vision inputs of encoded prompts; None if the policy takes no images.

        Args:
            prompts: N, of this policy.
            needs_blank: True if the vision tower has to run also where there is no image.
        """
        if not self.sees_images:
            return None
        blank = self.blank if needs_blank and self.family is not None else None
        return VisionInputs([prompt or PromptVision() for prompt in prompts], blank)

    # -------------------------------------------------------------------------------------------------------- lengths

    def num_tokens(self, prompt: Prompt, where: str = "") -> int:
        """L of a prompt, from the sizes of its images alone. Raises: as encoding does."""
        if not prompt.images or not self.sees_images:
            return len(self(prompt, where).token_ids)
        self.check(prompt, where)
        text = self.tokenizer(self.rendered(prompt, where), add_special_tokens=False)["input_ids"]
        try:
            return len(text) + sum(self.num_more_tokens(*image.size()) for image in prompt.images)
        except ImageError:
            raise  # which names the row
        except ValueError as error:
            raise ValueError(f"{where or prompt.label}: {error}") from error

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - as long as the run
    def num_more_tokens(self, width: int, height: int) -> int:
        """Tokens that an image of this size adds to its placeholder's own."""
        text = self.template([{"role": "user", "content": [{"type": "image"}]}], {})
        ids = self.processed(text, [blank_image(width, height)], "an image")["input_ids"][0]
        return len(ids) - len(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    # ----------------------------------------------------------------------------------------------------- the pieces

    @functools.cached_property
    def blank(self) -> dict[str, Tensor]:
        """The tensors of a small image that shows nothing."""
        image = blank_image(BLANK_SIDE, BLANK_SIDE)
        text = self.template([{"role": "user", "content": [{"type": "image"}]}], {})
        vision = self.with_images(self.processed(text, [image], "a blank image"), [image]).vision
        assert vision is not None
        return vision.images

    def template(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> str:
        """Messages as text, the assistant's turn opened, or continued if it is the last."""
        text: str = self.tokenizer.apply_chat_template(  # type: ignore[assignment]
            [dict(message) for message in messages], tokenize=False, **turn_settings(messages, settings)
        )
        return text

    def without_images(self, prompt: Prompt, where: str) -> list[int]:
        """The tokens of text alone. Raises: ValueError if a part of the messages stands for an image all the same."""
        ids = tokenize(self.unspelled(prompt), self.tokenizer, where)
        if stray := sorted(set(ids) & set(self.media_token_ids)):
            raise ValueError(
                f"{where or prompt.label} has no image, and its messages become "
                f"{self.tokenizer.convert_ids_to_tokens(stray[0])!r}: give it its images, or remove the part."
            )
        return ids

    def rendered(self, prompt: Prompt, where: str) -> str:
        """A prompt with images as text, a placeholder for each."""
        content = self.unspelled(prompt).content
        parts = [part for message in content if not isinstance(message, str) for part in message.get("content") or ()]
        places = sum(isinstance(part, Mapping) and part.get("type") == "image" for part in parts)
        if isinstance(content, str) or places != len(prompt.images):
            raise ValueError(
                f"{where or prompt.label} has {len(prompt.images)} image(s) and {places} place(s) for them: give it "
                'messages with a part {"type": "image"} for each.'
            )
        try:
            return self.template(content, prompt.chat_template_kwargs)
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(
                f"{where or prompt.label}: the processor's chat template cannot render the messages: {error}."
            ) from error

    def processed(self, text: str, images: list[Image], where: str) -> Any:
        """The processor's output for a text with its images."""
        try:
            return self.processor(text=[text], images=[images], add_special_tokens=False, return_tensors="pt")
        except (ValueError, IndexError) as error:  # an image that is too narrow, for example
            sizes = ", ".join(f"{image.width}x{image.height}" for image in images)
            raise ValueError(
                f"{where}: {type(self.processor).__name__} does not take its images ({sizes} pixels): {error}"
            ) from error

    def with_images(self, outputs: Mapping[str, Tensor], images: Sequence[Image]) -> EncodedPrompt:
        """A prompt with images, from what the processor made of it."""
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
        """How the policy sees one of the images."""
        seen = image.size
        if "image_grid_thw" in tensors:
            _, rows, columns = tensors["image_grid_thw"][number].tolist()
            patch = self.config.vision_config.patch_size
            seen = columns * patch, rows * patch
        return ImageView(*image.size, *seen, self.family.coordinates if self.family else None)

    def unspelled(self, prompt: Prompt) -> Prompt:
        """The prompt, its texts broken where they spell a token that stands for an image: text stays text."""
        content = map_contents(joined_parts, prompt.content)
        spelled = [token for token in self.media_tokens if token in str(content)]

        def broken(text: str) -> str:
            return functools.reduce(
                lambda t, token: t.replace(token, token[0] + WORD_JOINER + token[1:]), spelled, text
            )

        def broken_in(found: Any) -> Any:
            if isinstance(found, str):
                return broken(found)
            return [{**part, "text": broken(part["text"])} if part.get("type") == "text" else part for part in found]

        return dataclasses.replace(prompt, content=map_contents(broken_in, content) if spelled else content)


def map_contents(change: Callable[[Any], Any], content: Any) -> Any:
    """A prompt's content with every text, or list of a message's parts, changed."""
    if isinstance(content, str):
        return change(content)
    # A call of a tool has no content.
    return [
        message if message.get("content") is None else {**message, "content": change(message["content"])}
        for message in content
    ]


def joined_parts(parts: Any) -> Any:
    """The parts of a message, neighbouring texts made one, as templates do: no token is spelled over two of them."""
    if isinstance(parts, str):
        return parts
    joined: list[Mapping[str, Any]] = []
    for part in parts:
        if joined and part.get("type") == joined[-1].get("type") == "text":
            joined[-1] = {**joined[-1], "text": joined[-1]["text"] + part["text"]}
        else:
            joined.append(part)
    return joined


def kind_of(part: Any) -> str | None:
    """The type that a part of a message names."""
    return part.get("type") if isinstance(part, Mapping) else type(part).__name__


def blank_image(width: int, height: int) -> Image:
    """An image that shows nothing."""
    import PIL.Image

    return PIL.Image.new("RGB", (width, height), (127, 127, 127))


OWN_SETTINGS = ("add_generation_prompt", "continue_final_message", "tokenize", "return_dict", "return_tensors")
"""Arguments of `apply_chat_template` that every prompt decides itself."""


def check_template_settings(settings: Mapping[str, Any]) -> None:
    """Raise ValueError if `chat_template_kwargs` sets what every prompt decides itself."""
    for name in settings:
        if name in OWN_SETTINGS:
            raise ValueError(
                f"chat_template_kwargs has {name!r}, which follows from each prompt: an assistant message at the end "
                "of a prompt is continued, after any other message an assistant turn is opened. Remove it, and end "
                "the prompts to continue with an assistant message (column 'prompt')."
            )


def turn_settings(messages: Sequence[Message], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `apply_chat_template`: continue a final assistant message (prefill), or else open an assistant turn.

    Args:
        messages: The chat.
        settings: `chat_template_kwargs`.

    Raises:
        ValueError: If `settings` sets this as well.
    """
    check_template_settings(settings)
    is_prefilled = messages[-1].get("role") == "assistant"
    return {**settings, "add_generation_prompt": not is_prefilled, "continue_final_message": is_prefilled}


def tokenize(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, where: str = "") -> list[int]:
    """The prompt's token ids: text as it is, messages through the chat template with the assistant's turn opened.

    An assistant message at the end (prefill) is continued: completions are what comes after it.

    Args:
        prompt: Text or messages.
        tokenizer: The policy's.
        where: What to call the prompt in errors; by default by its `label`.

    Raises:
        ValueError: If the prompt has no tokens, or its messages meet a tokenizer without a chat template or one that
            cannot render them.
    """
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    if isinstance(prompt.content, str):
        ids = tokenizer(prompt.content)["input_ids"]
    else:
        if tokenizer.chat_template is None:
            raise ValueError(
                f"{where or prompt.label} is a list of messages, but the tokenizer has no chat template. Take "
                "an instruction-tuned model, put a chat template into the tokenizer's folder, or set data.prompt_as to "
                "text: then a question is continued as it is (in Python: PromptTemplate(prompt_as='text'))."
            )
        settings = turn_settings(prompt.content, prompt.chat_template_kwargs)
        try:
            ids = tokenizer.apply_chat_template(
                [dict(message) for message in prompt.content],
                tokenize=True,
                return_dict=False,
                **settings,
            )
        # What templates raise for roles and contents that they do not know, and transformers for a prefill that they
        # do not render.
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(
                f"{where or prompt.label}: the tokenizer's chat template cannot render the messages: {error}. "
                "Change or remove the row, or set another `tokenizer.chat_template`."
            ) from error
    if not ids:
        raise ValueError(f"{where or prompt.label} has no tokens: {prompt.content!r}. Remove the row.")
    return list(ids)


def check_length(prompt: Prompt, num_tokens: int, limit: int | None, max_completion_length: int) -> None:
    """Check that a prompt and its longest completion fit the model's positions.

    Args:
        prompt: To be named.
        num_tokens: L.
        limit: Positions of the model, see `num_positions`; None is no limit.
        max_completion_length: Tokens that may come after it.

    Raises:
        ValueError: If they do not, naming the prompt and the lengths.
    """
    if limit is not None and num_tokens + max_completion_length > limit:
        raise ValueError(
            f"{prompt.label} has {num_tokens} tokens; with sampling.max_completion_length "
            f"{max_completion_length} that is more than the policy's {limit} positions. Lower the length, set "
            "data.max_prompt_length (with overlong_prompts: drop or truncate), or leave the prompt out."
        )
