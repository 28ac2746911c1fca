"""Chromium, for the tests of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as api:
        started = api.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield started
        started.close()
