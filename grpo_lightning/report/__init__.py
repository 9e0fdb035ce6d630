"""The report of a run. `run_files` reads the files of a run, and `embed_data` writes their data into one HTML file."""

from grpo_lightning.report.embed_data import write_report
from grpo_lightning.report.run_files import find_run, read_run

__all__ = ["find_run", "read_run", "write_report"]
