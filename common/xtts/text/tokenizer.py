"""Text to ids:

XTTS's byte-pair vocabulary, read from and written to its vocab.json, learnt from nothing, or
extended.

An encoded text is [language] t1 [SPACE] t2 ...: no START or STOP. Spaces and the tag are placed by
id, and words are encoded without special tokens, so that a text saying "[STOP]" cannot end the
speech.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import tokenizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Whitespace

from common.system.documents import read_json
from common.xtts.text import clean as cleaning
from common.xtts.text.bpe import Pair, learn_merges
from common.xtts.text.errors import LanguageNotInVocabulary, TextError
from common.xtts.text.marks import is_silent

STOP, UNK, SPACE, START = "[STOP]", "[UNK]", "[SPACE]", "[START]"
_CONTROL = (STOP, UNK, SPACE, START)
_TAG = re.compile(r"\[([a-z]{2,3})(?:-[a-z]+)?\]")
# In a vocabulary learnt from nothing even if the corpus lacks them, so that a sentence can be asked
# for or shouted at synthesis.
_PUNCTUATION = "!'(),-.:;?"
_CACHE_WORDS = 1 << 18


_MOST_IDS = 1 << 20  # each is a row of the model


class VocabularyError(ValueError):
    """A vocabulary that cannot be read or made; the message says what is wrong with it."""


def language_tag(language: str) -> str:
    """The token that begins a text of `language`: "[zh-cn]" for zh."""
    return "[zh-cn]" if language == "zh" else f"[{language}]"


def describe_characters(characters: Iterable[str]) -> str:
    """ "U+16A0 x1, U+0E01 x3", most frequent first, for the report of a row with unknown
    characters.
    """
    counts = sorted(Counter(characters).items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"U+{ord(c):04X} x{n}" for c, n in counts)


class Tokenizer:
    """A vocabulary and how texts become its ids. Immutable; `train` and `extend` make new ones."""

    def __init__(
        self,
        vocab: dict[str, int],
        merges: Sequence[Pair],
        specials: Iterable[str],
        merge_limits: dict[str, int] | None = None,
        *,
        parity: bool = False,
        keep_diacritics: bool = True,
    ):
        """vocab: token -> id, ids unique but not necessarily without gaps. merges: in rank order,
        without repeats.

        merge_limits: language -> number of leading merges used for it, "*" for those not named; all
        merges if absent. parity, keep_diacritics: see `text.clean`.
        """
        missing = [token for token in _CONTROL if token not in vocab]
        if missing:
            raise VocabularyError(f"vocabulary lacks {', '.join(missing)}")
        self._vocab, self._merges = dict(vocab), list(merges)
        self._tokens = {i: token for token, i in self._vocab.items()}
        if len(self._tokens) != len(self._vocab):
            raise VocabularyError("two tokens of the vocabulary share an id")
        self._specials = sorted(set(specials) | set(_CONTROL), key=self._vocab.__getitem__)
        self._limits = dict(merge_limits or {})
        self._clean_options = {"parity": parity, "keep_diacritics": keep_diacritics}
        self._tags = _language_tags(self._vocab)
        self._characters = frozenset(token for token in self._vocab if len(token) == 1)
        self._backends: dict[int, tuple[tokenizers.Tokenizer, dict[str, list[int]]]] = {}
        self.stop, self.unk, self.space, self.start = (self._vocab[token] for token in _CONTROL)
        self.vocab_size = max(self._tokens) + 1

    # -- files -------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls, path: str | os.PathLike, *, parity: bool = False, keep_diacritics: bool = True
    ) -> Tokenizer:
        """Reads a vocab.json; VocabularyError naming the file and what is wrong with it."""
        try:
            document = read_json(path)
            model = document["model"]
            if model.get("type", "BPE") != "BPE":
                raise VocabularyError(f"model is {model['type']!r}, expected 'BPE'")
            added = {token["content"]: token["id"] for token in document.get("added_tokens") or ()}
            vocab = {**model["vocab"], **added}
            _check_ids(vocab, model.get("merge_limits"))
            merges = _last_of_each(model["merges"])
            absent = [pair for pair in merges if not {*pair, pair[0] + pair[1]} <= vocab.keys()]
            if absent:
                raise VocabularyError(
                    f"merge {absent[0]!r} names a token that is not in the vocabulary"
                    f" ({len(absent)} such merges)"
                )
            return cls(
                vocab,
                merges,
                added,
                model.get("merge_limits"),
                parity=parity,
                keep_diacritics=keep_diacritics,
            )
        except VocabularyError as error:
            raise VocabularyError(f"{path}: {error}") from None
        except OSError as error:
            raise VocabularyError(f"cannot read the vocabulary {path}: {error.strerror}") from error
        except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            raise VocabularyError(
                f"{path}: not a vocabulary in the format of XTTS's vocab.json"
                f" ({type(error).__name__}: {error})"[:400]
            ) from error

    def save(self, path: str | os.PathLike) -> None:
        """Writes vocab.json, readable by the `tokenizers` library; replaces an existing file at
        once or not at all.
        """
        path = Path(path)
        aside = path.with_name(path.name + f".{os.getpid()}.tmp")
        aside.write_text(
            json.dumps(self._document(), ensure_ascii=False, indent=1) + "\n", encoding="utf-8"
        )
        os.replace(aside, path)

    def _document(self) -> dict:
        flags = {
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": UNK,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "vocab": dict(sorted(self._vocab.items(), key=lambda item: item[1])),
            "merges": [f"{left} {right}" for left, right in self._merges],
        }
        if self._limits:
            model["merge_limits"] = self._limits
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": self._vocab[token], "content": token, **flags} for token in self._specials
            ],
            "normalizer": None,
            "pre_tokenizer": {"type": "Whitespace"},
            "post_processor": None,
            "decoder": None,
            "model": model,
        }

    @property
    def digest(self) -> str:
        """32 hex digits over everything that decides ids: tokens, merges, the options and the
        version of cleaning.
        """
        return self.digest_at(cleaning.VERSION)

    def digest_at(self, version: int) -> str:
        """The digest that this vocabulary has, or had, with a version of cleaning."""
        parts = [self._document(), self._clean_options, version]
        return hashlib.blake2b(
            json.dumps(parts, sort_keys=True).encode(), digest_size=16
        ).hexdigest()

    # -- use ---------------------------------------------------------------------------------------

    @property
    def languages(self) -> tuple[str, ...]:
        """Languages that have a tag, sorted."""
        return tuple(sorted(self._tags))

    def require_language(self, language: str) -> str:
        """The language's code as the project uses it; LanguageNotInVocabulary if it has no tag
        here.
        """
        meant = None
        try:
            code = cleaning.normalize_language(language)
        except cleaning.UnknownLanguage as error:
            code, meant = language, error.meant
        if code not in self._tags:
            raise LanguageNotInVocabulary(code, self._tags, meant)
        return code

    def clean(self, text: str, language: str) -> str:
        """`text.clean` with this tokenizer's options."""
        return cleaning.clean(text, self.require_language(language), **self._clean_options)

    def encode(self, text: str, language: str) -> list[int]:
        """Ids of a raw text: the language's tag, then its tokens.

        TextError and the language errors as in `text.clean`.
        """
        return self.encode_clean(self.clean(text, language), language)

    def encode_clean(self, clean_text: str, language: str) -> list[int]:
        """Ids of a text that `clean` gave: for a caller that keeps the cleaned text."""
        language = self.require_language(language)
        backend, cache = self._backend(language)
        ids = [self._tags[language]]
        for index, word in enumerate(clean_text.split(" ")):
            if index:
                ids.append(self.space)
            found = cache.get(word)
            if found is None:
                if len(cache) >= _CACHE_WORDS:
                    cache.clear()
                found = cache[word] = backend.encode(word, add_special_tokens=False).ids
            ids += found
        return ids

    def unknown_characters(self, text: str, language: str) -> list[str]:
        """The characters of the cleaned text that become [UNK], in order, with repeats."""
        return self.unknown_in_clean(self.clean(text, language))

    def unknown_in_clean(self, clean_text: str) -> list[str]:
        """`unknown_characters` of a text that `clean` gave."""
        return [c for c in clean_text if c not in self._characters and not c.isspace()]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, for people: tags and control tokens stay visible, [SPACE] is a space.

        KeyError for an id without token.
        """
        return "".join(" " if i == self.space else self._tokens[i] for i in ids)

    def token(self, i: int) -> str | None:
        """The token of an id; None where the vocabulary has a gap."""
        return self._tokens.get(i)

    def _backend(self, language: str) -> tuple[tokenizers.Tokenizer, dict[str, list[int]]]:
        limit = self._limits.get(language, self._limits.get("*", len(self._merges)))
        if limit not in self._backends:
            self._backends[limit] = (_library_tokenizer(self._vocab, self._merges[:limit]), {})
        return self._backends[limit]

    # -- learning ----------------------------------------------------------------------------------

    @classmethod
    def train(
        cls,
        pairs: Iterable[tuple[str, str]],
        vocab_size: int,
        languages: Iterable[str],
        *,
        parity: bool = False,
        keep_diacritics: bool = True,
    ) -> Tokenizer:
        """A vocabulary of at most `vocab_size` ids from (text, language) pairs: control tokens,
        tags, every character, then merges.

        Texts with a TextError are passed over (the scan rejects and reports them). VocabularyError
        if the characters alone do not fit.
        """
        languages = [cleaning.normalize_language(language) for language in languages]
        options = {"parity": parity, "keep_diacritics": keep_diacritics}
        words = _count_words(pairs, languages, options)
        tags = [language_tag(language) for language in dict.fromkeys(languages)]
        tokens = [
            *_CONTROL,
            *tags,
            *sorted({c for word in words for c in word} | set(_PUNCTUATION)),
        ]
        if len(tokens) > vocab_size:
            raise VocabularyError(
                f"vocab_size {vocab_size} is too small: the corpus alone has {len(tokens)}"
                " characters, tags and controls"
            )
        merges = learn_merges(
            {tuple(word): n for word, n in words.items()}, vocab_size - len(tokens)
        )
        tokens = dict.fromkeys([*tokens, *(left + right for left, right in merges)])
        return cls(
            {token: i for i, token in enumerate(tokens)}, merges, [*_CONTROL, *tags], **options
        )

    def extend(
        self, pairs: Iterable[tuple[str, str]], new_languages: Iterable[str], extra: int
    ) -> Tokenizer:
        """This vocabulary with `new_languages` and at most `extra` ids more: their tags, their
        characters, then merges.

        Every old id stays, and the old languages' texts keep their ids even where the script is
        shared: the new merges are used for the new languages only (the file's "merge_limits"; other
        readers of the file, which do not know it, apply them to all).
        """
        new = list(
            dict.fromkeys(cleaning.normalize_language(language) for language in new_languages)
        )
        known = [language for language in new if language in self._tags]
        if known:
            raise VocabularyError(f"already in the vocabulary: {', '.join(known)}")
        words = _count_words(pairs, new, self._clean_options)
        characters = sorted({c for word in words for c in word} - self._vocab.keys())
        tags = [language_tag(language) for language in new]
        if len(tags) + len(characters) > extra:
            raise VocabularyError(
                f"extra={extra} is too small: {len(tags)} tags and {len(characters)} new characters"
            )
        vocab = {
            **self._vocab,
            **{token: self.vocab_size + i for i, token in enumerate([*tags, *characters])},
        }
        # The new text as the old merges leave it: what is learnt continues from there.
        base = _library_tokenizer(vocab, self._merges)
        split = Counter()
        for word, n in words.items():
            split[tuple(base.encode(word, add_special_tokens=False).tokens)] += n
        merges = learn_merges(split, extra - len(tags) - len(characters), frozenset(vocab))
        following = max(vocab.values()) + 1
        for token in (left + right for left, right in merges):
            if token not in vocab:
                vocab[token], following = following, following + 1
        merges = self._merges + merges
        limits = {"*": len(self._merges), **self._limits, **dict.fromkeys(new, len(merges))}
        return Tokenizer(vocab, merges, [*self._specials, *tags], limits, **self._clean_options)


def _language_tags(vocab: dict[str, int]) -> dict[str, int]:
    tags = {}
    for token, i in vocab.items():
        match = _TAG.fullmatch(token)
        if match:
            tags[match.group(1)] = i
    return tags


def _check_ids(vocab: dict, merge_limits: object) -> None:
    """VocabularyError: what would take memory by the number, or fail later."""
    for token, i in vocab.items():
        if not isinstance(token, str) or type(i) is not int or not 0 <= i < _MOST_IDS:
            raise VocabularyError(
                f"the token {token!r:.40} has the id {i!r:.40}; ids are numbers below {_MOST_IDS}"
            )
    limits = merge_limits or {}
    if not isinstance(limits, dict) or not all(type(n) is int for n in limits.values()):
        raise VocabularyError("merge_limits is no table of numbers")


def _last_of_each(merges: Iterable[str | Sequence[str]]) -> list[Pair]:
    """Merges without repeats, each at the place of its last occurrence: the rank that XTTS's
    published ids were made with.
    """
    pairs = [
        tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges
    ]
    if any(len(pair) != 2 for pair in pairs):
        raise VocabularyError("a merge is not a pair of tokens")
    return list(dict.fromkeys(reversed(pairs)))[::-1]


def _library_tokenizer(vocab: dict[str, int], merges: Sequence[Pair]) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(
        BPE(vocab=vocab, merges=list(merges), unk_token=UNK, fuse_unk=False)
    )
    tokenizer.pre_tokenizer = Whitespace()
    return tokenizer


def _count_words(
    pairs: Iterable[tuple[str, str]], languages: Sequence[str], options: dict[str, bool]
) -> dict[str, int]:
    """How often each word (as the pre-tokenizer cuts them) occurs in the cleaned texts.

    Emoji and control characters, which XTTS's own cleaning leaves in, are not learnt.
    """
    chunks: Counter[str] = Counter()
    for text, language in pairs:
        code = cleaning.normalize_language(language)
        if code not in languages:
            raise VocabularyError(
                f"a text is in {code}, which is not among the languages asked for:"
                f" {', '.join(languages)}"
            )
        try:
            chunks.update(cleaning.clean(text, code, **options).split())
        except TextError:
            continue
    words: Counter[str] = Counter()
    cut = Whitespace().pre_tokenize_str
    for chunk, n in chunks.items():
        for word, _ in cut(chunk):
            spoken = "".join(c for c in word if not is_silent(c))
            if spoken:
                words[spoken] += n
    return words
