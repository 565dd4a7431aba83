"""Decoded clips to batches on the device: mels, DVAE codes and the rows around them. One compiled function per shape and feature.

Shapes: B rows, S samples of the bucket's longest wav, n codes, F mel frames, M mel channels. Everything is float32 on the device
(TensorFloat-32 is switched off); mels travel in the wire's dtype.
Source: coqui-tts, TTS/tts/layers/xtts/trainer/gpt_trainer.py (GPTTrainer.format_batch_on_device).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
import xxhash
from safetensors.numpy import load_file

from common.batch import empty_batch
from common.config import Config
from common.errors import BadInput
from common.manifest import Utterance
from common.plan import PlannedBatch
from common.run import RunFolder
from common.stopwatch import Stopwatch
from common.xtts.audio import CondMel, DvaeMel, lead_samples, prompt_slice
from common.xtts.dvae import Dvae, clip_codes
from common.xtts.weights import WeightsError, load_state_dict
from producer.cache import CodesCache, stamp_of
from producer.crops import crop_frames, crop_samples, crop_span
from producer.maker import BatchError, Clip, Made, Work
from producer.rows import layout_of, num_codes, pack_row, prompt_codes, prompt_targets_of_coqui


def configure_tensorflow(config: Config) -> None:
    """Settings that decide the bits of the features, besides the threads; once per process, before a function is traced."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    if config.deterministic:
        tf.random.set_seed(config.seed)
        tf.config.experimental.enable_op_determinism()


def on_gpu() -> bool:
    """Whether this process computes on a GPU."""
    return bool(tf.config.list_logical_devices("GPU"))


def load_dvae(run: RunFolder) -> Dvae:
    """The run's DVAE with its weights. BadInput: the file is not there, or does not fit the dims."""
    dvae = Dvae(run.dims.dvae)
    try:
        load_state_dict(dvae, load_file(run.dvae_weights))
    except FileNotFoundError as e:
        raise BadInput(f"{run.dvae_weights} is missing: stage 1 writes it, or model.dvae names it") from e
    except WeightsError as e:
        raise BadInput(f"{run.dvae_weights}: {e}") from e
    return dvae


class _StageMaker(ABC):
    """What both stages share: plans, manifest, compiled functions by shape."""

    stage: str

    def __init__(self, run: RunFolder):
        config = run.config
        self.dims, self.mel_dtype = run.dims, config.transport.mel_dtype
        self.feature_hash = run.feature_hash(self.stage)
        self.num_traces = 0
        self._manifest = run.manifest
        self._plans = {name: run.plan(self.stage, name) for name in ("train", "eval")}
        self._jit = bool(config.jit) and on_gpu()
        self._functions: dict[tuple[int, ...], tf.types.experimental.ConcreteFunction] = {}

    def plan(self, name: str, g: int) -> PlannedBatch:
        """Batch `g` of plan `name`. IndexError: there is none; KeyError: no such plan."""
        return self._plans[name].batch(g)

    @abstractmethod
    def begin(self, planned: PlannedBatch, clips: Sequence[Clip], decoded: Sequence[np.ndarray | Exception]) -> Work:
        """See `producer.maker.Maker`."""

    def make(self, planned: PlannedBatch, clips: Sequence[Clip], decoded: Sequence[np.ndarray | Exception]) -> Made:
        """The whole work, at once."""
        return self.begin(planned, clips, decoded).at_once()

    def _bucket(self, planned: PlannedBatch):
        return self._plans[planned.plan].buckets[planned.bucket]

    @abstractmethod
    def _shape(self, planned: PlannedBatch) -> tuple[int, ...]:
        """What the compiled function depends on."""

    def compiles(self, planned: PlannedBatch) -> bool:
        """True if making this batch will first compile a function."""
        return self._shape(planned) not in self._functions

    def _call(self, shape: tuple[int, ...], body, values: np.ndarray) -> np.ndarray:
        """`body` of one float32 array, through the function compiled for `shape`."""
        if shape not in self._functions:

            def traced(*args):
                self.num_traces += 1
                return body(*args)

            # Concrete at once: calling many tf.functions of one source line makes TensorFlow warn of retracing.
            function = tf.function(traced, input_signature=[tf.TensorSpec(values.shape)], jit_compile=self._jit, autograph=False)
            self._functions[shape] = function.get_concrete_function()
        return self._functions[shape](tf.constant(values)).numpy()

    def _utterances(self, ids: np.ndarray) -> list[tuple[int, Utterance]]:
        """(row, utterance) of the rows whose id int64[B] is none of padding."""
        rows = np.flatnonzero(ids >= 0)
        try:
            return list(zip(rows.tolist(), self._manifest.utterances(ids[rows]), strict=True))
        except KeyError as e:
            raise BatchError(f"plan and manifest disagree: {e.args[0]}") from e

    def _empty(self, planned: PlannedBatch) -> dict[str, np.ndarray]:
        return empty_batch(self.stage, self._bucket(planned), self.dims, self.mel_dtype)


