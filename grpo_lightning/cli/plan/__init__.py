"""`grpo-lightning plan` prints batch arithmetic and memory of a run, or translates other trainers' flags."""
