"""The metric names, and the TensorBoard sink read back with TensorBoard's own reader."""

from __future__ import annotations

import io
import re
import sys

import numpy as np
import pytest
from PIL import Image
from tensorboard.plugins.custom_scalar import layout_pb2, metadata
from tensorboard.summary.writer import event_file_writer

from kfac_bench.errors import UsageError
from kfac_bench.record.events import (
    Checkpointed,
    Evaluated,
    Predicted,
    Resumed,
    RunEnded,
    RunStarted,
    TargetReached,
    Trained,
)
from kfac_bench.record.sinks.file_views import TensorboardSink
from kfac_bench.record.sinks.panels import SECTIONS
from kfac_bench.record.sinks.view import ShownRun, metrics_of


def trained(step: int, loss: float) -> Trained:
    return Trained(
        step=step,
        train_s=0.5 * step,
        epoch=0.25,
        loss=loss,
        lr=0.1,
        examples_per_s=100.0,
        nu=0.5,
        cosine={"a.b": 0.25, "c": 1.0, "d": 0.5},
        stage_s={"factors": 0.01},
        damping=0.03,
        failed_decompositions=2,
        dropped_statistics=0,
        stage_mean_s={"Decompose": 0.1},
        condition={"a.b": 30.0, "c": 4.0},
        step_mean_s=0.25,
    )


@pytest.fixture(autouse=True)
def _order_of_files(monkeypatch):
    """The files of one second and process are read in the order of the text of a counter."""
    counter = event_file_writer.AtomicCounter(0)
    monkeypatch.setattr(event_file_writer, "_global_uid", counter)


def test_names_are_the_documented_ones():
    assert metrics_of(trained(4, 2.0)) == {
        "step": 4,
        "train_s": 2.0,
        "epoch": 0.25,
        "train/loss": 2.0,
        "train/lr": 0.1,
        "train/examples_per_s": 100.0,
        "train/epoch": 0.25,
        "kfac/nu": 0.5,
        "kfac/damping": 0.03,
        "kfac/failed_decompositions": 2,
        "kfac/dropped_statistics": 0,
        "kfac/cosine/a.b": 0.25,
        "kfac/cosine/c": 1.0,
        "kfac/cosine/d": 0.5,
        "kfac/cosine_min": 0.25,
        "kfac/cosine_median": 0.5,
        "kfac/condition/a.b": 30.0,
        "kfac/condition/c": 4.0,
        "kfac/condition_max": 30.0,
        "kfac/stage_s/factors": 0.01,
        "kfac/stage_mean_s/Decompose": 0.1,
        "train/step_mean_s": 0.25,
        "train/besides_kfac_s": 0.15,
    }
    without_kfac = metrics_of(Trained(1, 1.0, 1.0, 1.0, 1.0, 1.0))
    assert not [name for name in without_kfac if name.startswith("kfac")]
    assert metrics_of(Evaluated(3, 1.5, 0.5, {"accuracy": 0.9})) == {
        "step": 3,
        "train_s": 1.5,
        "epoch": 0.5,
        "eval/accuracy": 0.9,
    }
    assert metrics_of(TargetReached(3, 1.5, "accuracy", 0.9, 0.8)) == {
        "step": 3,
        "train_s": 1.5,
        "target/time_to_target_s": 1.5,
        "target/steps_to_target": 3,
        "target/value": 0.9,
    }
    row = metrics_of(Checkpointed(3, 1.5, "p", 0.2))
    assert row == {"step": 3, "train_s": 1.5, "checkpoint/write_s": 0.2}
    assert metrics_of(RunEnded(3, 1.5, "reached")) == {}


def reader_of(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory / "tensorboard"))
    reader.Reload()
    return reader


