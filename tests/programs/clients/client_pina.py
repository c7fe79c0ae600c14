"""pina-mathlab: a network that learns a function from samples, with the project's own subclass of the Trainer."""

from typing import ClassVar

import torch
from pina import Condition, Trainer
from pina.model import FeedForward
from pina.problem import BaseProblem
from pina.solver import SupervisedSolver
from train import Run

REQUIREMENTS = ["pina-mathlab"]
MONITOR = "train_loss"


X = torch.linspace(-3, 3, 160).reshape(-1, 1)


class Sine(BaseProblem):
    output_variables: ClassVar = ["sine"]
    input_variables: ClassVar = ["x"]
    conditions: ClassVar = {"data": Condition(input=X, target=X.sin())}


def train(run: Run) -> None:
    model = FeedForward(input_dimensions=1, output_dimensions=1, layers=[16, 16])
    solver = SupervisedSolver(Sine(), model=model, use_lt=False)
    trainer = Trainer(solver, batch_size=8, train_size=0.75, val_size=0.25, **run.kwargs())
    trainer.train(ckpt_path=run.ckpt_path, **run.unpickling)
