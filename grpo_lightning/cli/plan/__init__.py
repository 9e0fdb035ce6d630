"""`grpo-lightning plan`: batch arithmetic and memory of a run before it starts, and other trainers' batch flags."""
