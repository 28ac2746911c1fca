"""Who may read and change a run's files, as docs/guide/security.md describes."""

from __future__ import annotations

import base64
import dataclasses
import json
import os
import re
import stat
import subprocess
import sys
import textwrap
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from clusterddp import entry
from clusterddp.cli.command_line import command as run_command
from clusterddp.errors import JobDefinitionError, RunDirectoryError
from clusterddp.jobdef import load
from clusterddp.jobdef.differences import list_differences
from clusterddp.jobdef.job import Job, Resume
from clusterddp.jobdef.masking import MASK, _forms, is_secret, known_secrets, masked
from clusterddp.jobdef.secrets import secret_values, with_secrets, without_secrets
from clusterddp.rundir import run_directory
from clusterddp.rundir.files import write_atomically, write_json
from clusterddp.rundir.ownership import check_owner
from clusterddp.rundir.run_directory import RunDirectory, open_run
from clusterddp.runs import run_status
from clusterddp.runs.recording import recorded
from clusterddp.supervisor.launcher import rank_command
from clusterddp.supervisor.main import load_trusted
from clusterddp.supervisor.verdict import RankEnd
from tests.histories import happened
from tests.runs_on_disk import event, recorded_run, started, steps
from tests.waiting import story
from tests.wording import raises

JOB = Job(
    name="net",
    module="net",
    args=("--lr", "0.1", "--api-key", "s3cret-argument", "db.password=s3cret-override", "--sort-keys"),
    resume=Resume(("a.pt",), ("--hf_token=s3cret-resume",)),
    env={"HF_TOKEN": "s3cret-environment", "HF_HOME": "/data", "EMPTY_KEY": ""},
    device="cpu",
)
SHARED = dataclasses.replace(JOB, share="group")
PASSWORD = """se'cr\\et"\nof two lines"""
SECRETS = ("s3cret-argument", "s3cret-override", "s3cret-resume", "s3cret-environment")


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def any_umask(request: pytest.FixtureRequest) -> Iterator[None]:
    """What users have."""
    before = os.umask(request.param)
    yield
    os.umask(before)


# --- secrets


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        *[
            (name, True)
            for name in ("HF_TOKEN", "WANDB_API_KEY", "--api-key", "db.password", "secretSauce", "authToken")
        ],
        *[(name, True) for name in ("AWS_SECRET_ACCESS_KEY", "MY_PASSPHRASE", "KEY")],
        *[
            (name, False)
            for name in ("--tokenizer", "MAX_TOKENS", "KEYS", "HF_TOKEN_FILE", "monkey", "pad_token_id", "", "PWD")
        ],
        *[
            (name, False)
            for name in ("--text-key", "--eos-token", "partition-key", "label_key", "MASK_TOKEN", "--sort-key")
        ],
    ],
)
def test_a_secret_is_recognized_by_its_name(name: str, secret: bool) -> None:
    """The last word of it, or a password anywhere; not where a secret is to be found."""
    assert is_secret(name) == secret


def test_secrets_are_masked_and_restored() -> None:
    """The visible part has none of them, and both together are the job."""
    shown, secrets = without_secrets(JOB)
    assert shown.args == ("--lr", "0.1", "--api-key", MASK, f"db.password={MASK}", "--sort-keys")
    assert not [value for value in SECRETS if value in shown.to_yaml()]
    assert with_secrets(shown, secrets) == JOB


def test_a_recorded_job_has_its_secrets_in_the_private_folder_alone(tmp_path: Path) -> None:
    """0600, for the owner; a run whose secrets are missing does not start with a mask as password."""
    run = RunDirectory(tmp_path / "run")
    with recorded(run, JOB, created=True):
        pass
    holding = [path for path in run.path.rglob("*") if path.is_file() and "s3cret" in path.read_text()]
    assert holding == [run.private / "secrets.json"]
    assert stat.S_IMODE(holding[0].stat().st_mode) == 0o600
    assert load_trusted(run) == JOB
    assert load.load(run.job_file, {"seed": "7"}) == dataclasses.replace(JOB, seed=7)  # what continues it
    holding[0].unlink()
    with raises(RunDirectoryError):
        load_trusted(run)


