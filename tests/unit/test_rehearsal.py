"""Rehearsals: what is concluded from what the ranks report, without processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from clusterddp.cli.command_line import command
from clusterddp.environment import RankEnvironment
from clusterddp.errors import UsageError
from clusterddp.rehearsal.causes import Cause, Rank
from clusterddp.rehearsal.comparison import Result, first_unlike, result_of, resumes
from clusterddp.rehearsal.disturbances import Disturbance, Script
from clusterddp.rehearsal.facts import (
    Cut,
    Evaluated,
    Fact,
    HandlerSet,
    Loaded,
    Logged,
    Orders,
    Place,
    Reached,
    Renamed,
    SaveBegan,
    Saved,
    States,
    StepMade,
    ThreadEnded,
    Unmatched,
    read_facts,
    to_line,
    weights_in,
)
from clusterddp.rehearsal.findings import diagnose
from clusterddp.rehearsal.observer import unset
from clusterddp.rehearsal.supervised import TOGETHER
from clusterddp.rehearsal.trial import Start, Stimulus, Trial, Undisturbed
from clusterddp.rehearsal.under_slurm import SlurmConductor
from clusterddp.rehearsal.workspace import Workspace
from tests.wording import raises

STEPS, EVERY, FILE = 20, 5, "/run/last.pt"
SCRIPT = "/run/train.py"
HANDLER = HandlerSet(15, "on_term", SCRIPT, 10, False, 0.5, SCRIPT, 3)
NOTICE, KILL = Stimulus(Place.STEP, 8, 1, 5.0), Stimulus(Place.SAVE, 8, 0, kill=True)


def steps(first: int, end: int, **more: Any) -> list[Fact]:
    """Steps of a training in which the weights before step n are ``wn``."""
    return [
        replace(
            StepMade(n, n - first, float(n), f"w{n}", f"w{n + 1}", f"{n}.5", (f"0.{n:02}",), (n, n + 100), n % 10 == 0),
            **more,
        )
        for n in range(first, end)
    ]


def save(number: int, file: str = FILE, *, whole: bool = True) -> list[Fact]:
    began = SaveBegan(file, number, number, SCRIPT, 30)
    return [began, Saved(file, 0.2)] if whole else [began]


def start(*facts: Sequence[Fact], codes: int = 0, **more: Any) -> Start:
    """A start of two ranks with the same steps, of which rank 0 saves."""
    of_0 = [fact for some in facts for fact in some]
    of_1 = [fact for fact in of_0 if isinstance(fact, (StepMade, HandlerSet))]
    files = {fact.file: 1 for fact in of_0 if isinstance(fact, SaveBegan)}
    given = Start({0: of_0, 1: of_1}, {0: codes, 1: codes}, 1.0, files=files)
    return replace(given, **more)


def undisturbed(*more: Sequence[Fact]) -> Undisturbed:
    whole = start([HANDLER], steps(0, STEPS), save(EVERY), save(10), *more)
    return Undisturbed(Trial([whole]), Trial([whole]))


def noticed(end: int, *facts: Sequence[Fact], codes: int = 143, **more: Any) -> Start:
    """The first start: it has saved after 5 steps, and gets a notice after ``end``."""
    reached = [Reached(Place.STEP, end, end)]
    return start([HANDLER], steps(0, end), save(EVERY), reached, *facts, codes=codes, disturbed=True, **more)


def resumed(first: int, *facts: Sequence[Fact], file: str = FILE, **more: Any) -> Start:
    loaded = Loaded(file, 0, "", SCRIPT, 40)
    return start([HANDLER, loaded], *facts, steps(first, STEPS), **more)


def causes(*starts: Start, of: Undisturbed | None = None, stimulus: Stimulus = NOTICE) -> list[Cause]:
    return [one.cause for one in diagnose(of or undisturbed(), Trial(starts, [stimulus]))]


def test_a_run_that_saves_at_the_notice_and_continues_there_has_no_finding() -> None:
    trial = Trial([noticed(8, save(8)), resumed(8)], [NOTICE])
    assert diagnose(undisturbed(), trial) == []
    assert result_of(undisturbed(), trial) is Result.SAME
    (resume,) = resumes(undisturbed().start, trial)
    assert (resume.done, resume.at, resume.repeated, resume.loaded and resume.loaded.file) == (8, 8, 0, FILE)


def test_exit_0_after_a_notice_loses_the_rest_of_the_training() -> None:
    assert causes(noticed(8, save(8), codes=0)) == [Cause.ENDS_AS_COMPLETED]


def test_exit_0_after_the_last_step_is_no_loss() -> None:
    assert causes(noticed(STEPS, save(STEPS), codes=0)) == []


def test_without_a_handler_the_steps_since_the_last_save_are_repeated() -> None:
    first = start(steps(0, 8), save(EVERY), [Reached(Place.STEP, 8, 8)], codes=-15, disturbed=True)
    whole = start(steps(0, STEPS), save(EVERY), save(10))
    of = Undisturbed(Trial([whole]), Trial([whole]))
    again = start([Loaded(FILE, 0)], steps(EVERY, STEPS))
    assert causes(first, again, of=of) == [Cause.NO_HANDLER]
    assert causes(first, again) == [Cause.HANDLER_LATE]  # it is installed later


def test_steps_are_repeated_after_a_kill_and_after_a_notice_that_is_too_short() -> None:
    """That is no fault of the script."""
    kill = Stimulus(Place.STEP, 8, 0, 5.0, kill=True)
    assert causes(noticed(8, codes=-9), resumed(EVERY), stimulus=kill) == []
    whole = start([HANDLER], steps(0, STEPS), save(EVERY), save(10))
    short = Script.of(whole).stimulus(Disturbance.SHORT_NOTICE, 5.0)
    assert short.notice_s < 0.2  # of a save
    assert causes(noticed(8, codes=-9, killed=(0, 1)), resumed(EVERY), stimulus=short) == []


def test_a_handler_on_rank_0_alone() -> None:
    first = noticed(8, killed=(0,))
    alone = replace(first, facts={0: first.facts[0], 1: steps(0, 8)})
    assert causes(alone, resumed(EVERY)) == [Cause.HANDLER_ON_SOME_RANKS]


def test_a_handler_that_was_replaced() -> None:
    other = HandlerSet(15, "flush", "/run/log.py", 7, False, 0.6, "/run/log.py", 2)
    assert causes(noticed(8, [other]), resumed(EVERY)) == [Cause.HANDLER_REPLACED]


STACK = """Current thread 0x1 (most recent call first):
  File "/lib/torch/distributed/distributed_c10d.py", line 5 in barrier
  File "/lib/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "{handler}", line 5 in {function}
  File "/run/train.py", line 50 in main
