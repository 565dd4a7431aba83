"""The tables of names and shapes of Coqui's checkpoints match our networks."""

import math

import keras
import numpy as np
import pytest

from common.xtts import weights
from common.xtts.checkpoints import shapes
from common.xtts.dims import SIZES, GptDims
from common.xtts.dvae import Dvae
from common.xtts.gpt import Gpt
from common.xtts.hifigan import Hifigan, HifiganDims, unfold_weight_norm
from common.xtts.speaker_encoder import SpeakerEncoder
from tests.support.coqui_files import (
    VOCODER_DIMS,
)


def shapes_of(make) -> dict:
    with keras.StatelessScope(initialize_variables=False):
        return {key: t.torch_shape for key, t in weights.tensors(make()).items()}


@pytest.mark.parametrize("size", SIZES)
def test_tables_are_those_of_the_networks(size):
    dims = SIZES[size]
    assert shapes.gpt_shapes(dims.gpt) == shapes_of(lambda: Gpt(dims.gpt))
    assert shapes.dvae_shapes(dims.dvae) == shapes_of(lambda: Dvae(dims.dvae))


def test_tables_of_vocoder_and_speaker_encoder():
    assert shapes.speaker_encoder_shapes() == shapes_of(SpeakerEncoder)
    for v in (shapes.VocoderDims(), VOCODER_DIMS):
        own = shapes_of(lambda v=v: Hifigan(HifiganDims(v.in_channels, v.speaker_dim, v.channels)))
        unfolded = unfold_weight_norm(
            {k: np.broadcast_to(np.float32(1), s) for k, s in own.items()}
        )
        assert shapes.hifigan_shapes(v) == {k: a.shape for k, a in unfolded.items()}


def test_full_size_has_the_published_numbers():
    tables = (
        shapes.gpt_shapes(GptDims()),
        shapes.hifigan_shapes(shapes.VocoderDims()),
        shapes.speaker_encoder_shapes(),
    )
    assert [len(t) for t in tables] == [426, 241, 295]  # and mel_stats: 963
    numbers = [sum(math.prod(s) for s in t.values()) for t in tables]
    assert numbers == [441_018_563, 17_827_808, 8_028_492 + 25_655]


@pytest.mark.parametrize("size", SIZES)
def test_sizes_from_shapes(size):
    gpt, dvae = SIZES[size].gpt, SIZES[size].dvae
    said = {
        "gpt_n_heads": gpt.heads,
        "perceiver_head_dim": gpt.perceiver_head_dim,
        "cond_groups": gpt.cond_groups,
    }
    found = shapes.gpt_dims(
        shapes.gpt_shapes(gpt), {**said, "gpt_start_text_token": gpt.start_text}
    )
    assert found == gpt
    assert shapes.dvae_dims(shapes.dvae_shapes(dvae)) == dvae
    assert shapes.vocoder_dims(shapes.hifigan_shapes(VOCODER_DIMS)) == VOCODER_DIMS
    if size == "xtts":
        assert shapes.gpt_dims(shapes.gpt_shapes(gpt)) == gpt  # nothing said: XTTS v2


def test_a_missing_last_block_does_not_pass_for_a_smaller_model():
    table = {k: s for k, s in shapes.gpt_shapes(GptDims()).items() if not k.startswith("gpt.h.29.")}
    assert shapes.gpt_dims(table).layers == 30
    assert shapes.gpt_dims(table, {"gpt_layers": 29}).layers == 29
