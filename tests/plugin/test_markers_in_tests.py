"""Markers in a user's test file."""

from __future__ import annotations

import pytest

from tests.conftest import Inner


def test_a_wrong_argument_is_an_error_of_that_test_alone(pytester: pytest.Pytester, inner: Inner) -> None:
    """It is reported before set-up, nothing is started for it, and the other tests run."""
    pytester.makepyfile(
        """
        import pytest
        from pytest_vram import max_vram

        @pytest.fixture
        def loud():
            print("FIXTURE")

        @max_vram("3g")
        def test_bad(loud): pass

        @pytest.mark.max_vram()
        def test_empty(loud): pass

        @pytest.mark.vram_soak(turns=0)
        def test_later(loud): pass

        def test_good(): pass
        """
    )
    result = inner("-s", "-rE")
    result.assert_outcomes(errors=3, passed=1)
    result.stdout.no_fnmatch_line("*FIXTURE*")
    result.stdout.fnmatch_lines(
        [
            "*@max_vram: limit: `3g` is ambiguous*",
            "*@max_vram: missing a required argument: 'limit'*",
            "*@vram_soak: turns=0 is not a whole number of turns*",
        ]
    )
    assert not (pytester.path / ".vram").exists()


def test_a_marker_where_nothing_can_be_measured_skips_loudly(pytester: pytest.Pytester, inner: Inner) -> None:
    """The skip has the reason, and one loud line in the summary counts such skips."""
    pytester.makepyfile(
        """
        from pytest_vram import max_vram

        @max_vram("3GB")
        def test_it(): pass

        def test_other(): pass
        """
    )
    result = inner("-rs", "--vram-device=vulkan:0")
    result.assert_outcomes(skipped=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            "SKIPPED*test_a_marker_where_nothing*.py:3: not measured: nothing can be measured with --vram-device=vulkan:0: *"
        ]
    )
    loud = [line for line in result.stdout.lines if "1 test with VRAM markers SKIPPED" in line]
    assert len(loud) == 1


def test_missing_fail_makes_it_a_failure(pytester: pytest.Pytester, inner: Inner) -> None:
    """With --vram-missing=fail the same test fails, and says how to change that."""
    pytester.makepyfile("from pytest_vram import max_vram\n\n@max_vram('3GB')\ndef test_it(): pass\n")
    result = inner("--vram-device=vulkan:0", "--vram-missing=fail")
    assert result.ret == 1
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*not measured: nothing can be measured*--vram-missing=fail*"])


@pytest.mark.parametrize(("size", "outcome"), [("1MB", "passed"), ("900TB", "skipped")])
def test_requires_vram_compares_with_the_device(
    pytester: pytest.Pytester, inner: Inner, size: str, outcome: str
) -> None:
    """A smaller device skips the test with both sizes."""
    pytester.makepyfile(f"from pytest_vram import requires_vram\n\n@requires_vram('{size}')\ndef test_it(): pass\n")
    result = inner("--vram-device=cpu", "-rs")
    result.assert_outcomes(**{outcome: 1})


def test_requires_vram_never_skips_on_an_unread_size(pytester: pytest.Pytester, inner: Inner) -> None:
    """Where the device's size cannot be read, the test runs."""
    pytester.makepyfile("from pytest_vram import requires_vram\n\n@requires_vram('900TB')\ndef test_it(): pass\n")
    inner("--vram-device=vulkan:0").assert_outcomes(passed=1)
