"""`proofs.json`: the results of the long proofs, with date, versions and command."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "proofs.json"
PACKAGES = ("torch", "transformers", "lightning", "trl", "reasoning-gym", "vllm")
"""Packages whose versions are recorded, if they are installed."""


def versions() -> dict[str, str]:
    """Versions of the installed packages among `PACKAGES`."""
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):  # vLLM has an environment of its own, without trl
            found[package] = version(package)
    return found


def record(name: str, outcome: dict[str, Any]) -> None:
    """Replace the entry of one proof."""
    proofs = json.loads(PATH.read_text()) if PATH.exists() else {}
    proofs[name] = {
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "command": f"python benchmarks/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip(),
        "python": platform.python_version(),
        "versions": versions(),
        "cores": os.cpu_count(),
        **outcome,
    }
    PATH.write_text(json.dumps(proofs, indent=2) + "\n")
