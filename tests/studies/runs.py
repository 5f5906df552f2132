"""Training runs to measure: tiny models on disk, and a regression that is solved in closed form."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from tests import families
from tl_tangent.geometry.gradient_flow import gradient_flow_weights
from tl_tangent.studies.checkpoints import Checkpoint, CheckpointSeries

STEPS = (0, 1, 10, 40)
SMALL = {"rank": 2, "n_controls": 4, "kinds": ("q", "out"), "batches_per_piece": 2}
N_PIECES = 3 * 2 + 4 * 2 + 4  # three early checkpoints, then all, in two pieces each; and the sums


def write_run(folder: Path, steps=STEPS, family: str = "llama", drift: float = 0.0) -> Path:
    """Save a tiny model once a step, its weights disturbed a little more each time."""
    model = families.hf_model(family)
    generator = torch.Generator().manual_seed(7)
    for step in steps:
        model.save_pretrained(folder / f"step-{step}")
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.2 * noise * parameter.std())
            model.get_input_embeddings().weight.add_(drift)
    return folder


def tokens(n: int = 3) -> list[torch.Tensor]:
    return [families.tiny_tokens(batch=3, pos=10, seed=seed) for seed in range(n)]


class Regression(nn.Module):
    """Linear regression in the clothes of a language model: one map, of one block, of one token.

    There are two tokens an input direction, at plus and minus ``sqrt(d variance)`` on it: all of
    them together have mean zero and the covariance ``diag(variance)``, exactly.
    """

    def __init__(self, weight: torch.Tensor, teacher: torch.Tensor, variance: torch.Tensor):
        super().__init__()
        o, d = weight.shape
        self.config = SimpleNamespace(num_hidden_layers=1, model_type="regression")
        points = torch.diag((d * variance).sqrt())
        self.embedding = nn.Embedding.from_pretrained(torch.cat([points, -points]), freeze=False)
        self.layers = nn.ModuleList([nn.Module()])
        self.layers[0].q_proj = nn.Linear(d, o, bias=False, dtype=weight.dtype)
        self.layers[0].q_proj.weight.data.copy_(weight)
        self.register_buffer("teacher", teacher)

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, input_ids: torch.Tensor, **_) -> SimpleNamespace:
        x = self.embedding(input_ids)
        return SimpleNamespace(logits=self.layers[0].q_proj(x), wanted=x @ self.teacher.mT)


@dataclass(frozen=True)
class FlowCheckpoint(Checkpoint):
    """The regression after ``step`` units of time under gradient flow."""

    flow: tuple[float, ...] = ()  # variances in Q_T and beside it
    d: int = 12
    rank: int = 4
    o: int = 32

    def load(self, objective="causal", device="cpu") -> nn.Module:
        generator = torch.Generator().manual_seed(1)
        draw = torch.randn(2, self.o, self.d, generator=generator, dtype=torch.float64)
        tangent, normal = self.flow
        variance = torch.tensor(
            [tangent] * self.rank + [normal] * (self.d - self.rank), dtype=torch.float64
        )
        weight = gradient_flow_weights(draw[0], draw[1], variance, self.step)
        model = Regression(weight, draw[1], variance).eval()
        model.step = self.step
        return model


def squared_error(model, batch) -> torch.Tensor:
    """Half the squared error, mean over tokens: its gradient is ``(W - W*) diag(variance)``."""
    out = model(input_ids=batch.tokens)
    return (out.logits - out.wanted).square().sum(-1).mean() / 2


def unrelated(model, batch) -> torch.Tensor:
    """A loss whose gradient at the map's output is drawn anew, whatever the input is."""
    logits = model(input_ids=batch.tokens).logits
    generator = torch.Generator().manual_seed(model.step)
    return (torch.randn(logits.shape, generator=generator, dtype=logits.dtype) * logits).mean()


def flow_series(steps=range(21), objective=squared_error, flow=(0.5, 0.05)) -> CheckpointSeries:
    found = tuple(FlowCheckpoint("made-up", step, flow=flow) for step in steps)
    return CheckpointSeries("regression", found, objective=objective)


ALL_POINTS = torch.arange(2 * FlowCheckpoint.d)[None]


class LastFirst:
    """An executor that finishes what came last first, one piece a look."""

    def __init__(self):
        self.tasks = []

    def submit(self, function, piece):
        task = LastFirst.Task(self, function, piece)
        self.tasks.append(task)
        return task

    class Task(Future):
        def __init__(self, owner, function, piece):
            super().__init__()
            self.owner, self.work = owner, (function, piece)

        def done(self):
            if not super().done() and self is self.owner.tasks[-1]:
                function, piece = self.work
                self.set_result(function(piece))
                self.owner.tasks.pop()
            return super().done()