def _usable(clips: Sequence[Clip], decoded: Sequence[np.ndarray | Exception], made: Made) -> list[tuple[Clip, np.ndarray]]:
    """Clips that have the samples they should have, of rows that lack none; the other rows are listed in `made.bad`."""
    usable, bad = [], {}
    for clip, samples in zip(clips, decoded, strict=True):
        expected = clip.utterance.num_samples - clip.start if clip.num_samples is None else clip.num_samples
        if isinstance(samples, Exception):
            bad.setdefault(clip.row, (clip.utterance.id, str(samples)))
        elif len(samples) != expected:
            reason = f"{clip.utterance.path}: {len(samples)} samples, the manifest says {expected}; scan again"
            bad.setdefault(clip.row, (clip.utterance.id, reason))
        else:
            usable.append((clip, samples))
    made.bad += bad.values()
    return [(clip, samples) for clip, samples in usable if clip.row not in bad]


def open_cache(run: RunFolder, feature_hash: str, max_codes: int) -> CodesCache | None:
    """The run's store of codes; None where the settings want none, or where a clip's codes depend on its batch."""
    if not run.config.producers.cache_codes or run.config.batching.padded_codes:
        return None
    return CodesCache(run.path / "cache" / f"codes-{feature_hash[:16]}", max_codes, feature_hash)


