"""What a scan warns about: oddities that are no reason to leave a row out, with counts, and the
worst of each kind with its row.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from common.system.counted import counted
from common.xtts.text.clean import char_limit, script_share
from producer.corpus.headers import AudioFacts
from producer.corpus.languages import LanguageWords
from producer.corpus.readers import Row
from producer.corpus.rows import CorpusRow

OTHER_SCRIPT = 0.3  # share of letters
CLIPPED = 0.01  # share of samples at full scale
LOUD = 1.25  # peak; lossy codecs overshoot 1 by a few per cent
LOW_RATE = 16000
FASTEST = 40.0  # characters per second; fast speech has 25
SLOWEST = 3.0  # likewise; slow speech has 8
SLOWEST_OF = {"zh": 1.0, "ja": 1.0, "ko": 1.0}  # in scripts where a character is a syllable or more
OUT_OF_LINE = 4.0  # times slower than the median of corpus and language; half of it, faster
ENOUGH = 20  # rows that a language needs for a meaningful median
FEW_CLIPS = 100
OFFSET = 0.02  # of full scale; cheap recorders have a tenth of it
QUIET_DB = -45.0  # of the frames that sound; speech is recorded at -30 to -15
LONG_END_S = 1.5  # silence before or after the words
LONG_PAUSE_S = 3.0
SOFTER_DB = 20.0  # than the median of the corpus
MOST_TEXTS = 1_000_000  # clips compared for repeats: 100 MB
SHOWN = 20  # rows kept per finding

# kind → its message for `counted`: {n} rows, {v} the worst value, {x} where that is
MESSAGES = {
    "loud": (
        "{n} [clip exceeds|clips exceed] full scale and will be scaled ([|highest ]peak {v:.3g}:"
        " {x})"
    ),
    "clipped": (
        "{n} [clip is|clips are] clipped ([|worst ]{v:.1%} of the samples at full scale: {x})"
    ),
    "low_rate": "{n} [clip is|clips are] sampled below 16 kHz and [sounds|sound] dull ({x})",
    "quiet": (
        "{n} [clip is|clips are] very quiet (below -45 dBFS where [it sounds|they sound];"
        " [|quietest ]{w:.1f} dBFS: {x})"
    ),
    "offset": (
        "{n} [clip has|clips have] a constant offset ([|largest ]{v:.2g} of full scale: {x});"
        " remove it with a high-pass filter"
    ),
    "cancelled": (
        "{n} [clip has|clips have] channels that cancel each other when they are added; the louder"
        " one is taken alone ({x})"
    ),
    "dead_channel": (
        "{n} stereo [clip has|clips have] an empty channel, so that [its|their] mean is 6 dB"
        " softer ({x})"
    ),
    "doubtful_end": (
        "{n} [file|files] may end early: nothing marks the end of [its|their] stream ({x})"
    ),
    "found_by_name": (
        "{n} [recording is|recordings are] not where the metadata says; the"
        " [file of that name|files of those names] below the corpus [is|are] taken ({x})"
    ),
    "band_limited": (
        "{n} [clip has|clips have] nothing above 5 kHz, as a telephone leaves it, at a higher rate"
        " ({x})"
    ),
    "hum": "{n} [clip has|clips have] a hum of the mains at 50 or 60 Hz ({x})",
    "silence_before": (
        "{n} [clip begins|clips begin] with more than 1.5 s of silence ([|longest ]{v:.1f} s: {x})"
    ),
    "silence_after": (
        "{n} [clip ends|clips end] with more than 1.5 s of silence ([|longest ]{v:.1f} s: {x})"
    ),
    "pause": "{n} [clip has|clips have] a pause of more than 3 s ([|longest ]{v:.1f} s: {x})",
    "long_text": (
        "{n} [text is|texts are] longer than XTTS's limit for [its|their] language, where speech"
        " may be cut off ([|longest ]at {x})"
    ),
    "other_script": (
        "{n} [text has|texts have] more than 30 % letters of another script ([|most ]at {x})"
    ),
    "fast": (
        "{n} [text has|texts have] more than 40 characters per second of audio; [does it|do they]"
        " belong to it? ([|most ]at {x})"
    ),
    "slow": (
        "{n} [text has|texts have] too few characters per second of audio; [does it|do they] belong"
        " to it? ([|fewest ]at {x})"
    ),
    "faster_than_most": (
        "{n} [text has|texts have] twice the characters per second of others in [its|their]"
        " language ([|most ]at {x})"
    ),
    "shared": (
        "{n} [row shares its|rows share their] audio file with an earlier row ([|first ]at {x})"
    ),
    "same_audio": (
        "{n} [clip holds|clips hold] the same sound as an earlier row's, in another file"
        " ([|first ]at {x})"
    ),
    "same_text": (
        "{n} [row has|rows have] the same text as an earlier row of [its|their] speaker"
        " ([|first ]at {x})"
    ),
    "in_both": (
        "{n} [clip|clips] of data.val [is|are] in data.train too, so evaluation flatters ({x})"
    ),
    "other_language": (
        "{n} [row looks|rows look] like another language than [it is|they are] said to be: {x}"
    ),
    "lone_speaker": (
        "{n} [speaker has|speakers have] a single clip, which teaches little of a voice ({x})"
    ),
    "softer_than_most": (
        "{n} [clip is|clips are] more than 20 dB softer than the median of the corpus ({x})"
    ),
}

# kind → why `data.reject` leaves the row out: {v} the value, {x} the details
REASONS = {
    "loud": "peak {v:.3g}",
    "clipped": "{v:.1%} of the samples at full scale",
    "low_rate": "sampled below 16 kHz",
    "quiet": "{w:.1f} dBFS where it sounds",
    "offset": "a constant offset of {v:.2g}",
    "cancelled": "channels that cancel each other",
    "dead_channel": "an empty channel",
    "doubtful_end": "nothing marks the end of its stream",
    "found_by_name": "not where the metadata says",
    "band_limited": "nothing above 5 kHz",
    "hum": "a hum of the mains",
    "silence_before": "{v:.1f} s of silence before the words",
    "silence_after": "{v:.1f} s of silence after the words",
    "pause": "a pause of {v:.1f} s",
    "long_text": "{v:.0f} characters",
    "other_script": "{v:.0%} letters of another script",
    "fast": "{v:.1f} characters per second",
    "slow": "{w:.1f} characters per second",
    "faster_than_most": "{v:.1f} characters per second",
    "shared": "the recording of an earlier row",
    "same_audio": "the sound of an earlier row",
    "same_text": "the text of an earlier row of its speaker",
    "in_both": "in data.train and in data.val",
    "other_language": "looks like another language",
    "lone_speaker": "the only clip of its speaker",
    "softer_than_most": "{v:.0f} dB softer than the median",
}


@dataclass
class Finding:
    """One kind of oddity, and its rows."""

    kind: str
    count: int = 0
    # value, minus its number, its place, its details, the utterance's id
    worst: list[tuple[float, int, str, str, int]] = field(default_factory=list)
    every: dict[str, str] | None = None  # row → why it is rejected, if `data.reject` asks for that

    def add(self, where: str, said: str, value: float = 0.0, *, of: int) -> None:
        """`value`: how odd it is; of equal ones the first is kept. `of`: the utterance's id."""
        self.count += 1
        if self.every is not None:
            self.every[where] = REASONS[self.kind].format(v=value, w=-value)
        entry = (value, -self.count, where, said, of)
        if len(self.worst) < SHOWN:
            heapq.heappush(self.worst, entry)
        elif entry > self.worst[0]:
            heapq.heapreplace(self.worst, entry)

    @property
    def message(self) -> str:
        """One line, with the worst row."""
        value, _, _, said, _ = max(self.worst)
        return counted(self.count, MESSAGES[self.kind]).format(v=value, w=-value, x=said)

    def to_json(self) -> dict:
        """Plain values.

        `worst`: the worst twenty rows as `file:line`; `said` and `utterances`: the details of
        each, and its id in the manifest.
        """
        worst = sorted(self.worst, reverse=True)
        return {
            "kind": self.kind,
            "rows": self.count,
            "message": self.message,
            "worst": [w[2] for w in worst],
            "said": [w[3] for w in worst],
            "utterances": [w[4] for w in worst],
        }


