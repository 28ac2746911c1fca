"""What the ranks of a rehearsal report, a class each, and the orders that they get. A rank writes its facts to a file.

The file survives the rank: what was written before a kill can be read after it.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from clusterddp import codec

#: What a rank sends to the rehearsal, after the number of its attempt.
AT_PLACE, CUT_OFF = "at-place", "cut-off"


class Place(enum.Enum):
    """Where in a script a rank lets itself be disturbed."""

    START = "start"
    """torch is imported, and the script has not continued yet."""
    FIRST_STEPS = "first-steps"
    """After a step, before the first save of this start."""
    STEP = "step"
    """In a step, before its gradients are computed."""
    EVALUATION = "evaluation"
    """At a forward pass, or at a batch that is read without gradients, after ``eval()``."""
    SAVE = "save"
    """In a save: part of the file is written."""
    AFTER_SAVE = "after-save"
    """After the first step that follows a save."""
    EPOCH_END = "epoch-end"
    """A loader of the training has no further batch."""
    STRETCH = "stretch"
    """Some time after a step, while the script does something else."""
    LAST_STEP = "last-step"
    """After the last step."""


@dataclass(frozen=True)
class Orders:
    """What the ranks of one start do beside their work.

    ``facts``: the file that a rank writes to, with its ``{rank}`` and its ``{attempt}``.
    ``socket``: where rank 0 reports that it is at the ``place``, not before ``after`` steps of the whole run are done.
    ``steps``: the most steps of a start. ``last``: the weights before the last step of the undisturbed run, after which
    the start ends with ``cut``, as that run was cut off there. ``supervised``: clusterddp would start a rank again that
    ends there, so each reports that it is cut off, and waits until it is ended. ``last_number``: the number of that
    last step, for a script whose runs differ, so that its weights do not identify it. A start that loads nothing then
    begins at step 0. ``delay_s``: from the step before a stretch to the disturbance. ``skipped_saves``: the files that
    are saved at the place before the one in whose save the disturbance comes.
    ``known``: how many steps precede the step that begins with these weights. ``full_disk``: the first save at that
    place fails. ``toggle_workers``: loaders get two workers in place of none, and none in place of some.
    """

    facts: str
    socket: str
    steps: int
    last: str = ""
    cut: bool = False
    place: Place | None = None
    after: int = 0
    full_disk: bool = False
    toggle_workers: bool = False
    supervised: bool = False
    last_number: int | None = None
    delay_s: float = 0.0
    skipped_saves: int = 0
    known: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """The inverse of ``from_json``."""
        return json.dumps(asdict(self), default=codec.plain)

    @classmethod
    def from_json(cls, text: str) -> Orders:
        """Raises Misfit for a text that ``to_json`` did not write."""
        return codec.read(cls, json.loads(text))

    @classmethod
    def of_attempt(cls, file: Path, attempt: int) -> Orders:
        """The orders of this attempt: its own file beside ``file`` if there is one, else ``file``."""
        own = file_of_attempt(file, attempt)
        return cls.from_json((own if own.exists() else file).read_text())


def file_of_attempt(file: Path, attempt: int) -> Path:
    """The file with the orders of this attempt alone."""
    return file.with_stem(f"{file.stem}-{attempt}")


@dataclass(frozen=True)
class Began:
    """The script begins. ``seconds``: unix time."""

    pid: int
    seconds: float


@dataclass(frozen=True)
class HandlerSet:
    """The script, or a library, has called ``signal.signal``. ``seconds``: since this rank began. ``what``:
    ``default``, ``ignore`` or the name of a function, which is in ``function_file`` from ``function_line`` on.
    ``raises``: whether that function has a ``raise``."""

    signal: int
    what: str
    file: str
    line: int
    library: bool
    seconds: float
    function_file: str = ""
    function_line: int = 0
    raises: bool = False

    @property
    def is_function(self) -> bool:
        """Whether a function handles the signal."""
        return self.what not in ("default", "ignore")


@dataclass(frozen=True)
class StepMade:
    """A step of the first optimizer.

    ``number``: of the steps of the whole run that precede it. None if the weights are those of no earlier step.
    ``weights``: before the step. ``after``: after it. ``loss``: of the last ``backward()``. ``samples``: the indices
    that this rank asked its loaders for, and trained on. ``batch``: a digest of the batches without indices, and of
    those of ``run.steps()``. ``epoch_begins``: a loader was begun since then.
    """

    number: int | None
    local: int
    seconds: float
    weights: str
    after: str
    loss: str = ""
    rates: tuple[str, ...] = ()
    samples: tuple[int, ...] = ()
    epoch_begins: bool = False
    batch: str = ""


@dataclass(frozen=True)
class States:
    """The script's own objects and values on rank 0 before step ``local``, by their names in the script.

    ``objects``: digests of what has a state, by the object's name and the name in it. ``kinds``: what each object is.
    ``given``: the names of those that ``ctx.run()`` got. None without such a call. ``generators``: digests of the
    states of torch's, NumPy's and Python's own generators.
    """

    local: int
    objects: Mapping[str, str]
    variables: Mapping[str, str]
    kinds: Mapping[str, str]
    given: tuple[str, ...] | None = None
    generators: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Logged:
    """What the script gave to ``run.log()``, as digests, after so many steps of the whole run."""

    number: int
    values: Mapping[str, str]


@dataclass(frozen=True)
class Evaluated:
    """An evaluation has begun, after so many steps of this start."""

    local: int


@dataclass(frozen=True)
class SaveBegan:
    """A save to a file begins, after so many steps of this start. ``line``: of the script."""

    file: str
    local: int
    number: int | None
    script: str
    line: int


@dataclass(frozen=True)
class Saved:
    """That save has ended. ``error``: what it raised."""

    file: str
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class Renamed:
    """A file is renamed, copied or linked to another name."""

    source: str
    target: str


@dataclass(frozen=True)
class Loaded:
    """A file was loaded, after so many steps of this start."""

    file: str
    local: int
    error: str = ""
    script: str = ""
    line: int = 0


@dataclass(frozen=True)
class Unmatched:
    """``load_state_dict(strict=False)`` of a module has left out parameters. ``missing``: how many of its ``total``
    values. ``key``: the first of these. ``line``: of the script."""

    missing: int
    total: int
    key: str
    script: str
    line: int


@dataclass(frozen=True)
class ThreadEnded:
    """A daemon thread of the script was still running at the end of the process, which ends it. ``line``: of its
    function."""

    name: str
    script: str
    line: int


@dataclass(frozen=True)
class Reached:
    """This rank is at the place of the orders."""

    place: Place
    local: int
    number: int | None
    where: str = ""


@dataclass(frozen=True)
class Cut:
    """The start ends here, as it has made its steps."""

    local: int


Fact = (
    Began
    | HandlerSet
    | StepMade
    | States
    | Logged
    | Evaluated
    | SaveBegan
    | Saved
    | Renamed
    | Loaded
    | Unmatched
    | ThreadEnded
    | Reached
    | Cut
)
_KINDS = codec.by_name(Fact)


def to_line(fact: Fact) -> bytes:
    """The fact as a line of JSON."""
    values = {"fact": codec.name_of(type(fact)), **codec.written(fact)}
    return json.dumps(values, default=codec.plain).encode() + b"\n"


def read_facts(file: Path) -> tuple[Fact, ...]:
    """The facts of one rank in one start. A torn last line is left out."""
    if not file.exists():
        return ()
    found: list[Fact] = []
    for line in file.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            found.append(codec.read_one(_KINDS, "fact", json.loads(line)))
    return tuple(found)


def weights_in(facts: Iterable[Fact]) -> dict[str, int]:
    """How many steps precede the first step that begins with these weights, by the steps of one start. A step of a
    warm-up that begins with a learning rate of 0 leaves them as they are."""
    steps = [(fact, fact.number) for fact in facts if isinstance(fact, StepMade) and fact.number is not None]
    found: dict[str, int] = {}
    for made, number in steps:
        found.setdefault(made.weights, number)
    for made, number in steps[-1:]:  # of a save after the last step
        found.setdefault(made.after, number + 1)
    return found
