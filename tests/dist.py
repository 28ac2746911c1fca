"""``python -m tests.dist FOLDER [WHEELS]``: the wheel in FOLDER, installed in an environment of its own, outside the
checkout, and a run that is preempted.

The environment takes what the wheel depends on from the one that runs this: torch is not installed twice. With WHEELS,
it is installed from this folder alone, in a process that reaches no network.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

from clusterddp.protocol import PREEMPT

#: Files that are no modules and must be there.
DATA = (
    "hydra_plugins/clusterddp_launcher.py",
    "clusterddp/py.typed",
    "clusterddp/digits/digits.csv.gz",
    "clusterddp/digits/digits.py",
    "clusterddp/digits/digits.yaml",
)
#: What the installed wheel has below the environment's folder.
COMPLETIONS = ("share/bash-completion/completions/clusterddp", "share/zsh/site-functions/_clusterddp")


def main(folder: Path, wheels: Path | None = None) -> None:
    """Raises where the wheel lacks something, or a command fails."""
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    check_contents(wheel, sdist)
    with tempfile.TemporaryDirectory(prefix="clusterddp-dist-") as name:
        place = Path(name)
        python = install_offline(place / "venv", wheels) if wheels else make_environment(place / "venv", wheel)
        check_runs(python, place, wheel)
    how = " without a network" if wheels else ""
    print(f"{wheel.name} and {sdist.name}: contents, dry run and a preempted local run are good{how}")


def check_contents(wheel: Path, sdist: Path) -> None:
    """Data files are in both, as files where the checkout has links. Tests and benchmarks are not in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    with tarfile.open(sdist) as archive:
        sources = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    missing = [name for name in DATA if name not in names or name not in sources]
    assert not missing, f"missing: {missing}"
    strange = {name.split("/")[0] for name in names} - {
        "clusterddp",
        "hydra_plugins",
        f"clusterddp-{wheel.name.split('-')[1]}.dist-info",
        f"clusterddp-{wheel.name.split('-')[1]}.data",
    }
    assert not strange, f"{wheel.name} holds {strange}"


def make_environment(folder: Path, wheel: Path) -> Path:
    """A virtual environment with the wheel; its other packages are those of this one. Returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    own = [sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("-packages"))]
    # A path in a .pth file is searched, but the .pth files in it are not read: not even that of an editable install.
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in dict.fromkeys(own)))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        str(python),
        "install",
        "-q",
        "--no-deps",
    ]
    subprocess.run([*pip, "--ignore-installed", wheel], check=True)
    return python


def install_offline(folder: Path, wheels: Path) -> Path:
    """A virtual environment with what the README's offline installation puts into it. Returns its interpreter."""
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    assert not others, f"the network interfaces {others} are reachable. Start this with unshare --net"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
    environment["PIP_CONFIG_FILE"] = os.devnull
    subprocess.run([sys.executable, "-m", "venv", folder], env=environment, check=True)
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "--no-index", "--find-links", str(wheels), "clusterddp"]
    subprocess.run(install, env=environment, check=True)
    return python


def check_runs(python: Path, place: Path, wheel: Path) -> None:
    """The command line of the installed wheel, in a folder that is no checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SLURM_"))}
    environment[PREEMPT] = "[10]"
    command = [str(python.with_name("clusterddp")), "submit", "--device", "cpu", "--nodes", "1", "--gpus", "2"]

    def output(*words: str | Path) -> str:
        done = subprocess.run(words, cwd=place, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout

    found = output(python, "-c", "import clusterddp; print(clusterddp.__version__, clusterddp.__file__)").split()
    assert found[0] == wheel.name.split("-")[1], f"{wheel.name} says that it is {found[0]}"
    assert Path(found[1]).is_relative_to(place), f"{found[1]} is imported instead of the wheel"
    assert output(python.with_name("clusterddp"), "--version").split() == ["clusterddp", found[0]]
    missing = [name for name in COMPLETIONS if not (place / "venv" / name).is_file()]
    assert not missing, f"missing: {missing}"
    assert "#SBATCH --ntasks-per-node=2" in output(*command, "--dry-run")
    output(*command, "--local", "--", "--steps", "400")
    outcome = json.loads((place / "runs" / "digits-0" / "outcome.json").read_text())
    assert (outcome["state"], outcome["step"], outcome["attempts"]) == ("completed", 400, 2), outcome


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
