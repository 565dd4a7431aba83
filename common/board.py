"""TensorBoard files without TensorFlow: scalars, pictures and sound."""

from __future__ import annotations

import io
import os
import time
import wave

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


def wav_bytes(samples: np.ndarray, sample_rate: int) -> bytes:
    """float32[N] in [-1, 1] → a mono 16-bit WAV file's bytes; louder samples are clipped."""
    pcm = (np.clip(samples, -1, 1) * 32767).astype("<i2")
    out = io.BytesIO()
    with wave.open(out, "wb") as f:
        f.setnchannels(1)
        f.setsampwidth(2)
        f.setframerate(sample_rate)
        f.writeframes(pcm.tobytes())
    return out.getvalue()


class Board:
    """Writes one event file in `folder`; view with `tensorboard --logdir RUN/tensorboard`."""

    def __init__(self, folder: str | os.PathLike):
        self._writer = EventFileWriter(str(folder), max_queue_size=100, flush_secs=5)

    def _add(self, step: int, values: list[Summary.Value]) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Curves, by tag."""
        self._add(step, [Summary.Value(tag=k, simple_value=float(v)) for k, v in values.items()])

    def picture(self, step: int, tag: str, png: bytes, width: int, height: int) -> None:
        """An encoded PNG of `width` x `height` pixels."""
        image = Summary.Image(encoded_image_string=png, width=width, height=height, colorspace=3)
        self._add(step, [Summary.Value(tag=tag, image=image)])

    def sound(self, step: int, tag: str, samples: np.ndarray, sample_rate: int) -> None:
        """float32[N] mono audio."""
        audio = Summary.Audio(
            encoded_audio_string=wav_bytes(samples, sample_rate),
            sample_rate=sample_rate,
            num_channels=1,
            length_frames=len(samples),
            content_type="audio/wav",
        )
        self._add(step, [Summary.Value(tag=tag, audio=audio)])

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
