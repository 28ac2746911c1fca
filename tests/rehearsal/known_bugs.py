"""Published kinds of bugs in scripts that are preempted and resumed, each as a small script of our own in bugs/NAME.

``repaired.py`` resumes correctly, and ``bug.patch`` puts the bug into it. Both scripts train on two ranks with gloo, in
40 to 60 steps of a few milliseconds, and save below their working folder. A test shows what each bug does, by an
interruption where it hurts.
"""

from __future__ import annotations

import enum
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

BUGS = Path(__file__).with_name("bugs")


class Rank(enum.Enum):
    """What a user loses by a bug, the worst first."""

    LOSES_WORK = "loses_work"
    WRONG_RESULT = "wrong_result"
    REPEATS_WORK = "repeats_work"


class Damage(enum.Enum):
    """What an interrupted run of the broken script comes to."""

    #: It never ends with all its steps done: it fails at each start, or counts as completed before.
    UNFINISHED = "unfinished"
    #: It ends with all its steps done, and another result than without the interruption.
    DIFFERENT = "different"
    #: It ends with the same result, and did some steps twice.
    REPEATED = "repeated"


class Moment(enum.Enum):
    """Where rank 0 is interrupted: after a step, in an evaluation, or in a save with half of its bytes written."""

    STEP = "step"
    EVALUATION = "evaluation"
    SAVE = "save"


@dataclass(frozen=True)
class Interruption:
    """Every process of all ranks gets SIGTERM, and SIGKILL after ``notice_s``, or SIGKILL at once."""

    moment: Moment
    #: The first step, evaluation or save has number 1.
    number: int = 1
    notice_s: float | None = 10.0


@dataclass(frozen=True)
class KnownBug:
    """One kind of bug."""

    #: Of the folder with its scripts.
    name: str
    what: str
    #: Reports of it in public repositories.
    sources: tuple[str, ...]
    rank: Rank
    #: Of the finding that `clusterddp rehearse` must report first.
    cause: str
    damage: Damage
    interruption: Interruption
    #: The disturbance of `clusterddp rehearse` that shows it.
    shown_by: str
    #: The files with the result, relative to the working folder. The newest one counts, if several match.
    result: str
    #: Ranks of the starts after the interruption.
    ranks_afterwards: int = 2

    @property
    def repaired(self) -> Path:
        """The script without the bug."""
        return BUGS / self.name / "repaired.py"

    def write_broken(self, folder: Path) -> Path:
        """The script with the bug, in a new folder with what it imports.

        Raises:
            subprocess.CalledProcessError: the patch does not apply.
        """
        shutil.copytree(BUGS / self.name, folder)
        subprocess.run(["git", "apply", "bug.patch"], cwd=folder, check=True)
        return (folder / "repaired.py").rename(folder / "broken.py")


def _on_github(*threads: str) -> tuple[str, ...]:
    return tuple(f"https://github.com/{thread}" for thread in threads)


