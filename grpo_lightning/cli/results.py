"""The table that `validate` and `test` print."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from grpo_lightning.callbacks.before_after import cell, is_bound

GREEDY = "greedy/"


def print_results(metrics: Mapping[str, float], console: Console | None = None) -> None:
    """Print one row per number, sampled and greedy next to each other, each with its interval if it has one.

    Args:
        metrics: By log name: `val/reward`, `val/greedy/avg@1/low`; with several loaders `val/loader_0/...`.
        console: Where to print; null is stdout.
    """
    # The stage is the title of the column; where there are several loaders, each keeps its name in front.
    numbers: dict[str, dict[str, float]] = {"sampled": {}, "greedy": {}}
    for log_name, value in metrics.items():
        name = log_name.partition("/")[2]
        kind = "greedy" if GREEDY in name else "sampled"
        numbers[kind][name.replace(GREEDY, "", 1)] = float(value)
    kinds = [kind for kind, own in numbers.items() if own]
    table = Table()
    table.add_column(next(iter(metrics), "").partition("/")[0], overflow="fold")
    for kind in kinds:
        table.add_column(kind, justify="right")
    for name in dict.fromkeys(name for kind in kinds for name in numbers[kind]):
        if not is_bound(name):
            table.add_row(name, *(cell(numbers[kind], name) for kind in kinds))
    (console or Console()).print(table)
