"""The documentation's site, as ``make docs`` builds it, in a real browser: ``make test-browser``."""

from __future__ import annotations

import functools
import http.server
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.product
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    """The address of the site, on loopback."""
    subprocess.run([sys.executable, "-m", "docs.site"], cwd=REPOSITORY, check=True)
    folder = REPOSITORY / "build" / "docs" / "site"
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_the_width_and_ask_no_other_host(site: str, browser: Any, width: int, scheme: str) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for name in ("index.html", "docs/index.html", "docs/guide/debugging.html", "docs/guide/gpu-cluster.html"):
        response = page.goto(f"{site}/{name}", wait_until="networkidle")
        assert response is not None and response.ok, name
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.screenshot(path=REPOSITORY / "build" / "docs" / f"{name.replace('/', '-')}-{width}-{scheme}.png")
    assert [url for url in asked if not url.startswith((site, "data:", "blob:"))] == []
    page.close()
