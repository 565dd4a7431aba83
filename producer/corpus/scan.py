"""Sources → manifest: which rows can be trained on, and why the others cannot.

Metadata is read first (`producer/corpus/rows.py`), then the headers of the audio files in threads,
and the texts are cleaned and tokenised meanwhile. Files that an earlier manifest knows by path,
size and mtime are not opened again.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from common.audio import notes
from common.audio.treatment import Treatment
from common.data.manifest import EVAL, TRAIN, Manifest, Reject
from common.data.manifest_writer import ManifestWriter, NewUtterance
from common.run.settings import Config
from common.system.cores import cores
from common.system.counted import counted
from common.system.errors import BadInput
from common.xtts.text.clean import has_words
from common.xtts.text.errors import DamagedText, LanguageNotInVocabulary, TextError
from common.xtts.text.tokenizer import Tokenizer, describe_characters
from producer.corpus.findings import FEW_CLIPS, Findings, misfits, where_of
from producer.corpus.headers import AudioFacts, facts_of
from producer.corpus.journal import Journal
from producer.corpus.limits import Limits, Rejected
from producer.corpus.report import MISSING, Report, missing_reason, reject_line, write_rejects
from producer.corpus.rows import CorpusRow, CorpusRows, read_rows
from producer.corpus.text_findings import TextFindings
from producer.corpus.treated import Treated

DEEP_FILES = 2000  # corpora up to this size have their samples looked at, too: seconds
SAMPLED_FILES = 256  # of larger ones so many have
_SHOWN_REJECTS = 10
_CHUNK = 64  # rows per task: a header takes 0.05 ms, a task's bookkeeping as much


@dataclass(frozen=True)
class ScanResult:
    """What a scan made: the manifest's path and its summary."""

    path: Path
    report: Report

    @classmethod
    def of(cls, path: Path) -> ScanResult:
        """Summarise what was made."""
        with Manifest.open(path) as manifest:
            return cls(path, Report.of(manifest))

    @property
    def kept(self) -> int:
        """Utterances in the manifest."""
        return self.report.kept

    @property
    def rejected(self) -> int:
        """Rows left out."""
        return self.report.rejected

    def write_rejects(self, path: Path) -> None:
        """Every reject with file, line, id, kind and reason, tab-separated."""
        write_rejects(self.report.rejects, path)


def choose_eval(speakers: Iterable[int], fraction: float, most: int) -> list[int]:
    """Indices of the evaluation set: min(most, max(1, int(fraction · N))), drawn with seed 0, no
    speaker losing the last utterance.

    Source: coqui-tts, load_tts_samples. Fewer where the speakers have too little; none where
    `fraction` is 0.
    """
    speakers = np.asarray(list(speakers), np.int64)
    if fraction == 0 or not len(speakers):
        return []
    wanted = min(most, max(1, int(fraction * len(speakers))))
    left = np.bincount(speakers)
    chosen = []
    for i in np.random.RandomState(0).permutation(len(speakers)):
        if len(chosen) == wanted:
            break
        if left[speakers[i]] > 1:
            left[speakers[i]] -= 1
            chosen.append(int(i))
    return sorted(chosen)


