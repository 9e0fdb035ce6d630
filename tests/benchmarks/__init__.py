"""Tests of the scripts in benchmarks/, which measure and prove the numbers of docs/benchmarks.md."""
