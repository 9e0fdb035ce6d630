"""Every failure mode has its test."""

import re
from pathlib import Path

NUMBERS = range(1, 19)


def test_every_number_has_a_test():
    texts = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")]
    named = {int(number) for text in texts for number in re.findall(r"^def test_(\d\d)_", text, re.MULTILINE)}
    assert named == set(NUMBERS)
