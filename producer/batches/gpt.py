"""Decoded clips to batches of stage 2: mels, DVAE codes and the rows around them.

One compiled function per shape and feature.

Shapes: B rows, S samples of the bucket's longest wav, n codes, F mel frames, M mel channels.
Everything is float32 on the device (TensorFloat-32 is switched off); mels travel in the wire's
dtype.
Source: coqui-tts, TTS/tts/layers/xtts/trainer/gpt_trainer.py (GPTTrainer.format_batch_on_device).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from safetensors.numpy import load_file

from common.data.manifest import Utterance
from common.data.plan import PlannedBatch
from common.run.folder import RunFolder
from common.system.errors import BadInput
from common.system.stopwatch import Stopwatch
from common.xtts.audio import CondMel, DvaeMel, lead_samples, prompt_slice
from common.xtts.dvae import Dvae, clip_codes
from common.xtts.weights import WeightsError, load_state_dict
from producer.batches.cache import CodesCache, stamp_of
from producer.batches.features import StageMaker, feature_digest, on_gpu, usable_clips
from producer.batches.maker import BatchError, Clip, Made, Work
from producer.batches.rows import (
    layout_of,
    num_codes,
    pack_row,
    prompt_codes,
    prompt_targets_of_coqui,
)


def load_dvae(run: RunFolder) -> Dvae:
    """The run's DVAE with its weights.

    BadInput: the file is not there, or does not fit the dims.
    """
    dvae = Dvae(run.dims.dvae)
    try:
        load_state_dict(dvae, load_file(run.dvae_weights))
    except FileNotFoundError as e:
        raise BadInput(
            f"{run.dvae_weights} is missing: stage 1 writes it, or model.dvae names it"
        ) from e
    except WeightsError as e:
        raise BadInput(f"{run.dvae_weights}: {e}") from e
    return dvae


def open_cache(run: RunFolder, feature_hash: str, max_codes: int) -> CodesCache | None:
    """The run's store of codes; None where the settings want none, or where a clip's codes depend
    on its batch.
    """
    if not run.config.producers.cache_codes or run.config.batching.padded_codes:
        return None
    return CodesCache(run.path / "cache" / f"codes-{feature_hash[:16]}", max_codes, feature_hash)


class GptMaker(StageMaker):
    """Stage 2: ids, positions, targets, conditioning mel (see `producer.batches.maker.Maker`).

    Codes and conditioning mel are two functions, so that the mel is computed by the same one
    whether or not the codes are known already.
    """

    stage = "gpt"

    def __init__(self, run: RunFolder):
        super().__init__(run)
        self._batching, self._layout = run.config.batching, layout_of(run.config)
        self._changes_clips = run.config.augment.of == "clip"
        self._dvae = load_dvae(run)
        self._dvae_mel = DvaeMel(run.mel_stats, self.dims.audio, by_clip=not on_gpu())
        self._cond_mel = CondMel(run.mel_stats, self.dims.audio, by_clip=not on_gpu())
        self._cache = open_cache(
            run, self.feature_hash, max(b.num_codes for b in self._plans["train"].buckets)
        )
        self._made: set[tuple[int, ...]] = set()
        self._of_any_length = tf.function(
            self._padded_codes, input_signature=[tf.TensorSpec([None, None])], autograph=False
        )

    def _shape(self, planned: PlannedBatch) -> tuple[int, int]:
        bucket = self._bucket(planned)
        return bucket.batch_size, bucket.num_codes

    def compiles(self, planned: PlannedBatch) -> bool:
        """True if making this batch will first compile a function.

        A bucket whose codes were all known until now may surprise.
        """
        return self._shape(planned) not in self._made

    def clips(self, planned: PlannedBatch) -> list[Clip]:
        """Every row's whole utterance, or its conditioning clip alone where the codes are known;
        the conditioning clip, too, where it is of
        another utterance. BatchError: the manifest does not know one.

        At another rate than the features' a part is not to the bit what the resampled whole has
        there, so that the conditioning clip is always a part of its own: the batch must not depend
        on whether the codes were known. Nor must it where recordings are changed: a conditioning
        clip that is changed alone is a part of its own, and of a clip that is changed no codes are
        looked for, nor kept.
        """
        clips = []
        lenders = dict(
            self._utterances(np.where(planned.prompts != planned.utterances, planned.prompts, -1))
        )
        for row, u in self._utterances(planned.utterances):
            codes, change = None, self._change(planned, row, u.id)
            whole_change = change if self._changes_clips else None
            if self._cache is not None and whole_change is None:
                codes = self._cache.get(*self._slot(planned, row, u), stamp_of(u.path))
            if codes is None:
                clips.append(Clip(row, u, change=whole_change))
            apart = change is not None or u.source_rate != self.dims.audio.sample_rate
            if row in lenders:
                lender = lenders[row]
                at = self._prompt(planned, row, lender.num_samples)
                change = self._change(planned, row, lender.id)
                clips.append(Clip(row, lender, *at, codes, row_utterance=u, change=change))
            elif codes is not None or (apart and whole_change is None):
                at = self._prompt(planned, row, u.num_samples)
                clips.append(Clip(row, u, *at, codes, change=change))
        return clips

    def _prompt(self, planned: PlannedBatch, row: int, num_samples: int) -> tuple[int, int]:
        """Where the row's conditioning clip lies in the utterance that it is cut from, of
        `num_samples`: (start, length) in samples.
        """
        audio, training, lent = (
            self.dims.audio,
            planned.plan == "train",
            planned.prompts[row] != planned.utterances[row],
        )
        return prompt_slice(
            num_samples, int(planned.row_seeds[row]), audio, training, whole=bool(lent)
        )

    def _lead(self, planned: PlannedBatch, row: int) -> int:
        """Samples of silence before the row's utterance in its codes."""
        return lead_samples(
            int(planned.row_seeds[row]),
            self._batching.code_phases,
            self.dims.audio,
            planned.plan == "train",
        )

    def _slot(self, planned: PlannedBatch, row: int, utterance: Utterance) -> tuple[int, int]:
        """(where the cache keeps the row's codes, how many there are): an utterance has one set for
        each phase.
        """
        lead, audio = self._lead(planned, row), self.dims.audio
        slot = utterance.id * self._batching.code_phases + lead // audio.hop_samples
        return slot, num_codes(lead + utterance.num_samples, audio.samples_per_code)

    def _codes(self, wav):
        """[B, S + 8192] -> int32 [B, S / 1024]."""
        return clip_codes(self._dvae, self._dvae_mel, wav, self.dims.audio)

    def _padded_codes(self, wav):
        """[B, W] of any W, the batch's longest clip -> int32 [B, W // 1024 + 1], as XTTS's trainer
        computes them.
        """
        return self._dvae.codes(self._dvae_mel(wav))

    def _cond(self, cond):
        """[B, cond_max] -> conditioning mel [B, F, M] in the wire's dtype."""
        return tf.cast(self._cond_mel(cond), self.mel_dtype)

    def begin(
        self,
        planned: PlannedBatch,
        clips: Sequence[Clip],
        decoded: Sequence[np.ndarray | Exception],
    ) -> Work:
        """Towards the arrays of `common.data.batch.GPT_FIELDS`.

        BatchError: a row does not fit its bucket.
        """
        watch, made = Stopwatch(), Made(self._empty(planned))
        bucket, audio = self._bucket(planned), self.dims.audio
        with watch.part("pack"):
            usable = usable_clips(clips, decoded, made)
            wholes = {c.row: samples for c, samples in usable if c.num_samples is None}
            parts = {c.row: samples for c, samples in usable if c.num_samples is not None}
            rows = {c.row: c.row_utterance or c.utterance for c, _ in usable}
            codes = {c.row: c.codes for c, _ in usable if c.codes is not None}
            kept = {c.row for c, _ in usable if c.num_samples is None and c.change is None}
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
                    codes[row] = all_codes[row, : self._slot(planned, row, rows[row])[1]]
                    if row in kept:
                        self._keep(planned, row, rows[row], codes[row])
                for row, utterance in rows.items():
                    self._pack(made, planned, row, utterance, codes[row], is_last=row == max(rows))
                    made.arrays["cond_mel"][row] = cond_mel[row]
            made.spent_s = watch.take()
            return made

        return Work(compute, finish)

    def _waveforms(
        self, planned: PlannedBatch, wholes: dict[int, np.ndarray], rows: dict[int, Utterance]
    ) -> np.ndarray:
        """float32[B, S + 8192] of the clips whose codes are not known yet, as long as the longest
        with `padded_codes`.
        """
        bucket, audio = self._bucket(planned), self.dims.audio
        wav = np.zeros((bucket.batch_size, bucket.num_samples + audio.pad_samples), np.float32)
        longest = 0
        for row, samples in wholes.items():
            lead = self._lead(planned, row)
            end = lead + len(samples)
            if end > bucket.num_samples:
                raise BatchError(
                    f"utterance {rows[row].id}: {end} samples, its bucket has {bucket.num_samples}"
                )
            wav[row, lead:end] = samples
            longest = max(longest, end)
        return wav[:, :longest] if self._batching.padded_codes else wav

    def _all_codes(self, planned: PlannedBatch, wav: np.ndarray) -> np.ndarray:
        """int32[B, …], a row's codes first."""
        if self._batching.padded_codes:
            return self._of_any_length(tf.constant(wav)).numpy()
        return self._call(self._shape(planned), self._codes, wav)

    def _keep(
        self, planned: PlannedBatch, row: int, utterance: Utterance, codes: np.ndarray
    ) -> None:
        """Put a row's codes into the cache, if there is one."""
        if self._cache is not None:
            slot, _ = self._slot(planned, row, utterance)
            self._cache.put(slot, codes, stamp_of(utterance.path))

    def _pack(
        self,
        made: Made,
        planned: PlannedBatch,
        row: int,
        utterance: Utterance,
        codes: np.ndarray,
        is_last: bool,
    ) -> None:
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
        """32 hex digits: codes and conditioning mel of a fixed signal on this device, and
        TensorFlow's version.
        """
        audio = self.dims.audio
        wav = np.zeros((1, 16 * audio.samples_per_code + audio.pad_samples), np.float32)
        wav[0, : 16 * audio.samples_per_code] = self._probed(16 * audio.samples_per_code)
        cond = np.zeros((1, audio.cond_max_samples), np.float32)
        cond[0, : audio.cond_min_samples] = self._probed(audio.cond_min_samples)
        return feature_digest(self._codes(tf.constant(wav)), self._cond(tf.constant(cond)))