def scalars(directory) -> dict[str, list[tuple[int, float]]]:
    reader = reader_of(directory)
    return {
        tag: [(e.step, pytest.approx(e.value)) for e in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


def test_scalars_are_read_back(tmp_path):
    sink = TensorboardSink(ShownRun(tmp_path))
    sink.write(trained(1, 3.0))
    sink.write(trained(2, 2.0))
    sink.write(Evaluated(2, 1.0, 0.5, {"accuracy": 0.9}))
    sink.write(RunEnded(2, 1.0, "finished"))
    sink.close()
    read = scalars(tmp_path)
    assert read["train/loss"] == [(1, 3.0), (2, 2.0)]
    assert read["eval/accuracy"] == [(2, 0.9)]
    assert read["kfac/cosine/a.b"] == [(1, 0.25), (2, 0.25)]
    assert read["train_s"] == [(1, 0.5), (2, 1.0), (2, 1.0)]
    assert "step" not in read


def test_options_are_hyperparameters_and_the_wall_time_is_training_time(tmp_path):
    config = {"seed": 3, "optimizer": {"name": "sgd", "lr": 0.5}, "environment": {"torch": "2"}}
    shown = ShownRun(tmp_path, config=config, metric="accuracy")
    for first in (1, 3):  # the second process continues the run
        sink = TensorboardSink(shown)
        if first > 1:
            sink.write(Resumed(first - 1, 1.0, "checkpoint"))
        sink.write(trained(first, 3.0))
        sink.write(trained(first + 1, 2.0))
        sink.close()
    reader = reader_of(tmp_path)
    times = [e.wall_time for e in reader.Scalars("train/loss")]
    assert [t - times[0] for t in times] == [0.0, 0.5, 1.0, 1.5]
    contents = reader.PluginTagToContent("hparams")
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    start = HParamsPluginData.FromString(contents["_hparams_/session_start_info"])
    values = start.session_start_info.hparams
    assert set(values) == {"seed", "optimizer.name", "optimizer.lr"}
    assert (values["optimizer.lr"].number_value, values["optimizer.name"].string_value) == (
        0.5,
        "sgd",
    )
    experiment = HParamsPluginData.FromString(contents["_hparams_/experiment"]).experiment
    assert [info.name.tag for info in experiment.metric_infos] == ["eval/accuracy"]


def test_predictions_are_read_back(tmp_path):
    picture = np.arange(36, dtype=np.uint8).reshape(3, 4, 3)
    Image.fromarray(picture).save(tmp_path / "a.png")
    items = [
        {"caption": "wrong: *8*", "file": "a.png", "text": None},
        {"caption": "b", "file": None, "text": "<b>?\nyes"},
    ]
    sink = TensorboardSink(ShownRun(tmp_path))
    sink.write(Predicted(7, 1.0, "p", items))
    sink.close()
    reader = reader_of(tmp_path)
    [shown] = reader.Images("predictions/00")
    assert shown.step == 7
    pixels = np.asarray(Image.open(io.BytesIO(shown.encoded_image_string)))
    assert (pixels == picture).all()
    texts = {
        tag: reader.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in reader.Tags()["tensors"]
        if tag.startswith("captions")
    }
    assert texts == {
        "captions/00/text_summary": "    wrong: *8*",
        "captions/01/text_summary": "    b\n    <b>?\n    yes",
    }


def test_the_panels_are_those_of_the_dashboard_and_find_their_scalars(tmp_path):
    sink = TensorboardSink(ShownRun(tmp_path))
    sink.write(trained(1, 3.0))
    sink.write(Evaluated(1, 1.0, 0.5, {"accuracy": 0.9}))
    sink.close()
    reader = reader_of(tmp_path)
    [stored] = reader.Tensors(metadata.CONFIG_SUMMARY_TAG)
    layout = layout_pb2.Layout.FromString(stored.tensor_proto.string_val[0])
    charts = {chart.title: chart.multiline.tag for part in layout.category for chart in part.chart}
    shown = {chart.title for section in SECTIONS for chart in section.charts}
    assert charts.keys() <= shown
    found = {
        title: [
            tag for tag in reader.Tags()["scalars"] if any(re.match(each, tag) for each in tags)
        ]
        for title, tags in charts.items()
    }
    assert found["validation"] == ["eval/accuracy"]
    assert found["nu"] == ["kfac/nu"]
    assert sorted(found["cosine by layer"]) == [f"kfac/cosine/{x}" for x in ("a.b", "c", "d")]
    stages = ["kfac/stage_mean_s/Decompose", "train/besides_kfac_s"]
    assert sorted(found["time of a step, by stage"]) == stages


def test_a_resume_hides_the_scalars_that_it_made_void(tmp_path):
    sink = TensorboardSink(ShownRun(tmp_path))
    for step in (1, 2, 3):
        sink.write(trained(step, float(step)))
    sink.close()
    sink = TensorboardSink(ShownRun(tmp_path))
    sink.write(Resumed(1, 0.5, "checkpoint"))
    sink.write(trained(2, 20.0))
    sink.close()
    assert scalars(tmp_path)["train/loss"] == [(1, 1.0), (2, 20.0)]


def test_a_start_from_the_beginning_hides_the_scalars_before(tmp_path):
    """A run that was killed before its first checkpoint has another RunStarted event."""
    started = RunStarted(0, 0.0, "r", "accuracy", True, {}, {})
    for losses in ((1.0, 2.0, 3.0), (10.0,)):
        sink = TensorboardSink(ShownRun(tmp_path))
        sink.write(started)
        for step, loss in enumerate(losses, start=1):
            sink.write(trained(step, loss))
        sink.close()
    assert scalars(tmp_path)["train/loss"] == [(1, 10.0)]


def test_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"pip install '.\[tensorboard\]'"):
        TensorboardSink(ShownRun(tmp_path))


def test_a_failure_is_printed_once_and_training_goes_on(tmp_path):
    (tmp_path / "tensorboard").write_text("a file where the directory should be")
    said = []
    sink = TensorboardSink(ShownRun(tmp_path, say=said.append))
    for step in (1, 2, 3):
        sink.write(trained(step, 1.0))
    sink.close()
    assert len(said) == 1
    assert "TensorBoard failed" in said[0]