"""


def test_a_barrier_in_the_handler() -> None:
    stacks = {0: STACK.format(handler=SCRIPT, function="on_term")}
    assert causes(noticed(8, killed=(0,), codes=-9, stacks=stacks), resumed(EVERY)) == [Cause.BARRIER_IN_HANDLER]


def test_a_save_that_takes_longer_than_the_notice() -> None:
    first = noticed(8, save(8, "/run/new.pt", whole=False), killed=(0, 1), codes=-9)
    assert causes(first, resumed(EVERY)) == [Cause.SAVE_SLOWER_THAN_NOTICE]


def test_a_save_that_was_not_renamed_yet_is_no_checkpoint() -> None:
    """Names that end in .new are renamed in the undisturbed run."""
    renamed = [*save(15, "/run/15.new"), Renamed("/run/15.new", FILE)]
    whole = start([HANDLER], steps(0, STEPS), renamed, files={FILE: 1})
    of = Undisturbed(Trial([whole]), Trial([whole]))
    stacks = {0: STACK.format(handler=SCRIPT, function="save_slowly")}
    first = noticed(8, save(8, "/run/8.new"), killed=(0, 1), codes=-9, stacks=stacks)
    assert causes(first, resumed(EVERY), of=of) == [Cause.SAVE_SLOWER_THAN_NOTICE]


def test_a_flag_that_an_evaluation_does_not_look_at() -> None:
    first = noticed(8, [Evaluated(8)], killed=(0, 1), codes=-9)
    found = diagnose(undisturbed(), Trial([first, resumed(EVERY)], [NOTICE]))
    assert [one.cause for one in found] == [Cause.FLAG_NOT_CHECKED] and "evaluation" in found[0].detail


def test_loader_workers_that_the_notice_ends() -> None:
    output = {0: "RuntimeError: DataLoader worker (pid 7) exited unexpectedly"}
    assert causes(noticed(8, codes=1, output=output), resumed(EVERY)) == [Cause.WORKERS_KILLED]


def test_a_start_that_loads_what_an_interrupted_save_has_left() -> None:
    """The file is new, or it was the only checkpoint, which the save has overwritten."""
    error = [Loaded("/run/8.pt", 0, "RuntimeError: failed finding central directory", SCRIPT, 40)]
    failing = start(error, codes=1)
    assert causes(noticed(8, save(8, "/run/8.pt", whole=False), codes=-9), failing) == [Cause.RESUMES_HALF_WRITTEN]
    error = [Loaded(FILE, 0, "RuntimeError: failed finding central directory", SCRIPT, 40)]
    failing = start(error, codes=1)
    assert causes(noticed(8, save(8, whole=False), codes=-9), failing) == [Cause.CHECKPOINT_DESTROYED]


def test_a_start_that_fails_at_a_folder_of_which_a_save_has_left_some_files() -> None:
    """Unless the folder holds saves of other steps, too. Then the error may have another cause."""
    error = {0: "ValueError: Can't find a valid checkpoint at out/step_8"}
    partial = save(8, "/run/out/step_8/model.safetensors", whole=False)
    failing = start(codes=1, output=error)
    assert causes(noticed(8, partial, codes=-9), failing) == [Cause.RESUMES_HALF_WRITTEN]
    other = save(EVERY, "/run/out/step_8/first.bin")
    assert causes(noticed(8, other, partial, codes=-9), failing) == [Cause.RESTART_FAILS]


def test_a_start_that_begins_again_although_there_is_a_checkpoint() -> None:
    again = start([HANDLER], steps(0, STEPS), save(EVERY))
    assert causes(noticed(8, save(8)), again) == [Cause.NOT_RESUMED]
    elsewhere = start([HANDLER], steps(0, STEPS), save(EVERY, "/run/other/last.pt"))
    assert causes(noticed(8, save(8)), elsewhere) == [Cause.NEW_FOLDER]


@pytest.mark.parametrize(
    ("file", "cause"), [("/run/last.pt", Cause.LAST_IS_STALE), ("/run/epoch-5.pt", Cause.RESUMED_OLDER)]
)
def test_a_start_that_continues_from_an_older_file(file: str, cause: Cause) -> None:
    first = start(
        [HANDLER], steps(0, 8), save(EVERY, file), save(8, "/run/new-8.pt"), [Reached(Place.STEP, 8, 8)],
        codes=143, disturbed=True,
    )  # fmt: skip
    assert causes(first, resumed(EVERY, file=file)) == [cause]


def test_a_file_that_was_renamed_is_the_save_it_was_written_as() -> None:
    renamed = [*save(8, "/run/tmp"), Renamed("/run/tmp", FILE)]
    first = replace(noticed(8, renamed), files={FILE: 1})
    assert causes(first, resumed(8)) == []


def test_a_start_with_weights_of_no_step_before() -> None:
    unknown = start([HANDLER, Loaded(FILE, 0)], steps(8, STEPS, number=None, weights="other", after="other"))
    assert causes(noticed(8, save(8)), unknown) == [Cause.MODEL_NOT_RESTORED]


def test_steps_with_a_learning_rate_of_0_do_not_shift_the_numbers() -> None:
    """As in a warm-up from 0: the weights before the second step are those before the first one."""
    facts = [*steps(0, 1), *steps(1, 2, weights="w0"), *steps(2, 4)]
    assert Trial([start(facts), start(facts)]).weights() == {"w0": 0, "w2": 2, "w3": 3, "w4": 4}


def test_a_start_that_loads_the_newest_file_and_keeps_the_weights_of_a_new_model() -> None:
    """As with load_state_dict(strict=False), and other names in the file."""
    lenient = Unmatched(4, 4, "0.weight", SCRIPT, 41)
    again = start([HANDLER, Loaded(FILE, 0, "", SCRIPT, 40), lenient], steps(0, STEPS))
    (found,) = diagnose(undisturbed(), Trial([noticed(8, save(8)), again], [NOTICE]))
    assert (found.cause, found.line) == (Cause.MODEL_NOT_RESTORED, 41)
    assert "does not find 4 of its 4 values, such as 0.weight" in found.detail


def test_a_checkpoint_that_is_deleted_before_the_next_one_is_whole() -> None:
    begun = [*save(EVERY, "/run/5.pt"), *save(8, "/run/8.pt", whole=False)]
    killed = start([HANDLER], steps(0, 8), begun, codes=-9, disturbed=True, files={"/run/8.pt": 1})
    assert causes(killed, start([HANDLER], steps(0, STEPS)), stimulus=KILL) == [Cause.CHECKPOINT_DESTROYED]
    kept = replace(killed, files={"/run/5.pt": 1, "/run/8.pt": 1})
    assert causes(kept, resumed(EVERY, file="/run/5.pt"), stimulus=KILL) == []


def test_the_files_of_a_checkpoint_that_are_of_different_saves() -> None:
    model, optimizer = "/run/model.pt", "/run/optimizer.pt"

    def both(number: int, *, whole: bool = True) -> list[Fact]:
        second = save(number, f"{optimizer}.tmp", whole=whole)
        renamed = [Renamed(f"{optimizer}.tmp", optimizer)] if whole else []
        return [*save(number, f"{model}.tmp"), Renamed(f"{model}.tmp", model), *second, *renamed]

    files = {model: 1, optimizer: 1}
    whole = Trial([start([HANDLER], steps(0, STEPS), both(EVERY), both(10), files=files)])
    killed = start([HANDLER], steps(0, 8), both(EVERY), both(8, whole=False), codes=-9, disturbed=True, files=files)
    loads = [Loaded(model, 0), Loaded(optimizer, 0)]
    found = causes(killed, start(loads, steps(8, STEPS)), of=Undisturbed(whole, whole), stimulus=KILL)
    assert found == [Cause.RESUMES_HALF_WRITTEN]


def test_a_folder_that_was_renamed_holds_the_files_that_were_saved_in_it() -> None:
    """What an interrupted save leaves in the folder before is no checkpoint, though one of its files is whole."""

    def folder(number: int) -> list[Fact]:
        final = f"/run/step-{number}"
        return [*save(number, f"{final}_tmp/model.pt"), Renamed(f"{final}_tmp", final)]

    whole = Trial([start([HANDLER], steps(0, STEPS), folder(EVERY), folder(10), files={"/run/step-5/model.pt": 1})])
    torn = [*save(8, "/run/step-8_tmp/model.pt"), *save(8, "/run/step-8_tmp/optimizer.pt", whole=False)]
    files = {"/run/step-5/model.pt": 1, "/run/step-8_tmp/model.pt": 1, "/run/step-8_tmp/optimizer.pt": 1}
    killed = start([HANDLER], steps(0, 8), folder(EVERY), torn, codes=-9, disturbed=True, files=files)
    of = Undisturbed(whole, whole)
    assert causes(killed, resumed(EVERY, file="/run/step-5/model.pt"), of=of, stimulus=KILL) == []
    assert causes(killed, start([HANDLER], steps(0, STEPS)), of=of, stimulus=KILL) == [Cause.NOT_RESUMED]


def test_a_notice_that_the_script_ignores_to_its_end() -> None:
    """It passes the end of an epoch. A longer training would be killed."""
    raising = replace(HANDLER, raises=True)
    ignoring = start([raising], steps(0, 8), [Reached(Place.STEP, 8, 8)], steps(8, STEPS), disturbed=True)
    (found,) = diagnose(undisturbed(), Trial([ignoring], [NOTICE]))
    assert found.cause is Cause.FLAG_NOT_CHECKED and "12 steps after a notice" in found.detail
    assert "on_term raises an exception, which the script catches" in found.detail
    in_last_epoch = start([HANDLER], steps(0, 12), [Reached(Place.STEP, 12, 12)], steps(12, STEPS), disturbed=True)
    assert causes(in_last_epoch) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ([ThreadEnded("_write", SCRIPT, 20)], "without waiting for its thread in _write"),
        (save(8, "/run/8.pt", whole=False), "before its save to 8.pt is complete"),
    ],
)
def test_a_script_that_exits_before_its_save_is_complete(facts: list[Fact], words: str) -> None:
    (found,) = diagnose(undisturbed(), Trial([noticed(8, facts), resumed(EVERY)], [NOTICE]))
    assert found.cause is Cause.NOT_SAVED_AT_NOTICE and words in found.detail and found.line


def test_a_start_that_fails() -> None:
    failing = start([HANDLER], codes=1, output={0: "Traceback\nFileExistsError: out exists\n"})
    found = diagnose(undisturbed(), Trial([noticed(8, save(8)), failing], [NOTICE]))
    assert [one.cause for one in found] == [Cause.RESTART_FAILS] and "FileExistsError" in found[0].detail


OBJECTS = {"opt.state.0.exp_avg": "#8", "scaler.scale": "512.0", "ema.shadow": "#8", "net.weight": "#8"}
KINDS = {"opt": "optimizer", "scaler": "scaler", "ema": "average", "net": "model"}


@pytest.mark.parametrize(
    ("objects", "variables", "cause"),
    [
        ({}, {}, None),
        ({"opt.state.0.exp_avg": "missing"}, {}, Cause.OPTIMIZER_NOT_RESTORED),
        ({"scaler.scale": "65536.0"}, {}, Cause.SCALER_NOT_RESTORED),
        ({"ema.shadow": "#0"}, {}, Cause.EMA_NOT_RESTORED),
        ({"net.weight": "#9"}, {}, Cause.MODEL_NOT_RESTORED),
        ({}, {"best_loss": "inf"}, Cause.BEST_NOT_RESTORED),
        ({}, {"started": "7.5"}, None),
    ],
)
def test_an_object_that_is_not_restored(
    objects: dict[str, str], variables: dict[str, str], cause: Cause | None
) -> None:
    """What differs in two undisturbed runs, such as a time, does not count."""
    was = States(8, OBJECTS, {"best_loss": "0.5", "started": "1.5"}, KINDS)
    other = replace(was, variables={"best_loss": "0.5", "started": "2.5"})
    one, two = undisturbed([was]).start, undisturbed([other]).start
    now = States(0, {**OBJECTS, **objects}, {**was.variables, **variables}, KINDS)
    of = Undisturbed(Trial([one]), Trial([two]))
    assert causes(noticed(8, save(8)), resumed(8, [now]), of=of) == ([cause] if cause else [])


@pytest.mark.parametrize(("at_the_end", "cause"), [("#9", None), ("#1", Cause.STATE_NOT_RESTORED)])
def test_an_object_that_the_script_makes_again_need_not_be_restored(at_the_end: str, cause: Cause | None) -> None:
    """Such as a mean over an epoch. It is as in the undisturbed run before the last step."""
    kinds = {"meter": "Meter"}
    was = [States(8, {"meter.sum": "#8"}, {}, kinds), States(STEPS - 1, {"meter.sum": "#9"}, {}, kinds)]
    now = [States(0, {"meter.sum": "#0"}, {}, kinds), States(STEPS - 9, {"meter.sum": at_the_end}, {}, kinds)]
    assert causes(noticed(8, save(8)), resumed(8, now), of=undisturbed(was)) == ([cause] if cause else [])


@pytest.mark.parametrize(("best", "expected"), [("0.6", []), ("inf", [Cause.BEST_NOT_RESTORED])])
def test_an_evaluation_before_the_first_step_may_find_another_best_value(best: str, expected: list[Cause]) -> None:
    """As in nanoGPT, which evaluates again at the step of its checkpoint. The initial value is not restored."""
    states = [[States(number, {}, {"best_loss": value}, {})] for number, value in ((0, "inf"), (8, "0.5"))]
    again = resumed(8, [Evaluated(0), States(0, {}, {"best_loss": best}, {})])
    assert causes(noticed(8, save(8)), again, of=undisturbed(*states)) == expected


def test_a_variable_that_is_none_is_reported() -> None:
    """As timm's best metric, which is not known before an evaluation."""
    best_metric, other = None, 1
    assert unset()["best_metric"] == str(best_metric) and "other" not in unset(), other


