"""``run.log_media()``: what it takes, the values are those at the call, and what is on disk when a step is saved."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.training.log import media, media_file
from clusterddp.training.log.media import Media
from clusterddp.training.log.media_file import MediaFile, histogram, pixels_of, png
from tests import packages
from tests.waiting import wait_until


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create()
    return directory


def taken(**given: Any) -> list[media.Medium]:
    found = Media()
    found.add(given.get("images"), given.get("histograms"), given.get("text"))
    return found.take()


def written(run: RunDirectory, *steps: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines and the events of steps with these media."""
    events: list[dict[str, Any]] = []
    file = MediaFile(run, 2, lambda event, **fields: events.append({"event": event, **fields}))
    for step, found in enumerate(steps):
        file.add(step, found)
    file.close(30)
    assert not file.pending
    text = run.media_file.read_text() if run.media_file.exists() else ""
    return [json.loads(line) for line in text.splitlines()], events


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_an_image_is_a_png_that_others_read(channels: int) -> None:
    """With the very pixels."""
    packages.require("PIL")
    from PIL import Image

    pixels = numpy.random.default_rng(0).integers(0, 256, (5, 7, channels), numpy.uint8)
    read = numpy.asarray(Image.open(io.BytesIO(png(pixels))))
    assert (read.reshape(pixels.shape) == pixels).all()


def test_tensors_have_their_channels_first_and_arrays_last() -> None:
    """As in torchvision, and as in PIL and matplotlib; a square image of 3 x 3 pixels shows which."""
    values = torch.arange(27, dtype=torch.uint8).reshape(3, 3, 3)
    of_tensor, of_array, flat = taken(images={"a": values, "b": values.numpy(), "c": values[0]})
    shown = [pixels_of(medium.value, medium.channels_first) for medium in (of_tensor, of_array, flat)]  # type: ignore[arg-type]
    assert (shown[0] == values.permute(1, 2, 0).numpy()).all()
    assert (shown[1] == values.numpy()).all()
    assert shown[2].shape == (3, 3, 1)


def test_floats_are_clipped_to_0_to_1() -> None:
    """Also of 16 bits; NaN is black."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = torch.tensor([[-1.0, 0.0, 0.5, 1.0, 7.0, float("nan")]]).to(dtype)
        assert pixels_of(values, False).ravel().tolist() == [0, 0, 128, 255, 255, 0]


def test_a_histogram_counts_finite_numbers_in_equal_bins() -> None:
    """Of any numbers; the others are counted beside."""
    found = histogram(torch.tensor([0.0, 1.0, 64.0, float("inf"), float("nan")]))
    assert (found["edges"][0], found["edges"][-1], len(found["counts"])) == (0.0, 64.0, 64)
    assert [index for index, count in enumerate(found["counts"]) if count] == [0, 1, 63]
    assert (found["not_finite"], found["sum"], found["sum_squares"]) == (2, 65.0, 4097.0)
    assert histogram(torch.tensor([7, 7]))["counts"].count(2) == 1
    assert sum(histogram(torch.tensor([True, False]))["counts"]) == 2
    assert histogram(torch.tensor([float("nan")]))["not_finite"] == 1


def test_values_are_those_at_the_call_and_the_last_of_a_name_counts(run: RunDirectory) -> None:
    """Whatever the script does to its tensors before the step ends."""
    found, values = Media(), torch.zeros(2, 2, dtype=torch.uint8)
    found.add({"a": values}, None, {"a": "first"})
    values += 255
    found.add(None, {"a": torch.ones(3)}, {"a": "second"})
    lines, events = written(run, found.take(), found.take())
    assert [(line["step"], line["attempt"], line["kind"], line["name"]) for line in lines] == [
        *((0, 2, kind, "a") for kind in ("image", "text", "histogram"))
    ]
    assert lines[1]["text"] == "second" and not events
    assert (run.path / lines[0]["file"]).read_bytes() == png(numpy.zeros((2, 2, 1), numpy.uint8))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"images": [1]}, "run.log_media(images=...): expected a dict by name, got list"),
        ({"text": {3: "a"}}, "run.log_media(text=...): expected names of 1 to 200 characters, got 3"),
        ({"text": {"a": b"b"}}, "run.log_media(text={'a': ...}): expected text, got bytes"),
        (
            {"images": {"a": torch.zeros(5, 8, 8)}},
            "expected height x width, or channels x height x width with 1, 3 or 4 channels, got the shape (5, 8, 8)",
        ),
        (
            {"images": {"a": numpy.zeros((3, 8, 8))}},
            "expected height x width, or height x width x channels with 1, 3 or 4 channels, got the shape (3, 8, 8)",
        ),
        ({"images": {"a": torch.zeros(0, 3)}}, "got the shape (0, 3)"),
        ({"images": {"a": torch.zeros(4, 4).int()}}, "uint8 from 0 to 255, or floats from 0 to 1, got torch.int32"),
        ({"images": {"a": "cat.png"}}, "expected a tensor or a numpy array of real numbers, got str"),
        ({"histograms": {"a": torch.zeros(2, dtype=torch.complex64)}}, "real numbers, got Tensor of torch.complex64"),
        ({"histograms": {"a": numpy.array(["x"])}}, "of real numbers, got ndarray of <U1"),
    ],
)  # fmt: skip
def test_what_cannot_be_shown_is_refused_at_the_call(given: dict[str, Any], message: str) -> None:
    """By its name, with what is expected."""
    with pytest.raises(TypeError) as caught:
        taken(**given)
    assert message in str(caught.value)


def test_what_is_too_large_is_refused_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, or with the rest of the step; what was logged before stays."""
    with pytest.raises(ValueError, match="4,002,000 pixels times channels, and the limit is 4,000,000; log a smaller"):
        taken(images={"a": torch.zeros(3, 2000, 667)})
    with pytest.raises(ValueError, match=r"10,000,001 numbers, and the limit is .*value.flatten\(\)\[::100\]"):
        taken(histograms={"a": torch.zeros(1, dtype=torch.uint8).expand(10_000_001)})
    with pytest.raises(ValueError, match="100,001 characters, and the limit is 100,000"):
        taken(text={"a": "x" * 100_001})
    monkeypatch.setattr(media, "MOST_BYTES", 100)
    found = Media()
    found.add(None, {"a": torch.zeros(25)}, None)
    with pytest.raises(ValueError, match="101 bytes in one step, and the limit is 100"):
        found.add(None, None, {"b": "x"})
    found.add(None, {"a": torch.zeros(24)}, {"b": "x"})
    assert [medium.name for medium in found.take()] == ["a", "b"]


