"""What every other part uses: types, ranks, seeds, messages, files."""
