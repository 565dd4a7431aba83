"""Numbers in sentences."""

from __future__ import annotations

import re

import pytest

from common.system.counted import counted
from producer.corpus.findings import MESSAGES


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 clips have"), (1, "1 clip has"), (2, "2 clips have"), (21, "21 clips have")],
)
def test_one_is_singular_and_all_else_plural(count, said):
    assert counted(count, "{n} [clip has|clips have]") == said


def test_a_form_may_be_empty_and_the_number_may_be_missing():
    assert counted(1, "[|first ]at") == "at"
    assert counted(3, "[|first ]at") == "first at"
    assert counted(1, "[the one row|none of {n} rows]") == "the one row"


def test_braces_and_brackets_of_other_kinds_stay():
    assert counted(1, "{v:.3g} [a, b] {n}") == "{v:.3g} [a, b] 1"


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_finding_of_one_row_speaks_of_one(kind):
    """Of one row no message speaks as of several; of two, none as of one."""
    one, two = (counted(n, MESSAGES[kind]).format(v=0.5, w=0.5, x="X") for n in (1, 2))
    rest = re.sub("when they are added|others in", "", one)
    several = r"\b(clips|texts|rows|files|they|their|those|are|have|longest|first|worst|most at)\b"
    assert not re.search(several, rest), one
    assert re.match(r"1 \w+ ", one)
    assert re.match(r"2 (stereo )?\w+s ", two)
    assert not re.search(r"\b(is|has|its|begins|ends|shares|holds|sounds|exceeds) ", two[:30]), two
