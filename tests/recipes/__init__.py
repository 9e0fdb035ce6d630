"""Tests of the recipes, and of the scripts of other trainers that are translated to recipes."""
