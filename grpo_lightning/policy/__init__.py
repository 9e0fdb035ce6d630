"""The policy: loading it, scoring completions under it, and its frozen reference."""
