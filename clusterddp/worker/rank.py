"""The entry point of a rank: ``python -m clusterddp.worker SCRIPT [ARG...]`` (or ``-m MODULE``), one process per rank,
no torch.

It blocks the stop signals, joins the supervisor, sets torchrun's environment, runs the script in this process and
records how it ended. Until the script calls ``clusterddp.init()``, TERM has its default action and USR2 is ignored, so
that a script that does not use clusterddp behaves as under torchrun. If the job names the signal that the script
expects (``stop: {signal: USR1}``), the script gets that one instead.
"""

from __future__ import annotations

import faulthandler
import os
import random
import re
import resource
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from clusterddp import environment, protocol
from clusterddp.errors import (
    STOPPED,
    CheckpointMismatch,
    ClusterddpError,
    Declined,
    DeviceError,
    InterfaceMissing,
    LastSaveFailed,
    LauncherEnvironmentError,
    RunDirectoryError,
    Stopped,
    StoppedAlone,
)
from clusterddp.failures.stack_traces import main_thread_stack, stacks, write_stacks
from clusterddp.history.stops import Notified, Signal
from clusterddp.messages import orders
from clusterddp.messages.reports import End, Left, Made, Saving, record_of
from clusterddp.process import at_exit, collect_rarely, die_with_parent, module_command, this_process
from clusterddp.reporter import say, say_unlocked, show
from clusterddp.rundir.files import write_json
from clusterddp.rundir.ownership import hold_run
from clusterddp.rundir.run_directory import RunDirectory
from clusterddp.worker import (
    children,
    code_paths,
    control_channel,
    gpus,
    interfaces,
    rank_exit,
    rank_process,
    resume_watch,
    script_saves,
    spawned_children,
)
from clusterddp.worker.control_channel import ControlChannel
from clusterddp.worker.gpus import GpuWatch
from clusterddp.worker.rank_process import RankProcess

#: A rank that uses clusterddp has imported this module, or runs a launched function.
SCRIPT_LOOP = "clusterddp.training.script_loop"
USING_CLUSTERDDP = {SCRIPT_LOOP, "clusterddp.worker.function"}
HOST = socket.gethostname()
JOIN_TIMEOUT_S = 600.0
#: The variables without which a rank cannot reach its supervisor.
_NEEDED = (protocol.LAUNCHER, protocol.RUN_DIR, protocol.ATTEMPT, protocol.SUPERVISOR, protocol.TOKEN)
#: Between two looks for a newer attempt, by a rank without a supervisor.
FENCE_S = 2.0
#: Characters of an exception's message, and of its traceback, that are recorded: the beginning and the end.
LONGEST_ERROR, LONGEST_TRACEBACK = 2000, 40_000


