"""The Hugging Face Hub: upload of an exported model, and offline mode if the hub cannot be reached."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from grpo_lightning.cli.errors import ConfigurationError

HUB_SECONDS = 10.0
"""Seconds to wait for an answer of the hub before it counts as unreachable."""


def check_push(repo: str | None, *, private: bool) -> None:
    """Before an export, check the options of the upload.

    Raises:
        ConfigurationError: If a repository is given, and (a) its name is wrong, (b) the hub is switched off, or (c)
            nobody is logged in.
        ConfigurationError: If no repository is given, and `private` is true.
    """
    if repo is None:
        if private:
            raise ConfigurationError("--private makes a new repository of --push private, and --push is not set.")
        return
    from huggingface_hub import constants, get_token

    if repo.count("/") != 1 or not all(repo.split("/")):
        raise ConfigurationError(f"--push takes the name of a repository as OWNER/NAME, got {repo!r}.")
    if constants.HF_HUB_OFFLINE:
        raise ConfigurationError(
            f"--push {repo} needs the network, and HF_HUB_OFFLINE is set: unset it, or export without --push and "
            "upload the folder later (hf upload)."
        )
    if get_token() is None:
        raise ConfigurationError(
            f"--push {repo} needs your login on the hub: run `hf auth login`, or set HF_TOKEN to a token that may "
            "write."
        )


def push(folder: Path, repo: str, *, private: bool) -> str:
    """Upload a folder as a model to the repository `repo` (OWNER/NAME). Returns: the model's address.

    If the repository is new, `private` makes it private.

    Raises:
        ConfigurationError: If the hub cannot be reached or refuses the upload.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        hub.create_repo(repo, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message="Trained with grpo-lightning")
    except Exception as error:  # the client raises errors of many types
        raise ConfigurationError(
            f"The model is in {folder}, but it was not uploaded to {repo}: {error}. Try again with: hf upload {repo} "
            f"{folder}"
        ) from error
    return f"https://huggingface.co/{repo}"


@contextlib.contextmanager
def restored_mode() -> Iterator[None]:
    """At the end of the `with` block, restore the offline mode of `huggingface_hub`."""
    from huggingface_hub import constants

    mode = constants.HF_HUB_OFFLINE
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = mode


def go_offline_if_unreachable() -> None:
    """Switch `huggingface_hub` to offline mode if the hub cannot be reached.

    Otherwise, `huggingface_hub` would repeat the request for every file several times, with pauses.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS)
    except Exception as error:  # noqa: BLE001 (the kind of error depends on the HTTP library of huggingface_hub)
        constants.HF_HUB_OFFLINE = True
        print(
            f"The hub ({constants.ENDPOINT}) cannot be reached ({error}): only folders and the hub's cache are used. "
            "HF_HUB_OFFLINE=1 skips the wait for the hub."
        )