class _Measured:
    """A number for each row, with the row and its id: compared once all are known.

    The rows are in memory anyway; a number and an id take 16 bytes.
    """

    def __init__(self):
        self.values, self.rows, self.ids = array("d"), [], array("q")

    def add(self, value: float, row: CorpusRow, of: int) -> None:
        self.values.append(value)
        self.rows.append(row)
        self.ids.append(of)


class Findings:
    """Collects while rows are kept; `found` at the end.

    For the kinds in `every` it keeps all rows, not only the worst.
    """

    def __init__(self, every: Iterable[str] = ()):
        self._kinds = {
            kind: Finding(kind, every={} if kind in every else None) for kind in MESSAGES
        }
        self._contents: set[str] = set()
        self._words = LanguageWords()
        self._split_of: dict[str, int] = {}
        self._texts: set[int] = set()
        # speaker → the row and the id of its single clip; None: it has more
        self._only: dict[str, tuple[str, int] | None] = {}
        self._pace: dict[str, _Measured] = {}
        self._levels = _Measured()
        self._looked = 0
        self.unknown_characters: Counter[str] = Counter()

    def look_at(self, entry: CorpusRow, facts: AudioFacts) -> None:
        """Note what is odd about a kept row; rows come in the order of their ids."""
        where, of = where_of(entry.row), self._looked
        self._looked += 1
        for kind, said, value in (*_of_audio(facts), *_of_text(entry, facts, where)):
            self._kinds[kind].add(where, said, value, of=of)
        if facts.searched and any(c in entry.row.id for c in "/\\."):
            self._kinds["found_by_name"].add(
                where, f"{where}, {entry.row.id} → {facts.path}", of=of
            )
        self._pace.setdefault(entry.language, _Measured()).add(_pace(entry, facts), entry, of)
        if facts.level_db is not None:
            self._levels.add(facts.level_db, entry, of)
        self._only[entry.speaker] = None if entry.speaker in self._only else (where, of)
        text = hash((entry.speaker, entry.row.text))
        if text in self._texts:
            self._kinds["same_text"].add(where, where, of=of)
        elif len(self._texts) < MOST_TEXTS:
            self._texts.add(text)
        self._words.add(entry.row.text, entry.language)
        before = self._split_of.get(facts.path)
        if before is None and facts.content in self._contents:
            self._kinds["same_audio"].add(where, f"{where}, {facts.path}", of=of)
        if facts.content:
            self._contents.add(facts.content)
        if before is None:
            self._split_of[facts.path] = entry.split
        elif before == entry.split:
            self._kinds["shared"].add(where, f"{where}, {facts.path}", of=of)
        else:
            self._kinds["in_both"].add(where, facts.path, of=of)

    def found(self) -> list[Finding]:
        """The findings, one for each kind that occurred. Call it once."""
        for language, paces in self._pace.items():
            self._compare(language, paces)
        if len(self._levels.rows) >= ENOUGH:
            median = float(np.median(self._levels.values))
            levels = self._levels
            for level, entry, of in zip(levels.values, levels.rows, levels.ids, strict=True):
                if median - level > SOFTER_DB:
                    where = where_of(entry.row)
                    said = f"{where}, {level:.0f} dBFS against {median:.0f}"
                    self._kinds["softer_than_most"].add(where, said, median - level, of=of)
        for language, other, own, most, rows in self._words.doubts():
            finding = self._kinds["other_language"]
            said = (
                f"{language}, of whose common words they have {own:.1%}, and {most:.1%} of those of"
                f" {other}; set data.language"
            )
            paces = self._pace[language]
            for entry, of in zip(paces.rows, paces.ids, strict=True):
                finding.add(where_of(entry.row), said, of=of)
                if finding.every is None:
                    break
            finding.count += rows - finding.count
        if len(self._only) > 1:
            for speaker, only in self._only.items():
                if only is not None:
                    where, of = only
                    self._kinds["lone_speaker"].add(where, f"{speaker}, {where}", of=of)
        return [f for f in self._kinds.values() if f.count]

    def _compare(self, language: str, paces: _Measured) -> None:
        """Compare characters per second with the language's: the median of its rows, and rates
        that nobody speaks at.
        """
        values = np.asarray(paces.values)
        median = float(np.median(values)) if len(values) >= ENOUGH else 0.0
        low = max(SLOWEST_OF.get(language, SLOWEST), median / OUT_OF_LINE)
        high = OUT_OF_LINE / 2 * median if median else np.inf
        others = f" against {median:.1f}" if median else ""
        for i in np.flatnonzero((values < low) | (values > high)):
            where, pace, of = where_of(paces.rows[i].row), values[i], paces.ids[i]
            said = f"{where}, {pace:.1f} per second{others}"
            if pace < low:
                self._kinds["slow"].add(where, said, -pace, of=of)
            elif pace <= FASTEST:
                self._kinds["faster_than_most"].add(where, said, pace, of=of)