def test_media_that_cannot_be_written_are_left_out_and_reported_once(run: RunDirectory) -> None:
    """And the following ones are written, when there is room again."""
    run.media.touch()  # in place of the folder
    image = torch.zeros(2, 2)
    lines, events = written(run, taken(images={"a": image, "b": image}), taken(text={"c": "x"}))
    assert [line["name"] for line in lines] == ["c"]
    ((event),) = events
    assert {key: event[key] for key in ("event", "step", "kind", "name")} == {
        "event": "media_left_out",
        "step": 0,
        "kind": "image",
        "name": "a",
    }


def test_a_histogram_that_numpy_cannot_make_ends_no_thread(run: RunDirectory) -> None:
    """Of numbers with fewer floats between them than bins: training would wait for a thread that had ended."""
    close = torch.tensor([1.0, 1.0 + 2**-52], dtype=torch.float64)
    lines, events = written(run, taken(histograms={"a": close}), taken(text={"b": "x"}))
    assert [line["name"] for line in lines] == ["b"]
    assert events[0]["name"] == "a" and "Too many bins" in events[0]["reason"]


def test_the_media_of_a_run_have_a_limit(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all of its attempts."""
    monkeypatch.setattr(media_file, "MOST_RUN_BYTES", 10)
    lines, events = written(run, taken(text={"a": "x"}), taken(text={"b": "x"}))
    assert [line["name"] for line in lines] == ["a"]
    assert events[0]["reason"] == "the run has 10 bytes of media, which is the limit"
    assert len(written(run, taken(text={"c": "x"}))[0]) == 1


def test_training_waits_for_a_disk_that_is_far_behind(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than keep all media in memory, or lose some."""
    may_write, reached = threading.Event(), threading.Event()
    monkeypatch.setattr(media_file, "append_line", lambda *_: may_write.wait(30))
    file = MediaFile(run, 0, lambda *_, **__: None)

    def train() -> None:
        for step in range(media_file.MOST_WAITING + 2):
            if step == media_file.MOST_WAITING + 1:
                reached.set()
            file.add(step, taken(text={"a": "x"}))

    training = threading.Thread(target=train)
    training.start()
    assert reached.wait(30)
    file.settle(0.0)
    assert file.pending and training.is_alive()
    may_write.set()
    training.join(30)
    file.close(30)
    assert not file.pending and not training.is_alive()
    wait_until(lambda: not any(thread.name == "media" for thread in threading.enumerate()), "its thread to end")
