"""Average precision: by hand, and against pycocotools as its demo calls it."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch

from grpo_lightning.functional.average_precision import average_precision

pytest.importorskip("pycocotools")


def boxes(*rows: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)


SQUARE, RIGHT, AWAY = (0, 0, 10, 10), (20, 0, 30, 10), (50, 50, 60, 60)


def test_average_precision_by_hand():
    for answer, labels, right, right_labels, expected in [
        ([SQUARE, RIGHT], "ab", [SQUARE, RIGHT], "ab", 1),
        ([SQUARE, RIGHT], "ba", [SQUARE, RIGHT], "ab", 0),
        ([SQUARE], "a", [SQUARE, RIGHT], "ab", 0.5),
        # One of two of a label: precision 1 up to recall 0.5, 51 of the 101 recalls.
        ([SQUARE], "a", [SQUARE, RIGHT], "aa", 51 / 101),
        ([SQUARE, AWAY], "aa", [SQUARE], "a", 1),  # listed after the right one: free
        ([AWAY, SQUARE], "aa", [SQUARE], "a", 0.5),  # listed before it
        ([SQUARE, SQUARE], "aa", [SQUARE, RIGHT], "aa", 51 / 101),  # the same twice
        ([SQUARE, AWAY], "az", [SQUARE], "a", 0.5),  # a label that is not there is worth 0
        ([AWAY, AWAY], "zz", [SQUARE], "a", 0),
        ([(0, 0, 10, 6)], "a", [SQUARE], "a", 0.3),  # IoU 0.6: right at 0.5, 0.55 and 0.6
        ([(0, 0, 0, 0), SQUARE], "aa", [SQUARE], "a", 0.5),  # an empty box is a false positive
        ([(10, 10, 0, 0), SQUARE], "aa", [SQUARE], "a", 0.5),
        ([(10, 0, 0, 10), SQUARE], "aa", [SQUARE], "a", 0.5),
    ]:
        found = average_precision(boxes(*answer), list(labels), boxes(*right), list(right_labels))
        assert found == pytest.approx(expected), (answer, labels)


def test_average_precision_at_one_threshold():
    given = boxes((0, 0, 10, 6))
    for threshold, expected in [(0.5, 1), (0.6, 1), (0.61, 0), (1.0, 0)]:
        assert average_precision(given, ["a"], boxes(SQUARE), ["a"], threshold) == expected


def test_a_perfect_answer_is_exactly_one():
    many = boxes(*[(7.3 * i, 1.7 * i, 7.3 * i + 3.1, 1.7 * i + 2.9) for i in range(30)])
    assert average_precision(many, ["a"] * 30, many, ["a"] * 30) == 1.0


def test_no_box_is_too_many_or_too_large():
    """COCO looks at 100 boxes per label, and at none larger than 1e10 square pixels."""
    given = boxes(*[AWAY] * 150, SQUARE)
    assert average_precision(given, ["a"] * 151, boxes(SQUARE), ["a"]) == pytest.approx(1 / 151)
    huge = boxes((0, 0, 1e6, 1e6))
    assert average_precision(huge, ["a"], huge, ["a"]) == 1


def theirs(given: torch.Tensor, labels: list[str], right: torch.Tensor, right_labels: list[str]) -> list[float]:
    """AP and AP50 of pycocotools, in the way of its demo."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    def annotations(found: torch.Tensor, names: list[str]) -> list[dict[str, Any]]:
        rows = zip(names, found.tolist(), strict=True)
        return [
            {"id": i, "image_id": 1, "category_id": ord(name), "bbox": [x1, y1, x2 - x1, y2 - y1], "score": 1.0}
            | {"area": (x2 - x1) * (y2 - y1), "iscrowd": 0}
            for i, (name, (x1, y1, x2, y2)) in enumerate(rows, start=1)
        ]

    with contextlib.redirect_stdout(io.StringIO()):
        data = COCO()
        data.dataset = {
            "info": {},
            "images": [{"id": 1}],
            "categories": [{"id": ord(name), "name": name} for name in sorted(set(right_labels))],
            "annotations": annotations(right, right_labels),
        }
        data.createIndex()
        evaluation = COCOeval(data, data.loadRes(annotations(given, labels)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return [float(value) for value in evaluation.stats[:2]]


def test_it_is_that_of_pycocotools():
    draw = torch.Generator().manual_seed(0)
    values = []
    for _ in range(40):
        m, n = (int(torch.randint(1, 9, (1,), generator=draw)) for _ in range(2))
        corners = torch.rand(m, 2, generator=draw, dtype=torch.float64) * 100
        right = torch.cat([corners, corners + 5 + torch.rand(m, 2, generator=draw) * 40], dim=1)
        chosen = torch.randint(0, m, (n,), generator=draw)
        given = right[chosen] + torch.randn(n, 4, generator=draw, dtype=torch.float64)
        right_labels = [str(label) for label in torch.randint(0, 3, (m,), generator=draw).tolist()]
        labels = [right_labels[i] if i % 4 else right_labels[0] for i in chosen.tolist()]
        expected, at_half = theirs(given, labels, right, right_labels)
        assert average_precision(given, labels, right, right_labels) == pytest.approx(expected, abs=1e-9)
        assert average_precision(given, labels, right, right_labels, 0.5) == pytest.approx(at_half, abs=1e-9)
        values.append(expected)
    assert 0.1 < sum(values) / len(values) < 0.9


def test_average_precision_prints_nothing(capsys: pytest.CaptureFixture[str]):
    from pycocotools.coco import COCO

    average_precision(boxes(SQUARE), ["a"], boxes(SQUARE), ["a"])
    assert capsys.readouterr() == ("", "")
    COCO().createIndex()
    assert "creating index" in capsys.readouterr().out, "pycocotools itself still prints"