class GptMaker(_StageMaker):
    """Stage 2: ids, positions, targets, conditioning mel (see `producer.maker.Maker`).

    Codes and conditioning mel are two functions, so that the mel is computed by the same one whether or not the codes are known already.
    """

    stage = "gpt"

    def __init__(self, run: RunFolder):
        super().__init__(run)
        self._batching, self._layout = run.config.batching, layout_of(run.config)
        self._dvae = load_dvae(run)
        self._dvae_mel = DvaeMel(run.mel_stats, self.dims.audio, by_clip=not on_gpu())
        self._cond_mel = CondMel(run.mel_stats, self.dims.audio, by_clip=not on_gpu())
        self._cache = open_cache(run, self.feature_hash, max(b.num_codes for b in self._plans["train"].buckets))
        self._made: set[tuple[int, ...]] = set()
        self._of_any_length = tf.function(self._padded_codes, input_signature=[tf.TensorSpec([None, None])], autograph=False)

    def _shape(self, planned: PlannedBatch) -> tuple[int, int]:
        bucket = self._bucket(planned)
        return bucket.batch_size, bucket.num_codes

    def compiles(self, planned: PlannedBatch) -> bool:
        """True if making this batch will first compile a function. A bucket whose codes were all known until now may surprise."""
        return self._shape(planned) not in self._made

    def clips(self, planned: PlannedBatch) -> list[Clip]:
        """Every row's whole utterance, or its conditioning clip alone where the codes are known; the conditioning clip, too, where it is of
        another utterance. BatchError: the manifest does not know one.

        At another rate than the features' a part is not to the bit what the resampled whole has there, so that the conditioning clip is
        always a part of its own: the batch must not depend on whether the codes were known.
        """
        clips = []
        lenders = dict(self._utterances(np.where(planned.prompts != planned.utterances, planned.prompts, -1)))
        for row, u in self._utterances(planned.utterances):
            codes = None
            if self._cache is not None:
                codes = self._cache.get(*self._slot(planned, row, u), stamp_of(u.path))
            if codes is None:
                clips.append(Clip(row, u))
            if row in lenders:
                lender = lenders[row]
                clips.append(Clip(row, lender, *self._prompt(planned, row, lender.num_samples), codes, row_utterance=u))
            elif codes is not None or u.source_rate != self.dims.audio.sample_rate:
                clips.append(Clip(row, u, *self._prompt(planned, row, u.num_samples), codes))
        return clips

    def _prompt(self, planned: PlannedBatch, row: int, num_samples: int) -> tuple[int, int]:
        """Where the row's conditioning clip lies in the utterance that it is cut from, of `num_samples`: (start, length) in samples."""
        audio, training, lent = self.dims.audio, planned.plan == "train", planned.prompts[row] != planned.utterances[row]
        return prompt_slice(num_samples, int(planned.row_seeds[row]), audio, training, whole=bool(lent))

    def _lead(self, planned: PlannedBatch, row: int) -> int:
        """Samples of silence before the row's utterance in its codes."""
        return lead_samples(int(planned.row_seeds[row]), self._batching.code_phases, self.dims.audio, planned.plan == "train")

    def _slot(self, planned: PlannedBatch, row: int, utterance: Utterance) -> tuple[int, int]:
        """(where the cache keeps the row's codes, how many there are): an utterance has one set for each phase."""
        lead, audio = self._lead(planned, row), self.dims.audio
        slot = utterance.id * self._batching.code_phases + lead // audio.hop_samples
        return slot, num_codes(lead + utterance.num_samples, audio.samples_per_code)

    def _codes(self, wav):
        """[B, S + 8192] -> int32 [B, S / 1024]."""
        return clip_codes(self._dvae, self._dvae_mel, wav, self.dims.audio)

    def _padded_codes(self, wav):
        """[B, W] of any W, the batch's longest clip -> int32 [B, W // 1024 + 1], as XTTS's trainer computes them."""
        return self._dvae.codes(self._dvae_mel(wav))

    def _cond(self, cond):
        """[B, cond_max] -> conditioning mel [B, F, M] in the wire's dtype."""
        return tf.cast(self._cond_mel(cond), self.mel_dtype)

    def begin(self, planned: PlannedBatch, clips: Sequence[Clip], decoded: Sequence[np.ndarray | Exception]) -> Work:
        """Towards the arrays of `common.batch.GPT_FIELDS`. BatchError: a row does not fit its bucket."""
        watch, made = Stopwatch(), Made(self._empty(planned))
        bucket, audio = self._bucket(planned), self.dims.audio
        with watch.part("pack"):
            usable = _usable(clips, decoded, made)
            wholes = {c.row: samples for c, samples in usable if c.num_samples is None}
            parts = {c.row: samples for c, samples in usable if c.num_samples is not None}
            rows = {c.row: c.row_utterance or c.utterance for c, _ in usable}
            codes = {c.row: c.codes for c, _ in usable if c.codes is not None}
            made.num_cached = len(codes)
            cond = np.zeros((bucket.batch_size, audio.cond_max_samples), np.float32)
            for row, utterance in rows.items():
                if row in parts:
                    cond[row, : len(parts[row])] = parts[row]
                else:
                    at, length = self._prompt(planned, row, utterance.num_samples)
                    cond[row, :length] = wholes[row][at : at + length]
            wav = self._waveforms(planned, wholes, rows) if wholes else None

        def compute() -> tuple[np.ndarray | None, np.ndarray]:
            all_codes = None
            if wav is not None:
                with watch.part("codes"):
                    all_codes = self._all_codes(planned, wav)
            with watch.part("mel"):
                cond_mel = self._call(("cond", bucket.batch_size), self._cond, cond)
            self._made.add(self._shape(planned))
            return all_codes, cond_mel

        def finish(features: tuple[np.ndarray | None, np.ndarray]) -> Made:
            all_codes, cond_mel = features
            with watch.part("pack"):
                for row in wholes:
                    codes[row] = self._known_from_now_on(planned, row, rows[row], all_codes)
                for row, utterance in rows.items():
                    self._pack(made, planned, row, utterance, codes[row], is_last=row == max(rows))
                    made.arrays["cond_mel"][row] = cond_mel[row]
            made.spent_s = watch.take()
            return made

        return Work(compute, finish)

    def _waveforms(self, planned: PlannedBatch, wholes: dict[int, np.ndarray], rows: dict[int, Utterance]) -> np.ndarray:
        """float32[B, S + 8192] of the clips whose codes are not known yet, as long as the longest with `padded_codes`."""
        bucket, audio = self._bucket(planned), self.dims.audio
        wav = np.zeros((bucket.batch_size, bucket.num_samples + audio.pad_samples), np.float32)
        longest = 0
        for row, samples in wholes.items():
            lead = self._lead(planned, row)
            end = lead + len(samples)
            if end > bucket.num_samples:
                raise BatchError(f"utterance {rows[row].id}: {end} samples, its bucket has {bucket.num_samples}")
            wav[row, lead:end] = samples
            longest = max(longest, end)
        return wav[:, :longest] if self._batching.padded_codes else wav

    def _all_codes(self, planned: PlannedBatch, wav: np.ndarray) -> np.ndarray:
        """int32[B, …], a row's codes first."""
        if self._batching.padded_codes:
            return self._of_any_length(tf.constant(wav)).numpy()
        return self._call(self._shape(planned), self._codes, wav)

    def _known_from_now_on(self, planned: PlannedBatch, row: int, utterance: Utterance, all_codes: np.ndarray) -> np.ndarray:
        """int32[n] of a row whose codes were computed."""
        slot, n = self._slot(planned, row, utterance)
        codes = all_codes[row, :n]
        if self._cache is not None:
            self._cache.put(slot, codes, stamp_of(utterance.path))
        return codes

    def _pack(self, made: Made, planned: PlannedBatch, row: int, utterance: Utterance, codes: np.ndarray, is_last: bool) -> None:
        hidden, own_prompt = None, planned.prompts[row] == planned.utterances[row]
        if planned.plan == "train" and self._batching.mask_prompt and own_prompt:
            at, length = self._prompt(planned, row, utterance.num_samples)
            at += self._lead(planned, row)
            if self._batching.mask_prompt != "last_row":
                hidden = prompt_codes(at, length, len(codes), self.dims.audio.samples_per_code)
            elif is_last:
                hidden = prompt_targets_of_coqui(at, length)
        pack_row(made.arrays, row, utterance.tokens, codes, hidden, self.dims.gpt, self._layout)
        made.arrays["weights"][row] = planned.weights[row]

    def probe(self) -> str:
        """32 hex digits: codes and conditioning mel of a fixed signal on this device, and TensorFlow's version."""
        audio = self.dims.audio
        wav = np.zeros((1, 16 * audio.samples_per_code + audio.pad_samples), np.float32)
        wav[0, : 16 * audio.samples_per_code] = probe_signal(16 * audio.samples_per_code)
        cond = np.zeros((1, audio.cond_max_samples), np.float32)
        cond[0, : audio.cond_min_samples] = probe_signal(audio.cond_min_samples)
        return _digest(self._codes(tf.constant(wav)), self._cond(tf.constant(cond)))


