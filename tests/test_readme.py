"""The README's code runs, and what it shows of the package is what the package has."""

import inspect
import re
from pathlib import Path

from grpo_lightning.module import GRPOLightningModule
from tests.tiny_models import tiny_model, tiny_tokenizer

README = (Path(__file__).parents[1] / "README.md").read_text()
MAKEFILE = (Path(__file__).parents[1] / "Makefile").read_text()


def blocks(language: str) -> list[str]:
    """The code blocks of one language."""
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def code_lines(text: str) -> list[str]:
    """Without comments, docstrings, assertions and annotations."""
    text = re.sub(r'""".*?"""', "", text, flags=re.DOTALL)
    text = re.sub(r"(\w+): (Any|int)", r"\1", text).replace(" -> Tensor", "")
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("assert")]


def test_the_step_shown_is_the_step():
    (shown,) = [block for block in blocks("python") if "def training_step" in block]
    real = [
        line for line in inspect.getsource(GRPOLightningModule.training_step).splitlines() if "zero_grad" not in line
    ]
    assert code_lines(shown) == code_lines("\n".join(line for line in real if not line.strip().startswith("#")))


def test_python_examples_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model("qwen2").save_pretrained("name-or-path")
    tiny_tokenizer().save_pretrained("name-or-path")
    for block in blocks("python"):
        if "def training_step" not in block:
            exec(
                compile(
                    block.replace("L.Trainer(", 'L.Trainer(accelerator="cpu", logger=False, '), "README.md", "exec"
                ),
                {},
            )


def test_make_targets_exist():
    for target in re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE):
        assert f"\n{target}:" in MAKEFILE, target


def test_files_named_exist():
    root = Path(__file__).parents[1]
    for name in re.findall(r"recipes/[\w/.]+\.yaml|grpo_lightning/[\w/]+\.py", README):
        assert (root / name).is_file(), name
