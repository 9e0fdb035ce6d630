"""The policy, the code that loads it and scores completions under it, and its frozen reference."""
