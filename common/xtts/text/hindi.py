"""Hindi numbers in words, which num2words lacks: every number below a hundred has a word of its
own, then lakhs and crores.
"""

from __future__ import annotations

_BELOW_HUNDRED = (
    "शून्य एक दो तीन चार पाँच छह सात आठ नौ दस ग्यारह बारह तेरह चौदह पंद्रह सोलह सत्रह अठारह उन्नीस"
    " बीस इक्कीस बाईस तेईस चौबीस पच्चीस छब्बीस सत्ताईस अट्ठाईस उनतीस तीस इकतीस बत्तीस तैंतीस चौंतीस"
    " पैंतीस छत्तीस सैंतीस अड़तीस उनतालीस चालीस इकतालीस बयालीस तैंतालीस चौवालीस पैंतालीस छियालीस"
    " सैंतालीस अड़तालीस उनचास पचास इक्यावन बावन तिरेपन चौवन पचपन छप्पन सत्तावन अट्ठावन उनसठ साठ"
    " इकसठ बासठ तिरेसठ चौंसठ पैंसठ छियासठ सड़सठ अड़सठ उनहत्तर सत्तर इकहत्तर बहत्तर तिहत्तर चौहत्तर"
    " पचहत्तर छिहत्तर सतहत्तर अठहत्तर उन्यासी अस्सी इक्यासी बयासी तिरासी चौरासी पचासी छियासी"
    " सत्तासी अट्ठासी नवासी नब्बे इक्यानबे बानबे तिरानबे चौरानबे पचानबे छियानबे सत्तानबे अट्ठानबे"
    " निन्यानबे"
).split()
# Largest first; each but the hundred counts up to 99 of itself.
_SCALES = ((13, "नील"), (11, "खरब"), (9, "अरब"), (7, "करोड़"), (5, "लाख"), (3, "हज़ार"), (2, "सौ"))
MOST_DIGITS = 15


def number_words(number: int) -> str:
    """A whole number from 0 to 10^15 - 1 in words. ValueError: any other."""
    if not 0 <= number < 10**MOST_DIGITS:
        raise ValueError(f"no Hindi words for a number of {len(str(abs(number)))} digits")
    words = []
    for power, word in _SCALES:
        count, number = divmod(number, 10**power)
        if count:
            words += [_BELOW_HUNDRED[count], word]
    if number or not words:
        words.append(_BELOW_HUNDRED[number])
    return " ".join(words)