class DvaeMaker(_StageMaker):
    """Stage 1: crops of mel frames, equal to those frames of the whole clip's mel (see `producer.maker.Maker`)."""

    stage = "dvae"

    def __init__(self, run: RunFolder):
        super().__init__(run)
        self._mel = DvaeMel(run.mel_stats, self.dims.audio, by_clip=not on_gpu())

    def _shape(self, planned: PlannedBatch) -> tuple[int, int]:
        bucket = self._bucket(planned)
        return bucket.batch_size, bucket.row_len

    def _crop(self, planned: PlannedBatch, row: int, num_samples: int) -> tuple[int, int]:
        frames, audio = self._bucket(planned).row_len, self.dims.audio
        return crop_frames(num_samples, int(planned.row_seeds[row]), frames, audio, planned.plan == "train")

    def clips(self, planned: PlannedBatch) -> list[Clip]:
        """The samples under each row's crop. BatchError: the manifest does not know an utterance."""
        clips = []
        for row, u in self._utterances(planned.utterances):
            start, end = crop_span(*self._crop(planned, row, u.num_samples), u.num_samples, self.dims.audio)
            clips.append(Clip(row, u, start, end - start))
        return clips

    def _features(self, samples):
        """[B, (F + 3) · hop] -> DVAE mel [B, F, M] in the wire's dtype: the frames whose window lies inside."""
        mel = self._mel(samples)
        edge = self.dims.audio.win_samples // 2 // self.dims.audio.hop_samples
        return tf.cast(mel[:, edge : mel.shape[1] - edge], self.mel_dtype)

    def begin(self, planned: PlannedBatch, clips: Sequence[Clip], decoded: Sequence[np.ndarray | Exception]) -> Work:
        """Towards the arrays of `common.batch.DVAE_FIELDS`."""
        watch, made = Stopwatch(), Made(self._empty(planned))
        with watch.part("pack"):
            windows = self._windows(planned, clips, decoded, made)

        def compute() -> np.ndarray:
            with watch.part("mel"):
                return self._call(self._shape(planned), self._features, windows)

        def finish(mel: np.ndarray) -> Made:
            with watch.part("pack"):
                for row in np.flatnonzero(made.arrays["weights"]):
                    n = made.arrays["num_frames"][row]
                    made.arrays["mel"][row, :n] = mel[row, :n]
            made.spent_s = watch.take()
            return made

        return Work(compute, finish)

    def _windows(self, planned: PlannedBatch, clips: Sequence[Clip], decoded: Sequence[np.ndarray | Exception], made: Made) -> np.ndarray:
        """The samples under every crop, float32[B, (F - 1) · hop + win]; fills in the rows' lengths and weights."""
        bucket, audio = self._bucket(planned), self.dims.audio
        windows = np.zeros((bucket.batch_size, (bucket.row_len - 1) * audio.hop_samples + audio.win_samples), np.float32)
        for clip, part in _usable(clips, decoded, made):
            first, n = self._crop(planned, clip.row, clip.utterance.num_samples)
            seen = crop_samples(part, (clip.start, clip.start + len(part)), first, n, audio)
            windows[clip.row, : len(seen)] = seen
            made.arrays["num_frames"][clip.row] = n
            made.arrays["weights"][clip.row] = planned.weights[clip.row]
        return windows

    def probe(self) -> str:
        """32 hex digits: mel of a fixed signal on this device, and TensorFlow's version."""
        return _digest(self._features(tf.constant(probe_signal(16384)[None])))


def probe_signal(num_samples: int) -> np.ndarray:
    """float32[num_samples] within [-1, 1]: a sum of integer-phase triangle waves, so that no libm decides its bits."""
    t = np.arange(num_samples, dtype=np.int64)
    waves = [np.abs((t * step) % 65536 - 32768).astype(np.float32) / 16384 - 1 for step in (601, 2311, 7919)]
    return (waves[0] / 2 + waves[1] / 4 + waves[2] / 4).astype(np.float32)


def _digest(*tensors: tf.Tensor) -> str:
    h = xxhash.xxh3_128(tf.__version__.encode())
    for t in tensors:
        h.update(np.ascontiguousarray(t.numpy()).tobytes())
    return h.hexdigest()


MAKERS = {"gpt": GptMaker, "dvae": DvaeMaker}