@contextmanager
def _bar(total: int, show: bool) -> Iterator[Progress]:
    columns = (TextColumn("scan"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden, console = not (show and sys.stderr.isatty()), Console(stderr=True)
    bar = Progress(*columns, console=console, disable=hidden, transient=True)
    with notes.dropped(), bar:
        bar.add_task("scan", total=total)
        yield bar


def _facts(
    rows: list[CorpusRow], threads: int, every: int, journal: Journal
) -> Iterator[AudioFacts | None]:
    """Facts of each row's file, in order; of every `every`th its samples' too (1: of all, 0: of
    none).
    """

    def work(first: int) -> list[AudioFacts | None]:
        chunk = enumerate(rows[first : first + _CHUNK], first)
        found = [facts_of(r.row.place, every > 0 and i % every == 0, journal) for i, r in chunk]
        journal.add(found)
        return found

    with ThreadPoolExecutor(threads, "scan") as pool:
        for found in pool.map(work, range(0, len(rows), _CHUNK)):
            yield from found


class _Scan:
    def __init__(
        self,
        rows: CorpusRows,
        limits: Limits,
        tokenizer: Tokenizer,
        writer: ManifestWriter,
        treatment: Treatment,
    ):
        self.has_val = any(isinstance(e, CorpusRow) and e.split == EVAL for e in rows.entries)
        self.rows, self.limits, self.tokenizer, self.writer = rows, limits, tokenizer, writer
        self.findings, self.text_findings = Findings(), TextFindings()
        self.treated = Treated(treatment)
        self.sampled = False  # of some recordings the headers alone are looked at
        self.misfits: dict[str, tuple[str, str]] = {}  # what `data.reject` leaves out
        self.tally: Counter[str] = Counter()
        self.first_rejects: list[Reject] = []  # for an error, which leaves no manifest to look into
        self.num_missing = self.num_default_language = self.num_decoded = self.num_unusable = 0
        self.kept = Counter({TRAIN: 0, EVAL: 0})
        self.train_ids: list[int] = []
        self.train_speakers: list[int] = []
        self._speakers: dict[str, int] = {}

    def reject(self, reject: Reject) -> None:
        """Record a line that is left out."""
        self.tally[reject.kind] += 1
        if len(self.first_rejects) < _SHOWN_REJECTS:
            self.first_rejects.append(reject)
        self.writer.add_reject(reject)

    def take(self, entry: CorpusRow | Reject, facts: Iterator[AudioFacts | None]) -> None:
        """The next line of the metadata; `facts` are those of its rows' files, in order."""
        if isinstance(entry, Reject):
            self.reject(entry)
        else:
            self.judge(entry, next(facts))

    def judge(self, entry: CorpusRow, facts: AudioFacts | None) -> None:
        """Keep a row or reject it."""
        try:
            self._check(entry, facts)
        except Rejected as e:
            rejected = Reject(entry.row.file, entry.row.line, entry.row.id, e.reason, e.kind)
            if facts is None:
                self.num_missing += 1
            self.reject(rejected)

    def _check(self, entry: CorpusRow, facts: AudioFacts | None) -> None:
        if facts is None:
            raise Rejected(
                missing_reason(entry.row.candidates) + entry.row.place.nowhere(), MISSING
            )
        if facts.mtime_ns:  # else it was not opened
            self.writer.add_file(facts.path, facts.size, facts.mtime_ns, facts.remembered())
        self.num_decoded += facts.deep
        self.num_unusable += facts.deep and bool(facts.error)
        if facts.error:
            raise Rejected(facts.error, facts.kind)
        facts = facts.treated(self.treated.treatment)
        self.treated.add(facts)
        self.limits.check_audio(facts.num_samples)
        if self.misfits and (misfit := self.misfits.get(where_of(entry.row))):
            raise Rejected(*misfit)
        clean, tokens = self._tokenise(entry)
        number = self.writer.add_utterance(
            NewUtterance(
                source=entry.source,
                path=facts.path,
                name=entry.row.id,
                text=entry.row.text,
                clean=clean,
                tokens=tokens,
                language=entry.language,
                speaker=entry.speaker,
                num_samples=facts.num_samples,
                source_rate=facts.rate,
                source_frames=facts.frames,
                size=facts.size,
                split=entry.split,
                portion=facts.portion,
            )
        )
        self.kept[entry.split] += 1
        self.num_default_language += entry.by_default
        if entry.split == TRAIN:
            self.train_ids.append(number)
            self.train_speakers.append(
                self._speakers.setdefault(entry.speaker, len(self._speakers))
            )
        self.findings.look_at(entry, facts)
        self.text_findings.look_at(entry, clean)

    def _tokenise(self, entry: CorpusRow) -> tuple[str, list[int]]:
        try:
            clean = self.tokenizer.clean(entry.row.text, entry.language)
        except TextError as e:
            kind = "damaged text" if isinstance(e, DamagedText) else "text cannot be read out"
            raise Rejected(str(e), kind) from e
        if not has_words(clean):
            raise Rejected(
                f"no words in the text {entry.row.text!r}" if entry.row.text else "empty text",
                "empty text",
            )
        tokens = self.tokenizer.encode_clean(clean, entry.language)
        if self.tokenizer.unk in tokens or self.tokenizer.stop in tokens:
            unknown = self.tokenizer.unknown_in_clean(clean)
            self.findings.unknown_characters.update(unknown)
            raise Rejected(
                f"not in the vocabulary: {describe_characters(unknown)}", "unknown characters"
            )
        if len(tokens) > self.limits.max_tokens:
            raise Rejected(
                f"{len(tokens)} text tokens > {self.limits.max_tokens}",
                f"text >{self.limits.max_tokens} tokens",
            )
        return clean, tokens

    def check_usable(self) -> None:
        """BadInput: most files missing, or nothing usable."""
        total = len(self.rows.entries)
        where = ", ".join(map(str, self.rows.roots))
        reasons = ", ".join(f"{kind} {n}" for kind, n in self.tally.most_common())
        if total == 0:
            raise BadInput(f"no rows in the metadata ({where})")
        if 2 * self.num_missing > total:
            raise self._unusable(
                f"{self.num_missing} of"
                f" {counted(total, '{n} audio [file is|files are] missing')}; is this the right"
                f" folder? ({where})"
            )
        if not self.kept[TRAIN] + self.kept[EVAL]:
            raise self._unusable(f"0 of {total} usable: {reasons} ({where})")
        if self.sampled and 2 * self.num_unusable > self.num_decoded:
            some = (
                f"{self.num_unusable} of the {self.num_decoded} recordings that were decoded (of"
                f" {total}) {counted(self.num_unusable, '[is|are]')} unusable"
            )
            raise self._unusable(f"{some}: {reasons} ({where})")
        for name, split in (("data.train", TRAIN), ("data.val", EVAL)):
            if not self.kept[split] and (split == TRAIN or self.has_val):
                raise self._unusable(f"nothing in {name} is usable: {reasons}")

    def _unusable(self, message: str) -> BadInput:
        more = self.tally.total() - len(self.first_rejects)
        kinds = [
            r.kind for r in self.first_rejects
        ]  # the first of each in full: no rejects.tsv will say the rest
        lines = [
            reject_line(r, full=kinds.index(r.kind) == i) for i, r in enumerate(self.first_rejects)
        ]
        lines += [f"… and {more} more"] if more else []
        return BadInput("\n  ".join([message, *lines]))

    def finish(self, config: Config) -> None:
        """Split, and store what the report says besides the rows."""
        found = self.findings.found()
        meta = {
            "notes": self.rows.notes + self._decoded() + self.treated.notes(),
            "warnings": (
                self.rows.warnings
                + self.split(config)
                + [f.message for f in found]
                + self.text_findings.messages()
            ),
            "findings": [f.to_json() for f in found],
            "cleaning": self.text_findings.cleaning(),
            "unknown_characters": dict(self.findings.unknown_characters.most_common()),
            "num_default_language": self.num_default_language,
            "default_language": config.data.language,
            "strip_arabic_diacritics": config.text.strip_arabic_diacritics,
            "tokenizer": self.tokenizer.digest,
        }
        for key, value in meta.items():
            self.writer.set_meta(key, value)

    def _decoded(self) -> list[str]:
        """How many recordings were decoded, where it is not all."""
        if not self.sampled:
            return []
        total = sum(isinstance(e, CorpusRow) for e in self.rows.entries)
        rest = f"of the others the headers alone are known (corpora above {DEEP_FILES} rows)"
        decoded = counted(self.num_decoded, "[was|were] decoded")
        return [f"{self.num_decoded} of {total} recordings {decoded}; {rest}"]

    def split(self, config: Config) -> list[str]:
        """Choose the evaluation set where `data.val` gives none; warnings about the sizes."""
        warnings = []
        if not self.has_val:
            chosen = choose_eval(
                self.train_speakers, config.data.eval_fraction, config.data.eval_max
            )
            self.writer.set_split((self.train_ids[i] for i in chosen), EVAL)
            self.kept = Counter({TRAIN: self.kept[TRAIN] - len(chosen), EVAL: len(chosen)})
        if self.kept[EVAL] == 0:
            warnings.append(
                "no evaluation set (data.eval_fraction is 0, or every speaker has a single clip)"
            )
        elif self.kept[EVAL] < 5:
            warnings.append(
                f"the evaluation set is small ({self.kept[EVAL]}): its loss says little"
            )
        if self.kept[TRAIN] < FEW_CLIPS:
            clips = counted(self.kept[TRAIN], "{n} [clip|clips]")
            warnings.append(f"little to train on: {clips}")
        return warnings


def _check_languages(rows: CorpusRows, tokenizer: Tokenizer) -> None:
    for language in rows.languages:
        try:
            tokenizer.require_language(language)
        except LanguageNotInVocabulary as e:
            first = next(
                x for x in rows.entries if isinstance(x, CorpusRow) and x.language == language
            )
            raise BadInput(
                f"{e} (first at {first.row.file}:{first.row.line}; set data.language or text.vocab)"
            ) from e


def _misfits(
    config: Config, rows: Iterable[tuple[CorpusRow, AudioFacts | None]]
) -> dict[str, tuple[str, str]]:
    """What `data.reject` leaves out, as `findings.misfits`."""
    treatment = config.data.treatment
    usable = ((e, f.treated(treatment)) for e, f in rows if f is not None and not f.error)
    return misfits(usable, config.data.reject)


def _every(num_rows: int, deep: bool | None) -> int:
    """Of every how many recordings the samples are looked at; 0: of none."""
    if deep is not None:
        return int(deep)
    return 1 if num_rows <= DEEP_FILES else num_rows // SAMPLED_FILES


def scan(
    config: Config,
    manifest_path: Path,
    tokenizer: Tokenizer,
    *,
    rows: CorpusRows | None = None,
    progress: bool = True,
    previous: Manifest | None = None,
    deep: bool | None = None,
    journal: Path | None = None,
) -> ScanResult:
    """Scan the configured sources into a new manifest; ids count from 0 in the order of the
    metadata.

    Args:
        config: `data`, `model` (how many positions there are) are read.
        manifest_path: where the manifest appears, once complete.
        tokenizer: its `clean` and `encode_clean` make the tokens.
        rows: what `read_rows` gave; None reads them here.
        progress: a bar on stderr where that is a terminal.
        previous: an earlier manifest; files it knows unchanged are not opened.
        deep: look at every sample for NaN, silence, damage and clipping; None: in corpora of up to
            2000 rows, and in 256 recordings of larger ones. What is not looked at `decode` finds
            during training. Where recordings are treated, all are looked at.
        journal: a file that keeps what is found until the scan has ended well; a scan that finds
            one of a scan that was killed goes on from there, to the same manifest.

    Raises:
        BadInput: no usable row, more than half of the files missing or of those decoded unusable, a
            language that the vocabulary lacks, or limits beyond the model's positions. No manifest
            is written then.
    """
    limits = Limits.of(config)
    rows = read_rows(config) if rows is None else rows
    _check_languages(rows, tokenizer)
    candidates = [e for e in rows.entries if isinstance(e, CorpusRow)]
    treatment = config.data.treatment
    every = 1 if treatment.changes else _every(len(candidates), deep)
    threads = config.data.scan_threads or cores()
    with (
        ManifestWriter(manifest_path, treatment) as writer,
        _bar(len(rows.entries), progress) as bar,
        Journal(journal, previous) as looked_at,
    ):
        for root in rows.roots:
            writer.add_source(root)
        job = _Scan(rows, limits, tokenizer, writer, treatment)
        job.sampled = every != 1
        facts = _facts(candidates, threads, every, looked_at)
        if config.data.reject:
            facts = iter(looked := list(facts))
            job.misfits = _misfits(config, zip(candidates, looked, strict=True))
        for i, entry in enumerate(rows.entries):
            job.take(entry, facts)
            if i % _CHUNK == 0:
                bar.update(bar.task_ids[0], completed=i)
        job.check_usable()
        job.finish(config)
    looked_at.done()
    return ScanResult.of(Path(manifest_path))
