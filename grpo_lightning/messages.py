"""What the package says once (scoring path, attention kernel, rounded limits) must be seen without any set-up."""

from __future__ import annotations

import logging


def show_messages() -> None:
    """Print the package's messages to stderr, unless the application has set up logging itself."""
    logger = logging.getLogger("grpo_lightning")
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
        logger.addHandler(handler)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