def misfits(
    rows: Iterable[tuple[CorpusRow, AudioFacts]], kinds: Iterable[str]
) -> dict[str, tuple[str, str]]:
    """Row (`file:line`) → (reason, kind) for the rows with a finding in `kinds`: what
    `data.reject` leaves out.
    """
    findings = Findings(kinds)
    for entry, facts in rows:
        findings.look_at(entry, facts)
    found = {}
    for finding in findings.found():
        for where, reason in (finding.every or {}).items():
            found.setdefault(where, (reason, f"{finding.kind} (data.reject)"))
    return found


def where_of(row: Row) -> str:
    """`file:line`."""
    return f"{row.file}:{row.line}"


def _pace(entry: CorpusRow, facts: AudioFacts) -> float:
    """Characters per second of audio."""
    return len(entry.row.text) / facts.used_s


def _of_audio(facts: AudioFacts) -> Iterator[tuple[str, str, float]]:
    """(kind, details, how bad) of a recording."""
    path = facts.path
    if facts.rate < LOW_RATE:
        yield "low_rate", f"{path}: {facts.rate} Hz", 0.0
    if facts.doubt:
        yield "doubtful_end", path, 0.0
    if facts.peak is None:
        return
    if facts.peak > LOUD:
        yield "loud", path, facts.peak
    if facts.clipped > CLIPPED:
        yield "clipped", path, facts.clipped
    if facts.offset > OFFSET:
        yield "offset", path, facts.offset
    if facts.channel is not None:
        yield "cancelled", path, 0.0
    if facts.dead:
        yield "dead_channel", path, 0.0
    if facts.band_hz and facts.rate >= LOW_RATE:
        yield "band_limited", f"{path}: nothing above {facts.band_hz} Hz at {facts.rate} Hz", 0.0
    if facts.hum_hz:
        yield "hum", f"{path}: {facts.hum_hz} Hz", 0.0
    if facts.level_db is not None and facts.level_db < QUIET_DB:
        yield "quiet", path, -facts.level_db
    for kind, seconds, most in (
        ("silence_before", facts.lead_s, LONG_END_S),
        ("silence_after", facts.tail_s, LONG_END_S),
        ("pause", facts.pause_s, LONG_PAUSE_S),
    ):
        if seconds > most:
            yield kind, path, seconds


def _of_text(entry: CorpusRow, facts: AudioFacts, where: str) -> Iterator[tuple[str, str, float]]:
    """(kind, details, how bad) of a text."""
    text, limit = entry.row.text, char_limit(entry.language)
    if len(text) > limit:
        yield "long_text", f"{where}, {len(text)} characters, {entry.language}: {limit}", len(text)
    share = 0.0 if text.isascii() and entry.language == "en" else script_share(text, entry.language)
    if share > OTHER_SCRIPT:
        yield "other_script", f"{where}, {share:.0%} of a text in {entry.language}", share
    pace = _pace(entry, facts)
    if pace > FASTEST:
        yield "fast", f"{where}, {pace:.0f} per second", pace
