"""On the PYTHONPATH of the runs that tests/ranks start: torch._dynamo is imported once something needs it.

Torch imports it with the first optimizer or DistributedDataParallel, to mark functions that torch.compile must not
trace. That takes about as much CPU time as importing torch. A process that compiles nothing calls the same functions
unmarked. The tests on a real Slurm have torch as it is, as have all with CLUSTERDDP_TEST_PRODUCT=1.
"""

import importlib.machinery
import sys
import threading
from types import ModuleType, SimpleNamespace

NAME = "torch._dynamo"
_lock = threading.RLock()
#: Functions that torch has marked so far.
_marked = []


class _Pending(ModuleType):
    """The module before its import."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        _load(self)
        return getattr(self, name)


def _load(module):
    with _lock:
        if type(module) is not _Pending:
            return
        for part in _PARTS:
            delattr(module, part)
        for fn in _marked:
            vars(fn).pop("__dynamo_disable", None)  # torch marks it again
        module.__class__ = ModuleType
        super(_Loader, module.__spec__.loader).exec_module(module)


def _mark(fn=None, *words, **named):
    """``torch._dynamo.disable`` as torch/_compile.py calls it; anyone else gets the real one."""
    if fn is None or named.get("wrapping") is not False:
        _load(sys.modules[NAME])
        return sys.modules[NAME].disable(fn, *words, **named)
    _marked.append(fn)
    return fn


#: What optimizers, DDP and process groups use of it, where nothing is compiled.
_PARTS = {
    "disable": _mark,
    "graph_break": lambda msg="": None,
    "utils": SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"),
    "trace_rules": SimpleNamespace(clear_lru_cache=lambda: None),
}


class _Loader(importlib.machinery.SourceFileLoader):
    def create_module(self, spec):
        return _Pending(spec.name)

    def exec_module(self, module):
        vars(module).update(_PARTS)


class _Finder:
    def find_spec(self, name, path=None, target=None):
        if name == NAME:
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = _Loader(name, spec.origin)
            return spec
        if name.startswith(f"{NAME}.") and NAME in sys.modules:
            _load(sys.modules[NAME])
        return None


sys.meta_path.insert(0, _Finder())
