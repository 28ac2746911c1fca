"""A rank's hooks in libraries of its script: torch's optimizers, W&B and MLflow. Standard library only.

A hook must be in place before the script runs ``from torch import save``. The entry point of a rank must not import
torch itself, because a script may set variables that torch reads when it is imported, or need no torch at all. A hook
is therefore set as soon as the module has been imported, before the code that imports it continues.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, MutableMapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from clusterddp import protocol
from clusterddp.errors import RunDirectoryError
from clusterddp.reporter import say
from clusterddp.rundir.files import write_json
from clusterddp.rundir.records import Schema, is_text, read_json
from clusterddp.rundir.run_directory import RunDirectory

Act = Callable[[ModuleType], None]


def when_imported(name: str, act: Act) -> None:
    """Calls ``act`` with the module once it is imported, or at once if it is. An error of ``act`` is only reported."""
    if name in sys.modules:
        _act(act, sys.modules[name])
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _finder.waiting.setdefault(name, []).append(act)


class _Finder:
    """Finds the awaited modules as the other finders do, and extends what their loaders execute.

    Looking for a module does not import it (``importlib.util.find_spec``), so it is awaited until it is executed.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, list[Act]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """For the import system."""
        if name not in self.waiting:
            return None
        finders = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self)
        specs = (find(name, path, target) for find in finders if find is not None)
        spec = next((spec for spec in specs if spec is not None), None)
        loader = spec.loader if spec is not None else None
        if loader is None or not hasattr(loader, "exec_module"):
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            for act in self.waiting.pop(name, ()):
                _act(act, module)

        loader.exec_module = exec_module  # each spec has its own loader
        return spec


_finder = _Finder()


def _act(act: Act, module: ModuleType) -> None:
    try:
        act(module)
    except Exception as error:  # of a different version of the module: the script runs without the change
        say(f"could not extend {module.__name__} {getattr(module, '__version__', '')}: {error!r}")


# --- steps of a script that does not use clusterddp

#: The module that counts the steps. It is imported by name at the first step, because only then it is certain that the
#: script trains with torch in this process. It belongs to the training half, with torch.
_STEPS = "clusterddp.training.script_steps"
_handle: Any = None


def watch_optimizers() -> None:
    """Has torch call us after each step of any optimizer. A hook that fails is removed."""
    when_imported("torch", _register)


def unwatch_optimizers() -> None:
    """Ends ``watch_optimizers``."""
    global _handle
    if _handle is not None:
        _handle.remove()
        _handle = None


def _register(torch: ModuleType) -> None:
    global _handle
    is_compiling = torch.compiler.is_compiling
    note: Callable[[Any], None] | None = None

    def hook(optimizer: Any, _args: Any, _options: Any) -> None:
        nonlocal note
        if is_compiling():  # torch.compile would make this part of the compiled step, or fail to compile it
            return
        try:
            note = note or importlib.import_module(_STEPS).on_optimizer_step
            note(optimizer)
        except Exception as error:
            unwatch_optimizers()
            say(f"steps are not counted in this attempt, because the optimizer hook failed: {error!r}")

    _handle = sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(hook)


os.register_at_fork(after_in_child=unwatch_optimizers)


# --- W&B and MLflow runs of the script itself: an attempt's ranks continue those of earlier attempts

_SCHEMA: Schema = {"run_id": is_text}
#: The module of ``mlflow.start_run``.
_FLUENT = "mlflow.tracking.fluent"


def continue_runs(run: RunDirectory, rank: int, environ: MutableMapping[str, str]) -> None:
    """Sets the variables by which W&B and MLflow continue this rank's run, unless the user has set them.

    W&B takes the name of a run from the client, so each rank gets one. MLflow's server names a run itself, so the rank
    that starts one records its name, and gets it in later attempts.
    """
    if (name := environ.get(protocol.WANDB_NAME)) and "WANDB_RESUME" not in environ:
        # Ranks that each start their own run must not share it.
        environ.setdefault("WANDB_RUN_ID", name if rank == 0 else f"{name}-rank{rank}")
        environ["WANDB_RESUME"] = "allow"
    if protocol.MLFLOW not in environ or "MLFLOW_RUN_ID" in environ:
        return
    file = run.private / f"mlflow-rank-{rank}.json"
    try:
        record = read_json(file, _SCHEMA)
    except (OSError, RunDirectoryError) as error:
        say(f"could not determine which MLflow run this rank started ({error}). The script will start a new one")
        return
    if record is not None:
        environ["MLFLOW_RUN_ID"] = record["run_id"]
    else:
        when_imported(_FLUENT, lambda module: _record_first_run(module, file))


def _record_first_run(fluent: ModuleType, file: Path) -> None:
    """Has ``mlflow.start_run`` record the first run that this process creates."""
    start_run, process = fluent.start_run, os.getpid()
    recorded = False

    @functools.wraps(start_run)
    def starting(*args: Any, **kwargs: Any) -> Any:
        nonlocal recorded
        began = start_run(*args, **kwargs)
        named = bool(args) or kwargs.get("run_id") or kwargs.get("nested")
        if not recorded and not named and os.getpid() == process:
            recorded = True
            try:
                write_json(file, {"run_id": began.info.run_id}, mode=0o600)
            except OSError as error:
                say(f"could not record the MLflow run ({error}). The next attempt will start a new one")
        return began

    fluent.start_run = starting  # type: ignore[attr-defined]
