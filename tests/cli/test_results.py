"""The table of `validate` and `test`."""

import io

from rich.console import Console

from grpo_lightning.cli.results import print_results


def table(metrics, width=80):
    """The cells of every row that is printed."""
    out = io.StringIO()
    print_results(metrics, Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    rows = [[cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")] for line in lines]
    return [row for row in rows if len(row) > 1]


def test_sampled_and_greedy_stand_next_to_each_other_with_four_digits_and_intervals():
    numbers = {"avg@1": 0.123456, "avg@1/low": 0.1, "avg@1/high": 0.154, "length": 1234.5678}
    metrics = {f"val/{name}": value for name, value in numbers.items()} | {"val/greedy/avg@1": 1.0}
    assert table(metrics) == [
        ["val", "sampled", "greedy"],
        ["avg@1", "0.1235 [0.10, 0.15]", "1.000"],
        ["length", "1235", "-"],
    ]


def test_without_greedy_completions_there_is_no_such_column():
    assert table({"test/reward": 0.5}) == [["test", "sampled"], ["reward", "0.5000"]]


def test_loaders_and_sources_keep_their_names():
    metrics = {"val/loader_0/reward": 1.0, "val/loader_1/greedy/reward": 2.0, "val/source/a/reward": 3.0}
    assert table(metrics) == [
        ["val", "sampled", "greedy"],
        ["loader_0/reward", "1.000", "-"],
        ["source/a/reward", "3.000", "-"],
        ["loader_1/reward", "-", "2.000"],
    ]


def test_long_names_fold_instead_of_losing_their_end():
    name = "source/" + "a-rather-long-name-of-a-data-set" * 2 + "/format"
    rows = table({f"val/{name}": 0.25, "val/greedy/length": 3.0}, width=60)
    assert "".join(row[0] for row in rows[1:-1]) == name
    assert [row[1] for row in rows[1:-1]].count("0.2500") == 1
