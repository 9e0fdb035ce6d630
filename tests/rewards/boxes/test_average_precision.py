"""COCO's average precision: by hand, and against pycocotools used as its authors do."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
import threading
from typing import Any

import pytest
import torch

from grpo_lightning.rewards.boxes.average_precision import average_precision, check_installed

pytest.importorskip("pycocotools")


def boxes(*rows: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 4)


A, B, FAR = (0, 0, 10, 10), (20, 0, 30, 10), (50, 50, 60, 60)


@pytest.mark.parametrize(
    ("given", "labels", "right", "right_labels", "expected"),
    [
        ([A, B], "ab", [A, B], "ab", 1),
        ([A, B], "ba", [A, B], "ab", 0),
        ([A], "a", [A, B], "ab", 0.5),
        # One of two of a label: precision 1 up to recall 0.5, 51 of the 101 recalls.
        ([A], "a", [A, B], "aa", 51 / 101),
        ([A, FAR], "aa", [A], "a", 1),  # listed after the right one: free
        ([FAR, A], "aa", [A], "a", 0.5),  # listed before it
        ([A, A], "aa", [A, B], "aa", 51 / 101),  # the same twice
        ([A, FAR], "az", [A], "a", 0.5),  # a label that is not there is worth 0
        ([FAR, FAR], "zz", [A], "a", 0),
        ([(0, 0, 10, 6)], "a", [A], "a", 0.3),  # IoU 0.6: right at 0.5, 0.55 and 0.6
        ([(0, 0, 0, 0), A], "aa", [A], "a", 0.5),  # an empty box is a false positive
        ([(10, 10, 0, 0), A], "aa", [A], "a", 0.5),
        ([(10, 0, 0, 10), A], "aa", [A], "a", 0.5),
    ],
)
def test_by_hand(given, labels, right, right_labels, expected):
    assert average_precision(boxes(*given), list(labels), boxes(*right), list(right_labels)) == pytest.approx(expected)


def test_one_threshold():
    given = boxes((0, 0, 10, 6))
    for threshold, expected in [(0.5, 1), (0.6, 1), (0.61, 0), (1.0, 0)]:
        assert average_precision(given, ["a"], boxes(A), ["a"], threshold) == expected


def test_a_perfect_answer_is_exactly_one():
    many = boxes(*[(7.3 * i, 1.7 * i, 7.3 * i + 3.1, 1.7 * i + 2.9) for i in range(30)])
    assert average_precision(many, ["a"] * 30, many, ["a"] * 30) == 1.0


def test_no_box_is_too_many_or_too_large():
    """COCO looks at 100 boxes per label, and at none larger than 1e10 square pixels."""
    given = boxes(*[FAR] * 150, A)
    assert average_precision(given, ["a"] * 151, boxes(A), ["a"]) == pytest.approx(1 / 151)
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


def test_it_prints_nothing_and_keeps_what_others_print(capsys: pytest.CaptureFixture[str]):
    stop = threading.Event()
    printed = 0

    def talk() -> None:
        nonlocal printed
        while not stop.is_set():
            sys.stdout.write("tick\n")
            printed += 1

    thread = threading.Thread(target=talk)
    thread.start()
    for _ in range(5):
        average_precision(boxes(A), ["a"], boxes(A), ["a"])
    stop.set()
    thread.join()
    out, err = capsys.readouterr()
    assert printed
    assert out == "tick\n" * printed
    assert not err


def test_pycocotools_itself_still_prints(capsys: pytest.CaptureFixture[str]):
    from pycocotools.coco import COCO

    average_precision(boxes(A), ["a"], boxes(A), ["a"])
    COCO().createIndex()
    assert "creating index" in capsys.readouterr().out


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"OdLength needs pycocotools: pip install 'grpo-lightning\[grounding\]'"):
        check_installed("OdLength")
