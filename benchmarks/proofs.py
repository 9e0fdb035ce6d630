"""`proofs.json`: the results of the long proofs, with date, versions and command."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

PATH = Path(__file__).parent / "proofs.json"
PACKAGES = ("torch", "transformers", "lightning", "trl", "reasoning-gym")


def record(name: str, outcome: dict[str, Any]) -> None:
    """Replace the entry of one proof."""
    proofs = json.loads(PATH.read_text()) if PATH.exists() else {}
    proofs[name] = {
        "date": datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat(),
        "command": f"python benchmarks/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".strip(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in PACKAGES},
        "cores": os.cpu_count(),
        **outcome,
    }
    PATH.write_text(json.dumps(proofs, indent=2) + "\n")
