"""TensorBoard's front page for a run: the curves that matter first, and the settings as hparams."""

from __future__ import annotations

import time
from collections.abc import Mapping

from google.protobuf import struct_pb2
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2

# (title, tags as regular expressions): in the order in which one looks.
CHARTS = (
    ("audio codes: cross-entropy", ("train/audio_ce", "eval/audio")),
    ("text: cross-entropy", ("train/text_ce", "eval/text")),
    ("held-out audio codes by language", ("quality/audio_ce_by_language/.*",)),
    ("voice similarity", ("quality/similarity",)),
    ("understood by a recogniser", ("quality/[cw]er", "quality/[cw]er_recordings")),
    ("loss", ("train/loss",)),
    ("stage 1: reconstruction error", ("train/recon", "eval/recon")),
    ("stage 1: codes in use, of a batch", ("train/perplexity", "eval/perplexity")),
    ("learning rate", ("train/learning_rate",)),
    ("gradient norm", ("train/grad_norm",)),
    ("time of a step, ms", ("speed/step_ms",)),
    ("waiting for data, ms a step", ("speed/wait_ms",)),
    ("batches that wait", ("speed/ready", "speed/target")),
)
RESULTS = ("eval/audio", "eval/text", "eval/recon")


def text_value(tag: str, text: str) -> Summary.Value:
    """A text, for the tab TEXT."""
    return _string_value(tag, "text", text.encode())


def layout_value() -> Summary.Value:
    """CHARTS, for the tab CUSTOM SCALARS."""
    charts = [
        layout_pb2.Chart(
            title=title,
            multiline=layout_pb2.MultilineChartContent(tag=[f"^{tag}$" for tag in tags]),
        )
        for title, tags in CHARTS
    ]
    category = layout_pb2.Category(title="what matters first", chart=charts)
    layout = layout_pb2.Layout(category=[category])
    return _string_value("custom_scalars__config__", "custom_scalars", layout.SerializeToString())


def hparams_values(settings: Mapping[str, object], run: str) -> list[Summary.Value]:
    """Settings, for the tab HPARAMS, with the held-out losses as what they lead to."""
    start = plugin_data_pb2.SessionStartInfo(group_name=run, start_time_secs=time.time())
    for key, value in settings.items():
        start.hparams[key].CopyFrom(_plain(value))
    experiment = api_pb2.Experiment(
        hparam_infos=[api_pb2.HParamInfo(name=key) for key in settings],
        metric_infos=[api_pb2.MetricInfo(name=api_pb2.MetricName(tag=tag)) for tag in RESULTS],
        time_created_secs=time.time(),
    )
    return [
        _hparams_value("_hparams_/experiment", experiment=experiment),
        _hparams_value("_hparams_/session_start_info", session_start_info=start),
    ]


def _hparams_value(tag: str, **content) -> Summary.Value:
    data = plugin_data_pb2.HParamsPluginData(version=0, **content).SerializeToString()
    return _string_value(tag, "hparams", b"", data)  # the tab reads the metadata alone


def _string_value(tag: str, plugin: str, value: bytes, content: bytes = b"") -> Summary.Value:
    about = SummaryMetadata.PluginData(plugin_name=plugin, content=content)
    tensor = TensorProto(dtype=DT_STRING, string_val=[value])
    tensor.tensor_shape.dim.add().size = 1
    return Summary.Value(tag=tag, tensor=tensor, metadata=SummaryMetadata(plugin_data=about))


def _plain(value: object) -> struct_pb2.Value:
    if isinstance(value, bool):
        return struct_pb2.Value(bool_value=value)
    if isinstance(value, (int, float)):
        return struct_pb2.Value(number_value=value)
    return struct_pb2.Value(string_value="" if value is None else str(value))
