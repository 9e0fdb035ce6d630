"""`make test`, `make test-slow` and `make test-nightly` select tests by their marks."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]


def passed(pytester: pytest.Pytester, *arguments: str) -> list[str]:
    """The names of the tests that run with the marks of `tests/marks.py`."""
    pytester.makeconftest(
        "from tests.marks import mark_cases\ndef pytest_collection_modifyitems(items): mark_cases(items)"
    )
    pytester.makeini("[pytest]\nmarkers =\n    slow\n    nightly\n    few(number)\n")
    found = pytester.inline_run("-p", "no:cacheprovider", *arguments)
    return [report.nodeid.partition("::")[2] for report in found.getreports() if getattr(report, "when", "") == "call"]


def test_few_cases_are_evenly_spaced_and_the_others_are_nightly(pytester):
    pytester.makepyfile("""
        import pytest
        from tests.marks import NIGHTLY, SLOW, few

        @few(2)
        @pytest.mark.parametrize("number", range(5))
        def test_numbers(number): pass

        @few(1)
        @pytest.mark.parametrize("number", [pytest.param(0, marks=SLOW), pytest.param(1, marks=NIGHTLY), 2, 3])
        def test_some_are_slow(number): pass

        @few(1, slow=True)
        @pytest.mark.parametrize("number", range(2))
        def test_one_is_slow(number): pass

        @NIGHTLY
        def test_long(): pass

        @SLOW
        def test_matrix(): pass

        def test_quick(): pass
    """)
    some = "test_some_are_slow"
    nightly = ["test_numbers[1]", "test_numbers[3]", "test_numbers[4]", f"{some}[1]", f"{some}[3]"]
    nightly += ["test_one_is_slow[1]", "test_long"]
    fast = ["test_numbers[0]", "test_numbers[2]", f"{some}[2]", "test_quick"]
    slow = [f"{some}[0]", "test_one_is_slow[0]", "test_matrix"]
    assert passed(pytester, "-m", "not slow") == fast
    assert passed(pytester, "-m", "slow and not nightly") == slow
    assert passed(pytester, "-m", "nightly") == nightly
    assert sorted(passed(pytester, "-m", "")) == sorted(fast + slow + nightly)
