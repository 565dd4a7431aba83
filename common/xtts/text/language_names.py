"""Names of languages that people type for a code ("farsi", "Deutsch", "fra") -> the
code they mean.
"""

from __future__ import annotations

import difflib
import functools
import re

from common.xtts.text import currencies, rules

_OTHERS = {
    "farsi": "fa",
    "parsi": "fa",
    "mandarin": "zh",
    "cantonese": "zh",
    "castilian": "es",
    "flemish": "nl",
    "brazilian": "pt",
}
_CLOSE = 0.8  # of difflib's ratio: one letter of five


def code_of(name: str) -> str | None:
    """The code of a language from its English or native name, or a near miss; None if none comes
    near.
    """
    wanted = re.split(r"[\s,(_-]", name.strip().lower(), maxsplit=1)[0]
    known = _names()
    if wanted in known:
        return known[wanted]
    close = difflib.get_close_matches(wanted, known, 1, _CLOSE) if len(wanted) > 3 else []
    return known[close[0]] if close else None


@functools.cache
def _names() -> dict[str, str]:
    names = dict(_OTHERS)
    english = currencies.locale("en").languages
    for code in (*rules.LANGUAGES, *rules.GENERIC_LANGUAGES):
        own = currencies.locale(code)
        for name in (english.get(code), own and own.get_language_name(code)):
            if name:
                names.setdefault(name.lower(), code)
    return names
