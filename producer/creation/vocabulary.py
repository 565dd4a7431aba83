"""A run's vocabulary: given, kept, extended, or learnt from the corpus."""

from __future__ import annotations

from collections.abc import Callable

from common.run.beginning import Beginning
from common.run.folder import RunFolder
from common.run.settings import Config
from common.system.errors import BadInput
from common.xtts.text.clean import UnknownLanguage, normalize_language
from common.xtts.text.tokenizer import Tokenizer, VocabularyError
from producer.corpus.rows import CorpusRows


def make_vocabulary(
    config: Config,
    rows: CorpusRows,
    existing: RunFolder | None,
    out: Callable[[str], None],
    start: Beginning | None = None,
) -> Tokenizer:
    """The run's vocabulary: the given file, the existing run's, or a BPE learnt from the corpus.

    BadInput: it cannot be had.
    """
    vocab = config.text.vocab or (None if start is None else start.vocab)
    options = {
        "keep_diacritics": not config.text.strip_arabic_diacritics,
        "parity": config.text.coqui_cleaning,
    }
    try:
        if existing is not None and (config.text.extend or not vocab):
            return Tokenizer.load(existing.path / "vocab.json", **options)
        if vocab:
            return _extended(Tokenizer.load(vocab, **options), config, rows, out)
        if config.text.extend:
            raise BadInput(
                "text.extend needs a vocabulary to extend: set text.vocab, or model.weights"
            )
        tokenizer = Tokenizer.train(rows.pairs(), config.text.vocab_size, rows.languages, **options)
    except VocabularyError as e:
        raise BadInput(str(e)) from e
    out(
        f"vocabulary: {tokenizer.vocab_size} tokens learnt from the corpus, languages"
        f" {', '.join(tokenizer.languages)}"
    )
    return tokenizer


def _extended(
    tokenizer: Tokenizer, config: Config, rows: CorpusRows, out: Callable[[str], None]
) -> Tokenizer:
    """The vocabulary with `text.extend`'s languages, learnt from their texts.

    VocabularyError as of `Tokenizer.extend`.
    """
    extend = config.text.extend
    if extend is None:
        return tokenizer
    try:
        languages = [normalize_language(language) for language in extend.languages]
    except UnknownLanguage as e:
        raise BadInput(f"text.extend.languages: {e}") from e
    absent = [language for language in languages if language not in rows.languages]
    if absent:
        raise BadInput(
            f"text.extend.languages: the corpus has no texts in {', '.join(absent)}; it has"
            f" {', '.join(rows.languages)}"
        )
    pairs = (pair for pair in rows.pairs() if pair[1] in languages)
    longer = tokenizer.extend(pairs, languages, extend.tokens)
    out(
        f"vocabulary: {tokenizer.vocab_size} ids kept, {longer.vocab_size - tokenizer.vocab_size}"
        f" new for {', '.join(languages)}"
    )
    return longer
