"""Synthesis: references, splitting, the way from text to sound with and without a vocoder, and
streaming.
"""

import dataclasses

import numpy as np
import pytest
import soundfile
import tensorflow as tf

from common.xtts.audio import CondMel
from common.xtts.clips import ReferenceClipError, load_clip
from common.xtts.dims import AudioDims, DvaeDims, ModelDims
from common.xtts.dvae import Dvae
from common.xtts.gpt import Gpt
from common.xtts.hifigan import Hifigan, HifiganDims
from common.xtts.pace import Pace
from common.xtts.sampling import Generated, SamplingOptions, log_likelihood
from common.xtts.speaker_encoder import SpeakerEncoder, SpeakerEncoderDims
from common.xtts.synthesize import (
    Joiner,
    NotFinite,
    ReferenceOptions,
    Synthesizer,
    Vocoder,
    Voice,
    pcm16,
)
from common.xtts.text.tokenizer import Tokenizer
from tests.support.corpora import sine
from tests.support.gpt_cases import MICRO

RATE = 22050
STATS = np.linspace(2.0, 6.0, 80).astype(np.float32)
# At most 40 codes; the text table takes texts beyond it only in pieces.
GPT = dataclasses.replace(MICRO, max_audio_tokens=43, max_text_tokens=30)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(
        [("the small red house by the river", "en"), ("das kleine rote haus am fluss", "de")],
        48,
        ["en", "de"],
    )


@pytest.fixture(scope="module")
def parts(tokenizer):
    """dims, GPT, DVAE: random weights that draw many codes and never STOP."""
    base = ModelDims(
        "test",
        AudioDims(cond_max_samples=RATE),
        DvaeDims(num_codes=16, codebook_dim=8, hidden=8, num_resblocks=1),
        GPT,
    )
    dims = base.with_vocabulary(tokenizer.vocab_size, tokenizer.start, tokenizer.stop)
    gpt, dvae = Gpt(dims.gpt, seed=1), Dvae(dims.dvae)
    rng = np.random.default_rng(2)
    for t in gpt.tensors():
        t.variable.assign_add(0.3 * rng.standard_normal(t.variable.shape))
    bias = gpt.mel_head.bias.numpy()
    bias[-2:] = -30.0
    gpt.mel_head.bias.assign(bias)
    dvae.initialise(3)
    return dims, gpt, dvae


@pytest.fixture(scope="module")
def synthesizer(parts, tokenizer):
    dims, gpt, dvae = parts
    return Synthesizer(
        dims, gpt, dvae, STATS, tokenizer, reference=ReferenceOptions.as_trained(dims.audio)
    )


@pytest.fixture(scope="module")
def with_vocoder(parts, tokenizer):
    dims, gpt, _ = parts
    hifigan = Hifigan(HifiganDims(in_channels=GPT.width, speaker_dim=6, channels=32))
    hifigan.initialise(4)
    encoder = SpeakerEncoder(
        SpeakerEncoderDims(
            layers=(1, 1, 1, 1), filters=(4, 4, 8, 8), bottleneck=4, embedding=6, reduction=2
        )
    )
    encoder.initialise(5)
    return Synthesizer(dims, gpt, None, STATS, tokenizer, Vocoder(hifigan, encoder))


def clip(seconds, seed=0):
    return (0.1 * np.random.default_rng(seed).standard_normal(round(seconds * RATE))).astype(
        np.float32
    )


def say(synthesizer, text, voice, options=None, seed=0, **more):
    """Each piece of an English text, said."""
    pieces = synthesizer.pieces(text, "en")
    return [synthesizer.say(p, voice, options, (seed, i), **more) for i, p in enumerate(pieces)]


def style(parts, *clips):
    dims, gpt, _ = parts
    mel = CondMel(STATS, dims.audio)
    return [gpt.style_latents(mel(tf.constant(c[np.newaxis]))).numpy() for c in clips]


# -- references ------------------------------------------------------------------------------------


def test_latents_are_the_mean_over_chunks_of_all_clips(parts, tokenizer):
    """Two clips end to end: chunks of 1 s, the first across the seam, the last 0.4 s one kept, as
    0.33 s is the least.
    """
    dims, gpt, dvae = parts
    synthesizer = Synthesizer(
        dims, gpt, dvae, STATS, tokenizer, reference=ReferenceOptions(chunk_s=1.0)
    )
    a, b = clip(0.9), clip(1.5, seed=1)
    whole = np.concatenate([a, b])
    expected = np.mean(
        style(parts, whole[:RATE], whole[RATE : 2 * RATE], whole[2 * RATE :]), axis=0
    )
    np.testing.assert_allclose(synthesizer.voice([a, b]).latents, expected, atol=1e-5)
    short = synthesizer.voice([whole[: round(2.3 * RATE)]]).latents  # 0.3 s left over: passed over
    np.testing.assert_allclose(
        short, np.mean(style(parts, whole[:RATE], whole[RATE : 2 * RATE]), axis=0), atol=1e-5
    )


