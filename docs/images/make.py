"""Makes the picture of a report: ``make pictures``, a few minutes. A real run, and its report in Chromium.

The digits example trains in four ranks on this machine. It is preempted twice, and a rank is killed. In the page, the
name of this machine is replaced by HOST.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from clusterddp.cli.report import collected
from clusterddp.process import descendants
from clusterddp.protocol import PREEMPT
from clusterddp.report.page import page
from clusterddp.rundir.run_directory import RunDirectory

PREEMPTED, KILLED, STEPS, HOST = (800, 1900), 3600, 5000, "node1"
#: The width of a page, and pixels of the picture per pixel of the page.
WIDTH, SCALE = 1000, 1
#: The texts of a page between two heights, for tests/unit/test_pictures.py.
TEXT = """([begin, end]) => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [], range = document.createRange();
  while (walker.nextNode()) {
    range.selectNode(walker.currentNode);
    const {height, top, bottom} = range.getBoundingClientRect();
    const text = walker.currentNode.textContent.trim();
    if (text && height && top >= begin && bottom <= end) found.push(text);
  }
  return found.join("\\n");
}"""
#: The most bytes of a picture.
MOST = 150_000


def main() -> None:
    """Writes report-time-light.png and its text beside this file."""
    with tempfile.TemporaryDirectory() as folder:
        run = RunDirectory(Path(folder) / "digits")
        train(run)
        text = json.dumps(collected([run], time.time())).replace(socket.gethostname(), HOST)
        shown = Path(folder) / "report.html"
        shown.write_text(page(json.loads(text)))
        draw(shown)


def train(run: RunDirectory) -> None:
    """Carries out the run."""
    command = [sys.executable, "-m", "clusterddp", "submit", "jobs/digits.yaml", "--local", "--device", "cpu"]
    command += ["--set", "checkpoint.every=500 steps", "--run-dir", str(run), "--", "--steps", str(STEPS)]
    with subprocess.Popen(command, env={**os.environ, PREEMPT: json.dumps(PREEMPTED)}) as process:
        os.kill(rank_at(run, process, KILLED, rank=1), signal.SIGKILL)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")


def rank_at(run: RunDirectory, process: subprocess.Popen[bytes], step: int, rank: int) -> int:
    """The pid of a rank, once the run has reached a step."""
    while ((run.last_metrics() or {}).get("step", -1)) < step:
        if process.poll() is not None:
            raise SystemExit(f"the run ended before step {step}")
        time.sleep(0.1)
    ranks = [pid for pid in descendants(process.pid) if environment(pid).get("RANK") == str(rank)]
    return max(ranks)


def environment(pid: int) -> Mapping[str, str]:
    """A process's environment variables; none of one that has ended."""
    with suppress(OSError):
        found = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
        return dict(line.split("=", 1) for line in found if "=" in line)
    return {}


def draw(shown: Path) -> None:
    """Opens the page, and draws it from its title to the table of where the time went."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with import_module("playwright.sync_api").sync_playwright() as api:
        browser = api.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        size = {"width": WIDTH, "height": 900}
        opened = browser.new_page(viewport=size, color_scheme="light", device_scale_factor=SCALE)
        opened.goto(shown.as_uri())
        file = Path(__file__).with_name("report-time-light.png")
        clip = area(opened, "h1", "#time table")
        opened.screenshot(path=file, full_page=True, clip=clip)
        file.with_suffix(".txt").write_text(f"{opened.evaluate(TEXT, [clip['y'], clip['y'] + clip['height']])}\n")
        print(f"{file}: {file.stat().st_size} bytes", "" if file.stat().st_size < MOST else "(too large)")
        browser.close()


def area(opened: Any, first: str, last: str) -> Mapping[str, float]:
    """From the top of an element to the bottom of another one, over the whole width."""
    top = opened.locator(first).first.bounding_box()
    bottom = opened.locator(last).last.bounding_box()
    begin, end = top["y"] - 4, bottom["y"] + bottom["height"] + 8
    return {"x": 0, "y": begin, "width": WIDTH, "height": end - begin}


if __name__ == "__main__":
    main()
