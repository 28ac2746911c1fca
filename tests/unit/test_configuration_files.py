"""Configuration files: which files apply, whose value wins, and whose file is refused."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterddp.cli.command_line import command, parser
from clusterddp.cli.options import resolve_job
from clusterddp.errors import JobDefinitionError
from clusterddp.jobdef import configuration_files, configuration_paths, kinds
from clusterddp.jobdef.configuration_files import check_configuration_file, read_configuration_files
from clusterddp.jobdef.configuration_paths import ConfigurationFile, find_configuration_files
from clusterddp.jobdef.job import Job
from clusterddp.jobdef.load import from_values, load, load_resolved
from clusterddp.runs.configured_folder import use_runs_dir
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
    monkeypatch.setattr(configuration_paths, "SITE_FILE", etc)
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
    assert job_of(path, "north").gpu_request == "gres"
    assert job_of(path, "south").srun["container-image"] == "/images/train.sqsh"


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
    files = f"{', '.join(named)}, project {checkout}/.clusterddp/config.yaml"
    assert f"configuration files: {files}" in capsys.readouterr().err.splitlines()


def test_the_cluster_is_also_known_where_slurmctld_distributes_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login node then has no /etc/slurm/slurm.conf."""
    cached = write(tmp_path / "run" / "slurm.conf", "SlurmctldHost=c\nClusterName=alps\n")
    monkeypatch.setattr(commands, "CONFIGURATION_FILES", (str(tmp_path / "etc" / "slurm.conf"), str(cached)))
    assert submission_cluster({}) == "alps"
    assert submission_cluster({"SLURM_CONF": "/nonexistent"}) is None
    assert submission_cluster({"SLURM_CONF": str(cached), "SLURM_CLUSTERS": "other"}) == "other"


# --- sites and targets

TARGETS = """\
defaults:
  site: some
  account: mine
  setup: [of config]
clusters:
  alps:
    targets:
      h100: {constraint: h100, setup: [of target], env: {B: target}}
      own: {account: other}
"""
PROFILE = """\
about: some site
source: somewhere
date: 2026-11
cluster: alps
defaults: {account: site, partition: site, setup: [of site], env: {A: site, B: site}}
targets:
  h100: {partition: h100, constraint: site}
  v100: {partition: v100}
"""


@pytest.fixture
def profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of a user with TARGETS, where the profile `some` is the only one."""
    write(tmp_path / "sites" / "some.yaml", PROFILE)
    monkeypatch.setattr(kinds, "SITES_FOLDER", tmp_path / "sites")
    write(tmp_path / "home" / "clusterddp" / "config.yaml", TARGETS)
    return {**BARE, "XDG_CONFIG_HOME": str(tmp_path / "home")}


def job_on(environ: dict[str, str], on: str | None, **values: object) -> Job:
    files = find_configuration_files(environ, Path("/nonexistent"))
    return from_values({"module": "m", **values}, defaults=read_configuration_files(files, "alps"), on=on)


def test_site_configuration_target_and_job_are_layers(profile: dict[str, str]) -> None:
    """The later wins. Their setup lines and variables add up, in this order."""
    plain = job_on(profile, None)
    assert (plain.account, plain.partition, plain.constraint) == ("mine", "site", None)
    chosen = job_on(profile, "h100", setup=["of job"], env={"C": "job"})
    assert (chosen.partition, chosen.constraint) == ("h100", "h100")
    assert chosen.setup == ("of site", "of config", "of target", "of job")
    assert chosen.env == {"A": "site", "B": "target", "C": "job"}
    assert job_on(profile, "v100").partition == "v100"
    assert job_on(profile, "own", account="job").account == "job"


@pytest.mark.parametrize(
    ("setup", "lines"),
    [
        ({"replace": ["mine"]}, ("mine",)),
        ({"replace": "mine"}, ("mine",)),
        ("a\nb\n", ("of site", "of config", "a", "b")),
        (None, ()),
    ],
)
def test_a_job_may_replace_the_lines_of_configuration_files(
    profile: dict[str, str], setup: object, lines: tuple[str, ...]
) -> None:
    """A null drops them, as it drops every value. What is replaced in a configuration file stays so below a job."""
    assert job_on(profile, None, setup=setup).setup == lines
    path = Path(profile["XDG_CONFIG_HOME"]) / "clusterddp" / "config.yaml"
    path.write_text("defaults: {site: some, setup: {replace: [new]}}")
    assert job_on(profile, None, setup=["last"]).setup == ("new", "last")


def test_a_runs_record_has_the_values_of_its_site(profile: dict[str, str], tmp_path: Path) -> None:
    """And not its name: a later profile changes no run, and lines do not add up again."""
    made = job_on(profile, "h100", setup=["of job"])
    recorded = write(tmp_path / "run" / "job.yaml", made.to_yaml())
    assert "site: some" not in recorded.read_text()
    assert load_resolved(recorded) == load(recorded) == made


@pytest.mark.parametrize(("values", "on"), [({"site": "smoe"}, None), ({}, "h1000"), ({"site": None}, "v100")])
def test_an_unknown_site_or_target_is_a_mistake(
    profile: dict[str, str], values: dict[str, object], on: str | None
) -> None:
    """It names the ones that there are. Without the site, its targets are not there."""
    with raises(JobDefinitionError):
        job_on(profile, on, **values)


def test_mistakes_in_a_target_are_found_like_others(profile: dict[str, str]) -> None:
    """Whether or not it is chosen."""
    path = Path(profile["XDG_CONFIG_HOME"]) / "clusterddp" / "config.yaml"
    path.write_text("clusters: {other: {targets: {a: {partitoin: x}, b: [c]}}}")
    with raises(JobDefinitionError):
        job_on(profile, None)


@pytest.mark.parametrize("text", ["site: alex", "targets: {a: {}}", "account: mine", "defaults: {script: a.py}"])
def test_a_key_outside_of_the_sections_is_told_where_it_belongs(text: str, tmp_path: Path) -> None:
    """As a user's first configuration file may be written."""
    with raises(JobDefinitionError):
        check_configuration_file(write(tmp_path / "config.yaml", text))