def test_references_of_runs_trained_here_are_padded_like_conditioning_clips(parts, synthesizer):
    padded = np.concatenate([clip(0.6), np.zeros(RATE - round(0.6 * RATE), np.float32)])
    voice = synthesizer.voice([clip(0.6)])
    np.testing.assert_allclose(voice.latents, style(parts, padded)[0], atol=1e-5)
    assert voice.speaker is None


def test_no_more_than_so_many_seconds_are_used(parts, tokenizer):
    dims, gpt, dvae = parts
    synthesizer = Synthesizer(
        dims,
        gpt,
        dvae,
        STATS,
        tokenizer,
        reference=ReferenceOptions(clip_s=1.0, total_s=1.5, chunk_s=1.0),
    )
    a, b = clip(3.0), clip(3.0, seed=1)
    expected = np.mean(style(parts, a[:RATE], b[: RATE // 2]), axis=0)
    np.testing.assert_allclose(synthesizer.voice([a, b]).latents, expected, atol=1e-5)


def test_a_reference_that_is_too_short(synthesizer):
    with pytest.raises(ReferenceClipError, match=r"0.20 s long; at least 0.33 s"):
        synthesizer.voice([clip(0.2)])
    with pytest.raises(ReferenceClipError, match="0.00 s"):
        synthesizer.voice([])


def test_speaker_embedding_is_the_mean_of_the_clips(with_vocoder):
    a, b, both = (
        with_vocoder.voice(c).speaker
        for c in ([clip(1.0)], [clip(1.2, 1)], [clip(1.0), clip(1.2, 1)])
    )
    assert both.shape == (1, 6)
    np.testing.assert_allclose(both, (a + b) / 2, atol=1e-6)


def test_clips_are_read_as_the_model_wants_them(tmp_path):
    path = tmp_path / "a.wav"
    soundfile.write(path, np.stack([sine(48000, rate=48000), np.zeros(48000)], 1), 48000)
    wav = load_clip(path)
    assert (wav.dtype, len(wav)) == (np.float32, RATE)
    assert np.abs(np.fft.rfft(wav)).argmax() == 440
    assert abs(np.abs(wav).max() - 0.25) < 0.01  # the mean of the channels
    soundfile.write(path, 4.0 * sine(RATE, amplitude=1.0), RATE, subtype="FLOAT")
    assert np.abs(load_clip(path)).max() <= 1.0


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (np.zeros(100), "silent"),
        (np.zeros(0), "cannot be read as audio: no samples"),
        (np.array([0.1, np.nan]), "non-finite: 1"),
        (None, "cannot be read"),
    ],
)
def test_unusable_reference_files(tmp_path, samples, message):
    path = tmp_path / "a.wav"
    if samples is not None:
        soundfile.write(path, samples, RATE, subtype="FLOAT")
    with pytest.raises(ReferenceClipError, match=rf"a\.wav.*{message}"):
        load_clip(path)


# -- text ------------------------------------------------------------------------------------------


def test_pieces_fit_the_models_text_positions(synthesizer):
    text = "the small red house by the river and a small river by the red house"
    pieces = synthesizer.pieces(text, "en")
    assert len(pieces) > 1
    assert all(len(p.ids) < GPT.max_text_tokens for p in pieces)
    assert " ".join(p.text for p in pieces) == text
    with pytest.raises(ValueError, match="nothing to say"):
        synthesizer.pieces(" ", "en")


@pytest.mark.parametrize("text", ["😀", "…", "?! 😀 --", '"'])
def test_a_text_without_words_is_not_spoken(synthesizer, text):
    with pytest.raises(ValueError, match="no words in the text .*: nothing to say"):
        synthesizer.pieces(text, "en")


@pytest.mark.parametrize("text", ["€", "5", "😀 red"])
def test_what_is_read_out_as_words_is_a_text(synthesizer, text):
    assert [p.text for p in synthesizer.pieces(text, "en")] == [text]


def test_gaps_of_the_vocabulary_are_told_once(synthesizer, caplog):
    synthesizer.pieces("red ж house. " * 30 + "ж", "en")
    assert caplog.text.count("the vocabulary has no 'ж'") == 1


# -- sound -----------------------------------------------------------------------------------------


def test_speech_without_a_vocoder(synthesizer):
    voice = synthesizer.voice([clip(1.0)])
    options = SamplingOptions(max_codes=10)
    (spoken,) = say(synthesizer, "red house", voice, options, seed=3)
    assert len(spoken.generated.codes) == 10
    assert spoken.mel.shape == (40, 80)
    assert (len(spoken.wav), spoken.wav.dtype) == (39 * 256, np.float32)
    assert np.isfinite(spoken.wav).all()
    assert 0 < np.abs(spoken.wav).max() <= 1
    assert spoken.spent_s > 0
    (again,) = say(synthesizer, "red house", voice, options, seed=3)
    np.testing.assert_array_equal(again.wav, spoken.wav)
    (other,) = say(synthesizer, "red house", voice, options, seed=4)
    assert other.generated.codes.tolist() != spoken.generated.codes.tolist()


@pytest.mark.parametrize("candidates", [1, 3])
def test_a_model_that_prefers_start_speaks_all_the_same(parts, synthesizer, candidates):
    """START has no place in the codebook: drawn as a code it would end the synthesis."""
    _, gpt, _ = parts
    bias = gpt.mel_head.bias.numpy()
    gpt.mel_head.bias.assign(bias + 1e4 * (np.arange(len(bias)) == GPT.start_audio))
    try:
        voice, options = (
            synthesizer.voice([clip(1.0)]),
            SamplingOptions(max_codes=10, temperature=2.0, top_k=0, top_p=1.0),
        )
        (spoken,) = say(synthesizer, "red house", voice, options, candidates=candidates)
    finally:
        gpt.mel_head.bias.assign(bias)
    assert len(spoken.wav) == 39 * 256
    assert (spoken.generated.codes < 16).all()


def test_ids_outside_the_codebook_are_left_out_of_the_sound(synthesizer, caplog):
    def spoken(*codes):
        generated = Generated(
            np.array(codes, np.int32), False, np.zeros((len(codes), GPT.width), np.float32)
        )
        return synthesizer.sound(generated, synthesizer.voice([clip(1.0)]))

    wav, mel = spoken(3, 16, 5, -1, 999, 15)
    assert "left out of the sound: 3 ids outside the DVAE's 16 codes: [-1, 16, 999]" in caplog.text
    expected_wav, expected_mel = spoken(3, 5, 15)
    np.testing.assert_array_equal(mel, expected_mel)
    np.testing.assert_array_equal(wav, expected_wav)
    wav, mel = spoken(16, 17)
    assert (len(wav), mel.shape) == (0, (0, 80))
    assert caplog.text.count("left out of the sound") == 2


def test_of_several_candidates_the_likeliest_is_spoken(synthesizer):
    voice, options = (
        synthesizer.voice([clip(1.0)]),
        SamplingOptions(max_codes=10, temperature=1.5, top_k=0, top_p=1.0),
    )
    (first,) = say(synthesizer, "red house", voice, options, seed=3)
    (chosen,) = say(synthesizer, "red house", voice, options, seed=3, candidates=8)
    likelihood = [log_likelihood(synthesizer.gpt, s.generated) for s in (chosen, first)]
    assert likelihood[0] > likelihood[1]
    (again,) = say(synthesizer, "red house", voice, options, seed=3, candidates=8)
    assert chosen.generated.codes.tolist() == again.generated.codes.tolist()


def test_speed_shortens(synthesizer, with_vocoder):
    options = SamplingOptions(max_codes=10)
    voice = synthesizer.voice([clip(1.0)])
    assert len(say(synthesizer, "red", voice, options, speed=2.0)[0].wav) == 19 * 256
    voice = with_vocoder.voice([clip(1.0)])
    lengths = [len(say(with_vocoder, "red", voice, options, speed=s)[0].wav) for s in (1.0, 2.0)]
    assert lengths == [with_vocoder.vocoder.hifigan.num_samples(n) for n in (10, 5)]


def test_speech_with_a_vocoder(with_vocoder):
    """The vocoder gets the states behind the codes, and the speaker of the voice."""
    voice = with_vocoder.voice([clip(1.0)])
    (spoken,) = say(with_vocoder, "red house", voice, SamplingOptions(max_codes=8), seed=3)
    assert (with_vocoder.sample_rate, spoken.mel) == (24000, None)
    expected = with_vocoder.vocoder.sound(
        tf.constant(spoken.generated.states[np.newaxis]), voice.speaker
    )
    np.testing.assert_allclose(spoken.wav, expected, atol=1e-6)
    assert len(spoken.wav) == with_vocoder.vocoder.hifigan.num_samples(8)


def test_a_model_that_stops_at_once_says_nothing(parts, synthesizer):
    _, gpt, _ = parts
    bias = gpt.mel_head.bias.numpy()
    gpt.mel_head.bias.assign(bias + 1e4 * (np.arange(len(bias)) == GPT.stop_audio))
    try:
        (spoken,) = say(synthesizer, "red house", synthesizer.voice([clip(1.0)]), pace=Pace())
    finally:
        gpt.mel_head.bias.assign(bias)
    assert (len(spoken.wav), spoken.mel.shape) == (0, (0, 80))
    assert spoken.generated.stopped
    assert (spoken.draws, spoken.fault) == (3, "nothing was said of a text of 9 characters")


# -- the guard -------------------------------------------------------------------------------------


class Scripted:
    """A sampler that gives codes of these lengths, one after the other; negative: without an
    end."""

    def __init__(self, *lengths: int):
        self.lengths, self.seeds, self.limits = list(lengths), [], []
        self.max_codes = 600

    def generate_best(self, latents, ids, options, seeds):
        self.seeds.append(seeds)
        self.limits.append(options.max_codes)
        n = self.lengths.pop(0)
        count = min(abs(n), options.max_codes or self.max_codes)
        states = np.zeros((count, GPT.width), np.float32)
        return Generated(np.arange(count, dtype=np.int32) % 16, n >= 0, states)


@pytest.fixture
def scripted(synthesizer, monkeypatch):
    def of(*lengths: int) -> Scripted:
        sampler = Scripted(*lengths)
        monkeypatch.setattr(synthesizer, "sampler", sampler)
        return sampler

    return of


PACE = Pace(0.04, 0.1)  # 30 characters: 1.2 s to 4 s, 26 to 86 codes


@pytest.mark.parametrize(
    ("lengths", "chosen", "draws", "fault"),
    [
        ([50], 50, 1, ""),
        ([120, 50], 50, 2, ""),  # runs on
        ([3, 4, 50], 50, 3, ""),  # stops early, twice
        ([120, 95, 150], 95, 3, "runs on: 4.4 s for a text of 30 characters, at most 4.0 s fit"),
        ([3, 20, 5], 20, 3, "stops early: 0.9 s for a text of 30 characters, at least 1.2 s fit"),
        ([-600, 0, 60], 60, 3, ""),  # no end, nothing at all
        (
            [-600, -600, -600],
            174,
            3,
            "no end after 8.1 s for a text of 30 characters: cut off there",
        ),
    ],
)
def test_what_is_too_short_or_too_long_is_drawn_again(
    synthesizer, scripted, lengths, chosen, draws, fault
):
    voice = synthesizer.voice([clip(1.0)])
    (piece,) = synthesizer.pieces("the small red house by a river", "en")
    assert piece.chars == 30
    sampler = scripted(*lengths)
    spoken = synthesizer.say(piece, voice, seed=(7, 2), pace=PACE)
    assert (len(spoken.generated.codes), spoken.draws, spoken.fault) == (chosen, draws, fault)
    drawn = [seed for seeds in sampler.seeds for seed in seeds]
    assert drawn[0] == (7, 2)
    assert len(set(drawn)) == len(drawn) == draws
    assert set(sampler.limits) == {174}  # twice 4 s


def test_greedy_speech_is_not_drawn_again(synthesizer, scripted):
    sampler = scripted(3)
    (piece,) = synthesizer.pieces("the small red house by a river", "en")
    voice = synthesizer.voice([clip(1.0)])
    spoken = synthesizer.say(piece, voice, SamplingOptions(greedy=True), pace=PACE)
    assert (spoken.draws, len(sampler.seeds)) == (1, 1)
    assert spoken.fault.startswith("stops early")


def test_the_draws_of_candidates_differ(synthesizer, scripted):
    sampler = scripted(3, 3, 3)
    (piece,) = synthesizer.pieces("the small red house by a river", "en")
    synthesizer.say(piece, synthesizer.voice([clip(1.0)]), candidates=4, pace=PACE)
    drawn = [seed for seeds in sampler.seeds for seed in seeds]
    assert len(set(drawn)) == len(drawn) == 12


def test_a_stream_is_bounded_and_tells_what_is_wrong(synthesizer, caplog):
    (piece,) = synthesizer.pieces("red", "en")
    voice = synthesizer.voice([clip(1.0)])
    parts = list(synthesizer.stream(piece, voice, pace=Pace(0.01, 0.02)))  # at most 1.06 s
    assert sum(map(len, parts)) <= 22050 * 2 * 1.06 + 2048
    assert "no end after" in caplog.text


def test_v5_what_is_not_finite_is_no_sound(synthesizer, with_vocoder, monkeypatch):
    """Wherever it begins: in the voice, in the model's states, in the DVAE, in the vocoder."""
    voice, options = synthesizer.voice([clip(1.0)]), SamplingOptions(max_codes=10)
    (piece,) = synthesizer.pieces("red house", "en")

    def refused(what: str, synthesizer=synthesizer, voice=voice) -> None:
        with pytest.raises(NotFinite, match=what):
            synthesizer.say(piece, voice, options)
        with pytest.raises(NotFinite, match=what):
            list(synthesizer.stream(piece, voice, options))

    refused("latents are not finite", voice=Voice(np.full_like(voice.latents, np.nan)))
    bad = tf.fill([1, 40, 80], np.float32(np.nan))
    with monkeypatch.context() as patched:
        patched.setattr(synthesizer.dvae, "decode", lambda codes: bad)
        refused("mel is not finite")
        patched.setattr(with_vocoder.vocoder, "sound", lambda *_: np.float32([0, np.inf]))
        refused("sound is not finite", with_vocoder, with_vocoder.voice([clip(1.0)]))
    gamma = next(t for t in synthesizer.gpt.tensors() if "ln_f" in t.key or "final_norm" in t.key)
    before = gamma.variable.numpy()
    gamma.variable.assign(np.full_like(before, np.nan))
    try:
        refused("states are not finite")
    finally:
        gamma.variable.assign(before)


def test_parts_that_do_not_belong_together(parts, tokenizer):
    dims, gpt, dvae = parts
    with pytest.raises(ValueError, match="give a DVAE, or a vocoder"):
        Synthesizer(dims, gpt, None, STATS, tokenizer)
    with pytest.raises(ValueError, match="the DVAE has 12 codes, the model speaks 16"):
        Synthesizer(dims, gpt, Dvae(dataclasses.replace(dims.dvae, num_codes=12)), STATS, tokenizer)
    with pytest.raises(ValueError, match="vocabulary has"):
        Synthesizer(dims.with_vocabulary(99, 3, 0), gpt, dvae, STATS, tokenizer)


# -- streaming -------------------------------------------------------------------------------------


def test_a_stream_has_the_length_of_the_whole_and_its_first_part(with_vocoder):
    voice, options = with_vocoder.voice([clip(1.0)]), SamplingOptions(max_codes=25)
    (whole,) = say(with_vocoder, "red house", voice, options, seed=3)
    (piece,) = with_vocoder.pieces("red house", "en")
    parts = list(with_vocoder.stream(piece, voice, options, (3, 0), every=10))
    samples_of = with_vocoder.vocoder.hifigan.num_samples
    assert [len(p) for p in parts] == [
        samples_of(10) - 1024,
        samples_of(20) - samples_of(10),
        samples_of(25) - samples_of(20),
        1024,
    ]
    joined = np.concatenate(parts)
    assert len(joined) == len(whole.wav)
    # A vocoder looks a few codes ahead: the middle of each part is the whole's, its seams differ a
    # little.
    np.testing.assert_allclose(
        joined[: samples_of(10) - 8000], whole.wav[: samples_of(10) - 8000], atol=1e-5
    )


def test_parts_of_the_same_sound_join_to_it():
    wav = np.sin(np.arange(7000) / 50).astype(np.float32)
    joiner, heard = Joiner(), []
    for length in (500, 900, 2500, 2600, 6000, 7000):  # the first two are shorter than the fade
        heard += joiner.push(wav[:length])
    heard += joiner.finish()
    np.testing.assert_allclose(np.concatenate(heard), wav, atol=1e-6)
    assert len(heard[0]) == 2500 - 1024


def test_parts_are_faded_into_each_other():
    joiner = Joiner()
    (first,) = joiner.push(np.zeros(3000, np.float32))
    (second,) = joiner.push(np.ones(6000, np.float32))
    (third,) = joiner.finish()
    assert (len(first), len(second), len(third)) == (1976, 3000, 1024)
    np.testing.assert_allclose(second[:1024], np.linspace(0, 1, 1024), atol=1e-6)
    assert (second[1024:] == 1).all()


def test_pcm():
    assert (
        pcm16(np.array([0.0, 1.0, -1.0, 2.0]))
        == np.array([0, 32767, -32767, 32767], "<i2").tobytes()
    )
