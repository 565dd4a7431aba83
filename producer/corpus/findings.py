"""What a scan warns about: things that are no reason to leave a row out, counted, with one example each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from common.xtts.text.clean import char_limit, script_share
from producer.corpus.headers import AudioFacts
from producer.corpus.rows import CorpusRow

OTHER_SCRIPT = 0.3  # share of letters
CLIPPED = 0.01  # share of samples at full scale
LOUD = 1.25  # peak; lossy codecs overshoot 1 by a few per cent
LOW_RATE = 16000
FASTEST = 40.0  # characters per second; fast speech has 25
FEW_CLIPS = 100


@dataclass
class _Finding:
    count: int = 0
    example: str = ""
    worst: float = 0.0

    def add(self, example: str, value: float = 0.0) -> None:
        self.count += 1
        if self.count == 1 or value > self.worst:
            self.example, self.worst = example, value


class Findings:
    """Collects while rows are kept; `messages` at the end."""

    def __init__(self):
        self._loud, self._clipped, self._low_rate = _Finding(), _Finding(), _Finding()
        self._long_text, self._other_script, self._fast = _Finding(), _Finding(), _Finding()
        self._shared, self._both = _Finding(), _Finding()
        self._split_of: dict[str, int] = {}
        self.unknown_characters: Counter[str] = Counter()

    def look_at(self, entry: CorpusRow, facts: AudioFacts) -> None:
        """Note what is odd about a row that is kept."""
        where = f"{entry.row.file}:{entry.row.line}"
        text = entry.row.text
        if (facts.peak or 0) > LOUD:
            self._loud.add(facts.path, facts.peak)
        if facts.clipped > CLIPPED:
            self._clipped.add(facts.path, facts.clipped)
        if facts.rate < LOW_RATE:
            self._low_rate.add(f"{facts.path}: {facts.rate} Hz")
        if len(text) > char_limit(entry.language):
            self._long_text.add(f"{where}, {len(text)} characters, {entry.language}: {char_limit(entry.language)}", len(text))
        share = 0.0 if text.isascii() and entry.language == "en" else script_share(text, entry.language)
        if share > OTHER_SCRIPT:
            self._other_script.add(f"{where}, {share:.0%} of a text in {entry.language}", share)
        speed = len(text) * facts.rate / facts.frames
        if speed > FASTEST:
            self._fast.add(f"{where}, {speed:.0f} per second", speed)
        before = self._split_of.get(facts.path)
        if before is None:
            self._split_of[facts.path] = entry.split
        elif before == entry.split:
            self._shared.add(f"{where}, {facts.path}")
        else:
            self._both.add(facts.path)

    def messages(self) -> list[str]:
        """One line per kind of finding."""
        found = [
            (self._loud, "{n} clips exceed full scale and will be scaled (highest peak {v:.3g}: {x})"),
            (self._clipped, "{n} clips are clipped (worst {v:.1%} of the samples at full scale: {x})"),
            (self._low_rate, "{n} clips are sampled below 16 kHz and sound dull ({x})"),
            (self._long_text, "{n} texts are longer than XTTS's limit for their language, where speech may be cut off (longest at {x})"),
            (self._other_script, "{n} texts have more than 30 % letters of another script (most at {x})"),
            (self._fast, "{n} texts have more than 40 characters per second of audio; do they belong to it? (most at {x})"),
            (self._shared, "{n} rows share their audio file with an earlier row (first at {x})"),
            (self._both, "{n} clips of data.val are in data.train too, so evaluation flatters ({x})"),
        ]
        return [message.format(n=x.count, v=x.worst, x=x.example) for x, message in found if x.count]
