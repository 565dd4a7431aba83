"""Checks that texts are in the language they claim, by words that every text of a language
contains.

A corpus whose language was never set is trained as English. Scripts reveal some cases
(`other_script`); for languages with the same letters, function words do. Counts cover all rows of a
language, never one row: names and loan words are in every text.
"""

from __future__ import annotations

import re
from collections import Counter

_WORD = re.compile(r"[^\W\d_]+")
WORDS = {
    language: frozenset(words.split())
    for language, words in {
        "en": (
            "the and of to in is was that it for with as on be at by this had not are but from have"
            " they which you were her all"
        ),
        "de": (
            "der die und das ist nicht ein eine zu den von mit sich des auf für im dem auch es"
            " werden aus er hat dass sie nach wird bei"
        ),
        "fr": (
            "le la les et des est une du que dans qui il elle pas pour sur au ce ne se sont avec"
            " plus par nous vous était"
        ),
        "es": (
            "el la los las y de que en un una es no se del por con para su lo al como más pero sus"
            " le ha este fue"
        ),
        "pt": (
            "o a os as e de que em um uma não é do da dos das para com por se mais como mas ao foi"
            " ele ela isso"
        ),
        "it": (
            "il la le gli e di che è un una non per del della dei con si da sono nel anche come più"
            " ma al ha questo"
        ),
        "nl": (
            "de het een en van is dat niet in op te zijn voor met die er aan als ook maar bij nog"
            " naar wordt heeft werd"
        ),
        "pl": (
            "i w na nie z do się że jest to o jak ale za od po co tak czy już przez był tym dla"
            " jego może"
        ),
        "tr": (
            "bir ve bu da de için ile çok ne gibi daha en var olan o sonra kadar ama değil olarak"
            " ben her şey mi"
        ),
        "cs": (
            "a v se na je že s z do i o to jako za by pro jsem ale po od si jeho podle nebo jsou"
            " byl tak"
        ),
        "hu": (
            "a az és hogy nem is egy meg de ez volt csak el van ki már még mint azt vagy ha kell"
            " úgy lehet minden"
        ),
        "ru": (
            "и в не на что он с как это по но из за то все она так его к у же вы бы мне только"
            " было от"
        ),
        "fa": "و در به از که این را با است برای آن یک خود تا کرد بر هم نیز می شد او ما شده بود",
        "ar": "في من على أن إلى عن التي الذي هذا هذه مع ما لا كان كل لم هو قد بعد ذلك بين أو ثم",
    }.items()
}
_LANGUAGES = {  # that have a word among theirs
    word: [language for language, known in WORDS.items() if word in known]
    for word in set().union(*WORDS.values())
}
ENOUGH = 200  # words needed for a verdict
OWN = 0.08  # share of the language's own function words; every language here has 0.15 in prose
OTHER = 2.0  # times as many function words of another language


class LanguageWords:
    """Counts the function words in the texts of each language."""

    MOST_ROWS = 2000  # words examined per language

    def __init__(self):
        self._counts: dict[str, Counter[str]] = {}
        self._rows: Counter[str] = Counter()
        self._total: Counter[str] = Counter()

    def add(self, text: str, language: str) -> None:
        """Count a text."""
        self._rows[language] += 1
        if self._rows[language] > self.MOST_ROWS or language not in WORDS:
            return
        words = _WORD.findall(text.lower())
        self._total[language] += len(words)
        counts = self._counts.setdefault(language, Counter(dict.fromkeys(WORDS, 0)))
        for word in words:
            for other in _LANGUAGES.get(word, ()):
                counts[other] += 1

    def doubts(self) -> list[tuple[str, str, float, float, int]]:
        """(language, the likelier one, share of each's words, rows) for the languages whose texts
        look like another.
        """
        found = []
        for language, counts in self._counts.items():
            total = self._total[language]
            best, most = counts.most_common(1)[0]
            if (
                total < ENOUGH
                or best == language
                or counts[language] >= OWN * total
                or most < OWN * total
            ):
                continue
            if most >= OTHER * counts[language]:
                found.append(
                    (language, best, counts[language] / total, most / total, self._rows[language])
                )
        return found
