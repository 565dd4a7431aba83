import numpy as np
import soundfile
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.report.tensorboard import EventWriter, wav_bytes


def test_tensorboard_reads_back_what_was_written(tmp_path):
    events = EventWriter(tmp_path)
    for s in (1, 2, 3):
        events.scalars(s, {"train/loss": 10.0 - s})
    tone = 0.5 * np.sin(np.arange(22050) * 2 * np.pi * 440 / 22050)
    events.sound(3, "sample/0", tone, 22050)
    events.picture(3, "mel/0", b"png", 4, 5)
    events.close()
    events = EventAccumulator(str(tmp_path), size_guidance={"audio": 0, "images": 0}).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [
        (1, 9.0),
        (2, 8.0),
        (3, 7.0),
    ]
    assert events.Images("mel/0")[0].encoded_image_string == b"png"
    (tmp_path / "a.wav").write_bytes(events.Audio("sample/0")[0].encoded_audio_string)
    samples, rate = soundfile.read(tmp_path / "a.wav")
    assert rate == 22050
    np.testing.assert_allclose(samples, tone, atol=1 / 16000)


def test_loud_samples_are_clipped_not_wrapped(tmp_path):
    (tmp_path / "a.wav").write_bytes(wav_bytes(np.array([2.0, -2.0, 0.0]), 8000))
    samples, _ = soundfile.read(tmp_path / "a.wav")
    np.testing.assert_allclose(samples, [1, -1, 0], atol=1e-4)
