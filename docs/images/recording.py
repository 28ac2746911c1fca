"""Draws docs/images/demo.svg, the moving picture of the README: a rehearsal in a terminal.

``make pictures`` runs it. The command really runs, on this machine. Each line of the picture appears when the command
printed it, except that a pause lasts a second at most. The picture is text with CSS animations, which also move in
an ``<img>``.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from html import escape
from pathlib import Path
from subprocess import PIPE, STDOUT

COMMAND = "clusterddp rehearse jobs/digits.yaml"
#: The longest pause, and how long the last line stands, in seconds.
PAUSE_S, STANDS_S = 1.0, 10.0
#: Characters of the longest line.
WIDEST = 120
#: Of a line and of a character at this size, in pixels.
LINE, CHARACTER, SIZE, MARGIN = 20, 7.8, 13, 16
HOST = "laptop"
#: Lines that are shown in colour: what was not tried or not survived, and what was.
NOTICE = re.compile(r"  not tried  |loses work|wrong result|repeats work")
RESUMED = re.compile(r"  ok  |survives")
STYLE = f"""
  text {{ font: {SIZE}px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #1f2328; white-space: pre }}
  rect {{ fill: #f6f8fa; stroke: #d1d9e0 }}
  .notice {{ fill: #9a6700 }} .resumed {{ fill: #1a7f37 }} .command {{ font-weight: 600 }}
  @media (prefers-color-scheme: dark) {{
    text {{ fill: #f0f6fc }} rect {{ fill: #151b23; stroke: #3d444d }}
    .notice {{ fill: #d29922 }} .resumed {{ fill: #3fb950 }}
  }}
  @media (prefers-reduced-motion: reduce) {{ text {{ animation: none !important }} }}
"""


def main() -> None:
    lines = shortened(recorded())
    file = Path(__file__).with_name("demo.svg")
    file.write_text(drawn(lines))
    print(f"{file}: {len(lines)} lines, {lines[-1][0]:.1f} s, {file.stat().st_size} bytes")


def recorded() -> list[tuple[float, str]]:
    """Each line of the command's output, with the second in which it appeared."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree("jobs", Path(folder, "jobs"))
        environment = {**os.environ, "COLUMNS": "100"}
        words = [str(Path(".venv/bin/clusterddp").resolve()), *COMMAND.split()[1:]]
        began = time.monotonic()
        with subprocess.Popen(words, cwd=folder, stdout=PIPE, stderr=STDOUT, text=True, env=environment) as process:
            assert process.stdout is not None
            lines = [(time.monotonic() - began, clean(line, folder)) for line in process.stdout]
    if process.returncode:
        raise SystemExit(f"{COMMAND}: exit code {process.returncode}\n" + "\n".join(line for _, line in lines))
    return [(at, line) for at, line in lines if line]


def clean(line: str, folder: str) -> str:
    """Without this machine's name and places, and not wider than the picture."""
    cleaned = line.rstrip().replace(f"{folder}/", "").replace(socket.gethostname(), HOST)
    return cleaned if len(cleaned) <= WIDEST else f"{cleaned[: WIDEST - 1]}…"


def shortened(lines: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """With pauses of at most PAUSE_S."""
    found, now, before = [], 0.0, 0.0
    for at, line in lines:
        now += min(at - before, PAUSE_S)
        before = at
        found.append((now, line))
    return found


def drawn(lines: list[tuple[float, str]]) -> str:
    """The picture, which begins again after its end."""
    whole = lines[-1][0] + STANDS_S
    shown = [(0.0, f"$ {COMMAND}"), *lines]
    width = round(max(len(line) for _, line in shown) * CHARACTER + 2 * MARGIN)
    height = LINE * len(shown) + 2 * MARGIN - 6
    rules, texts = [], []
    for number, (at, line) in enumerate(shown):
        name = "command" if number == 0 else kind(line)
        y = MARGIN + LINE * number + SIZE
        moving = ""
        if at:
            percent = 100 * at / whole
            hidden, seen = f"0%, {percent:.2f}% {{ opacity: 0 }}", f"{percent + 0.01:.2f}% {{ opacity: 1 }}"
            rules.append(f"@keyframes l{number} {{ {hidden} {seen} }}")
            moving = f' style="animation: l{number} {whole:.1f}s infinite"'
        texts.append(f'<text class="{name}" x="{MARGIN}" y="{y}"{moving}>{escape(line)}</text>')
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
    title = "<title>A script is disturbed in many ways, and survives each of them</title>"
    frame = f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>'
    return "\n".join([head, title, f"<style>{STYLE}{chr(10).join(rules)}</style>", frame, *texts, "</svg>\n"])


def kind(line: str) -> str:
    """The class of a line in the style sheet."""
    return "notice" if NOTICE.search(line) else "resumed" if RESUMED.search(line) else ""


if __name__ == "__main__":
    main()
