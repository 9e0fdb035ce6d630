"""Imports point down, heavy packages load late."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "grpo_lightning"

# What may import what: only lower levels, and the same folder. A new file or folder of the package gets its level here.
LEVELS = {
    "images": 0,
    "listing": 0,
    "messages": 0,
    "ranks": 0,
    "seeding": 0,
    "types": 0,
    "unique_keys": 0,
    "whole_folder": 0,
    "tasks": 1,
    "functional": 1,
    "objective": 2,
    "offload": 5,
    "overlong": 4,
    "own_callbacks": 5,
    "policy": 2,
    "rollout": 4,
    "rewards": 3,
    "data": 4,
    "metrics": 4,
    "dynamic_sampling": 5,
    "evaluation": 4,
    "grounding": 4,
    "planner": 4,
    "optimizers": 5,
    "schedules": 4,
    "actor": 5,
    "box_checks": 5,
    "callbacks": 5,
    "checkpoints": 5,
    "completeness": 5,
    "checks": 5,
    "data_checks": 5,
    "demo": 5,
    "empty_updates": 5,
    "export": 5,
    "hooks": 5,
    "limits": 5,
    "logged": 5,
    "module": 5,
    "planning": 5,
    "rank_files": 5,
    "requeue": 5,
    "run_state": 5,
    "saved": 5,
    "strategies": 5,
    "sync_reference": 5,
    "update_log": 5,
    "cli": 6,
}
# A callback reads the module that it is called with, and what it logged.
SIDEWAYS = {("callbacks", "module"), ("callbacks", "logged")}
FOLDERS = {"callbacks", "cli", "data", "demo", "functional", "planning", "policy", "rewards", "rollout", "tasks"}
LIGHTNING_LEVEL = 5
LIGHTNING_BELOW = {"data/datamodule.py"}
LIGHTNING = {"lightning", "lightning_fabric", "pytorch_lightning"}
HEAVY = {
    *("bitsandbytes", "deepspeed", "flash_attn", "matplotlib", "openai", "peft", "PIL", "pycocotools"),
    *("reasoning_gym", "torchvision", "trl", "vllm", "wandb"),
}


def is_type_checking(node: ast.AST) -> bool:
    """True for `if TYPE_CHECKING:`, whose body never runs."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(node: ast.AST, *, is_eager: bool = True) -> Iterator[tuple[ast.Import | ast.ImportFrom, str, bool]]:
    """Every import below `node`: the statement, the module named, and whether it runs when the file is imported."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((child, alias.name, is_eager) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module == PACKAGE.name:
            yield from ((child, f"{child.module}.{alias.name}", is_eager) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield child, child.module or "", is_eager
        elif is_type_checking(child):
            assert isinstance(child, ast.If)
            for statement in child.body:
                yield from imports(ast.Module([statement], []), is_eager=False)
            for statement in child.orelse:
                yield from imports(ast.Module([statement], []), is_eager=is_eager)
        else:
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(child, is_eager=is_eager and not is_function)


def points_down(unit: str, target: str) -> bool:
    """True if `unit` (a file or folder of the package) may import `target`."""
    is_same_folder = unit == target or (LEVELS[unit] == LEVELS[target] and {unit, target}.isdisjoint(FOLDERS))
    return LEVELS[target] < LEVELS[unit] or is_same_folder or (unit, target) in SIDEWAYS


def file_problems(path: Path, package: Path) -> Iterator[str]:
    """What one file does that the layout does not allow."""
    name = path.relative_to(package).as_posix()
    unit = path.relative_to(package).parts[0].removesuffix(".py")
    is_root = unit == "__init__"  # the lazy public names: they point everywhere
    if not is_root and unit not in LEVELS:
        yield f"{name} has no level: add {unit!r} to LEVELS."
        return
    for node, module, is_eager in imports(ast.parse(path.read_text(encoding="utf-8"))):
        where, top = f"{name}:{node.lineno}", module.partition(".")[0]
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"{where} imports relatively: write the absolute name."
        if is_eager and top in HEAVY:
            yield f"{where} imports {top} at the top level: import it in the function that uses it."
        if is_root:
            continue
        if top in LIGHTNING and LEVELS[unit] < LIGHTNING_LEVEL and name not in LIGHTNING_BELOW:
            yield f"{where} imports {top}, which levels below {LIGHTNING_LEVEL} may not."
        target = module.split(".")[1] if module.startswith(f"{PACKAGE.name}.") else unit
        if target not in LEVELS and not target.startswith("__"):
            yield f"{where} imports {module}, which has no level: name the file that defines it."
        elif target in LEVELS and not points_down(unit, target):
            yield f"{where} ({unit}, level {LEVELS[unit]}) may not import {module} (level {LEVELS[target]})."


def problems(package: Path) -> list[str]:
    """What the files of `package` do that the layout does not allow."""
    return [problem for path in sorted(package.rglob("*.py")) for problem in file_problems(path, package)]


def test_the_package_follows_its_layout():
    found = problems(PACKAGE)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("module.py", "from grpo_lightning.policy.scoring import score"),
        ("functional/losses.py", "from grpo_lightning.functional.kl import k3\nfrom grpo_lightning import types"),
        ("module.py", "from grpo_lightning.strategies import context\nimport lightning as L"),
        ("callbacks/samples.py", "from grpo_lightning.module import GRPOLightningModule"),
        ("data/datamodule.py", "from lightning import LightningDataModule"),
        ("policy/loading.py", "def load():\n    import peft"),
        ("rollout/vllm.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vllm import LLM"),
        ("__init__.py", "from grpo_lightning.module import GRPOLightningModule"),
        ("types.py", "from grpo_lightning import __version__"),
    ],
)
def test_good_files_pass(tmp_path: Path, name: str, source: str):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(source)
    assert problems(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("types.py", "import grpo_lightning.rollout.base", "types.py:1 (types, level 0) may not import"),
        ("functional/kl.py", "from grpo_lightning import policy", "may not import grpo_lightning.policy (level 2)"),
        (
            "policy/loading.py",
            "def f():\n    from grpo_lightning import module",
            "loading.py:2 (policy, level 2) may not",
        ),
        (
            "rewards/text.py",
            "from grpo_lightning.rollout.groups import f",
            "may not import grpo_lightning.rollout.groups",
        ),
        ("objective.py", "from grpo_lightning.policy import loading", "may not import"),
        ("module.py", "from grpo_lightning.callbacks.samples import S", "may not import"),
        (
            "types.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import grpo_lightning.cli.main",
            "may not import",
        ),
        ("policy/loading.py", "from .scoring import score", "imports relatively"),
        ("policy/loading.py", "from . import scoring", "imports relatively"),
        ("module.py", "import deepspeed", "imports deepspeed at the top level"),
        (
            "module.py",
            "try:\n    from peft import LoraConfig\nexcept ImportError:\n    pass",
            "imports peft at the top",
        ),
        ("module.py", "class M:\n    import matplotlib.pyplot", "imports matplotlib at the top"),
        ("__init__.py", "import vllm", "imports vllm at the top"),
        ("rollout/local.py", "import lightning as L", "imports lightning, which levels below 5 may not"),
        ("data/source.py", "from lightning.pytorch import Trainer", "imports lightning"),
        ("cli/main.py", "from grpo_lightning import GRPOLightningModule", "name the file that defines it"),
        ("misc.py", "", "has no level"),
    ],
)
def test_bad_files_are_found(tmp_path: Path, name: str, source: str, message: str):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(source)
    assert [problem for problem in problems(tmp_path) if message in problem]
