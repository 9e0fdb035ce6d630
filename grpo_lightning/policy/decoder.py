"""Which parts of a model are its language model."""

from __future__ import annotations

from typing import Any

from torch import nn

NOT_LANGUAGE = ("visual", "vision", "image", "audio", "projector", "merger", "connector")
"""Parts of the names of what is no language model, where a model does not say which of its parts the decoder is."""


def language_modules(model: Any) -> dict[str, nn.Module]:
    """Every module of the decoder but the output head, by name.

    Of models with several parts, the vision tower and its projector are none: they are outside of the decoder.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    inside = {id(module) for module in decoder.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if module is not head
        and id(module) in inside
        and not (decoder is model and any(part in name for part in NOT_LANGUAGE))
    }
