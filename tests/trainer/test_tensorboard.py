import numpy as np
import pytest
import soundfile
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import metadata

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


def test_the_front_page_and_the_texts(tmp_path):
    """As TensorBoard's own code reads them back."""
    writer = EventWriter(tmp_path)
    writer.front_page({"seed": 1, "model.size": "tiny", "jit": False, "model.dvae": None}, "fa")
    writer.text(5, "samples/a", "سلام دنیا")
    writer.close()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    layout = layout_pb2.Layout.FromString(
        found.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    )
    (category,) = layout.category
    assert len(category.chart) == 13
    assert category.chart[0].multiline.tag == ["^train/audio_ce$", "^eval/audio$"]
    assert found.Tensors("samples/a")[0].tensor_proto.string_val[0].decode() == "سلام دنیا"
    assert found.SummaryMetadata("samples/a").plugin_data.plugin_name == "text"
    content = found.PluginTagToContent("hparams")
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    values = {k: v.WhichOneof("kind") for k, v in start.hparams.items()}
    assert values == {
        "seed": "number_value", "model.size": "string_value", "jit": "bool_value",
        "model.dvae": "string_value",
    }  # fmt: skip
    of = metadata.parse_experiment_plugin_data(content[metadata.EXPERIMENT_TAG])
    assert sorted(i.name for i in of.hparam_infos) == sorted(values)
    assert of.metric_infos[0].name.tag == "eval/audio"


def test_a_tag_is_of_one_kind(tmp_path):
    """TensorBoard shows what a tag was first, and hides the rest without a word."""
    writer = EventWriter(tmp_path)
    writer.text(1, "samples/a/text", "hello")
    writer.picture(1, "samples/a/mel", b"png", 4, 5)
    writer.picture(2, "samples/a/mel", b"png", 4, 5)
    with pytest.raises(ValueError, match="samples/a/text is a text"):
        writer.picture(1, "samples/a/text", b"png", 4, 5)
    writer.close()
    board = EventMultiplexer().AddRunsFromDirectory(str(tmp_path)).Reload()
    shown = MultiplexerDataProvider(board, str(tmp_path))
    where = {"ctx": RequestContext(), "experiment_id": ""}
    texts = shown.list_tensors(**where, plugin_name="text")
    pictures = shown.list_blob_sequences(**where, plugin_name="images")
    assert [list(of) for of in texts.values()] == [["samples/a/text"]]
    assert [list(of) for of in pictures.values()] == [["samples/a/mel"]]
