"""Tiny models and tasks of the quickstarts, built offline: text, images and conversations.

Text: `arithmetic`, `reasoning_gym`. Images: `grounding`, with the pictures of `scenes`. Conversations: `guessing` (a
game) and `tool_use` (a calculator). `number_games` writes rows of the game for a policy that understands English.
"""
