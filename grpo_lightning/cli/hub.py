"""Upload of an exported model to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path

from grpo_lightning.cli.errors import ConfigurationError


def check_push(repo: str | None, *, private: bool) -> None:
    """Check the options for the upload, before a model is exported. Without a repository, nothing will be uploaded.

    Raises:
        ConfigurationError: If a repository is given, and (a) the name of the repository is wrong, (b) the hub is
            switched off, or (c) nobody is logged in.
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
    """Upload a folder as a model, into a new repository or an existing one.

    Args:
        folder: Folder of the model.
        repo: OWNER/NAME.
        private: Whether a new repository is private.

    Returns:
        Address of the model.

    Raises:
        ConfigurationError: If the hub cannot be reached or refuses the upload. The upload does not change the local
            `folder`, so the exported model is still complete there.
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
