"""Prompts to token ids, by the policy's tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jinja2 import TemplateError

from grpo_lightning.policy.rope import rope_entries, rope_type
from grpo_lightning.types import Prompt

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def tokenize(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, where: str = "") -> list[int]:
    """The prompt's token ids: text as it is, messages through the chat template with the assistant's turn opened.

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
        try:
            ids = tokenizer.apply_chat_template(
                [dict(message) for message in prompt.content],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                **prompt.chat_template_kwargs,
            )
        except (TemplateError, TypeError) as error:  # what templates raise for roles and contents they do not know
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