KNOWN_BUGS = (
    KnownBug(
        "exits_as_completed",
        "it saves at the notice and exits with 0, so the job counts as completed",
        _on_github("marian-nmt/marian-dev/pull/551", "wandb/docs/pull/2278"),
        Rank.LOSES_WORK,
        "ends_as_completed",
        Damage.UNFINISHED,
        Interruption(Moment.STEP, 20),
        "step",
        "siamese.pt",
    ),
    KnownBug(
        "half_written",
        "it writes checkpoints in place, and resumes from one that is cut off",
        _on_github("Lightning-AI/pytorch-lightning/issues/688", "rwth-i6/returnn/issues/1444"),
        Rank.LOSES_WORK,
        "resumes_half_written",
        Damage.UNFINISHED,
        Interruption(Moment.SAVE, 3, notice_s=None),
        "kill",
        "ckpt/state_48.pt",
    ),
    KnownBug(
        "last_is_stale",
        "it resumes from last.ckpt, and later saves get other names",
        _on_github("GaTech-RL2/EgoVerse/pull/621", "EveryVoiceTTS/EveryVoice/issues/183"),
        Rank.LOSES_WORK,
        "last_is_stale",
        Damage.REPEATED,
        Interruption(Moment.STEP, 27),
        "step",
        "lightning_logs/checkpoints/last*.ckpt",
    ),
    KnownBug(
        "older_file",
        "it sorts the names of checkpoints as text, and resumes from an older one",
        _on_github("strands-labs/robots/pull/3165"),
        Rank.LOSES_WORK,
        "resumed_older",
        Damage.REPEATED,
        Interruption(Moment.STEP, 27),
        "step",
        "models/model_54.pt",
    ),
    KnownBug(
        "new_folder",
        "each start makes a new output folder, and looks for a checkpoint only there",
        _on_github("NVIDIA/physicsnemo/pull/1843", "ashleve/lightning-hydra-template/issues/146"),
        Rank.LOSES_WORK,
        "new_folder",
        Damage.REPEATED,
        Interruption(Moment.STEP, 25),
        "step",
        "runs/*/checkpoint.pt",
    ),
    KnownBug(
        "files_of_two_saves",
        "it replaces the files of a checkpoint one after another, and resumes from files of two saves",
        _on_github("KempnerInstitute/KempnerForge/issues/177"),
        Rank.LOSES_WORK,
        "resumes_half_written",
        Damage.DIFFERENT,
        Interruption(Moment.SAVE, 6, notice_s=None),
        "kill",
        "checkpoint*/model.pt",
    ),
    KnownBug(
        "lenient_load",
        "the names in the checkpoint have a prefix, and strict=False hides that no weight is loaded",
        _on_github("nayeemrizve/OpenLDN/issues/5", "pytorch/examples/issues/1029"),
        Rank.WRONG_RESULT,
        "model_not_restored",
        Damage.DIFFERENT,
        Interruption(Moment.STEP, 20),
        "step",
        "ddp.pth",
    ),
    KnownBug(
        "optimizer",
        "the optimizer's state is not in the checkpoint",
        _on_github("EvolvingLMMs-Lab/OneVision-Encoder/pull/65", "NVlabs/stylegan2-ada-pytorch/issues/108"),
        Rank.WRONG_RESULT,
        "optimizer_not_restored",
        Damage.DIFFERENT,
        Interruption(Moment.STEP, 25),
        "step",
        "out/checkpoint.pt",
    ),
    KnownBug(
        "scheduler",
        "the scheduler's state is not in the checkpoint",
        _on_github("PolymathicAI/the_well/pull/63", "lightly-ai/lightly-train/pull/301"),
        Rank.WRONG_RESULT,
        "scheduler_not_restored",
        Damage.DIFFERENT,
        Interruption(Moment.STEP, 17),
        "step",
        "checkpoints/checkpoint.pth",
    ),
    KnownBug(
        "warmup",
        "the warm-up of the learning rate begins again at each start",
        _on_github("metatensor/metatrain/issues/375", "awslabs/sockeye/issues/925"),
        Rank.WRONG_RESULT,
        "warmup_restarted",
        Damage.DIFFERENT,
        Interruption(Moment.STEP, 29),
        "step",
        "out-regression/ckpt.pt",
    ),
    KnownBug(
        "scaler",
        "the gradient scaler's state is not in the checkpoint",
        _on_github("pytorch/vision/pull/4923", "ultralytics/ultralytics/pull/22189"),
        Rank.WRONG_RESULT,
        "scaler_not_restored",
        Damage.DIFFERENT,
        Interruption(Moment.STEP, 20),
        "step",
        "amp_run/state.pt",
    ),
    KnownBug(
        "ema",
        "the averaged weights are not in the checkpoint",
        _on_github("ai2cm/ace/issues/349", "m2lines/Samudra/issues/282"),
        Rank.WRONG_RESULT,
        "ema_not_restored",
        Damage.DIFFERENT,
        Interruption(Moment.STEP, 26),
        "step",
        "results/denoiser/ema_final.pt",
    ),
    KnownBug(
        "generator",
        "the generators' states are not in the checkpoint, so dropout differs",
        _on_github("vllm-project/speculators/issues/1027", "huggingface/transformers/pull/11582"),
        Rank.WRONG_RESULT,
        "generator_not_restored",
        Damage.DIFFERENT,
        Interruption(Moment.STEP, 22),
        "step",
        "output/step-000045.ckpt",
    ),
    KnownBug(
        "sampler_epoch",
        "the sampler begins with its first epoch again",
        _on_github("huggingface/accelerate/issues/2016", "huggingface/accelerate/pull/4071"),
        Rank.WRONG_RESULT,
        "sampler_epoch_not_restored",
        Damage.DIFFERENT,
        Interruption(Moment.STEP, 29),
        "step",
        "last_checkpoint.pth",
    ),
    KnownBug(
        "best",
        "the best validation loss is not in the checkpoint, and a worse model replaces the best one",
        _on_github("facebookresearch/fairchem/pull/349", "OpenRLHF/OpenRLHF/pull/1333"),
        Rank.WRONG_RESULT,
        "best_not_restored",
        Damage.DIFFERENT,
        Interruption(Moment.STEP, 30),
        "step",
        "ckpt/best.pt",
    ),
    KnownBug(
        "curriculum",
        "the stage of the curriculum is not in the checkpoint, and begins again",
        _on_github("Metta-AI/metta/pull/2702", "huggingface/transformers/issues/10290"),
        Rank.WRONG_RESULT,
        "state_not_restored",
        Damage.DIFFERENT,
        Interruption(Moment.STEP, 28),
        "step",
        "curriculum.ckpt",
    ),
    KnownBug(
        "saved_by_every_rank",
        "every rank saves its state to the same file",
        _on_github("bytedance/ibot/issues/15", "DLLXW/baby-llama2-chinese/pull/56"),
        Rank.WRONG_RESULT,
        "saves_on_every_rank",
        Damage.DIFFERENT,
        Interruption(Moment.STEP, 25),
        "step",
        "weights/state.pth",
    ),
    KnownBug(
        "order_by_ranks",
        "another number of ranks trains on other samples, though the global batch stays the same",
        _on_github("meta-pytorch/torchft/pull/292", "PrimeIntellect-ai/prime-rl/pull/1035"),
        Rank.WRONG_RESULT,
        "order_depends_on_ranks",
        Damage.DIFFERENT,
        Interruption(Moment.STEP, 18),
        "ranks",
        "polynomial.pth",
        ranks_afterwards=1,
    ),
    KnownBug(
        "evaluation",
        "the flag that the handler sets is not looked at in a long evaluation",
        _on_github("goodfire-ai/spd/issues/741", "goodfire-ai/spd/issues/677"),
        Rank.REPEATS_WORK,
        "flag_not_checked",
        Damage.REPEATED,
        Interruption(Moment.EVALUATION, notice_s=2.0),
        "evaluation",
        "tagger/checkpoint.pt",
    ),
    KnownBug(
        "handler_on_rank_0",
        "only rank 0 handles the signal, which ends the other ranks at once",
        _on_github("Lightning-AI/pytorch-lightning/issues/20806", "Lightning-AI/pytorch-lightning/pull/20825"),
        Rank.REPEATS_WORK,
        "handler_on_some_ranks",
        Damage.REPEATED,
        Interruption(Moment.STEP, 25),
        "step",
        "factorisation/current.pt",
    ),
    KnownBug(
        "handler_replaced",
        "a library installs its own handler after the script has",
        _on_github("Lightning-AI/pytorch-lightning/issues/1455"),
        Rank.REPEATS_WORK,
        "handler_replaced",
        Damage.REPEATED,
        Interruption(Moment.STEP, 25),
        "step",
        "save/quantiles.tar",
    ),
    KnownBug(
        "barrier_in_handler",
        "the handler waits for other ranks, which cannot run theirs inside a collective",
        _on_github("ai2cm/ace/pull/1425", "Lightning-AI/pytorch-lightning/issues/21406"),
        Rank.REPEATS_WORK,
        "barrier_in_handler",
        Damage.REPEATED,
        Interruption(Moment.STEP, 30, notice_s=4.0),
        "step",
        "oscillator.ckpt",
    ),
    KnownBug(
        "slow_save",
        "the save takes longer than the notice",
        _on_github("PrimeIntellect-ai/prime-rl/issues/2664", "ai2cm/ace/pull/1398"),
        Rank.REPEATS_WORK,
        "save_slower_than_notice",
        Damage.REPEATED,
        Interruption(Moment.STEP, 28, notice_s=2.0),
        "step",
        "scratch/checkpoint.pt",
    ),
    KnownBug(
        "workers_killed",
        "the signal ends the loader's workers, and the next batch raises before the save",
        _on_github("KempnerInstitute/KempnerForge/issues/177", "allenai/olmoearth_pretrain/pull/604"),
        Rank.REPEATS_WORK,
        "workers_killed",
        Damage.REPEATED,
        Interruption(Moment.STEP, 21),
        "step",
        "model/checkpoint.pt",
    ),
)
