"""Training loops with what makes a resume differ, one each, and loops without: ``rehearse`` must tell them apart.

Each is a function of the context, and makes all its objects itself, as a script does in a fresh process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch

from clusterddp import orders
from clusterddp.training.context import Context
from tests.descent import Descent

SAMPLES, WIDTH, STEPS = 20, 3, 14
#: The steps of an epoch.
BATCH, EPOCH = 4, 5


class Samples(torch.utils.data.Dataset[Any]):
    """Numbers with noise from a ``generator``, if there is one."""

    def __init__(self, noise: Callable[[], float] = lambda: 0.0) -> None:
        self.values, self._noise = torch.arange(SAMPLES * WIDTH).reshape(SAMPLES, WIDTH) / 50, noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.values[index] + self._noise()


class Parts:
    """A model and what trains it."""

    def __init__(self, ctx: Context) -> None:
        self.model = ctx.wrap(torch.nn.Sequential(torch.nn.Linear(WIDTH, 4), torch.nn.Linear(4, 1)))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.5)

    def step(self, batch: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        loss: torch.Tensor = factor * self.model(batch).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss

    def all(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}


def train(ctx: Context, loader: Any, **more: Any) -> None:
    """A loop without a fault of its own."""
    parts = Parts(ctx)
    run = ctx.run(loader=loader, **parts.all(), **more)
    for batch in run.steps(STEPS):
        run.log(loss=parts.step(batch))


# --- without a fault


def shuffled(ctx: Context) -> None:
    train(ctx, ctx.loader(Samples(), BATCH))


def sequential_with_workers(ctx: Context) -> None:
    train(ctx, ctx.loader(Samples(lambda: torch.rand(()).item()), BATCH, shuffle=False, num_workers=1))


def weighted(ctx: Context) -> None:
    train(ctx, ctx.loader(Samples(), BATCH, order=orders.weighted([1.0 + n for n in range(SAMPLES)])))


class Meter:
    """The sum of losses in an epoch."""

    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]


def with_a_meter(ctx: Context) -> None:
    """The meter is no part and is lost, which makes no difference from the next epoch on; the average is a part."""
    parts, meter = Parts(ctx), Meter()
    ema = torch.optim.swa_utils.AveragedModel(parts.model.module)
    run = ctx.run(loader=ctx.loader(Samples(), BATCH), ema=ema, **parts.all())
    for batch in run.steps(STEPS):
        if run.at_start_of_epoch:
            meter.total = 0.0
        loss = parts.step(batch)
        meter.total += loss.item()
        ema.update_parameters(parts.model.module)
        run.log(loss=loss)


def evaluated(ctx: Context) -> None:
    """Four epochs with an evaluation behind each, so that there is a place for every disturbance."""
    parts = Parts(ctx)
    run = ctx.run(loader=ctx.loader(Samples(), BATCH), **parts.all())
    for batch in run.steps(10 * EPOCH):
        if run.every(epochs=1):
            parts.model.eval()
            with torch.no_grad():
                run.log(held_out_loss=parts.model(batch).square().mean())
            parts.model.train()
        run.log(loss=parts.step(batch))


def own_optimizer(ctx: Context) -> None:
    """Not torch's: the steps are those of the loop."""
    model = ctx.wrap(torch.nn.Linear(WIDTH, 1))
    optimizer = Descent(model)
    run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(Samples(), BATCH))
    for batch in run.steps(STEPS):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)


# --- with a fault


def unseeded_generator(ctx: Context) -> None:
    rng = numpy.random.default_rng()
    train(ctx, ctx.loader(Samples(rng.random), BATCH))


def generator_of_the_dataset(ctx: Context) -> None:
    rng = numpy.random.default_rng(0)
    train(ctx, ctx.loader(Samples(rng.random), BATCH))


class External:
    """A loader of a library: pass after pass in an order of its own, resumed by the number of batches."""

    def __init__(self) -> None:
        self.data, self.passes, self.done = Samples(), 0, 0

    def order(self) -> list[int]:
        return torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.passes)).tolist()

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = self.order()
        while self.done < EPOCH:
            indices = order[self.done * BATCH : (self.done + 1) * BATCH]
            self.done += 1
            yield torch.stack([self.data[index] for index in indices])
        self.passes, self.done = self.passes + 1, 0

    def __len__(self) -> int:
        return EPOCH

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes, "done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes, self.done = state["passes"], state["done"]


