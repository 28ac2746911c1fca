"""The signal that a script without clusterddp expects: its handler is called once, whatever announced the stop."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.wording import says

#: Waits for what the signals did; the handlers run between two bytecodes of the main thread.
BEGIN = """
import os, signal, sys, threading
from clusterddp.worker import rank_process
caught, seen = [], threading.Semaphore(0)
def told(number): seen.release()
stop = rank_process.begin().signals.expect("{name}", told)
def send(*names):
    for name in names:
        os.kill(os.getpid(), getattr(signal, name))
        seen.acquire(timeout=60)
"""


def run(name: str, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEGIN.format(name=name) + code], capture_output=True, text=True, timeout=60, check=False
    )


EVERY_NOTICE = """
own = lambda number, frame: caught.append(number)
usual = signal.getsignal(stop.number)
assert signal.signal(stop.number, own) == usual and signal.getsignal(stop.number) is own
if stop.number != signal.SIGTERM:
    assert signal.signal(signal.SIGTERM, lambda *_: caught.append("TERM")) == signal.SIG_DFL
send("SIGTERM", "SIGTERM", "SIGUSR2", stop.number.name)
stop.send()
assert caught == [stop.number] and stop.delivered, caught
"""


@pytest.mark.parametrize("name", ["USR1", "USR2", "INT", "TERM"])
def test_every_notice_becomes_the_signal_that_the_script_expects_once(name: str) -> None:
    """The script's own TERM handler is not called, as Slurm's TERM is replaced."""
    done = run(name, EVERY_NOTICE)
    assert done.returncode == 0, done.stderr


def test_without_a_handler_the_signal_has_its_usual_action() -> None:
    """The script has not begun to train. One that ignores the signal is left alone."""
    done = run("USR1", 'send("SIGTERM"); threading.Event().wait(60)')
    assert done.returncode == -signal.SIGUSR1
    says(done.stderr)
    done = run("INT", 'send("SIGTERM")')
    assert done.returncode in (1, -signal.SIGINT) and "KeyboardInterrupt" in done.stderr
    done = run("USR1", 'signal.signal(signal.SIGUSR1, signal.SIG_IGN); send("SIGTERM"); print("lives")')
    assert (done.returncode, done.stdout) == (0, "lives\n"), done.stderr


CHILDREN = """
import multiprocessing, subprocess
def handlers():
    return signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR2)
handler = signal.signal(signal.SIGUSR1, lambda *_: caught.append("USR1")) and signal.getsignal(signal.SIGUSR1)
with multiprocessing.get_context("fork").Pool(1) as pool:  # its end terminates the worker
    of_child = pool.apply(handlers)
assert of_child == (signal.SIG_DFL, signal.SIG_IGN), of_child
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
child.terminate()
assert child.wait(60) == -signal.SIGTERM
assert not caught
"""


def test_children_of_the_script_have_default_signals() -> None:
    """A pool ends, and a program that is told to end does."""
    done = run("USR1", CHILDREN)
    assert done.returncode == 0, done.stderr


LOADER = """
code = compile("pid = os.fork()", "/x/torch/utils/data/dataloader.py", "exec")
exec(code)
if pid == 0:
    os._exit(signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ()) and signal.getsignal(signal.SIGTERM) == 0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
"""


def test_workers_of_a_data_loader_ignore_the_stop_of_their_rank() -> None:
    """Their death would raise in the rank while it saves; Slurm may signal all processes of a step."""
    done = run("USR1", LOADER)
    assert done.returncode == 0, done.stderr


ERRORS = """
for wrong in (lambda: signal.signal(signal.SIGTERM, 3), lambda: signal.signal(signal.SIGTERM, "x")):
    try:
        wrong()
    except (TypeError, ValueError) as error:
        caught.append(error)
def other():
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    except ValueError as error:
        caught.append(error)
thread = threading.Thread(target=other)
thread.start(); thread.join()
assert len(caught) == 3, caught
stop.release()
assert signal.signal is not stop._note and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
assert signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN
"""


def test_its_errors_are_those_of_python_and_it_can_be_released() -> None:
    """``clusterddp.init()`` releases it."""
    done = run("USR1", ERRORS)
    assert done.returncode == 0, done.stderr