def test_differences_are_listed_without_the_secrets() -> None:
    """`submit` lists it on the terminal."""
    other = Job(
        name="net", module="net", args=("--api-key", "s3cret-other"), env={"HF_TOKEN": "s3cret-new"}, device="cpu"
    )
    lines = list_differences(JOB, other)
    assert f"env.HF_TOKEN: {MASK} recorded, {MASK} given" in lines
    assert "s3cret" not in "".join(lines)


def test_no_command_line_has_a_secret() -> None:
    """Everyone on a node may see those of all processes."""
    assert "s3cret" not in " ".join([*rank_command(JOB, False, Path()), *rank_command(JOB, True, Path())])


def test_a_secret_in_a_mistake_is_not_repeated() -> None:
    """Nor in what `--set` says is wrong."""
    with pytest.raises(JobDefinitionError) as caught:
        load.from_values({"module": "net"}, overrides={"env.HF_TOKEN.x": "s3cret-value", "api_key": "s3cret-value"})
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"setup": ["export HF_TOKEN=s3cret-value"]},
        {"setup": ["cd /data; API_KEY='s3cret-value' ./prepare"]},
        {"sbatch": {"export": "ALL,HF_TOKEN=s3cret-value"}},
    ],
)
def test_a_secret_is_refused_where_the_batch_script_would_have_it(values: dict[str, object]) -> None:
    """Slurm keeps the script and shows it; the message says where to write it instead."""
    with raises(JobDefinitionError) as caught:
        load.from_values({"module": "net", **values})
    assert "s3cret" not in str(caught.value)


def test_a_setup_line_may_read_a_secret_from_a_file() -> None:
    """Then the script has none."""
    lines = ["export HF_TOKEN=$(cat ~/.hf)", 'export API_KEY="$OTHER"', "MAX_TOKENS=5", "KEYS=a"]
    assert load.from_values({"module": "net", "setup": lines}).setup == tuple(lines)


def test_a_failure_is_shown_without_the_secrets(tmp_path: Path) -> None:
    """An exception's text often has the address it was about."""
    write_json(
        tmp_path / "rank-0.json",
        {"host": "n1", "end": "exception", "error": "no answer from https://x?key=s3cret-environment",
         "traceback": "connect('s3cret-exported')"},
    )  # fmt: skip
    secrets = secret_values(JOB, {"GITHUB_TOKEN": "s3cret-exported", "SHORT_KEY": "no", "HOME": "/root"})
    end = RankEnd.read(0, "n1", 1.0, tmp_path / "rank-0.json").without(secrets)
    assert (end.error, end.traceback) == (f"no answer from https://x?key={MASK}", f"connect('{MASK}')")
    assert masked("nothing here", secrets) == "nothing here"
    assert known_secrets({}, ["--api-key=YWJjZA==", "--token", "x=YWJjZB=="]) == ["x=YWJjZB==", "YWJjZA=="]


def test_a_single_word_is_masked_where_it_is_written_down_and_not_in_every_message() -> None:
    """Shorter than many passwords of letters alone, and longer than most words of a message."""
    words = ["--password", "training", "--db-password=Internal", "--token", "abcdefghijklmnop", "--key", "Training1"]
    assert known_secrets({"PASSWORD": "DEFAULT"}, words) == ["abcdefghijklmnop", "Training1"]
    job, secrets = without_secrets(dataclasses.replace(JOB, args=("--password", "training")))
    assert job.args == ("--password", MASK)
    assert "training" in secrets.values()


