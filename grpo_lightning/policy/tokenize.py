"""Prompts to token ids, by the policy's tokenizer."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedTokenizerBase

from grpo_lightning.policy.inputs import text_config
from grpo_lightning.types import Prompt


def tokenize(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The prompt's token ids: text as it is, messages through the chat template with the assistant's turn opened.

    Raises:
        ValueError: If the prompt has no tokens, or messages meet a tokenizer without a chat template.
    """
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    if isinstance(prompt.content, str):
        ids = tokenizer(prompt.content)["input_ids"]
    else:
        if tokenizer.chat_template is None:
            raise ValueError(
                f"Prompt {prompt.index} is a list of messages, but the tokenizer has no chat template. Set "
                "`tokenizer.chat_template`, use an instruction-tuned model, or give prompts as text."
            )
        ids = tokenizer.apply_chat_template(
            [dict(message) for message in prompt.content],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **prompt.chat_template_kwargs,
        )
    if not ids:
        raise ValueError(f"Prompt {prompt.index} has no tokens: {prompt.content!r}. Remove the row.")
    return list(ids)


def check_length(prompt: Prompt, prompt_ids: list[int], model: nn.Module, max_completion_length: int) -> None:
    """Check that a prompt and its longest completion fit the model's positions.

    Raises:
        ValueError: If they do not, naming the prompt and the lengths.
    """
    limit = getattr(text_config(model), "max_position_embeddings", None)
    if limit is not None and len(prompt_ids) + max_completion_length > limit:
        raise ValueError(
            f"Prompt {prompt.index} has {len(prompt_ids)} tokens; with sampling.max_completion_length "
            f"{max_completion_length} that is more than the policy's {limit} positions. Lower the length, or leave the "
            "prompt out."
        )
