"""docs/the_step.md: the step that it shows is the step, and its methods are those of the module."""

import inspect
import re

from grpo_lightning.module import GRPOLightningModule
from tests.helpers.pages import blocks, read, tables

PAGE = read("the_step.md")


def code_lines(text: str) -> list[str]:
    """Without comments, docstrings, assertions and annotations."""
    text = re.sub(r'""".*?"""', "", text, flags=re.DOTALL)
    text = re.sub(r"(\w+): (Any|int)", r"\1", text).replace(" -> Tensor", "")
    lines = [re.sub(r"\s+#.*", "", line).strip() for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("assert")]


def test_the_step_shown_is_the_step():
    (shown,) = blocks(PAGE, "python")
    real = [
        line for line in inspect.getsource(GRPOLightningModule.training_step).splitlines() if "zero_grad" not in line
    ]
    assert code_lines(shown) == code_lines("\n".join(line for line in real if not line.strip().startswith("#")))


def test_the_methods_return_what_the_table_says():
    rows = [row for row in tables(PAGE) if row.heading == "The training step"]
    assert [row.names()[0] for row in rows] == [
        *("sample", "score_rewards", "resample", "compute_advantages", "split_rollout", "update"),
    ]
    for row in rows:
        returned = inspect.signature(getattr(GRPOLightningModule, row.names()[0])).return_annotation
        assert returned in (row.names(2) or ["Tensor"]), row
