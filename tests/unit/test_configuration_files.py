"""Configuration files: which files apply, whose value wins, and whose file is refused."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterddp.cli.command_line import parser
from clusterddp.cli.options import resolve_job
from clusterddp.errors import JobDefinitionError
from clusterddp.jobdef import configuration_files
from clusterddp.jobdef.configuration_files import ConfigurationFile, find_configuration_files, read_configuration_files
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import from_values
from clusterddp.runs.submission import describe
from clusterddp.slurm import commands
from clusterddp.slurm.commands import submission_cluster
from tests.other_user import UID
from tests.wording import raises

SITE = """\
defaults: {partition: site, account: site, qos: site, reservation: site, env: {A: site, B: site}}
clusters:
  alps: {account: site-alps, setup: [module load cuda], gpu_request: gres}
  other: {account: site-other}
"""
USER = """\
defaults: {qos: user, constraint: user, env: {B: user, C: user}}
clusters: {alps: {constraint: user-alps}}
"""
PROJECT = "defaults: {constraint: project, env: {C: project}}\n"
#: The environment of a user without any file.
BARE = {"CLUSTERDDP_SITE_CONFIG": "", "XDG_CONFIG_HOME": "/nonexistent"}


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """That of a user with a site's and a user's file."""
    site = write(tmp_path / "site" / "config.yaml", SITE)
    write(tmp_path / "home" / "clusterddp" / "config.yaml", USER)
    return {"CLUSTERDDP_SITE_CONFIG": str(site), "XDG_CONFIG_HOME": str(tmp_path / "home")}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout with a project's file."""
    (tmp_path / "checkout" / ".git").mkdir(parents=True)
    write(tmp_path / "checkout" / ".clusterddp" / "config.yaml", PROJECT)
    return tmp_path / "checkout"


def job(environ: dict[str, str], folder: Path, cluster: str | None) -> Job:
    return from_values(
        {"module": "m"}, defaults=read_configuration_files(find_configuration_files(environ, folder), cluster)
    )


def test_the_more_specific_file_wins(environ: dict[str, str], checkout: Path) -> None:
    """Site, user, project; within a file the cluster's section; mappings are merged key by key."""
    here = job(environ, checkout, "Alps")
    assert (here.partition, here.account, here.qos, here.constraint) == ("site", "site-alps", "user", "project")
    assert here.env == {"A": "site", "B": "user", "C": "project"}
    assert (here.setup, here.gpu_request) == (("module load cuda",), "gres")
    for cluster in (None, "unknown"):
        elsewhere = job(environ, checkout.parent, cluster)
        assert (elsewhere.account, elsewhere.constraint, elsewhere.setup) == ("site", "user", ())


def test_a_job_overrides_the_configuration_files_and_null_restores_a_default(
    environ: dict[str, str], checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then come the options and --set, as `submit` and `launch()` read them."""
    for name, value in {**environ, "SLURM_CLUSTERS": "alps"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(checkout)
    write(checkout / "job.yaml", "module: m\npartition: job\naccount: job\nqos: job\nreservation: null\n")
    given = describe("job.yaml", {"account": "option", "qos": "option"}, {"qos": "set"})
    assert (given.partition, given.account, given.qos, given.reservation) == ("job", "option", "set", None)
    assert (given.constraint, given.gpu_request) == ("project", "gres")


def test_the_projects_file_is_the_nearest_one_in_the_checkout(checkout: Path, tmp_path: Path) -> None:
    """Also in a worktree, whose .git is a file; the files of other folders above do not count."""
    deep = checkout / "a" / "b"
    deep.mkdir(parents=True)
    top = checkout / ".clusterddp" / "config.yaml"
    assert [file.path for file in find_configuration_files(BARE, deep)] == [top]
    near = write(checkout / "a" / ".clusterddp" / "config.yaml", "")
    assert [file.path for file in find_configuration_files(BARE, deep)] == [near]
    write(tmp_path / ".clusterddp" / "config.yaml", "")
    (checkout / ".git").rmdir()
    assert find_configuration_files(BARE, deep) == []
    assert [file.path for file in find_configuration_files(BARE, checkout)] == [top]
    (checkout / ".git").write_text("gitdir: elsewhere\n")
    assert [file.path for file in find_configuration_files(BARE, deep)] == [near]


def test_the_sites_file_is_in_etc_or_where_the_site_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty variable stands for no file, and a missing file is an error."""
    etc = write(tmp_path / "etc" / "config.yaml", SITE)
    monkeypatch.setattr(configuration_files, "SITE_FILE", etc)
    named = write(tmp_path / "named" / "config.yaml", SITE)
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert find_configuration_files(environ, tmp_path) == [ConfigurationFile("site", etc)]
    assert find_configuration_files({**environ, "CLUSTERDDP_SITE_CONFIG": str(named)}, tmp_path) == [
        ConfigurationFile("site", named)
    ]
    assert find_configuration_files({**environ, "CLUSTERDDP_SITE_CONFIG": ""}, tmp_path) == []
    absent = find_configuration_files({**environ, "CLUSTERDDP_SITE_CONFIG": str(tmp_path / "absent.yaml")}, tmp_path)
    with raises(JobDefinitionError):
        read_configuration_files(absent, None)


def test_all_mistakes_in_all_files_are_reported(tmp_path: Path) -> None:
    """With file, line and column, also those of other clusters; what belongs to one job has no place there."""
    site = write(
        tmp_path / "site" / "config.yaml",
        "default: {}\ndefaults: {nodes: x, script: a.py}\nclusters:\n  a: {partitoin: x}\n  b: [1]\n",
    )
    user = write(tmp_path / "user" / "config.yaml", "clusters: {a: {gpu_request: gpus}}\n")
    with pytest.raises(JobDefinitionError) as caught:
        read_configuration_files([ConfigurationFile("site", site), ConfigurationFile("user", user)], "c")
    assert [line[:36] for line in str(caught.value).replace(f"{tmp_path}/", "").splitlines()] == [
        "site/config.yaml:1:1: unknown key 'd",
        "site/config.yaml:2:19: nodes: expect",
        "site/config.yaml:2:22: unknown key '",
        "site/config.yaml:4:7: unknown key 'p",
        "site/config.yaml:5:6: expected 'key:",
        "user/config.yaml:1:29: gpu_request: ",
    ]


def widen(path: Path) -> None:
    path.chmod(stat.S_IMODE(path.stat().st_mode) | 0o020)


def give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, UID, -1)