def test_a_secret_that_contains_another_is_masked_to_its_end() -> None:
    url = "https://me:s3cret-password@host/s3cret-path"
    assert masked(f"no answer from {url} at the end", [url, "s3cret-password"]) == f"no answer from {MASK} at the end"


@pytest.mark.parametrize(
    "secret", ["simple-s3cret", PASSWORD, "a'b'c-s3cret", 'a"b\\n-s3cret', "pässwörd-s3cret", "%2F/+ s3cret"]
)
def test_a_secret_is_masked_in_every_form_that_an_error_may_have(secret: str) -> None:
    """Quoted once or twice, encoded, with a line broken within it, or with one of its own lines alone."""
    data = secret.encode()
    forms = [secret, repr(secret), repr((secret, "'\"")), ascii(secret), repr(data), repr(KeyError(repr(secret)))]
    forms += [json.dumps(secret), json.dumps(secret, ensure_ascii=False), json.dumps({"x": repr(secret)})]
    forms += [quote(secret), quote(secret, safe=""), quote_plus(secret)]
    forms += [re.sub("%..", lambda code: code[0].lower(), quote(secret))]
    for before in (b"", b"a", b"ab"):
        forms += [base64.b64encode(before + data + b"xyz").decode(), base64.urlsafe_b64encode(before + data).decode()]
    forms += [secret.splitlines()[-1], "\n".join(secret), textwrap.indent(textwrap.fill(repr(secret), 7), "| ")]
    forms += [base64.encodebytes(b"x" * 50 + data).decode()]
    pieces = [form[at : at + 6] for form in _forms((secret,)) for at in range(len(form) - 5)]
    for form in forms:
        shown = masked(f"error: {form} at the end", [secret])
        assert MASK in shown and shown.startswith("error: ") and shown.endswith(" at the end"), (form, shown)
        assert not [piece for piece in pieces if piece in shown], (form, shown)


@pytest.mark.parametrize("found", [True, False])
def test_a_large_text_is_masked_in_little_memory(found: bool) -> None:
    """A script may print much before a command shows it. It took 50 times as much memory as the text."""
    text = "step 100 of 200, loss 0.123\n" * 20_000 + ("s3cret-value" if found else "")
    tracemalloc.start()
    try:
        assert (masked(text, ["s3cret-value"]) != text) is found
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 20 * len(text)


