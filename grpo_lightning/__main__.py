"""`python -m grpo_lightning` runs the command line, like the console script `grpo-lightning`."""

from grpo_lightning.cli import entry_point

if __name__ == "__main__":
    entry_point()
