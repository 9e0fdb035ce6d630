"""Self CPU time of our training step by operator group and phase, with torch.profiler.

    python benchmarks/profile_step.py --workloads w1 w2   # these two are the default

The step is that of `versus_trl.py`: same workload, defaults and phases. It follows two steps without the profiler. The
self time of an operator excludes the operators that it calls. The time outside of all operators is Python's: the code
of the model, of Lightning and of the package. The profiler measures wall-clock time, and its shares distribute the CPU
time of each phase. The last line compares the step with the one before, because the profiler slows operators down.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile, record_function
from training_runs import Meter, fit, metered_phases, our_module, our_rows
from versus_trl import WORKLOADS, workload_file
from workload import Workload, build_policy

from grpo_lightning import GRPOLightningModule

GROUPS = {
    "matrix products": r"aten::(mm|addmm|bmm|baddbmm|addmv|mv|dot|mkldnn_linear)$",
    "attention": r"aten::_(scaled_dot_product|flash_attention|efficient_attention)",
    "softmax, log-softmax": r"aten::(_softmax|_log_softmax|_?logsumexp|_safe_softmax)",
    "copies, indexing": r"aten::(copy_|cat|clone|gather|scatter|index|embedding|nonzero|repeat_interleave|fill_|zero_"
    r"|constant_pad|masked_fill|_local_scalar_dense|slice_backward|select_backward)",
    "dispatch": r"(?!aten::)|aten::(linear|matmul|to$|_to_copy|view|_unsafe_view|reshape|_reshape|transpose|t$|permute"
    r"|expand|slice|select|narrow|unsqueeze|squeeze|as_strided|detach|contiguous|unbind|split|chunk|flatten|unflatten"
    r"|alias|empty|new_|zeros|ones|full|arange|scaled_dot_product|softmax|log_softmax|pad|item|is_nonzero|result_type"
    r"|lift_fresh|resolve_|resize_|stack)",
}
"""Patterns of operator names; the first that matches counts. All other operators are elementwise or reductions."""

ELEMENTWISE, PYTHON, MARK = "elementwise, reductions", "Python", "phase: "


def group_of(name: str) -> str:
    """The group of an operator."""
    return next((group for group, pattern in GROUPS.items() if re.match(pattern, name)), ELEMENTWISE)


class ProfiledMeter(Meter):
    """Profiles the step after the warm-up, and marks where its phases begin."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.profile = profile(activities=[ProfilerActivity.CPU], acc_events=True)

    def begin(self, phase: str) -> None:
        """Begin a phase."""
        super().begin(phase)
        with record_function(MARK + phase):
            pass

    def step_ended(self) -> None:
        """Start the profiler after the warm-up, and stop it after the next step."""
        super().step_ended()
        if len(self.steps) == self.warmup_steps:
            self.profile.start()
            self.begin("other")
        elif len(self.steps) > self.warmup_steps:
            self.profile.stop()


def seconds_by_phase(events: Iterable[Any], cpu_seconds: Mapping[str, float]) -> dict[str, Counter[str]]:
    """CPU seconds by phase and operator group: `cpu_seconds` by phase, distributed by the profiler's `events`."""
    phases: dict[str, Counter[str]] = {}
    phase, began = "", 0.0
    for event in sorted(events, key=lambda event: event.time_range.start):
        if event.name.startswith(MARK):
            if phase:
                phases.setdefault(phase, Counter())[PYTHON] += event.time_range.start - began
            phase, began = event.name.removeprefix(MARK), event.time_range.start
        elif phase and not event.is_user_annotation:
            found = phases.setdefault(phase, Counter())
            found[group_of(event.name)] += event.self_cpu_time_total
            found[PYTHON] -= event.self_cpu_time_total
    return {
        phase: Counter({group: time * cpu_seconds[phase] / found.total() for group, time in found.items()})
        for phase, found in phases.items()
    }


def table_of(title: str, phases: dict[str, Counter[str]]) -> Table:
    """A row per operator group and a column per phase, both in descending order."""
    total: Counter[str] = sum(phases.values(), Counter())
    names = sorted(phases, key=lambda name: -phases[name].total())
    table = Table(title, *names, "all", "share", title="CPU seconds of one step")
    total["all"] = total.total()
    for group, seconds in total.most_common():
        cells = [phases[name].total() if group == "all" else phases[name][group] for name in names]
        table.add_row(group, *(f"{cell:.3f}" for cell in [*cells, seconds]), f"{seconds / total['all']:.0%}")
    return table


def main() -> None:
    """Print a table for every workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["w1", "w2"], metavar="NAME")
    torch.set_num_threads(1)
    for name in parser.parse_args().workloads:
        workload = Workload.load(workload_file(name)).changed({"warmup_steps": 2})
        meter = ProfiledMeter(workload)
        with tempfile.TemporaryDirectory() as folder:
            build_policy(workload, Path(folder))
            module = our_module(workload, Path(folder), 0, GRPOLightningModule)
            callback, rows = metered_phases(workload, meter), our_rows(workload, Path(folder))
            fit(workload, Path(folder), module, callback, rows, steps=3, seed=0)
        before, profiled = meter.steps[-2:]
        phases = seconds_by_phase(meter.profile.events(), profiled.phases)
        Console(width=150).print(table_of(f"{name}: {workload.title}", phases))
        print(f"CPU s of this step: {profiled.cpu_seconds:.2f}; of the one before: {before.cpu_seconds:.2f}")


if __name__ == "__main__":
    main()