def test_other_random_numbers_are_found_beside_a_best_value_that_begins_again() -> None:
    of = undisturbed([States(8, {}, {"best_loss": "0.5"}, {})])
    loaded, now = Loaded(FILE, 0), States(0, {}, {"best_loss": "inf"}, {})
    later = start([HANDLER, loaded, now], steps(8, STEPS, loss="1"))
    found = causes(noticed(8, save(8)), later, of=of)
    assert found == [Cause.GENERATOR_NOT_RESTORED, Cause.BEST_NOT_RESTORED]


@pytest.mark.parametrize(
    ("key", "loss", "expected"),
    [
        ("net.running_mean", "1", [Cause.GENERATOR_NOT_RESTORED]),
        ("net.num_batches_tracked", "1", [Cause.MODEL_NOT_RESTORED]),
        ("net.running_mean", "8.5", [Cause.MODEL_NOT_RESTORED]),
        ("meter.sum", "1", [Cause.GENERATOR_NOT_RESTORED]),
    ],
)
def test_what_other_batches_change_need_not_have_been_restored(key: str, loss: str, expected: list[Cause]) -> None:
    """A forward pass with another batch leaves other statistics, and the number of batches is not one of them."""
    kinds = {"net": "model", "meter": "Meter"}
    of = undisturbed([States(number, {key: "#8"}, {}, kinds) for number in (8, STEPS - 1)])
    states = [States(local, {key: "#9"}, {}, kinds) for local in (0, STEPS - 9)]
    first = steps(8, 9, loss=loss)
    later = start([HANDLER, Loaded(FILE, 0)], states, first, steps(9, STEPS))
    assert causes(noticed(8, save(8)), later, of=of) == expected


