"""The workload `series`: forecasts of long synthetic time series.

A series is the sum of a trend whose slope changes, a short season whose strength and level change
with the regime, a long season, and noise. The waveforms of the seasons, their periods, the two
regimes and the noise are drawn anew for every series, so that they must be found in the context;
regimes return. A token is PATCH successive values; the model predicts a Gaussian for each of the
next PATCH values. The loss is the negative log-likelihood; `error` is the root mean square error.

Beside the model: `last`, which repeats the last value; `seasonal`, the last value plus the change
of the series one short period earlier; `noise`, the loss and error with everything known except the
noise. The first two get the single deviation that fits the batch best, and `seasonal` the period.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from quality_model import to_device
from torch import nn
from torch.nn.functional import relu
from workloads_model import Batch, Body, Config, Sums, Workload

PATCH = 4  # values of a token
HARMONICS = 6
SHORT, LONG = (16, 96), (512, 6144)  # values in a period: the shortest and the longest
DWELL = (256, 2048)  # values from one change of regime to the next
BEND = (1024, 8192)  # and from one slope to the next
SLOPE = 4e-4  # deviation of the slope, per value
FEATURE_SCALE = 10  # weights begin with deviation 0.02: this makes inputs as large as norms expect
LEAST_LOG, MOST_LOG = -5.0, 3.0  # limits of predicted log deviations


@dataclasses.dataclass(frozen=True)
class Size:
    config: Config
    length: int  # tokens
    batch: int
    steps: int


USUAL = Size(Config(6, 6, 3), 8192, 8, 1000)
QUICK = Size(Config(2, 2, 1), 256, 4, 8)


class Model(Body):
    """From values [batch, len * PATCH] to means and log deviations of the PATCH values after each
    token [batch, len, 2 * PATCH]. A mean is relative to the last value of the token."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.expand = nn.Linear(2 * PATCH + 1, config.width, bias=False)
        self.project = nn.Linear(config.width, config.width, bias=False)
        self.head = nn.Linear(config.width, 2 * PATCH, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        tokens = values.unflatten(1, (-1, PATCH))
        changes = tokens - tokens[..., -1:]
        features = torch.cat((tokens, changes, torch.ones_like(tokens[..., :1])), -1)
        x = self.project(relu(self.expand(FEATURE_SCALE * features)))
        length = tokens.shape[1]
        positions = torch.arange(length, dtype=torch.int32, device=values.device)
        return self.head(self.run(x, positions[None]))


def steps_between(
    limits: tuple[int, int], batch: int, length: int, random: np.random.Generator
) -> np.ndarray:
    """[batch, length] integers that grow by one at random positions, `limits` apart."""
    count = length // limits[0] + 1
    ends = np.cumsum(random.integers(*limits, size=(batch, count)), 1)
    grown = np.zeros((batch, length + 1), np.int64)
    rows = np.arange(batch)[:, None]
    grown[rows, np.minimum(ends, length)] = 1
    return np.cumsum(grown[:, :length], 1)


def draw_season(
    limits: tuple[int, int], batch: int, random: np.random.Generator
) -> dict[str, np.ndarray]:
    """A period and a waveform for each series: log-uniform, and with falling harmonics."""
    strength = random.normal(size=(batch, HARMONICS)) / np.arange(1, HARMONICS + 1) ** 0.5
    strength /= np.sqrt((strength**2).sum(1, keepdims=True) / 2)
    return {
        "period": np.rint(np.exp(random.uniform(*np.log(limits), batch))),
        "strength": strength,
        "phase": random.uniform(0, 2 * math.pi, (batch, HARMONICS)),
    }


def season_at(season: dict[str, np.ndarray], length: int, device: torch.device) -> torch.Tensor:
    """[batch, length]: a waveform of deviation 1."""
    period, strength, phase = (
        to_device(season[name].astype(np.float32), device)
        for name in ("period", "strength", "phase")
    )
    position = torch.arange(length, device=device)
    turn = 2 * math.pi * torch.remainder(position, period[:, None]) / period[:, None]
    total = torch.zeros_like(turn)
    for number in range(HARMONICS):
        wave = torch.sin((number + 1) * turn + phase[:, number, None])
        total += strength[:, number, None] * wave
    return total


class Drawn:
    """A batch of series: parameters by numpy, values [batch, length] on the device."""

    def __init__(
        self, batch: int, length: int, random: np.random.Generator, device: torch.device
    ) -> None:
        self.short = draw_season(SHORT, batch, random)
        long = draw_season(LONG, batch, random)
        regime = steps_between(DWELL, batch, length, random) % 2
        bend = steps_between(BEND, batch, length, random)
        slopes = SLOPE * random.normal(size=(batch, length // BEND[0] + 2))
        strength, level = random.uniform(0.2, 1.2, (batch, 2)), random.normal(size=(batch, 2))
        rows = np.arange(batch)[:, None]
        on_device = [
            to_device(one.astype(np.float32), device)
            for one in (strength[rows, regime], level[rows, regime], slopes[rows, bend])
        ]
        strengths, levels, slope = on_device
        self.signal = strengths * season_at(self.short, length, device) + levels
        self.signal += season_at(long, length, device) + slope.cumsum(1)
        deviation = np.exp(random.uniform(math.log(0.05), math.log(0.3), (batch, 1)))
        self.deviation = to_device(deviation.astype(np.float32), device)
        generator = torch.Generator(device).manual_seed(int(random.integers(1 << 62)))
        noise = torch.randn(batch, length, generator=generator, device=device)
        self.values = self.signal + self.deviation * noise
        self.period = to_device(self.short["period"].astype(np.int64), device)


def gaussian(error: torch.Tensor, log_deviation: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of errors, in nats."""
    scaled = error * torch.exp(-log_deviation)
    return 0.5 * scaled * scaled + log_deviation + 0.5 * math.log(2 * math.pi)


def next_tokens(values: torch.Tensor) -> torch.Tensor:
    """[batch, len - 1, PATCH]: the values predicted from each token except the last."""
    return values.unflatten(1, (-1, PATCH))[:, 1:]


def sums_of(error: torch.Tensor, log_deviation: torch.Tensor, prefix: str = "") -> Sums:
    count = error.numel()
    loss = gaussian(error, log_deviation).double().sum()
    return {
        f"{prefix}loss": (loss, count),
        f"{prefix}error": (error.double().square().sum(), count),
    }


class Series(Workload):
    name, data, unit = "series", "synthetic series", "nats per value"
    roots = ("error", "last error", "seasonal error", "noise error")  # roots of means of squares

    @property
    def tokens(self) -> int:
        return self.size.batch * self.size.length

    def make_model(self, form: str, keys: int, recent: int) -> nn.Module:
        return Model(self.size.config.of_form(form, keys, recent))

    def batch(self, step: int, is_held_out: bool = False) -> Batch:
        size = self.size
        random = self.random_of(step, is_held_out)
        drawn = Drawn(size.batch, (size.length + 1) * PATCH, random, self.device)
        return {
            "values": drawn.values,
            "signal": drawn.signal,
            "deviation": drawn.deviation,
            "period": drawn.period,
        }

    def predict(self, model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Errors and log deviations [batch, len, PATCH]."""
        values = batch["values"]
        mean, log_deviation = model(values[:, :-PATCH]).float().chunk(2, -1)
        last = values[:, PATCH - 1 : -PATCH : PATCH, None]
        error = next_tokens(values) - last - mean
        return error, log_deviation.clamp(LEAST_LOG, MOST_LOG)

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        return gaussian(*self.predict(model, batch)).mean()

    def measure(self, model: nn.Module, batch: Batch) -> Sums:
        return sums_of(*self.predict(model, batch))

    def baseline(self, batch: Batch) -> Sums:
        values, period = batch["values"], batch["period"]
        last = values[:, PATCH - 1 : -PATCH : PATCH, None]
        position = torch.arange(PATCH, values.shape[1], device=values.device)
        earlier = values.gather(1, (position - period[:, None]).clamp(min=0))
        before = values.gather(1, (position // PATCH * PATCH - 1 - period[:, None]).clamp(min=0))
        change = (earlier - before).unflatten(1, (-1, PATCH))
        wanted = next_tokens(values)
        sums: Sums = {}
        for name, error in (("last", wanted - last), ("seasonal", wanted - last - change)):
            best = error.square().mean().log() / 2
            sums.update(sums_of(error, best.expand_as(error), f"{name} "))
        error = wanted - next_tokens(batch["signal"])
        known = batch["deviation"].log()[..., None].expand_as(error)
        return {**sums, **sums_of(error, known, "noise ")}
