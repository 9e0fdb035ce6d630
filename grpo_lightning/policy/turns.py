"""The tokens that the chat template writes between two turns of the policy.

The policy's own text is never tokenized again, because the result could differ from the tokens that the policy sampled.
The chat template renders a conversation in which a placeholder (`MARK`) replaces the policy's text. The messages that
follow the policy's turn come after the placeholder. Only the rendered text after the placeholder is tokenized. The
resulting tokens are appended to the policy's own tokens.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from grpo_lightning.core.images import ImageRef
from grpo_lightning.core.types import IMAGE_MARK, Message, ObservedImages, change_texts
from grpo_lightning.policy.encoder import WORD_JOINER, Encoder, merge_text_parts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "turnofthepolicy"
"""The word that stands for a turn of the policy."""

REASONING = "reasoningofthepolicy"
"""The word that stands for the reasoning of the policy."""

TRUNCATED = " ... (truncated)"
"""Appended to a text of an observation that was cut."""


class TurnTokens:
    """Makes the tokens of observations.

    Args:
        tokenizer: The policy's tokenizer.
        stop_ids: Ids of the tokens that end a turn of the policy.
        encoder: Encodes images; None for texts only.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], encoder: Encoder | None = None
    ) -> None:
        self.tokenizer, self.stop_ids = tokenizer, frozenset(stop_ids)
        self.encoder = encoder if encoder is not None and encoder.is_multimodal else None

    def ids(
        self, messages: Sequence[Message], last_id: int | None, settings: Mapping[str, Any], *, is_chat: bool
    ) -> list[int]:
        """Tokens between a turn of the policy and the beginning of the policy's next turn.

        Args:
            messages: The environment's messages.
            last_id: The last token of the policy's turn. If it is a stop token, its repetition by the template is left
                out.
            settings: Arguments of the chat template.
            is_chat: False for a prompt that is plain text. The messages' texts are then appended without a template.

        Raises:
            ValueError: If the chat template cannot render the messages, or does not show the policy's turn.
        """
        if not is_chat:
            return self.text_ids("".join(str(message["content"]) for message in messages))
        escaped = [{**message, "content": self.escape(str(message["content"]))} for message in messages]
        ids = self.encode(self.behind_the_turn(escaped, settings))
        return ids[self.num_repeated(ids, last_id) :]

    def num_repeated(self, ids: Sequence[int], last_id: int | None) -> int:
        """Number of tokens to skip at the beginning of `ids`, so that the stop token `last_id` does not occur twice.

        The result is 0 if `last_id` is not a stop token, or if `ids` does not begin with `last_id`. A different stop
        token is never skipped, because this token can open the next message. Some templates write a space in front of
        `last_id`. The tokens of this space are skipped as well.
        """
        if last_id not in self.stop_ids or last_id not in ids:
            return 0
        place = ids.index(last_id)
        return 0 if str(self.tokenizer.decode(ids[:place])).strip() else place + 1

    def with_images(
        self,
        messages: Sequence[Message],
        images: Sequence[ImageRef],
        last_id: int | None,
        settings: Mapping[str, Any],
        where: str,
    ) -> tuple[list[int], ObservedImages]:
        """Same as `ids`, for messages with a part {"type": "image"} per image. Also return the images.

        Returns:
            The tokens, and the images. Places in `ObservedImages` are counted from the first token of the observation.

        Raises:
            ValueError: If the chat template cannot render the messages, or the processor refuses the images.
        """
        assert self.encoder is not None
        merged = [
            {**message, "content": merge_text_parts(message["content"])} for message in messages
        ]  # as templates do
        escaped = [change_texts(message, self.escape) for message in merged]
        text = self.behind_the_turn(escaped, settings)
        self.encoder.check_places(text, len(images), where)
        encoded, unexpanded = self.encoder.from_text(text, images, where), self.encode(text)
        assert encoded.vision is not None
        skipped = self.num_repeated(encoded.token_ids, last_id)
        ids = encoded.token_ids[skipped:]
        encoded.vision.token_types = {name: types[skipped:] for name, types in encoded.vision.token_types.items()}
        return ids, ObservedImages(0, len(ids), unexpanded[skipped:], encoded.vision)

    def text_ids(self, text: str) -> list[int]:
        """Tokens of a text that continues the conversation."""
        return self.encode(self.escape(text))

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without the special tokens that the tokenizer adds to texts."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a completion's tokens, without special tokens, and with `IMAGE_MARK` for an image."""
        media = () if self.encoder is None else self.encoder.media_token_ids
        if not set(media) & set(ids):
            return str(self.tokenizer.decode(ids, skip_special_tokens=True))
        image = self.encoder.config.image_token_id  # type: ignore[union-attr]
        mark, shown = self.encode(IMAGE_MARK), list[int]()
        for before, token in zip([None, *ids], ids, strict=False):
            if token not in media:
                shown.append(token)
            elif token == image != before:
                shown += mark
        return str(self.tokenizer.decode(shown, skip_special_tokens=True))

    def cut(self, text: str, max_tokens: int) -> tuple[str, int]:
        """Cut a text to at most `max_tokens` tokens. Returns: text and number of tokens."""
        ids = self.encode(text)
        if len(ids) <= max_tokens:
            return text, len(ids)
        return str(self.tokenizer.decode(ids[:max_tokens])), max_tokens

    def behind_the_turn(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> str:
        """Text that the template writes after a turn of the policy."""
        turn = {"role": "assistant", "content": MARK}
        if any(message["role"] == "tool" for message in messages):  # many templates require a call before tool messages
            try:
                call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
                answers = [{"tool_call_id": "call00000", "name": "f", **message} for message in messages]
                return self._behind({**turn, "tool_calls": [call]}, answers, settings, behind_call=True)
            except ValueError:
                pass  # the template cannot render calls in a turn that has text, or cannot render calls at all
        return self._behind(turn, messages, settings)

    def turn_with_call(self, name: str, arguments: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
        """Text of a turn of the policy that calls a tool, without special tokens.

        Returns:
            The text; empty if the template cannot render calls.
        """
        question = {"role": "user", "content": "question"}
        call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            prompt = self._render([question], settings, opens_turn=True)
            rendered = self._render([question, turn], settings, opens_turn=False)
        except ValueError:
            return ""
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, rendered, strict=False))
        written = rendered[sum(1 for _ in same) :]
        return self.decode(self.encode(written)) if name in written else ""

    def _behind(
        self, turn: Message, messages: Sequence[Message], settings: Mapping[str, Any], *, behind_call: bool = False
    ) -> str:
        question = {"role": "user", "content": "question"}
        rendered = self._render([question, turn, *messages], settings, opens_turn=True)
        if behind_call:  # what the template writes for the call itself belongs to the policy's turn
            alone = self._render([question, turn], settings, opens_turn=False)
            plain = self._render([question, {"role": "assistant", "content": MARK}], settings, opens_turn=False)
            ending = plain.partition(MARK)[2]
            if not alone.endswith(ending) or not rendered.startswith(alone):
                raise ValueError("the template writes calls in another way than texts")
            return ending + rendered[len(alone) :]
        _, found, behind = rendered.partition(MARK)
        if not found or MARK in behind:
            raise ValueError(
                "The tokenizer's chat template does not show the turn of the assistant once "
                f"({rendered!r:.200}): it cannot be used for conversations."
            )
        return behind

    def _render(self, messages: Sequence[Message], settings: Mapping[str, Any], *, opens_turn: bool) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    **{**settings, "add_generation_prompt": opens_turn},
                )
            )
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ValueError(
                f"The tokenizer's chat template cannot render a conversation of the roles {roles}: {error}. Set "
                "another `observation_role` in the environment, or use a model whose template has these roles."
            ) from error

    def rewritten_part(self, settings: Mapping[str, Any]) -> str:
        """The part that the template removes from earlier turns of the policy: "reasoning", or "" for no part.

        Some chat templates remove `<think>...</think>` from earlier turns. In training, earlier turns keep this part.
        If a server renders the whole conversation anew, the model gets the earlier turns without this part.
        """
        turn = {"role": "assistant", "content": f"<think>\n{REASONING}\n</think>\n\n{MARK}"}
        user = {"role": "user", "content": "question"}
        rendered = self._render([user, turn, user], settings, opens_turn=True)
        return "reasoning" if MARK in rendered and REASONING not in rendered else ""

    @functools.cached_property
    def special_tokens(self) -> list[str]:
        """Special tokens as text, the longest first."""
        added = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        media = [] if self.encoder is None else self.encoder.media_tokens
        return sorted({*added, *media, *map(str, self.tokenizer.all_special_tokens)}, key=len, reverse=True)

    def escape(self, text: str) -> str:
        """Escape special tokens that are spelled out in a text, so that an observation cannot end a message."""
        for token in self.special_tokens:
            if len(token) > 1 and token in text:
                text = text.replace(token, token[0] + WORD_JOINER + token[1:])
        return text