def external(ctx: Context) -> None:
    """No fault."""
    train(ctx, External())


class HiddenSampler(External):
    """The sampler's generator is not in the loader's state."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def order(self) -> list[int]:
        return torch.randperm(SAMPLES, generator=self.generator).tolist()


def sampler_with_hidden_state(ctx: Context) -> None:
    train(ctx, HiddenSampler())


class CountsSinceItsStart(External):
    """Saves how many batches it has given since it was loaded: right after the first resume, wrong after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = 0

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes, "done": max(0, self.done - self.loaded)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loaded = self.done


def second_resume_starts_over(ctx: Context) -> None:
    train(ctx, CountsSinceItsStart())


class ShortEpochs(External):
    """Persistent workers keep the place at which they were resumed, and begin each later epoch there, too."""

    def __init__(self) -> None:
        super().__init__()
        self.resumed_at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.done = max(self.done, self.resumed_at)
        yield from super().__iter__()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.resumed_at = self.done


def short_epochs(ctx: Context) -> None:
    train(ctx, ShortEpochs())


def forgotten_average(ctx: Context) -> None:
    """It is used only behind the loop: no step shows that it is lost."""
    parts = Parts(ctx)
    ema = torch.optim.swa_utils.AveragedModel(parts.model.module)
    run = ctx.run(loader=ctx.loader(Samples(), BATCH), **parts.all())
    for batch in run.steps(STEPS):
        run.log(loss=parts.step(batch))
        ema.update_parameters(parts.model.module)


def forgotten_scheduler(ctx: Context) -> None:
    parts = Parts(ctx)
    run = ctx.run(model=parts.model, optimizer=parts.optimizer, loader=ctx.loader(Samples(), BATCH))
    for batch in run.steps(STEPS):
        run.log(loss=parts.step(batch))


def time_dependent(ctx: Context) -> None:
    parts = Parts(ctx)
    run = ctx.run(loader=ctx.loader(Samples(), BATCH), **parts.all())
    begun = time.perf_counter()
    for batch in run.steps(STEPS):
        run.log(loss=parts.step(batch, 1 + time.perf_counter() - begun))


def counter_in_a_closure(ctx: Context) -> None:
    def warm_up() -> Callable[[], float]:
        count = 0

        def factor() -> float:
            nonlocal count
            count += 1
            return 1 / count

        return factor

    parts, factor = Parts(ctx), warm_up()
    run = ctx.run(loader=ctx.loader(Samples(), BATCH), **parts.all())
    for batch in run.steps(STEPS):
        run.log(loss=parts.step(batch, factor()))


def running_mean(ctx: Context) -> None:
    """A tensor that is no part."""
    parts, mean = Parts(ctx), torch.zeros(WIDTH)
    run = ctx.run(loader=ctx.loader(Samples(), BATCH), **parts.all())
    for batch in run.steps(STEPS):
        mean = 0.9 * mean + 0.1 * batch.mean(0)
        run.log(loss=parts.step(batch - mean))


def forgotten_logged_value(ctx: Context) -> None:
    """It has no effect on the training."""
    parts, best = Parts(ctx), [float("inf")]
    run = ctx.run(loader=ctx.loader(Samples(), BATCH), **parts.all())
    for batch in run.steps(STEPS):
        loss = parts.step(batch).item()
        best[0] = min(best[0], loss + 0.01 * run.step)
        run.log(loss=loss, best=best[0])


class OwnDropout(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * torch.rand(values.shape, generator=self.generator)


def dropout_generator(ctx: Context) -> None:
    model = ctx.wrap(torch.nn.Sequential(torch.nn.Linear(WIDTH, 4), OwnDropout()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = ctx.run(model=model, optimizer=optimizer, loader=ctx.loader(Samples(), BATCH))
    for batch in run.steps(STEPS):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(loss=loss)
