"""Decoded clips to batches of stage 1: crops of the DVAE's mel. One compiled function per shape."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from common.data.plan import PlannedBatch
from common.run.folder import RunFolder
from common.system.stopwatch import Stopwatch
from common.xtts.audio import DvaeMel
from producer.batches.crops import crop_frames, crop_samples, crop_span
from producer.batches.features import StageMaker, feature_digest, on_gpu, usable_clips
from producer.batches.maker import Clip, Made, Work


class DvaeMaker(StageMaker):
    """Stage 1: crops of mel frames, equal to those frames of the whole clip's mel (see
    `producer.batches.maker.Maker`).
    """

    stage = "dvae"

    def __init__(self, run: RunFolder):
        super().__init__(run)
        self._whole = run.config.augment.of == "clip"
        self._mel = DvaeMel(run.mel_stats, self.dims.audio, by_clip=not on_gpu())

    def _shape(self, planned: PlannedBatch) -> tuple[int, int]:
        bucket = self._bucket(planned)
        return bucket.batch_size, bucket.row_len

    def _crop(self, planned: PlannedBatch, row: int, num_samples: int) -> tuple[int, int]:
        frames, audio = self._bucket(planned).row_len, self.dims.audio
        return crop_frames(
            num_samples, int(planned.row_seeds[row]), frames, audio, planned.plan == "train"
        )

    def clips(self, planned: PlannedBatch) -> list[Clip]:
        """The samples under each row's crop; of a clip that is changed the whole, so that the crop
        is a part of the changed clip.

        BatchError: the manifest does not know an utterance.
        """
        clips = []
        for row, u in self._utterances(planned.utterances):
            change = self._change(planned, row, u.id) if self._whole else None
            if change is not None:
                clips.append(Clip(row, u, change=change))
                continue
            start, end = crop_span(
                *self._crop(planned, row, u.num_samples), u.num_samples, self.dims.audio
            )
            clips.append(Clip(row, u, start, end - start))
        return clips

    def _features(self, samples):
        """[B, (F + 3) · hop] -> DVAE mel [B, F, M] in the wire's dtype: the frames whose window
        lies inside.
        """
        mel = self._mel(samples)
        edge = self.dims.audio.win_samples // 2 // self.dims.audio.hop_samples
        return tf.cast(mel[:, edge : mel.shape[1] - edge], self.mel_dtype)

    def begin(
        self,
        planned: PlannedBatch,
        clips: Sequence[Clip],
        decoded: Sequence[np.ndarray | Exception],
    ) -> Work:
        """Towards the arrays of `common.data.batch.DVAE_FIELDS`."""
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

    def _windows(
        self,
        planned: PlannedBatch,
        clips: Sequence[Clip],
        decoded: Sequence[np.ndarray | Exception],
        made: Made,
    ) -> np.ndarray:
        """The samples under every crop, float32[B, (F - 1) · hop + win]; fills in the rows' lengths
        and weights.
        """
        bucket, audio = self._bucket(planned), self.dims.audio
        windows = np.zeros(
            (bucket.batch_size, (bucket.row_len - 1) * audio.hop_samples + audio.win_samples),
            np.float32,
        )
        for clip, part in usable_clips(clips, decoded, made):
            first, n = self._crop(planned, clip.row, clip.utterance.num_samples)
            start, end = crop_span(first, n, clip.utterance.num_samples, audio)
            part = part[start:end] if clip.num_samples is None else part
            seen = crop_samples(part, (start, end), first, n, audio)
            windows[clip.row, : len(seen)] = seen
            made.arrays["num_frames"][clip.row] = n
            made.arrays["weights"][clip.row] = planned.weights[clip.row]
        return windows

    def probe(self) -> str:
        """32 hex digits: mel of a fixed signal on this device, and TensorFlow's version."""
        return feature_digest(self._features(tf.constant(self._probed(16384)[None])))
