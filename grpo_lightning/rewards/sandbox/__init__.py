"""Running untrusted programs: kernel isolation, limits, and tests whose answers the program cannot reach."""
