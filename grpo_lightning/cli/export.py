"""`grpo-lightning export`: convert a checkpoint to a folder that transformers loads."""

from __future__ import annotations

import argparse
from pathlib import Path

from grpo_lightning.cli.help import command_parser
from grpo_lightning.cli.hub import check_push, push


def run(args: list[str]) -> None:
    """Export a checkpoint. For errors, see `grpo_lightning.training.checkpoint_export.export`.

    Even if the run kept its frozen weights quantized, an exported adapter must be loaded with the base model in full
    precision.
    """
    options = vars(parser().parse_args(args))
    repo, private = options.pop("push"), options.pop("private")
    check_push(repo, private=private)
    from grpo_lightning.report.model_card import write_card
    from grpo_lightning.training.checkpoint_export import export
    from grpo_lightning.training.checkpoint_files import run_of

    options["checkpoint"] = checkpoint_of(Path(options["checkpoint"]))
    written = export(**options)
    card = write_card(
        written.folder,
        run_of(options["checkpoint"]),
        policy=written.policy,
        num_steps=written.num_steps,
        is_adapter=written.is_adapter,
        is_multimodal=written.is_multimodal,
    )
    folder, dtype = written.folder, str(written.dtype).removeprefix("torch.")
    what = "weights of an adapter" if written.is_adapter else "weights"
    print(f"Exported {written.num_weights:,} {what} ({dtype}) to {folder}:")
    for path in written.files:
        if path.name == card.path.name:  # peft wrote this file for an adapter; the card has replaced it
            continue
        print(f"  {path.name}  {path.stat().st_size / 2**20:,.1f} MiB")
    sections = f": {', '.join(title[0].lower() + title[1:] for title in card.titles)}" if card.titles else ""
    print(f"  {card.path.name}  the model's card{sections}")
    is_multimodal = written.is_multimodal
    tokenizer, model = ("processor", "ImageTextToText") if is_multimodal else ("tokenizer", "CausalLM")
    limits = "; the image size limits of the processor are those of the run" if is_multimodal else ""
    parts = ["the config", f"the {tokenizer}"]
    if written.is_merged:
        print(f"The trained LoRA adapter is merged into the weights of {written.policy}.")
    elif written.num_from_policy:
        parts.append(f"{written.num_from_policy:,} weights that were not trained")
    print(f"Copied from {written.policy}: {', '.join(parts[:-1])} and {parts[-1]}{limits}.")
    if written.quantization != "none":
        what = "the adapter goes with" if written.is_adapter else "the adapter is merged into"
        print(f"The run kept frozen weights in {written.quantization}; {what} the full-precision ones.")
    print("To load it:")
    print(f"  from transformers import AutoModelFor{model}, Auto{tokenizer.title()}")
    if written.is_adapter:
        print("  from peft import PeftModel")
        print(f'  base = AutoModelFor{model}.from_pretrained("{written.policy}", dtype="auto")')
        print(f'  model = PeftModel.from_pretrained(base, "{folder}")')
    else:
        print(f'  model = AutoModelFor{model}.from_pretrained("{folder}", dtype="auto")')
    print(f'  {tokenizer} = Auto{tokenizer.title()}.from_pretrained("{folder}")')
    if repo is not None:
        print(f"Uploaded to {push(folder, repo, private=private)}")


def checkpoint_of(path: Path) -> Path:
    """Return the newest complete checkpoint if `path` is the folder of a run. If not, return `path` itself.

    The folder is `runs/<run name>/version_<N>`, or `runs/<run name>` for the newest checkpoint of all versions.

    Raises:
        ConfigurationError: If the run has no complete checkpoint.
    """
    from grpo_lightning.cli import resume
    from grpo_lightning.cli.errors import ConfigurationError

    folders = resume.folders_of_run(path)
    if not folders:
        return path
    newest, skipped = resume.newest(folders)
    if newest is None and not skipped:
        raise ConfigurationError(
            f"{path} has no checkpoint. The recipe may turn checkpoints off (trainer.enable_checkpointing: false, as "
            "the quickstarts do): train again with --trainer.enable_checkpointing=true. If the checkpoints are in "
            "another folder, give a file."
        )
    if newest is None:
        raise ConfigurationError(f"{path} has no complete checkpoint ({len(skipped)} incomplete). Give a file.")
    print(f"Checkpoint: {newest}")
    return newest


def parser() -> argparse.ArgumentParser:
    """Argument parser of the command."""
    parser = command_parser(
        "export",
        "Write the policy in a checkpoint as a folder that transformers loads: weights, config, generation config and "
        "tokenizer, or the processor of a multimodal policy; and a README.md, the model's card.",
        ["export runs/my_run my_model"],
    )
    parser.add_argument(
        "checkpoint",
        help="a .ckpt file, the folder of a sharded checkpoint, or the folder of a run, for its newest checkpoint",
    )
    parser.add_argument("folder", help="where the model goes")
    parser.add_argument("--policy", help="the policy before training; default: as named by the checkpoint or its run")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="dtype of the weights; default: the checkpoint's"
    )
    parser.add_argument("--adapter", action="store_true", help="write only the LoRA adapter, for peft; do not merge it")
    parser.add_argument("--force", action="store_true", help="write into a folder that has files")
    parser.add_argument(
        "--fill_missing",
        action="store_true",
        help="take weights missing in the checkpoint from the policy, even if it is unknown whether they were frozen",
    )
    parser.add_argument("--push", metavar="OWNER/NAME", help="also upload the folder to the hub, with your login there")
    parser.add_argument("--private", action="store_true", help="with --push: make a new repository private")
    return parser
