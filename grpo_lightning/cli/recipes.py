"""`grpo-lightning recipes`: list, show and copy the recipes that come with the package."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

from grpo_lightning.cli.errors import ConfigurationError
from grpo_lightning.cli.help import command_parser
from grpo_lightning.core.log_messages import nearest

PACKAGE = Path(__file__).parents[1]


def folder() -> Path:
    """Find the folder of the recipes, in the installed package, or next to the package in a checkout.

    Raises:
        ConfigurationError: If there is no such folder.
    """
    for candidate in (PACKAGE / "recipes", PACKAGE.parent / "recipes"):
        if (candidate / "quickstart.yaml").is_file():
            return candidate
    raise ConfigurationError(f"The recipes are missing: neither in {PACKAGE} nor next to it. Reinstall the package.")


def names() -> list[str]:
    """Names of all recipes. Recipes in subfolders come last."""
    root = folder()
    found = [path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml")]
    return sorted(found, key=lambda name: ("/" in name, name))


def find(name: str) -> Path | None:
    """Find the file of a recipe ("quickstart", "recipes/quickstart.yaml"); None if unknown.

    The folder can be omitted if the name is unique.
    """
    plain = re.sub(r"^(\./)?recipes/", "", name)
    plain = re.sub(r"\.ya?ml$", "", plain)
    called = [plain] if plain in names() else [known for known in names() if known.endswith(f"/{plain}")]
    return folder() / f"{called[0]}.yaml" if len(called) == 1 else None


def recipe_path(name: str) -> Path:
    """Find the file of a recipe. Raises: ConfigurationError if it is unknown."""
    path = find(name)
    if path is None:
        raise ConfigurationError(unknown(name))
    return path


def find_fragment(folder_name: str, name: str) -> str | None:
    """Find the recipe in a folder by its name in the literature ("Dr. GRPO")."""
    return next(
        (known for known in names() if plain_name(known) == plain_name(name) and known.startswith(f"{folder_name}/")),
        None,
    )


def plain_name(name: str) -> str:
    """Name of a recipe without its folder, in letters and digits only."""
    return re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower().replace("+", "plus"))


def unknown(name: str) -> str:
    """Error message for an unknown recipe, with suggestions."""
    plain = re.sub(r"\.ya?ml$", "", re.sub(r"^(\./)?recipes/", "", name))
    by_last = {known.rpartition("/")[2]: known for known in names()}
    near = nearest(plain, names()) or [by_last[last] for last in nearest(plain, by_last)]
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Recipes: {', '.join(names())}."
    return f"There is no recipe {name!r}. {hint} (`grpo-lightning recipes list` shows all.)"


def header(path: Path) -> dict[str, str]:
    """Map each label in the comments at the top of a recipe to its text.

    A comment line without a label continues the text above.
    """
    texts: dict[str, str] = {}
    label = "Shows"
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        text = line.lstrip("# ").rstrip()
        match = re.match(r"(Shows|Expect|Hardware|Command|Outputs): *(.*)", text)
        if match:
            label, text = match.groups()
        texts[label] = f"{texts.get(label, '')} {text}".strip()
    return texts


def run(args: list[str]) -> None:
    """Run the command `recipes`."""
    parser = command_parser(
        "recipes",
        "List, show and copy the recipes that come with the package.",
        ["recipes list", "recipes show objectives/dapo", "recipes copy quickstart my_recipe.yaml"],
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", allow_abbrev=False, help="name of each recipe, and what it shows")
    show_parser = commands.add_parser("show", allow_abbrev=False, help="print a recipe")
    show_parser.add_argument("name", help="name of the recipe")
    copy_parser = commands.add_parser("copy", allow_abbrev=False, help="copy a recipe, to change it")
    copy_parser.add_argument("name", help="name of the recipe")
    copy_parser.add_argument("target", nargs="?", default=".", help="folder or .yaml file (default: here)")
    copy_parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    given = parser.parse_args(args)
    if given.command == "list":
        list_all()
    elif given.command == "show":
        print(recipe_path(given.name).read_text(encoding="utf-8"), end="")
    else:
        copy(given.name, Path(given.target), force=given.force)


def is_fragment(path: Path) -> bool:
    """True for a recipe that has no data and changes another recipe."""
    return "\ndata:" not in path.read_text(encoding="utf-8")


def list_all() -> None:
    """Print the name of each recipe, and what it shows."""
    for name in names():
        print(name)
        print(f"    {first_sentence(header(recipe_path(name)).get('Shows', ''))}")
    print()
    print("Run one:  grpo-lightning fit --config quickstart")
    print("Add one:  grpo-lightning fit --config quickstart --config objectives/dapo")
    print("Copy one: grpo-lightning recipes copy quickstart my_recipe.yaml")


def first_sentence(text: str) -> str:
    """First sentence of a text, of at least 20 characters."""
    match = re.match(r".{20,}?(?<!et al)\.(?= |$)", text)
    return match[0] if match else text


def copy(name: str, target: Path, *, force: bool) -> None:
    """Copy a recipe and print the command to run it.

    Raises:
        ConfigurationError: If there is no such recipe, or the target exists and `force` is False.
    """
    source = recipe_path(name)
    is_file = target.suffix in (".yaml", ".yml")
    path = target if is_file else target / source.name
    if path.exists() and not force:
        raise ConfigurationError(f"{path} already exists. Name another file, or add --force to overwrite it.")
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, path)
    print(f"Copied {name} to {path}. Next:")
    if is_fragment(source):  # needs a complete recipe before it
        print(f"  grpo-lightning fit --config quickstart --config {shlex.quote(str(path))}")
    else:
        print(f"  grpo-lightning fit --config {shlex.quote(str(path))}")