def test_a_scheduler_that_does_not_continue() -> None:
    of = undisturbed()
    falling = Undisturbed(*(Trial([start([HANDLER], steps(0, STEPS, rates=("0.1",)))]),) * 2)
    assert causes(noticed(8, save(8)), resumed(8), of=falling) == [Cause.SCHEDULER_NOT_RESTORED]
    again = [replace(made, rates=(f"0.{made.local:02}",)) for made in steps(8, STEPS) if isinstance(made, StepMade)]
    second = start([HANDLER, Loaded(FILE, 0)], again)
    assert causes(noticed(8, save(8)), second, of=of) == [Cause.WARMUP_RESTARTED]


@pytest.mark.parametrize(
    ("at", "samples", "loss", "cause"),
    [
        (12, (2, 102), "1", Cause.SAMPLER_EPOCH_NOT_RESTORED),
        (12, (10, 110), "1", Cause.POSITION_NOT_RESTORED),
        (12, (77, 78), "1", Cause.GENERATOR_NOT_RESTORED),
        (12, (12, 112), "1", Cause.GENERATOR_NOT_RESTORED),
        (12, (12, 112), "12.5", None),
    ],
)
def test_the_samples_and_the_loss_of_a_restart(
    at: int, samples: tuple[int, ...], loss: str, cause: Cause | None
) -> None:
    """Epochs have ten steps."""
    later = start([HANDLER, Loaded(FILE, 0)], steps(at, at + 1, samples=samples, loss=loss), steps(at + 1, STEPS))
    assert causes(noticed(at, save(at)), later) == ([cause] if cause else [])


