"""What a rehearsal can find: the causes, the worst first, and what each costs a user."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Rank(enum.Enum):
    """What a finding costs a user, the worst first."""

    LOSES_WORK = "loses_work"
    WRONG_RESULT = "wrong_result"
    REPEATS_WORK = "repeats_work"
    UNTIDY = "untidy"

    @property
    def words(self) -> str:
        """For a table."""
        return self.value.replace("_", " ")


class Cause(enum.Enum):
    """Why. The value is its name in rehearsal.json. The order, the worst first, is that of their ranks."""

    ENDS_AS_COMPLETED = "ends_as_completed"
    RESUMES_HALF_WRITTEN = "resumes_half_written"
    CHECKPOINT_DESTROYED = "checkpoint_destroyed"
    NEW_FOLDER = "new_folder"
    NOT_RESUMED = "not_resumed"
    NO_CHECKPOINT = "no_checkpoint"
    RESUMED_OLDER = "resumed_older"
    LAST_IS_STALE = "last_is_stale"
    RESTART_FAILS = "restart_fails"
    HANGS = "hangs"
    SAVES_ON_EVERY_RANK = "saves_on_every_rank"
    MODEL_NOT_RESTORED = "model_not_restored"
    OPTIMIZER_NOT_RESTORED = "optimizer_not_restored"
    SCHEDULER_NOT_RESTORED = "scheduler_not_restored"
    WARMUP_RESTARTED = "warmup_restarted"
    SCALER_NOT_RESTORED = "scaler_not_restored"
    EMA_NOT_RESTORED = "ema_not_restored"
    GENERATOR_NOT_RESTORED = "generator_not_restored"
    SAMPLER_EPOCH_NOT_RESTORED = "sampler_epoch_not_restored"
    POSITION_NOT_RESTORED = "position_not_restored"
    BEST_NOT_RESTORED = "best_not_restored"
    ORDER_DEPENDS_ON_RANKS = "order_depends_on_ranks"
    STATE_NOT_RESTORED = "state_not_restored"
    HANDLER_ON_SOME_RANKS = "handler_on_some_ranks"
    HANDLER_REPLACED = "handler_replaced"
    HANDLER_LATE = "handler_late"
    BARRIER_IN_HANDLER = "barrier_in_handler"
    SAVE_SLOWER_THAN_NOTICE = "save_slower_than_notice"
    FLAG_NOT_CHECKED = "flag_not_checked"
    WORKERS_KILLED = "workers_killed"
    NO_HANDLER = "no_handler"
    NOT_SAVED_AT_NOTICE = "not_saved_at_notice"
    NEW_TRACKER_RUN = "new_tracker_run"
    FILES_LEFT = "files_left"
    PROCESSES_LEFT = "processes_left"

    @property
    def rank(self) -> Rank:
        """What it costs."""
        order = list(Cause)
        place = order.index(self)
        if place <= order.index(Cause.HANGS):
            return Rank.LOSES_WORK
        if place <= order.index(Cause.STATE_NOT_RESTORED):
            return Rank.WRONG_RESULT
        return Rank.REPEATS_WORK if place <= order.index(Cause.NOT_SAVED_AT_NOTICE) else Rank.UNTIDY


@dataclass(frozen=True)
class Finding:
    """One fault. ``detail``: a sentence with what was seen. ``file`` and ``line``: where in the script, if known."""

    cause: Cause
    detail: str
    file: str | None = None
    line: int | None = None

    @property
    def rank(self) -> Rank:
        """What it costs."""
        return self.cause.rank
