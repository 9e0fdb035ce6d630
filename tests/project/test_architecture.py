"""Imports point down, heavy packages load late, and few files run in a training step."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_lightning.module import GRPOLightningModule
from grpo_lightning.objective import Objective
from tests.helpers.module_runs import fit, make_module
from tests.helpers.paths import PACKAGE

# What may import what: only lower levels, and the same folder. A new file or folder of the package gets its level here.
LEVELS = {
    "core": 0,
    "functional": 0,
    "policy": 1,
    "objective": 1,
    "optimizers": 1,
    "schedules": 1,
    "data": 2,
    "rewards": 3,
    "environments": 4,
    "rollout": 5,
    "training": 6,
    "grounding": 7,
    "report": 8,
    "module": 8,
    "callbacks": 9,
    "demo": 10,
    "cli": 11,
    "__main__": 12,
}
FOLDERS = {
    "callbacks",
    "cli",
    "core",
    "data",
    "demo",
    "environments",
    "functional",
    "policy",
    "report",
    "rewards",
    "rollout",
    "training",
}
LIGHTNING_LEVEL = 6
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
    return LEVELS[target] < LEVELS[unit] or is_same_folder


def file_problems(path: Path, package: Path) -> Iterator[str]:
    """Yield the violations of the layout in one file."""
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
    """Return the violations of the layout in the files of `package`."""
    return [problem for path in sorted(package.rglob("*.py")) for problem in file_problems(path, package)]


def test_the_package_follows_its_layout():
    found = problems(PACKAGE)
    assert not found, "\n".join(found)


def graph(package: Path) -> dict[str, set[str]]:
    """The files of the package that each file imports, those for type checkers and late ones included."""
    files = {
        path: ".".join((package.name, *path.relative_to(package).with_suffix("").parts))
        for path in sorted(package.rglob("*.py"))
    }
    names = {name.removesuffix(".__init__") for name in files.values()}
    found: dict[str, set[str]] = {}
    for path, name in files.items():
        targets = set()
        for node, module, _ in imports(ast.parse(path.read_text(encoding="utf-8"))):
            imported = {f"{module}.{alias.name}" for alias in node.names} if isinstance(node, ast.ImportFrom) else set()
            targets |= (imported & names) or ({module} & names)
        found[name.removesuffix(".__init__")] = targets - {name.removesuffix(".__init__")}
    return found


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Files that import each other in a circle; none if there is no circle."""
    left = dict(edges)
    while True:
        ends = {name for name, targets in left.items() if not targets & left.keys()}
        if not ends:
            break
        left = {name: targets for name, targets in left.items() if name not in ends}
    return sorted(left)


def test_no_file_imports_itself_around_a_corner():
    assert circle(graph(PACKAGE)) == []


def test_circles_are_found():
    edges = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}
    assert circle(edges) == ["a", "b", "c"]
    assert circle(edges | {"c": {"d"}}) == []


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("core/types.py", "import grpo_lightning.rollout.engine", "types.py:1 (core, level 0) may not import"),
        (
            "policy/loading.py",
            "def f():\n    from grpo_lightning import module",
            "loading.py:2 (policy, level 1) may not",
        ),
        (
            "core/types.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import grpo_lightning.cli.main",
            "may not import",
        ),
        ("policy/loading.py", "from .scorer import score", "imports relatively"),
        (
            "module.py",
            "try:\n    from peft import LoraConfig\nexcept ImportError:\n    pass",
            "imports peft at the top",
        ),
        ("rollout/local_engine.py", "import lightning as L", "imports lightning, which levels below 6 may not"),
        ("cli/main.py", "from grpo_lightning import GRPOLightningModule", "name the file that defines it"),
        ("misc.py", "", "has no level"),
    ],
)
def test_bad_files_are_found(tmp_path: Path, name: str, source: str, message: str):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(source)
    assert [problem for problem in problems(tmp_path) if message in problem]


def test_a_reader_of_a_training_step_opens_few_files():
    """A step that samples, scores and trains, with the default objective, runs functions of at most 25 files."""
    files: set[Path] = set()

    def record(frame, event, argument):
        if event == "call" and PACKAGE in (path := Path(frame.f_code.co_filename)).parents:
            files.add(path.relative_to(PACKAGE))

    class Recorded(GRPOLightningModule):
        def training_step(self, batch, batch_idx):
            sys.setprofile(record)
            try:
                return super().training_step(batch, batch_idx)
            finally:
                sys.setprofile(None)

    fit(make_module(Recorded, objective=Objective()), max_steps=1)
    assert {Path("module.py"), Path("objective.py"), Path("rollout/local_engine.py")} <= files
    assert len(files) <= 25, sorted(map(str, files))