#: The generators of a script with dropout, and of one whose loader alone draws from them, once an epoch.
DROPOUT, LOADER = {"torch's": "#{n}"}, {"torch's": "#{epoch}"}


@pytest.mark.parametrize(
    ("generators", "later", "stage", "cause"),
    [
        (DROPOUT, "#other", "0", Cause.GENERATOR_NOT_RESTORED),
        (DROPOUT, "#8", "0", Cause.STATE_NOT_RESTORED),
        (LOADER, "#other", "0", Cause.STATE_NOT_RESTORED),
        (LOADER, "#other", "2", Cause.GENERATOR_NOT_RESTORED),
    ],
)
def test_another_loss_is_explained_by_a_generator_or_by_a_value_that_begins_again(
    generators: Mapping[str, str], later: str, stage: str, cause: Cause
) -> None:
    def state(n: int) -> States:
        drawn = {name: text.format(n=n, epoch=n // 10) for name, text in generators.items()}
        return States(n, {}, {"stage": str(n // 4)}, {}, None, drawn)

    of = undisturbed([state(n) for n in range(STEPS)])
    now = States(0, {}, {"stage": stage}, {}, None, {"torch's": later})
    again = start([HANDLER, Loaded(FILE, 0), now], steps(8, STEPS, loss="1"))
    (found,) = diagnose(of, Trial([noticed(8, save(8)), again], [NOTICE]))
    assert found.cause is cause
    assert ("stage is 0 again after the restart, and was 2 before it" in found.detail) == (
        cause is Cause.STATE_NOT_RESTORED
    )


def test_a_value_that_begins_again_explains_a_training_that_ends_at_another_step() -> None:
    of = undisturbed([States(n, {}, {"stopper.bad": str(n // 8)}, {}) for n in range(STEPS)])
    now = States(0, {}, {"stopper.bad": "0"}, {})
    longer = start([HANDLER, Loaded(FILE, 0), now], steps(8, STEPS + 4))
    (found,) = diagnose(of, Trial([noticed(8, save(8)), longer], [NOTICE]))
    assert found.cause is Cause.STATE_NOT_RESTORED
    assert "ends after 24 steps instead of 20. stopper.bad is 0 again" in found.detail


def test_a_file_that_every_rank_writes() -> None:
    whole = start([HANDLER], steps(0, STEPS), save(EVERY))
    both = replace(whole, facts={0: whole.facts[0], 1: whole.facts[0]})
    assert causes(noticed(8, save(8)), resumed(8), of=Undisturbed(Trial([both]), Trial([both]))) == [
        Cause.SAVES_ON_EVERY_RANK
    ]


def test_what_an_interrupted_save_leaves_counts_at_the_end_of_the_run() -> None:
    left = resumed(8, files={"/run/last.pt.tmp": 1, FILE: 1})
    assert causes(noticed(8, save(8)), left) == [Cause.FILES_LEFT]
    gone = replace(noticed(8, save(8)), files={"/run/last.pt.tmp": 1, FILE: 1})
    assert causes(gone, resumed(8)) == []


def test_processes_that_outlive_their_rank_are_named_unless_it_was_killed() -> None:
    first = noticed(8, save(8), leftover=True)
    assert causes(first, resumed(8)) == [Cause.PROCESSES_LEFT]
    kill = Stimulus(Place.STEP, 8, 0, 5.0, kill=True)
    assert causes(replace(first, codes={0: -9, 1: 1}), resumed(8), stimulus=kill) == []


def test_another_final_result_without_a_cause_is_a_finding() -> None:
    differs = resumed(8)
    last = differs.steps()[-1]
    facts = [*differs.facts[0][:-1], replace(last, after="other")]
    assert causes(noticed(8, save(8)), replace(differs, facts={0: facts, 1: facts})) == [Cause.STATE_NOT_RESTORED]


def test_two_undisturbed_runs_that_differ_are_not_repeatable() -> None:
    one = Trial([start(steps(0, 5))])
    assert first_unlike(one, one) is None
    assert first_unlike(one, Trial([start(steps(0, 3), steps(3, 5, loss="9"))])) == 3
    assert first_unlike(one, Trial([start(steps(0, 4))])) == 4


def unseeded(name: str, first: int, end: int, **more: Any) -> list[Fact]:
    """Steps of one of several runs whose weights and losses differ, and whose samples do not."""
    made = [one for one in steps(first, end, **more) if isinstance(one, StepMade)]
    return [replace(one, weights=f"{name}{one.weights}", after=f"{name}{one.after}", loss=name) for one in made]


def test_of_a_script_that_is_not_repeatable_what_is_equal_undisturbed_is_compared() -> None:
    """Outcomes, files, repeated steps, learning rates and samples."""
    runs = [Trial([start([HANDLER], unseeded(name, 0, STEPS), save(EVERY), save(10))]) for name in "ab"]
    of = Undisturbed(*runs)
    reached = [Reached(Place.STEP, 8, 8)]
    first = start([HANDLER], unseeded("c", 0, 8), save(EVERY), save(8), reached, codes=143, disturbed=True)
    again = start([HANDLER, Loaded(FILE, 0)], unseeded("c", 8, STEPS))
    assert diagnose(of, Trial([first, again], [NOTICE])) == []
    assert result_of(of, Trial([first, again], [NOTICE])) is Result.SAME
    assert result_of(of, Trial([first, start(unseeded("c", 8, 10))], [NOTICE])) is Result.UNFINISHED
    assert causes(replace(first, codes={0: 0, 1: 0}), of=of) == [Cause.ENDS_AS_COMPLETED]
    older = start([HANDLER, Loaded(FILE, 0)], unseeded("c", EVERY, STEPS))
    assert causes(first, older, of=of) == [Cause.LAST_IS_STALE]
    other = start([HANDLER, Loaded(FILE, 0)], unseeded("c", 8, STEPS, samples=(5, 6)))
    assert causes(first, other, of=of) == [Cause.GENERATOR_NOT_RESTORED]


def test_the_weights_after_the_last_step_of_a_start_are_known() -> None:
    """Those of a save after it."""
    assert weights_in(steps(0, 3)) == {"w0": 0, "w1": 1, "w2": 2, "w3": 3}


def test_an_object_without_a_value_is_not_restored_even_if_its_values_differ_undisturbed() -> None:
    was, other = (States(8, {"opt.state.0.exp_avg": digest}, {}, {"opt": "optimizer"}) for digest in ("#1", "#2"))
    of = Undisturbed(Trial([undisturbed([was]).start]), Trial([undisturbed([other]).start]))
    now = States(0, {}, {}, {"opt": "optimizer"})
    assert causes(noticed(8, save(8)), resumed(8, [now]), of=of) == [Cause.OPTIMIZER_NOT_RESTORED]


def test_the_error_of_a_start_is_named_with_its_line_in_the_script() -> None:
    """torch puts the rank before each line."""
    output = {0: '[rank0]:   File "/run/train.py", line 9, in main\n[rank0]: UnboundLocalError: no value\n'}
    (found,) = diagnose(undisturbed(), Trial([noticed(8, save(8)), start([HANDLER], codes=1, output=output)], [NOTICE]))
    assert (found.cause, found.file, found.line) == (Cause.RESTART_FAILS, "/run/train.py", 9)
    assert "UnboundLocalError" in found.detail


def test_the_worst_finding_comes_first() -> None:
    assert [cause.rank for cause in (Cause.NEW_FOLDER, Cause.EMA_NOT_RESTORED, Cause.NO_HANDLER, Cause.FILES_LEFT)] == [
        Rank.LOSES_WORK,
        Rank.WRONG_RESULT,
        Rank.REPEATS_WORK,
        Rank.UNTIDY,
    ]


# --- the places


def test_a_step_is_disturbed_where_a_lost_step_shows() -> None:
    """After a checkpoint, and not right after one."""
    script = Script.of(start(steps(0, STEPS), save(EVERY), save(10), save(15)))
    after = script.stimulus(Disturbance.STEP, 5.0).after
    assert EVERY < after < STEPS and not {after - 1, after, after + 1} & {10, 15}


def slow(*gaps: float, after: int = 12) -> Start:
    """A run with one or more long gaps between steps, the first of them after so many steps."""
    made = [one for one in steps(0, STEPS) if isinstance(one, StepMade)]
    times = [0.01 * n + sum(gaps[: max(0, n - after + 1)]) for n in range(STEPS)]
    return start([HANDLER], [replace(one, seconds=at) for one, at in zip(made, times, strict=True)], save(EVERY))


def test_a_long_stretch_without_steps_is_disturbed_in_its_middle() -> None:
    """If both undisturbed runs have it."""
    script = Script.of(slow(0.5, 2.0), slow(0.5, 2.0))
    given = script.stimulus(Disturbance.STRETCH, 5.0)
    assert (given.place, given.after, round(given.delay_s, 1)) == (Place.STRETCH, 13, 1.0)
    for other in (slow(), slow(0.1, 0.1)):
        assert Script.of(slow(0.5, 2.0), other).stretch is None


@pytest.mark.parametrize(
    ("known", "length"),
    [(Evaluated(12), None), (Saved(FILE, 1.9), None), (Saved(FILE, 0.5), 1.5)],
)
def test_an_evaluation_is_no_stretch_and_a_save_is_no_part_of_one(known: Fact, length: float | None) -> None:
    run = slow(2.0)
    more = [*save(12, whole=False), known] if isinstance(known, Saved) else [known]
    with_it = replace(run, facts={0: [*run.facts[0], *more], 1: run.facts[1]})
    found = Script.of(with_it).stretch
    assert (found and round(found[1], 1)) == length


def test_exit_0_at_the_time_limit_loses_nothing_if_the_next_job_continues() -> None:
    limit = Script.of(start(steps(0, STEPS), save(EVERY))).stimulus(Disturbance.TIME_LIMIT, 5.0)
    assert (limit.time_limit, limit.notice_s) == (True, 30.0)
    assert causes(noticed(8, save(8), codes=0), resumed(8), stimulus=limit) == []
    assert causes(noticed(8, codes=0), resumed(EVERY), stimulus=limit) == [Cause.NOT_SAVED_AT_NOTICE]


def test_what_a_script_does_not_do_is_not_tried() -> None:
    script = Script.of(start(steps(0, STEPS, samples=(), epoch_begins=False), [Cut(STEPS)]))
    not_tried = {one for one in Disturbance if script.why_not(one) is not None}
    assert not_tried == {
        Disturbance.EVALUATION, Disturbance.SAVE, Disturbance.AFTER_SAVE, Disturbance.EPOCH_END, Disturbance.LAST_STEP,
        Disturbance.SHORT_NOTICE, Disturbance.FULL_DISK, Disturbance.WORKERS, Disturbance.STRETCH,
    }  # fmt: skip


def test_facts_and_orders_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Without a torn last line."""
    facts = [*steps(0, 2), *save(1), HANDLER, Reached(Place.SAVE, 1, None, "x")]
    file = tmp_path / "facts"
    file.write_bytes(b"".join(map(to_line, facts)) + b'{"fact": "step_ma')
    assert list(read_facts(file)) == facts
    orders = Orders("f", "s", 60, place=Place.SAVE, known={"w": 3})
    assert Orders.from_json(orders.to_json()) == orders


@pytest.mark.parametrize(
    "words",
    [
        ["--only", "lunch"],
        ["--only", "step", "--at", "5"],
        ["--at", "("],
        ["--notice", "0"],
        ["--gpus", "0"],
        ["--steps", "1"],
        ["--limit", "0"],
        ["--output", "nowhere"],
        ["-N", "2"],
    ],
)
def test_wrong_options_start_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('started')\n")
    monkeypatch.chdir(tmp_path)
    with raises(UsageError):
        command(["rehearse", "train.py", *words])
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_signal_of_slurms_cannot_be_chosen_for_a_script_that_uses_clusterddp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job definition names the signal of a stop."""
    (tmp_path / "train.py").write_text("import clusterddp\n")
    monkeypatch.chdir(tmp_path)
    with raises(UsageError):
        command(["rehearse", "train.py", "--signal", "USR1"])


# --- under clusterddp

PARTS = States(0, {"ema.n": "1", "model.w": "#1"}, {"count": "3"}, {"ema": "average", "model": "model"}, ("model",))


def with_run(
    start_: Start, states: Mapping[int, States], logged_values: Mapping[int, str] = MappingProxyType({})
) -> Start:
    """The start of a script with ``ctx.run()``: the states before its steps, and what it logs."""
    more = [replace(one, local=local) for local, one in states.items()]
    values = [Logged(number, {"loss": value}) for number, value in logged_values.items()]
    return replace(start_, facts={**start_.facts, 0: [*start_.facts[0], *more, *values]})


@pytest.mark.parametrize(
    ("changed", "cause", "words"),
    [
        ({"objects": {"ema.n": "0", "model.w": "#1"}}, Cause.EMA_NOT_RESTORED, "ctx.run(ema=ema, ...)"),
        ({"objects": {"ema.n": "1", "model.w": "#2"}}, Cause.MODEL_NOT_RESTORED, "although ctx.run() receives model"),
    ],
)
def test_what_a_run_did_not_restore_is_named_with_what_it_received(
    changed: dict[str, Any], cause: Cause, words: str
) -> None:
    whole = with_run(undisturbed().start, dict.fromkeys(range(STEPS), PARTS))
    lost = with_run(resumed(9), dict.fromkeys(range(STEPS - 9), replace(PARTS, **changed)))
    found = diagnose(Undisturbed(Trial([whole]), Trial([whole])), Trial([noticed(9, save(9)), lost], [NOTICE]))
    assert [one.cause for one in found] == [cause]
    assert words in found[0].detail


def test_a_generator_in_a_module_is_not_taken_for_a_part_of_it() -> None:
    kinds = {"model": "model", "model.rng": "generator"}
    was = States(0, {"model.w": "#1", "model.rng.state": "#5"}, {}, kinds, ("model",))
    whole = with_run(undisturbed().start, dict.fromkeys(range(STEPS), was))
    lost = replace(was, objects={"model.w": "#1", "model.rng.state": "#0"})
    trial = Trial([noticed(9, save(9)), with_run(resumed(9), dict.fromkeys(range(STEPS - 9), lost))], [NOTICE])
    found = diagnose(Undisturbed(Trial([whole]), Trial([whole])), trial)
    assert [one.cause for one in found] == [Cause.GENERATOR_NOT_RESTORED]


def test_a_logged_value_that_differs_is_named_with_the_variables_that_differ() -> None:
    """Unless it also differs between two undisturbed runs."""
    numbers = {number: f"0.{number}" for number in range(STEPS)}
    whole = with_run(undisturbed().start, dict.fromkeys(range(STEPS), PARTS), numbers)
    wrong = replace(PARTS, variables={"count": "0"})
    lost = with_run(resumed(9), dict.fromkeys(range(STEPS - 9), wrong), {**numbers, 12: "9"})
    trial = Trial([noticed(9, save(9)), lost], [NOTICE])
    (found,) = diagnose(Undisturbed(Trial([whole]), Trial([whole])), trial)
    assert found.cause is Cause.STATE_NOT_RESTORED
    assert "loss after 12 steps is 9 instead of 0.12" in found.detail and "count (0 instead of 3)" in found.detail
    other = with_run(undisturbed().start, dict.fromkeys(range(STEPS), PARTS), {**numbers, 12: "7"})
    assert diagnose(Undisturbed(Trial([whole]), Trial([other])), trial) == []


def test_batches_without_indices_are_compared() -> None:
    def with_batches(one: Start, later: int) -> Start:
        facts = [replace(fact, samples=(), batch=f"#{fact.local + later}") if isinstance(fact, StepMade) else fact
                 for fact in one.facts[0]]  # fmt: skip
        return replace(one, facts={0: facts})

    whole = with_batches(undisturbed().start, 0)
    trial = Trial([with_batches(noticed(9, save(9)), 0), with_batches(resumed(9), 0)], [NOTICE])
    (found,) = diagnose(Undisturbed(Trial([whole]), Trial([whole])), trial)
    assert found.cause is Cause.POSITION_NOT_RESTORED
    trial = Trial([with_batches(noticed(9, save(9)), 0), with_batches(resumed(9), 9)], [NOTICE])
    assert diagnose(Undisturbed(Trial([whole]), Trial([whole])), trial) == []


def test_the_disturbances_of_one_run_are_in_the_order_of_their_places() -> None:
    """Each has its place behind that of the one before."""
    script = Script(60, range(5, 60, 5), [20, 40], [15, 30, 45], 0.1, True, True)
    wanted = [one for one in TOGETHER if one is not Disturbance.START]
    planned = script.in_order(wanted, 20.0)
    places = [one.after for one in planned.values()]
    assert planned.keys() == set(wanted) and list(planned)[-1] is Disturbance.FULL_DISK
    assert places == sorted(set(places)) and places[-1] < 60
    late = replace(script, evaluations=[], epochs=[45])
    assert set(wanted) - late.in_order(wanted, 20.0).keys() == {Disturbance.EVALUATION}
    assert script.in_order([Disturbance.EPOCH_END], 20.0)[Disturbance.EPOCH_END].after == 15
    assert Disturbance.SAVE not in Script(4, [], [], [], 0.1, True, True).in_order([Disturbance.SAVE], 20.0)


def test_the_variables_of_a_job_definition_reach_the_ranks(tmp_path: Path) -> None:
    """Under Slurm alone, too. Slurm's own variables win."""
    variables = {"DATA": "/data", "OMP_NUM_THREADS": "3", "PATH": "/own", "SLURM_PROCID": "9"}
    workspace = Workspace(tmp_path, Path(), (), (), None, False)
    conductor = SlurmConductor(tmp_path, workspace, ["-m", "m"], 60, 9.0, variables=variables)
    found = conductor.environment(RankEnvironment(1, 1, 2, 2, 0, (), "127.0.0.1", 1, "slurm"), 1, 0)
    assert (found["DATA"], found["OMP_NUM_THREADS"], found["SLURM_PROCID"]) == ("/data", "3", "1")
    assert found["PATH"] == f"{tmp_path}/bin:/own"
