"""Shares of languages and corpora in balanced training, against sums done by hand."""

from types import SimpleNamespace

import numpy as np
import pytest

from common.data.manifest import EVAL, TRAIN
from common.run import settings as config_module
from common.system.errors import BadInput
from producer.creation import shares

OLD, NEW, TEXT = {"path": "old"}, {"path": "new"}, {"path": "text"}


def settings(train=(OLD,), sampling="balanced", **weights):
    tree = {"data": {"train": list(train)}, "batching": {"sampling": sampling, "weights": weights}}
    return config_module.parse(tree)


def manifest(*rows):
    """(source, language, split) of each utterance; languages de, en, fa."""
    source, language, split = np.array(rows).T
    columns = {"source": source, "language": language, "split": split.astype(np.uint8)}
    return SimpleNamespace(languages=["de", "en", "fa"], columns=lambda: columns)


def by_row(config, of):
    """The share of each utterance's group."""
    group, share = shares.groups_of(config, of)
    assert share.sum() == pytest.approx(1.0)
    return share[group].round(6).tolist()


CORPUS = manifest((0, 0, TRAIN), (0, 1, TRAIN), (0, 1, TRAIN), (1, 2, TRAIN), (1, 1, EVAL))


def test_without_weights_and_shares_the_languages_are_the_groups():
    assert shares.groups_of(settings(), CORPUS) is None
    assert shares.groups_of(settings(sampling="epoch"), CORPUS) is None


def test_weights_of_languages():
    # de 1, en 2, fa 5; en has two rows in one group
    assert by_row(settings([OLD, NEW], fa=5, en=2), CORPUS)[:4] == [0.125, 0.25, 0.25, 0.625]


def test_a_share_of_old_data_and_the_rest_by_weights():
    config = settings([OLD | {"share": 0.2}, NEW], en=3)
    # old: 0.2 parted 1 : 3 between de and en; new: 0.8, all fa (its English is held out)
    assert by_row(config, CORPUS)[:4] == [0.05, 0.15, 0.15, 0.8]


def test_one_language_in_two_corpora_with_shares():
    config = settings([OLD | {"share": 0.25}, NEW, TEXT])
    of = manifest((0, 1, TRAIN), (1, 1, TRAIN), (2, 1, TRAIN), (2, 2, TRAIN))
    # two sources without a share are one part: en and fa alike in it
    assert by_row(config, of) == [0.25, 0.375, 0.375, 0.375]
    (line,) = shares.lines(config, of)
    assert line == (
        "balanced training: en 62 % (of the corpus 75 %), fa 38 % (of the corpus 25 %);"
        " 25 % from old"
    )


def test_every_corpus_with_a_share():
    config = settings([OLD | {"share": 0.25}, NEW | {"share": 0.75}])
    assert by_row(config, CORPUS)[:4] == [0.125, 0.125, 0.125, 0.75]


@pytest.mark.parametrize(
    ("train", "sampling", "weights", "says"),
    [
        ([OLD], "epoch", {"en": 2}, r"batching.weights: of batching.sampling=balanced alone"),
        ([OLD | {"share": 0.2}, NEW], "epoch", {}, r"data.train\[0\].share=0.2: of batching"),
        ([OLD | {"share": 0.6}, NEW | {"share": 0.6}], "balanced", {}, "come to 1.2: make"),
        (
            [OLD | {"share": 0.5}, NEW | {"share": 0.5}, TEXT],
            "balanced",
            {},
            "come to 1, and leave nothing for the others",
        ),
        ([OLD | {"share": 0.2}], "balanced", {}, "no other source has the rest"),
    ],
)
def test_what_cannot_be_meant_is_refused(train, sampling, weights, says):
    with pytest.raises(BadInput, match=says):
        shares.check(settings(train, sampling, **weights))


def test_a_share_of_what_is_not_trained_on_is_refused():
    tree = {"data": {"train": [OLD], "val": [NEW | {"share": 0.5}]}}
    with pytest.raises(BadInput, match=r"data.val\[0\].share: nothing is trained on data.val"):
        shares.check(config_module.parse(tree))


@pytest.mark.parametrize("tree", [{"en": 0}, {"en": -1}, {"en": "much"}])
def test_weights_are_positive_numbers(tree):
    with pytest.raises(BadInput, match=r"batching\.weights\.en"):
        settings(**tree)


def test_names_that_the_corpus_does_not_have_are_refused():
    with pytest.raises(BadInput, match="the corpus has no it; it has de, en, fa"):
        shares.groups_of(settings(it=2), CORPUS)
    nothing, config = manifest((0, 0, TRAIN), (1, 0, EVAL)), settings([OLD, NEW | {"share": 0.5}])
    with pytest.raises(BadInput, match=r"data.train\[1\].share=0.5: there is nothing to train on"):
        shares.groups_of(config, nothing)