def main() -> None:
    """Runs the script as one rank and exits with its exit code.

    A child that the script has forked and that returns here also exits, without a report, as it is not a rank.
    """
    started, pid = time.time(), os.getpid()
    if lacking := [name for name in _NEEDED if name not in os.environ]:
        say(
            f"this rank's environment lacks {' and '.join(lacking)}. What starts Python here, such as a container or "
            "os.execve(), must pass on the environment that it gets"
        )
        raise SystemExit(1)
    process = rank_process.begin()
    faulthandler.enable()  # for its own crashes, whose stacks failures/stack_traces.py reads
    # Torch's watchdog aborts every rank of a failed NCCL job. Their core files would be as large as their memory.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # Processes that the script starts also write each line at once, because a stop may kill them, and `done` may need
    # it.
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    if os.environ[protocol.LAUNCHER] == "local":
        die_with_parent()
    run = RunDirectory(os.environ[protocol.RUN_DIR])
    try:
        hold_run(run, int(os.environ[protocol.RUN_INODE]), int(os.environ[protocol.ATTEMPT]))
    except RunDirectoryError as error:  # a record of the rank's end would be written there
        say(str(error))
        sys.exit(1)
    ranks = environment.read(os.environ)
    record = run.rank_record(int(os.environ[protocol.ATTEMPT]), ranks.rank)
    end = Ending(process, record, ranks.rank, started)
    if _notified():
        end.exit(left(End.STOPPED, reason="stop signal before the script started"), 0)
    try:
        named_interface()
    except InterfaceMissing as error:
        end.exit(_raised(error), 1)
    try:
        held_port = join(process, ranks)
    except ClusterddpError as error:
        say(str(error))
        end.exit(left(End.LOST, error=str(error)), 1)
    if (channel := process.channel) is None:
        end.exit(left(End.STOPPED, reason="stop signal before all ranks had joined"), 0)
    channel.listen(lambda: exit_if_superseded(run, end), lambda order: obey(process, order))
    if os.environ[protocol.DEVICE] == "cuda":
        process.gpus = gpus.start(dict(os.environ), ranks, channel.send, HOST)
    _let_signals_through(process, os.environ.get(protocol.STOP_SIGNAL))
    at_exit(rank_exit.end_daemonic)
    process.note_stops(lambda stopped: _bound_stop(process, end, stopped))
    code_paths.use_snapshot()
    attempt = int(os.environ[protocol.ATTEMPT])
    script_saves.sweep(run, attempt)
    protects, sees = (os.environ.get(name) != "off" for name in (protocol.PROTECT_SAVES, protocol.SEE_STEPS))
    if protects:
        process.saves.protect(str(run), attempt, stops_at_a_step, os.environ.get(protocol.STOP_SIGNAL))
    if sees:
        process.optimizers.begin(run.child_step_file(attempt).absolute())
    children.ChildWatch(process.report).begin()
    spawned_children.prepare_children(str(run), attempt, protect=protects, steps=sees)
    if trackers := os.environ[protocol.TRACKERS].split():
        from clusterddp.trackers.registry import TRACKERS

        for tracker in trackers:
            os.environ.update(TRACKERS[tracker].variables(run, ranks.rank, os.environ))
    collect_rarely()
    if os.environ[protocol.LAUNCHER] == "slurm" and protocol.DEBUG_RANK in os.environ:
        _debug(run, ranks.rank)
    command = filled(whole_command(sys.argv[1:], run), ranks)
    if os.environ.get(protocol.HYDRA):
        command = hydra_command(command, run)
    keep_place_after_exec(command)
    if ranks.rank == 0:
        _enter(process, "importing")
        process.resume_watch = resume_watch.begin(os.environ, process.report)
    values, code = run_script(process, command)
    if process.training.loop is not None:  # the script's loop ended early, at this step
        values = replace(values, step=process.training.loop.step())
    if os.getpid() != pid:
        rank_exit.finish_child(code)
    is_done = values.end is End.DONE
    if is_done and not _used_clusterddp():
        children.wait_for_trainers(run.child_step_file(attempt), rank_exit.EXIT_GRACE_S)
    watch = process.resume_watch
    if watch and watch.end(trained=is_done, stepped=False) and is_done and protocol.SAVED in os.environ:
        values = replace(values, read_saved=True)
    del held_port
    end.exit(replace(values, without_torch="torch" not in sys.modules, used_clusterddp=_used_clusterddp()), code)


def left(end: End, **fields: Any) -> Left:
    """How this rank ends."""
    return Left(HOST, end, **fields)


class Ending:
    """The end of this rank, which is reported and recorded once. ``record``: its file."""

    def __init__(self, process: RankProcess, record: Path, rank: int, started: float) -> None:
        self._process, self._record, self.rank, self._started = process, record, rank, started
        self._once = threading.Lock()

    def exit(self, how: Left, code: int) -> NoReturn:
        """Records the end and exits. After a failure, does not wait for threads or the process group."""
        self.record(how)
        if code == 0:
            self._process.exit.finish(0, stopped=how.end is End.STOPPED)
        self._process.exit.fail(code)

    def record(self, how: Left) -> None:
        """Reports the end to the supervisor and writes it to a file, unless another one was."""
        if not self._once.acquire(blocking=False):
            return
        if self.rank == 0:
            _enter(self._process, "ending")
        self._process.report(how)  # before the file, as the order of failures counts
        try:
            write_json(
                self._record, {**record_of(how, self.rank), "started": self._started, "ended": time.time()}, mode=0o600
            )
        except OSError as error:
            say(f"could not record the end of rank {self.rank}: {error}")