def test_a_run_gets_its_secrets_and_shows_none(tmp_path: Path) -> None:
    """The script has all of them, and what it printed is in its log; nothing that we write or show has one."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\nassert sys.argv[1:] == ['--api-key', 's3cret-argument']\n"
        "print(open('/proc/self/cmdline').read().split('\\0'))\n"
        "import base64; password = os.environ['DB_PASSWORD']\n"
        "code = base64.encodebytes(b'user:' + password.encode()).decode()\n"
        "raise ValueError('with ' + os.environ['HF_TOKEN'], password, code, 'x' * 3_000_000 + password)\n"
    )
    (tmp_path / "job.yaml").write_text(f"script: train.py\ndevice: cpu\nenv: {{HF_TOKEN: {SECRETS[3]}}}\n")
    command = [sys.executable, "-m", "clusterddp.submit", "job.yaml", "--local", "--run-dir", "run"]
    done = subprocess.run(
        [*command, "--", "--api-key", SECRETS[0]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "DB_PASSWORD": PASSWORD},
    )
    run = RunDirectory(tmp_path / "run")
    logs = run.attempt_logs(0)
    assert f"'--api-key', '{MASK}'" in (logs / "rank-0.out").read_text(), story(run)
    assert f"ValueError: ('with {SECRETS[3]}" in (logs / "rank-0.err").read_text()
    assert f"with {MASK}" in done.stderr + (logs.parent / "supervisor.log").read_text()
    traces = ["s3cret", *_forms((PASSWORD,))]
    texts = {path: path.read_text() for path in run.path.rglob("*") if path.is_file()}
    holding = {path for path, text in texts.items() if any(trace in text for trace in traces)}
    assert holding == {run.private / "secrets.json", logs / "rank-0.err"}
    assert not [trace for trace in traces if trace in done.stdout + done.stderr]
    assert run.events_file.stat().st_size + run.outcome_file.stat().st_size < 30_000
    assert "characters left out" in run.events()[-1]["reason"]


# --- who may read


def modes(run: RunDirectory) -> dict[str, int]:
    """Of all that is in a run, by path."""
    return {str(path.relative_to(run.path)): stat.S_IMODE(path.stat().st_mode) for path in run.path.rglob("*")}


@pytest.mark.usefixtures("any_umask")
@pytest.mark.parametrize(("share", "folder", "file"), [("private", 0o700, 0o600), ("group", 0o2750, 0o640)])
def test_permissions_follow_share_under_any_umask(tmp_path: Path, share: str, folder: int, file: int) -> None:
    """Nobody but the owner may write; `private` is closed in any case."""
    run = RunDirectory(tmp_path / "run")
    job = Job(name="net", module="net", share=share, device="cpu")  # type: ignore[arg-type]
    with recorded(run, job, created=True):
        pass
    run.create_attempt()
    happened(run, {"event": "started"})
    write_atomically(run.attempt_logs(0) / "x", "")
    write_atomically(run.attempt_private(0) / "x", "")
    assert stat.S_IMODE(run.path.stat().st_mode) == folder
    assert modes(run) == {
        "job.yaml": file,
        "events.jsonl": file,
        "checkpoints": folder,
        "logs": folder,
        "logs/attempt-0": folder,
        "logs/attempt-0/x": file,
        "private/attempt-0/x": 0o600,
        "private/secrets.json": 0o600,
        **{name: modes(run)[name] for name in ("private", "private/attempt-0")},
    }
    assert {modes(run)[name] & 0o777 for name in ("private", "private/attempt-0")} == {0o700}


def test_sharing_a_run_later_shares_its_existing_files(tmp_path: Path) -> None:
    """And the other way round."""
    run = RunDirectory(tmp_path / "run")
    for share, folder, file in (("private", 0o700, 0o600), ("group", 0o2750, 0o640), ("private", 0o700, 0o600)):
        with recorded(run, Job(name="net", module="net", share=share, device="cpu"), created=False):  # type: ignore[arg-type]
            pass
        happened(run, {"event": "started"})
        found = modes(run)
        assert (found["logs"], found["events.jsonl"], found["private"] & 0o777) == (folder, file, 0o700)


# --- who may have written what is executed


def test_what_others_may_have_written_is_not_run(tmp_path: Path) -> None:
    """The error names the file, its owner, its mode and the remedy."""
    run = RunDirectory(tmp_path / "run")
    with recorded(run, SHARED, created=True):
        pass
    for path in (run.job_file, run.path, run.logs, run.private):
        before = stat.S_IMODE(path.stat().st_mode)
        path.chmod(before | 0o020)
        words = f"{path} .user {os.geteuid()}, mode {before | 0o020:04o}. .*chmod -R go-w {path}"
        with pytest.raises(RunDirectoryError, match=words):
            load_trusted(run)
        path.chmod(before)
    assert load_trusted(run) == SHARED
    run.path.chmod(0o700)
    run.logs.chmod(0o777)  # of an earlier version: nobody else comes there
    assert load_trusted(run) == SHARED


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_another_user_has_written_is_not_run(tmp_path: Path) -> None:
    """Not even if it cannot be changed any more."""
    path = tmp_path / "job.yaml"
    path.write_text("")
    path.chmod(0o644)
    check_owner(path)
    os.chown(path, 65534, -1)
    with raises(RunDirectoryError):
        check_owner(path)


def test_a_run_that_others_can_write_is_neither_continued_nor_resubmitted(tmp_path: Path) -> None:
    """Reported at once by the commands, and again by the job that Slurm starts later."""
    run = RunDirectory(tmp_path / "run")
    with recorded(run, SHARED, created=True):
        pass
    run.job_file.chmod(0o666)
    for command in (
        ["clusterddp.submit", "--local", "--run-dir"],
        ["clusterddp", "wait", "--resubmit"],
        ["clusterddp.supervisor", "--local"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command, str(run)], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, "can be written by others" in done.stderr) == (1, True), done.stderr
    assert json.loads((run.private / "secrets.json").read_text())


def test_a_reader_without_permission_gets_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed run names the remedy; a shared one shows all but who holds it, which is in `private`."""
    run = RunDirectory(tmp_path / "run")
    with recorded(run, dataclasses.replace(JOB, share="group"), created=True):
        pass

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "exists", refuse)
        with raises(RunDirectoryError):
            open_run(str(run))
    hidden = lambda folder: None if folder == run.private else os.listdir(folder)  # noqa: E731
    monkeypatch.setattr("clusterddp.rundir.summary._names_in", hidden)
    assert run_status.state_of(run) == ("unknown", "unknown: only its owner can see which job or process trains it")


