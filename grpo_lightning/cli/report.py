"""`grpo-lightning report`: write one HTML file about a run, or about several runs side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from grpo_lightning.cli.help import command_parser

MAX_RUNS = 8
"""Number of runs that the page has colors for."""


def run(args: list[str]) -> None:
    """Write the report.

    Raises:
        ConfigurationError: If (a) a folder is not the folder of a run, (b) the log of completions or tokens has an
            invalid line, (c) `--max_completions` is below 1, (d) `--output` is a folder, or (e) there are more than
            `MAX_RUNS` runs.
    """
    options = parser().parse_args(args)
    from grpo_lightning.cli.errors import ConfigurationError
    from grpo_lightning.report import find_run, read_run, write_report

    paths = [Path(path) for path in options.runs]
    if len(paths) > MAX_RUNS:
        raise ConfigurationError(f"A report shows at most {MAX_RUNS} runs, got {len(paths)}: write several reports.")
    if options.max_completions < 1:
        raise ConfigurationError(f"--max_completions must be at least 1, got {options.max_completions}.")
    try:
        folders = [find_run(path) for path in paths]
        runs = [read_run(folder, max_completions=options.max_completions) for folder in folders]
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    output = Path(options.output) if options.output else folders[0] / default_name(folders)
    if output.is_dir():
        raise ConfigurationError(f"--output must be a file, but {output} is a folder. Write {output / 'report.html'}.")
    write_report(runs, output)
    total = sum(each["num_completions"] for each in runs)
    size = output.stat().st_size / 2**20
    print(f"Report: {output} ({size:,.1f} MiB, {total:,} completions). Open it in a browser; it needs no network.")


def default_name(folders: list[Path]) -> str:
    """Name of the file: `report.html`, `report_<second run>_<version>.html` (two runs) or `report_3_runs.html`."""
    if len(folders) == 1:
        return "report.html"
    others = f"{len(folders)}_runs" if len(folders) > 2 else "_".join(folders[1].resolve().parts[-2:])
    return f"report_{others}.html"


def parser() -> argparse.ArgumentParser:
    """Argument parser of the command."""
    parser = command_parser(
        "report",
        "Write one HTML file about a run: settings, curves, histograms of rewards, time by phase, failures, and all "
        f"completions by step and group. Several runs, at most {MAX_RUNS}, are shown side by side. The file loads "
        "nothing from the network. The run may still be training, or may have crashed.",
        ["report runs/quickstart", "report runs/my_run/version_1 runs/my_run/version_0"],
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="run",
        help="folder of a run: runs/<run name>/version_<N>, or runs/<run name> for its newest training run",
    )
    parser.add_argument(
        "--output",
        help="file to write; default: report.html, or report_<other runs>.html, in the folder of the first run",
    )
    parser.add_argument(
        "--max_completions",
        type=int,
        default=20_000,
        help="maximum number of completions per run whose texts are in the file; a longer run is thinned out to "
        "rollouts at equal distances (default: %(default)s)",
    )
    return parser
