"""TensorBoard files without TensorFlow: scalars, pictures, sound, texts, and a front page."""

from __future__ import annotations

import io
import os
import socket
import time
import wave
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from trainer.report import board

_FLUSH_S = 5.0


def wav_bytes(samples: np.ndarray, sample_rate: int) -> bytes:
    """float32[N] in [-1, 1] → a mono 16-bit WAV file's bytes; louder samples are clipped."""
    pcm = np.round(np.clip(samples, -1, 1) * 32767).astype("<i2")
    out = io.BytesIO()
    with wave.open(out, "wb") as f:
        f.setnchannels(1)
        f.setsampwidth(2)
        f.setframerate(sample_rate)
        f.writeframes(pcm.tobytes())
    return out.getvalue()


class EventWriter:
    """Writes one event file in `folder`; view with `tensorboard --logdir RUN/tensorboard`."""

    def __init__(self, folder: str | os.PathLike):
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard's own EventFileWriter imports TensorFlow to open a file; the record format is
        # all that is needed.
        self._file = open(
            folder / f"events.out.tfevents.{time.time():.3f}.{socket.gethostname()}.{os.getpid()}",
            "ab",
        )
        self._records = RecordWriter(self._file)
        self._flushed = 0.0
        self._kinds: dict[str, str] = {}
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def _add(self, step: int, values: list[Summary.Value]) -> None:
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _is(self, tag: str, kind: str) -> None:
        """ValueError: the tag is of another kind; TensorBoard would show the first alone."""
        if self._kinds.setdefault(tag, kind) != kind:
            raise ValueError(f"tag {tag} is a {self._kinds[tag]}, and cannot be a {kind}, too")

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        if time.monotonic() - self._flushed > _FLUSH_S:
            self._records.flush()
            self._flushed = time.monotonic()

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Curves, by tag."""
        for tag in values:
            self._is(tag, "curve")
        self._add(step, [Summary.Value(tag=k, simple_value=float(v)) for k, v in values.items()])

    def picture(self, step: int, tag: str, png: bytes, width: int, height: int) -> None:
        """An encoded PNG of `width` x `height` pixels."""
        self._is(tag, "picture")
        image = Summary.Image(encoded_image_string=png, width=width, height=height, colorspace=3)
        self._add(step, [Summary.Value(tag=tag, image=image)])

    def sound(self, step: int, tag: str, samples: np.ndarray, sample_rate: int) -> None:
        """float32[N] mono audio."""
        self._is(tag, "sound")
        audio = Summary.Audio(
            encoded_audio_string=wav_bytes(samples, sample_rate),
            sample_rate=sample_rate,
            num_channels=1,
            length_frames=len(samples),
            content_type="audio/wav",
        )
        self._add(step, [Summary.Value(tag=tag, audio=audio)])

    def text(self, step: int, tag: str, text: str) -> None:
        """A text, for the tab TEXT."""
        self._is(tag, "text")
        self._add(step, [board.text_value(tag, text)])

    def front_page(self, settings: Mapping[str, object], run: str) -> None:
        """The charts that matter first, and the settings: once in a file."""
        self._add(0, [board.layout_value(), *board.hparams_values(settings, run)])

    def close(self) -> None:
        """Flush and close."""
        self._records.close()