HOSTILE = "\x1b[2J\x9b\x07\u202ex"


def test_no_text_of_a_run_reaches_the_terminal_with_control_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever command prints it: names and values of metrics, reasons, exceptions, logs, colours in a traceback."""
    failed = event("rank_failed", rank=0, host=HOSTILE, error=HOSTILE, step=3)
    best = event("checkpoint", step=3, blocked_s=0.1, durable_s=0.1, bytes=9, best={HOSTILE: 0.5})
    stopped = event("stopped", reason=HOSTILE, step=3, checkpoint=3, cause="signal")
    metrics = [{**line, HOSTILE: 0.5, "text": HOSTILE} for line in steps(range(4), acc=0.5)]
    history = [
        started(nodes=HOSTILE),
        event("progress", step=0, steps=4),
        event("training", step=0),
        best,
        stopped,
        failed,
    ]
    over = {"state": "failed", "step": 3, "reason": HOSTILE}
    run = recorded_run(tmp_path / "runs" / "failed", history, outcome=over, metrics=metrics)
    trace = f"\x1b[31mTraceback\x1b[0m\n  {HOSTILE}"
    record = {"end": "exception", "error": HOSTILE, "traceback": trace, "time": 1.0, "host": HOSTILE}
    run.rank_record(0, 0).write_text(json.dumps(record))
    (run.attempt_logs(0) / "rank-0.err").write_text(trace)
    recorded_run(tmp_path / "runs" / "stopped", history, metrics=metrics)
    done = {"state": "completed", "step": 4, "reason": HOSTILE}
    recorded_run(tmp_path / "runs" / "done", history, outcome=done, metrics=metrics)
    monkeypatch.chdir(tmp_path)
    of_all = ["list", "list --csv", "list --json", f"list --show text,{HOSTILE}", f"list --best {HOSTILE}",
              f"list --best nothing{HOSTILE}", "list --best nothing", f"list --sort {HOSTILE}", "list --show nothing",
              f"list {HOSTILE}"]  # fmt: skip
    of_one = ["status", "status --json", "logs", "wait", "cancel", "report -o page.html"]
    for words in [*of_all, *(f"{words} runs/{name}" for words in of_one for name in ("failed", "done"))]:
        with pytest.raises(SystemExit):
            entry.exit_with(partial(run_command, words.split(" ")))
        printed = capsys.readouterr()
        text = printed.out + printed.err
        assert text.replace("\n", "").isprintable(), words
        assert text.strip(), words

    def said(*words: str) -> str:
        run_command(words)
        return capsys.readouterr().out

    assert "?[2J???x" in said("status", "runs/failed")
    assert "| Traceback\n" in said("logs", "runs/failed"), "without its colours"
