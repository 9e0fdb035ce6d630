"""Shared utilities: types, collectives, seeding, logging set-up, files."""