def test_a_profile_is_offered_where_its_cluster_is(
    profile: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """To a user without configuration files. Nothing of it applies."""
    for name, value in {**BARE, "SLURM_CLUSTERS": "alps"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    assert describe(None, {"module": "m"}, {}).partition is None
    assert "config sites some" in capsys.readouterr().err


@pytest.mark.parametrize(("cluster", "said"), [("alps", False), ("nowhere", True), (None, True)])
def test_a_cluster_without_a_section_is_said(
    profile: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cluster: str | None,
    said: bool,
) -> None:
    """Also if its name is unknown, where there is a Slurm. slurmctld knows it if no file does."""
    for program in ("sbatch", "scontrol"):
        name = f"echo 'ClusterName = {cluster}'" if cluster else "exit 1"
        write(tmp_path / "bin" / program, f"#!/bin/sh\n{name}\n").chmod(0o755)
    for variable, value in {**profile, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("SLURM_CONF", "/nowhere")
    monkeypatch.delenv("SLURM_CLUSTERS", raising=False)
    monkeypatch.chdir(tmp_path)
    made = describe(None, {"module": "m"}, {}, on="own" if cluster == "alps" else None)
    assert made.account == ("other" if cluster == "alps" else "mine")
    assert ("`clusters:`" in capsys.readouterr().err) is said


@pytest.mark.parametrize("name", kinds.site_names())
def test_every_profile_is_valid_and_says_where_it_is_from(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With each of its targets. All values may be overridden."""
    profile = configuration_files.site_profile(name)
    assert profile.about and profile.source and re.fullmatch(r"\d{4}-\d{2}", profile.date)
    for target in (None, *profile.targets):
        assert from_values({"module": "m", "site": name}, on=target) != from_values({"module": "m"})
    assert command(["config", "sites"]) == 0
    listed = capsys.readouterr()
    assert re.search(rf"^{name} .*{re.escape(profile.source)}", listed.out, re.M) and "not been tested" in listed.err
    assert command(["config", "sites", name]) == 0
    assert profile.text.strip() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("defaults: {runs_dir: /scratch/runs}", "/scratch/runs"),
        ("defaults: {runs_dir: $PLACE/runs}\nclusters: {other: {runs_dir: /other}}", "/place/runs"),
        ("defaults: {runs_dir: /scratch}\nclusters: {Alps: {runs_dir: ~/alps}}", "/home/me/alps"),
        ("defaults: {account: mine}", None),
    ],
)
def test_the_folder_for_new_runs_may_be_configured(
    text: str, folder: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CLUSTERDDP_RUNS has precedence. Every command looks for runs there."""
    write(tmp_path / "clusterddp" / "config.yaml", text)
    variables = {
        **BARE,
        "XDG_CONFIG_HOME": str(tmp_path),
        "PLACE": "/place",
        "HOME": "/home/me",
        "SLURM_CLUSTERS": "alps",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CLUSTERDDP_RUNS", "mine")
    use_runs_dir()
    assert os.environ["CLUSTERDDP_RUNS"] == "mine"
    monkeypatch.delenv("CLUSTERDDP_RUNS")
    use_runs_dir()
    assert os.environ.pop("CLUSTERDDP_RUNS", None) == folder
    assert from_values(
        {"module": "m"}, defaults=read_configuration_files(find_configuration_files(variables, tmp_path), "alps")
    )


@pytest.mark.parametrize("value", ["$NOWHERE/runs", "[a]", '""', "' '"])
def test_a_folder_for_new_runs_that_cannot_be_is_a_mistake(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable that is not set would make it another folder."""
    path = write(tmp_path / "clusterddp" / "config.yaml", f"defaults: {{runs_dir: {value}}}")
    for name, variable in {**BARE, "XDG_CONFIG_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, variable)
    monkeypatch.delenv("CLUSTERDDP_RUNS", raising=False)
    with raises(JobDefinitionError):
        use_runs_dir()
    if "$" in value:  # which is set elsewhere
        check_configuration_file(path)
        return
    with pytest.raises(JobDefinitionError):
        check_configuration_file(path)