def _enter(process: RankProcess, phase: str) -> None:
    """Rank 0 begins a phase."""
    from clusterddp.history.beginnings import Phase  # only rank 0 needs it

    process.report(Phase(phase=phase))


def _debug(run: RunDirectory, rank: int) -> None:
    """``breakpoint()`` waits for a debugger in one rank, and has no effect in the others."""
    if rank == int(os.environ[protocol.DEBUG_RANK]):
        from clusterddp.worker import debugger

        debugger.install(run, int(os.environ[protocol.ATTEMPT]), rank)
    else:
        os.environ["PYTHONBREAKPOINT"] = "0"


def whole_command(command: list[str], run: RunDirectory) -> list[str]:
    """The script and its arguments. Secret arguments are masked on the command line and are read from the job."""
    from clusterddp.jobdef.masking import MASK

    if not any(word.endswith(MASK) for word in command):
        return command
    from clusterddp.jobdef.load import load_resolved

    words = load_resolved(run.job_file).arguments(protocol.CHECKPOINT in os.environ)
    return [*command[: len(command) - len(words)], *words]


def filled(command: list[str], ranks: environment.RankEnvironment) -> list[str]:
    """The command with this rank's values in place of the placeholders in its arguments, and in the job's variables."""
    if not any("{" in word for word in command) and protocol.PLACEHOLDERS not in os.environ:
        return command
    from clusterddp.jobdef.program import checkpoint_values, fill

    values = {
        **checkpoint_values(os.environ.get(protocol.CHECKPOINT, "")),
        "run_dir": os.environ[protocol.RUN_DIR],
        "attempt": os.environ[protocol.ATTEMPT],
        "node_rank": str(ranks.node_rank),
        "local_rank": str(ranks.local_rank),
        "nodes": str(ranks.world_size // ranks.local_world_size),
        "master_addr": os.environ["MASTER_ADDR"],
        "master_port": os.environ["MASTER_PORT"],
    }
    for name in os.environ.get(protocol.PLACEHOLDERS, "").split():
        os.environ[name] = fill(os.environ[name], values)
    target = 2 if command[0] == "-m" else 1
    return [*command[:target], *(fill(word, values) for word in command[target:])]


def hydra_command(command: list[str], run: RunDirectory) -> list[str]:
    """The same for a Hydra app, with options that make all ranks and attempts share one output folder."""
    from clusterddp.jobdef.program import hydra_arguments

    # Otherwise Hydra prints the traceback and exits with code 1, and the record has no exception.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    target = 2 if command[0] == "-m" else 1
    return [*command[:target], *hydra_arguments(command[target:], run.hydra)]


def keep_place_after_exec(command: list[str]) -> None:
    """Makes an ``os.exec`` of Python with the same script or module begin with this entry point again.

    Scripts do that to set LD_LIBRARY_PATH before the first import of a library. The new program would not be connected
    to the supervisor, which would take this rank for one that has exited.
    """
    process, execv, execve = os.getpid(), os.execv, os.execve

    def through_here(path: Any, given: Iterable[Any]) -> list[str]:
        words = [os.fsdecode(word) for word in given]
        is_python = os.path.realpath(os.fsdecode(path)) == os.path.realpath(sys.executable)
        if os.getpid() != process or not is_python:
            return words
        return through_entry(words, command, getattr(sys.modules["__main__"], "__file__", None))

    os.execv = lambda path, argv: execv(path, through_here(path, argv))
    os.execve = lambda path, argv, env: execve(path, through_here(path, argv), env)


def through_entry(words: list[str], command: list[str], main_file: str | None) -> list[str]:
    """Python's command line ``words``, through this entry point if it runs what this rank runs: the script or module of
    ``command``, whose file is ``main_file``.

    Not if that is only an argument of another program, such as torchrun.
    """
    place = _program(words)
    if place is None:
        return words
    if words[place] == "-m":
        same = command[0] == "-m" and words[place + 1 : place + 2] == command[1:2]
    else:
        same = os.path.realpath(words[place]) in {os.path.realpath(file) for file in (command[0], main_file) if file}
    return [*words[:place], *module_command(protocol.module_of_rank(os.environ))[1:], *words[place:]] if same else words


def _program(words: list[str]) -> int | None:
    """Where a command line of Python has its script, or the ``-m`` before its module. None if it has neither."""
    place = 1
    while place < len(words):
        option = words[place]
        if option == "-m" or not option.startswith("-"):
            return place
        takes = re.match("-[^-]*?([cmWX])(.*)", option)  # the rest of the option, or the next word
        if takes is not None and takes[1] in "cm":
            return None
        place += 2 if option == "--check-hash-based-pycs" or (takes is not None and not takes[2]) else 1
    return None


def join(process: RankProcess, ranks: environment.RankEnvironment) -> socket.socket | None:
    """Joins the supervisor and sets torchrun's environment. Returns the socket that reserves rank 0's port.

    MASTER_ADDR and MASTER_PORT are chosen here, once per attempt. Rank 0 reserves a port and sends it with its first
    message. The supervisor takes the address from which rank 0 connects, and sends both to each rank that joins
    (``ControlServer._greet``). Values that the user has set have precedence. A restart chooses again, in place as well,
    because every attempt has new ranks and a new control server. A rank that only reconnects gets the same address.
    Without a supervisor, ``environment.read`` takes torchrun's values, or under a plain srun the step's first host and
    a port that it computes from the job, the step and the restart.

    Has no effect if a stop signal arrives before all ranks have joined.
    """
    host, _, supervisor_port = os.environ[protocol.SUPERVISOR].rpartition(":")
    # srun sets this to the address of the node that it runs on, which is the supervisor's.
    address = f"{host or os.environ['SLURM_LAUNCH_NODE_IPADDR']}:{supervisor_port}"
    held = reserve_port(os.environ.get("MASTER_PORT") or None) if ranks.rank == 0 else None
    port = held.getsockname()[1] if held else None
    token, identity = os.environ[protocol.TOKEN], this_process()
    channel = ControlChannel.join(address, token, ranks.rank, port, JOIN_TIMEOUT_S, _notified, identity)
    process.channel = channel
    if channel is None:
        return None
    # The peer address of rank 0's connection, so that no name is resolved. A MASTER_ADDR of the user has precedence.
    master = os.environ.get("MASTER_ADDR") or channel.store_host
    channel.variables = {**ranks.exports(), "MASTER_ADDR": master, "MASTER_PORT": str(channel.store_port)}
    os.environ.update(channel.variables)
    environment.mark(os.environ)
    if channel.term_notice_s is not None:
        os.environ[protocol.TERM_NOTICE_S] = str(channel.term_notice_s)
    use_interface(channel.local_address)
    # When rank 0's store is lost, every peer prints C++ stacks, which would bury the first failure.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    return held


def exit_if_superseded(run: RunDirectory, end: Ending) -> NoReturn:
    """Waits until a newer attempt of the run exists, then ends this rank.

    For a rank whose supervisor has exited or is unreachable. The rank may wait in a collective for ranks that no longer
    exist, on a node that Slurm cannot reach, after the run was requeued to other nodes.
    """
    own = int(os.environ[protocol.ATTEMPT])
    say("the supervisor is unreachable. Training continues unless a newer attempt starts")
    while True:
        with suppress(OSError):  # of a network file system; the next look may succeed
            if run.superseded(own):
                break
        time.sleep(FENCE_S)
    words = f"attempt {own} was superseded by attempt {run.newest_attempt()}"
    say(f"{words}. Rank {end.rank} exits without writing")
    end.record(left(End.SUPERSEDED, reason=words))
    rank_exit.exit_now(1)  # without the script's exit handlers, which may write to files that the newer attempt uses


def obey(process: RankProcess, order: orders.Order) -> None:
    """Carries out an order of the supervisor: connect to the store, stop like on a signal, save, count its steps,
    commit, report or write stacks, write torch's flight record, or exit at once. Works even if the main thread hangs.

    A script that does not use clusterddp may be saving, and is left to its launcher.
    """
    channel = process.channel
    assert channel is not None  # the order came through it
    match order:
        case orders.Stop():
            channel.stop(order.reason)
        case orders.Connect():
            channel.store_open.set()
        case orders.RecordFlight():
            channel.write_flight_record()
        case orders.WriteStacks():
            write_stacks(order.seconds)
        case orders.SendStacks():  # in a separate thread, so that orders that follow do not wait for it
            _in_thread(lambda: channel.send(stacks(order.request)), "stacks")
        case orders.Explain():
            _in_thread(lambda: _explain(process.gpus, channel, order), "facts")
        case orders.Save():
            _save(channel, order)
        case orders.CountSteps() if channel.steps_made is not None:
            channel.send(Made(question=order.question, step=channel.steps_made()))
        case orders.Commit():
            channel.answer(order)
        case orders.Leave() if _used_clusterddp():
            say_unlocked(f"exiting, because {order.why}")
            where = _short(main_thread_stack(), LONGEST_TRACEBACK)
            channel.send(left(End.DISMISSED, error=order.why, traceback=where, used_clusterddp=True))
            # In a separate thread, because an exit handler may need an answer of the supervisor.
            _in_thread(lambda: process.exit.fail(1, rank_exit.DISMISSAL_GRACE_S), "exit")


def _in_thread(work: Callable[[], None], name: str) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()


def _explain(watch: GpuWatch | None, channel: ControlChannel, order: orders.Explain) -> None:
    """Reports what may make this rank slow."""
    from clusterddp.history.failures import SlowNode  # few runs need it

    facts = gpus.node_facts(watch)
    channel.send(SlowNode(host=HOST, ratio=order.ratio, seconds=order.seconds, facts=facts))


def _save(channel: ControlChannel, order: orders.Save) -> None:
    """Has the next step boundary save. The answer comes first, because it must precede the checkpoint's report."""
    if (run := channel.run) is None:
        channel.send(Saving(request=order.request))
        return
    step, committed = run.progress()
    channel.send(Saving(request=order.request, step=step, committed=committed))
    if committed != step:
        run.save()


def stops_at_a_step() -> bool:
    """Whether a stop waits for the end of a step, and so for a save."""
    return SCRIPT_LOOP in sys.modules


def _used_clusterddp() -> bool:
    return bool(USING_CLUSTERDDP & sys.modules.keys())


def run_script(process: RankProcess, command: list[str]) -> tuple[Left, int]:
    """Runs ``SCRIPT ARG...`` or ``-m MODULE ARG...`` as ``__main__``. Returns how it ended, and the exit code.

    ``supervisor/verdict.py`` judges how the ranks ended, and takes the run's exit code from that (``exit_code``: only
    after ``sys.exit``), not from the exit code of this process.
    """
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            if not command[1].startswith("clusterddp."):  # never import our own modules from the current folder
                sys.path.insert(0, code_paths.of_this_attempt(str(Path.cwd())))
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path.insert(0, str(Path(command[0]).resolve().parent))
            runpy.run_path(command[0], run_name="__main__")
    except Stopped as stopped:
        return _stopped(stopped)
    except Declined as declined:
        return left(End.DECLINED, error=str(declined)), 1
    except SystemExit as leaving:
        return _exited(process, leaving)
    except BaseException as error:
        return _raised(error), 1
    return _done(process)


def _stopped(stopped: Stopped) -> tuple[Left, int]:
    alone = isinstance(stopped, StoppedAlone)
    return left(End.STOPPED, step=stopped.step, reason=stopped.reason, alone=alone), STOPPED if alone else 0


def _done(process: RankProcess) -> tuple[Left, int]:
    """The script returned. It is not done if it caught Stopped (as a bare ``except:`` does) or had to stop.

    After ``break`` it is done, unless the supervisor has a reason to stop.
    """
    if process.stopped is not None:
        say("the script caught clusterddp.Stopped. The run is stopped, not completed. Let this exception propagate")
        return _stopped(process.stopped)
    if process.training.stop_reason is not None:
        say("the script exited without requeue() after stop_requested() was true. The run is stopped, not completed")
        return left(End.STOPPED, reason=process.training.stop_reason), 0
    if process.terminated:
        return left(End.STOPPED, reason=f"exited with code 0 after {process.terminated}"), 0
    expected = process.signals.of_script
    if expected is not None and expected.delivered:
        return left(End.STOPPED, reason=f"exited with code 0 after {expected.number.name}"), 0
    return left(End.DONE, left_loop=process.training.loop is not None), 0


def _exited(process: RankProcess, leaving: SystemExit) -> tuple[Left, int]:
    if leaving.code is None or leaving.code == 0:
        loop = process.training.loop
        if process.stopped is None and loop is not None and loop.ended_by(leaving):
            process.training.exited_in_loop = True
            where = f"exited with code 0 inside its training loop, after step {loop.step()} of {loop.steps}"
            remedy = "To end training early, use run.finish() or break"
            say(f"the script {where}. The run does not count as completed. {remedy}")
            return left(End.UNFINISHED, error=where), 0
        return _done(process)
    if isinstance(leaving.code, int):  # includes True; the system takes 8 bits of a larger number, which may all be 0
        code = leaving.code & 0xFF or 1
        return left(End.EXIT, exit_code=code), code
    show(str(leaving.code))  # as Python does
    return left(End.EXIT, exit_code=1, error=_short(str(leaving.code), LONGEST_ERROR)), 1


def _raised(error: BaseException) -> Left:
    """Prints the traceback as Python would, starting at the script's own frames, and returns its record."""
    inner = error.__traceback__
    while inner is not None and _below_the_script(inner.tb_frame.f_code.co_filename):
        inner = inner.tb_next
    error.__traceback__ = inner
    try:
        sys.excepthook(type(error), error, inner)
    except BaseException as failure:  # in the script's own excepthook: print both, as Python does
        failure.__context__ = None
        with suppress(Exception):  # the script has closed standard error
            sys.__excepthook__(type(failure), failure, failure.__traceback__)
            sys.__excepthook__(type(error), error, inner)
    try:
        message = f"{type(error).__name__}: {error}"
    except Exception:  # in the error's __str__; as traceback prints it
        message = f"{type(error).__name__}: <exception str() failed>"
    text = "".join(traceback.format_exception(error))
    return left(
        End.EXCEPTION,
        error=_short(message, LONGEST_ERROR),
        exception=type(error).__name__,
        traceback=_short(text, LONGEST_TRACEBACK),
        lacks_gpus=isinstance(error, DeviceError) and error.lacks_gpus,
        lacks_interface=isinstance(error, InterfaceMissing),
        final=isinstance(error, (CheckpointMismatch, LastSaveFailed)),
    )


def _short(text: str, longest: int) -> str:
    """A text with secrets masked, then truncated, because truncating first could leave a part of one."""
    from clusterddp.jobdef.masking import known_secrets, masked

    secrets = known_secrets(os.environ, [str(word) for word in sys.argv or ()])
    return control_channel.clip(masked(text, secrets), longest)


def _below_the_script(file: str) -> bool:
    """Whether a frame belongs to what runs the script or calls the launched function."""
    functions = (Path(__file__).with_name("function.py"), Path(__file__).parents[1] / "function.py")
    ours = (__file__, *map(str, functions), runpy.__file__, "<frozen runpy>")
    return file in ours or file.endswith("/submitit/core/utils.py")


def _bound_stop(process: RankProcess, end: Ending, stopped: Stopped) -> None:
    """Limits the time that the script may take to exit after a stop, because its nodes are needed."""
    how, code = _stopped(stopped)
    known = replace(how, used_clusterddp=True)
    process.exit.within(rank_exit.STOP_GRACE_S, "the stop", code, lambda: end.record(known))


def _notified() -> bool:
    return bool(signal.sigpending() & {signal.SIGTERM, signal.SIGUSR2})


def _let_signals_through(process: RankProcess, stop_signal: str | None) -> None:
    """TERM gets its default action. USR2 stays blocked and ignored, so it has no effect on a script that does not use
    clusterddp, but stays pending for ``clusterddp.init()``: Linux keeps a blocked signal even if it is ignored.

    A stop that Slurm's TERM has not announced to this process is announced by a TERM from here: see ``_terminate``.

    ``stop_signal``: the one that the script expects, which replaces every notice.
    """
    if stop_signal:
        report = process.report
        expected = process.signals.expect(
            stop_signal, lambda seen: report(Signal(signal=seen.name.removeprefix("SIG")))
        )

        def told(reason: str) -> None:
            report(Notified(reason=reason))
            expected.send()

        process.on_stop(told)
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    process.on_stop(lambda reason: _terminate(process, reason))


def _terminate(process: RankProcess, reason: str) -> None:
    """Sends this process the TERM of a stop, until the script calls ``clusterddp.init()``.

    A rank that was started during a preemption has missed Slurm's TERM, and would hold its node while it imports. If
    TERM has its default action, it has certainly missed it. A handler of the script may be saving, and gets one TERM.
    Before a time limit, Slurm sends its TERM later.
    """
    missed = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and reason != protocol.TIME_LIMIT
    if missed or reason in protocol.REQUESTED_STOPS:
        process.report(Notified(reason=reason))
        process.terminated = reason
        os.kill(os.getpid(), signal.SIGTERM)


def reserve_port(asked: str | None) -> socket.socket:
    """A socket that reserves a port for rank 0's store: ``asked`` (the user's MASTER_PORT), or a free one.

    The socket is bound with SO_REUSEADDR and does not listen. Linux then lets torch's TCPStore, which sets that option
    too, listen on the port, but does not hand it out as a free port. The port lies outside the ephemeral range, which
    outgoing connections use.
    """
    if asked is not None:
        return _bind(int(asked))
    low, high = (int(word) for word in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    candidates = range(10000, low) if low > 11000 else range(high + 1, 65536)
    if not candidates:
        candidates = range(10000, 65536)
    for _ in range(100):
        with suppress(LauncherEnvironmentError):
            return _bind(random.choice(candidates))
    raise LauncherEnvironmentError(
        f"found no free port from {candidates.start} to {candidates.stop - 1} in 100 tries. Set MASTER_PORT to a free "
        "port"
    )


def _bind(port: int) -> socket.socket:
    held = socket.socket()
    try:
        held.bind(("", port))  # before SO_REUSEADDR, so that it fails if another rank 0 has reserved the port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError as error:
        held.close()
        raise LauncherEnvironmentError(
            f"MASTER_PORT {port} is in use on {socket.gethostname()} ({error}). Unset it, or set a free port"
        ) from error
    return held


def named_interface() -> str | None:
    """The interface that the key ``interface`` names on this node. Raises InterfaceMissing if it has none of them,
    which comes before the supervisor is unreachable."""
    wanted = os.environ.get(protocol.INTERFACE)
    return interfaces.chosen(wanted.split(","))[0] if wanted else None


def use_interface(address: str) -> None:
    """gloo uses the interface with this address: it resolves the host name, which on many clusters gives 127.0.1.1 or
    fails. With the key ``interface``, gloo and NCCL use ``named_interface``.
    """
    if interface := named_interface():
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": no other name that begins like it
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    elif found := interfaces.interface_of(address):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
