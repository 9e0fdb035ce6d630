"""Prompts to token ids, by the policy's tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from grpo_lightning.core.types import Message, Prompt
from grpo_lightning.policy.rope import rope_entries, rope_type

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


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


def num_positions(config: PretrainedConfig) -> int | None:
    """Positions of the language model a config describes; None if it has no limit.

    Dynamic NTK rope stretches those that the model was trained with by its factor.
    """
    text = config.get_text_config(decoder=True)
    positions: int | None = getattr(text, "max_position_embeddings", None)
    factors = [entry.get("factor", 1.0) for entry in rope_entries(text) if "dynamic" in rope_type(entry)]
    return positions and int(positions * max(factors, default=1.0))


def vocabulary_size(config: PretrainedConfig) -> int:
    """Tokens that the language model a config describes has a score for; 0 if it does not say."""
    return getattr(config.get_text_config(decoder=True), "vocab_size", None) or 0
