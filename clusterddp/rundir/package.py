"""A copy of clusterddp in a run directory, for ranks whose Python has none, such as that of an image.

It is a zip file, so that a rank opens one file on a shared disk instead of hundreds. Any Python can import from it,
because it has no compiled code. The image has torch and numpy.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import zipfile
from pathlib import Path

from clusterddp.rundir.files import write_atomically
from clusterddp.rundir.run_directory import RunDirectory

_PACKAGES = ("clusterddp", "yaml", "cloudpickle")


def write_package(run: RunDirectory) -> None:
    """Writes the packages that this process imports."""
    write_atomically(run.package_file, _packages())


@functools.cache
def _packages() -> bytes:
    """Compressed once for all members of a sweep."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in _PACKAGES:
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.origin is not None
            folder = Path(spec.origin).parent
            for file in sorted(folder.rglob("*.py")):
                archive.writestr(f"{name}/{file.relative_to(folder)}", file.read_bytes())
    return content.getvalue()
