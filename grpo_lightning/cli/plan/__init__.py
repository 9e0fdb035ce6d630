"""What a run will do and need, worked out before it starts: its batches, its memory, and other trainers' settings."""
