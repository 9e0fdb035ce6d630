"""`grpo-lightning plan` prints batch arithmetic and memory of a run in advance, or translates other trainers' flags."""