@pytest.mark.parametrize("owner", ["site", "project"])
@pytest.mark.parametrize("part", ["file", "folder"])
@pytest.mark.parametrize("change", [widen, give_away])
def test_a_file_that_another_user_may_have_written_is_refused(
    owner: str, part: str, change: Callable[[Path], None], tmp_path: Path
) -> None:
    """Its setup lines run as this user. The user's own file is like ~/.bashrc."""
    (tmp_path / "open").mkdir(mode=0o755)
    path = write(tmp_path / "open" / "config.yaml", "defaults: {setup: [touch executed]}\n")
    change(path if part == "file" else path.parent)
    with raises(JobDefinitionError):
        read_configuration_files([ConfigurationFile(owner, path)], None)
    assert read_configuration_files([ConfigurationFile("user", path)], None).keys() == {"setup"}


def test_the_page_shows_a_valid_configuration_file(tmp_path: Path) -> None:
    """For several clusters."""
    page = (Path(__file__).parents[2] / "docs" / "guide" / "job-definition.md").read_text()
    path = write(tmp_path / "config.yaml", re.findall(r"```yaml\n(defaults.*?)```", page, re.DOTALL)[0])
    assert job_of(path, "alps").gpu_request == "gres"
    assert job_of(path, "clariden").srun["container-image"] == "/images/train.sqsh"


def job_of(path: Path, cluster: str) -> Job:
    return from_values({"module": "m"}, defaults=read_configuration_files([ConfigurationFile("user", path)], cluster))


def test_submit_names_the_configuration_files_that_it_has_read(
    environ: dict[str, str], checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They change a job without being on its command line."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(checkout)
    arguments = parser(["submit"]).parse_args(["submit", "-m", "net"])
    assert resolve_job(arguments, None).partition == "site"
    named = [f"site {environ['CLUSTERDDP_SITE_CONFIG']}", f"user {environ['XDG_CONFIG_HOME']}/clusterddp/config.yaml"]
    assert (
        capsys.readouterr().err
        == f"configuration files: {', '.join(named)}, project {checkout}/.clusterddp/config.yaml\n"
    )


def test_the_cluster_is_also_known_where_slurmctld_distributes_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login node then has no /etc/slurm/slurm.conf."""
    cached = write(tmp_path / "run" / "slurm.conf", "SlurmctldHost=c\nClusterName=alps\n")
    monkeypatch.setattr(commands, "CONFIGURATION_FILES", (str(tmp_path / "etc" / "slurm.conf"), str(cached)))
    assert submission_cluster({}) == "alps"
    assert submission_cluster({"SLURM_CONF": "/nonexistent"}) is None
    assert submission_cluster({"SLURM_CONF": str(cached), "SLURM_CLUSTERS": "other"}) == "other"
