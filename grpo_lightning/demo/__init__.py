"""Tiny models and tasks of the quickstarts, all built offline.

The tasks with text are `arithmetic` and `reasoning_gym`. The task with images is `grounding`. The tasks with
conversations are `guessing` (a game) and `tool_use` (a calculator).
"""
