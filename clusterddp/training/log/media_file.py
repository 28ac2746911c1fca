"""A run's media: ``media.jsonl``, a line for each, and its images as PNG files; written by rank 0 in a thread.

A line counts by the rule of the metrics. All media below a checkpoint are durable before it is committed, unless the
disk is so slow that the checkpoint would have to wait for a minute. One that cannot be written is left out, and the
first is reported.
"""

from __future__ import annotations

import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Full, Queue
from typing import Any

import numpy
import torch

from clusterddp.distributed.device_threads import device_thread
from clusterddp.reporter import in_words
from clusterddp.rundir.files import append_line, create_folder, finite, write_atomically
from clusterddp.rundir.records import drop_torn_line
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.training.log.media import Medium

#: The most steps whose media wait; with more, training waits for the disk.
MOST_WAITING = 8
#: The most that the media of a run may take on disk; later ones are left out.
MOST_RUN_BYTES = 1_000_000_000
BINS = 64
Report = Callable[..., None]


class MediaFile:
    """Appends to ``media.jsonl``. The thread begins with the first medium."""

    def __init__(
        self, directory: RunDirectory, attempt: int, report: Report, device: torch.device | None = None
    ) -> None:
        self._directory, self._attempt, self._report, self._device = directory, attempt, report, device
        self._waiting: Queue[tuple[int, float, Sequence[Medium]] | None] = Queue(MOST_WAITING)
        self._done = threading.Condition()
        self._added = self._written = 0
        self._thread: threading.Thread | None = None
        self._bytes: int | None = None
        self._failed = False

    def add(self, step: int, media: Sequence[Medium]) -> None:
        """Takes the media of a completed step. For the training thread."""
        if not media:
            return
        if self._thread is None:
            self._thread = device_thread(self._device, self._run, name="media")
            self._thread.start()
        self._added += 1
        self._waiting.put((step, time.time(), media))

    @property
    def pending(self) -> bool:
        """Whether media wait to be written."""
        return self._written < self._added

    def settle(self, seconds: float) -> None:
        """Waits at most so long until all that was added is written. Any thread."""
        added = self._added
        with self._done:
            self._done.wait_for(lambda: self._written >= added, seconds)

    def close(self, seconds: float) -> None:
        """``settle``, and ends the thread."""
        self.settle(seconds)
        if self._thread is not None:
            self._thread = None
            with suppress(Full):  # of a disk that hangs
                self._waiting.put_nowait(None)

    def _run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            step, at, media = waiting
            for number, medium in enumerate(media):
                try:
                    self._write({"step": step, "time": at, "attempt": self._attempt}, number, medium)
                except Exception as error:  # of the disk, CUDA or numpy: training would wait for a thread that ended
                    self._leave_out(step, medium, in_words(error))
            with self._done:
                self._written += 1
                self._done.notify_all()

    def _write(self, line: dict[str, Any], number: int, medium: Medium) -> None:
        if self._bytes is None:
            drop_torn_line(self._directory.media_file)
            self._bytes = _bytes_of(self._directory)
        if self._bytes > MOST_RUN_BYTES:
            self._leave_out(line["step"], medium, f"the run has {MOST_RUN_BYTES:,} bytes of media, which is the limit")
            return
        if medium.event is not None:
            medium.event.synchronize()
        line |= {"kind": medium.kind, "name": medium.name}
        if isinstance(medium.value, str):
            line["text"] = medium.value
        elif medium.kind == "histogram":
            line |= histogram(medium.value.reshape(-1))
        else:
            line |= self._write_image(line["step"], number, medium.value, medium.channels_first)
        append_line(self._directory.media_file, finite(line))
        self._bytes += line.get("bytes", 0) + 2000

    def _write_image(self, step: int, number: int, tensor: torch.Tensor, channels_first: bool) -> dict[str, Any]:
        pixels = pixels_of(tensor, channels_first)
        height, width, channels = pixels.shape
        name = f"step-{step:012}.attempt-{self._attempt}.{number}.png"
        content = png(pixels)
        create_folder(self._directory.media, exist_ok=True)
        write_atomically(self._directory.media / name, content)
        return {"file": f"media/{name}", "width": width, "height": height, "channels": channels, "bytes": len(content)}

    def _leave_out(self, step: int, medium: Medium, reason: str) -> None:
        if not self._failed:
            self._failed = True
            self._report("media_left_out", step=step, kind=medium.kind, name=medium.name, reason=reason)


def pixels_of(tensor: torch.Tensor, channels_first: bool) -> numpy.ndarray[Any, Any]:
    """An image as height x width x channels of bytes; floats are clipped to 0 to 1, and NaN is 0."""
    if channels_first:
        tensor = tensor.permute(1, 2, 0)
    if tensor.dtype != torch.uint8:
        tensor = tensor.float().nan_to_num(0.0).clamp(0.0, 1.0).mul(255.0).round().to(torch.uint8)
    pixels: numpy.ndarray[Any, Any] = tensor.numpy()
    return numpy.ascontiguousarray(pixels if pixels.ndim == 3 else pixels[:, :, None])


def png(pixels: numpy.ndarray[Any, Any]) -> bytes:
    """Bytes of height x width x 1, 3 or 4 channels as a PNG file (W3C's specification, 2003)."""
    height, width, channels = pixels.shape
    color_type = {1: 0, 3: 2, 4: 6}[channels]
    rows = numpy.zeros((height, 1 + width * channels), numpy.uint8)  # each row begins with its filter: none
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, color_type, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def histogram(tensor: torch.Tensor) -> dict[str, Any]:
    """How many numbers are in each of equal bins from the least to the largest; NaN and infinities are only counted."""
    numbers: numpy.ndarray[Any, Any] = tensor.double().numpy()
    kept = numbers[numpy.isfinite(numbers)]
    counts, edges = numpy.histogram(kept, BINS) if kept.size else (numpy.zeros(1, int), numpy.array([0.0, 1.0]))
    found = {"counts": counts.tolist(), "edges": edges.tolist(), "not_finite": int(numbers.size - kept.size)}
    return found | {"sum": float(kept.sum()), "sum_squares": float((kept * kept).sum())}


def _bytes_of(directory: RunDirectory) -> int:
    paths = [directory.media_file, *directory.media.glob("*")]
    return sum(path.stat().st_size for path in paths if path.exists())
