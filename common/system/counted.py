"""Sentences with a number in them: "1 clip has", "2 clips have"."""

from __future__ import annotations

import re

_FORMS = re.compile(r"\[([^][|]*)\|([^][|]*)\]")


def counted(count: int, text: str) -> str:
    """`text` with the count for `{n}`, and of each `[one|many]` what fits the count.

    Example: counted(1, "{n} [clip has|clips have] a hum") is "1 clip has a hum". Of zero, English
    has many. Whatever else is in the text stays, so put nothing there that users wrote.
    """
    form = 1 if count == 1 else 2
    return _FORMS.sub(lambda found: found[form], text).replace("{n}", str(count))
