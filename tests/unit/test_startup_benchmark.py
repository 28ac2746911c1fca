"""The arithmetic of ``benchmarks.startup``."""

from __future__ import annotations

from typing import Any

from benchmarks import startup

TRACE = """\
10 execve("/bin/python", ["python", "-m", "launcher", "train.py"], 0x7f /* 37 vars */) = 0
10 openat(AT_FDCWD, "/launcher", O_RDONLY) = 3
10 clone(child_stack=NULL, flags=CLONE_CHILD_CLEARTID|SIGCHLD) = 11
11 execve("/nowhere/python", ["python", "worker", "train.py"], 0x7f) = -1 ENOENT (No such file or directory)
11 execve("/bin/python", ["python", "worker", "train.py"], 0x7f <unfinished ...>
11 <... execve resumed>)             = 0
11 openat(AT_FDCWD, "/module.py", O_RDONLY) = 3
11 openat(AT_FDCWD, "/other.py", O_RDONLY) = -1 ENOENT (No such file or directory)
11 clone3({flags=CLONE_VM|CLONE_FS|CLONE_THREAD, exit_signal=0} => {parent_tid=[12]}, 88) = 12
12 openat(AT_FDCWD, "/in-a-thread", O_RDONLY <unfinished ...>
12 <... openat resumed>)             = 4
11 clone(child_stack=NULL, flags=CLONE_CHILD_CLEARTID|SIGCHLD) = 13
13 openat(AT_FDCWD, "/in-a-child", O_RDONLY) = 3
12 connect(5, {sa_family=AF_INET, sin_port=htons(53), sin_addr=inet_addr("10.0.0.1")}, 16) = 0
11 connect(5, {sa_family=AF_INET, sin_port=htons(530), sin_addr=inet_addr("10.0.0.1")}, 16) = 0
11 newfstatat(AT_FDCWD, "/module.py", {st_mode=S_IFREG|0644, st_size=1, ...}, 0) = 0
"""


def test_the_calls_of_a_rank_are_those_of_its_process_with_all_threads() -> None:
    """Neither the launcher's, nor those of the rank's children."""
    assert startup.counted_calls(TRACE.splitlines(), "worker") == {
        "files opened": 3,
        "opened without success": 1,
        "stat and the like": 1,
        "connections": 2,
        "DNS queries": 1,
    }


def a_rank(started: float, first_step: float, cpu: float) -> dict[str, Any]:
    return {"started": started, "phases": {"script": started + 0.5, "first step": first_step}, "cpu_s": cpu}


def test_a_start_ends_when_the_last_rank_has_made_its_step() -> None:
    found = startup.seconds_of([a_rank(10.0, 13.0, 1.0), a_rank(9.5, 14.0, 3.0)])
    assert found == {"seconds": 4.5, "cpu": 2.0, "phases": {"script": 0.5, "first step": 2.5}}
