"""`grpo-lightning plan`: batch arithmetic and memory of a run before it starts; translates other trainers' flags."""
