"""The loaders of one stage, and what they are, with the Trainer's own settings for them, read by duck type."""

from dataclasses import dataclass, field
from typing import Any

from lightning_ncclsafe import _torch
from lightning_ncclsafe.facts import DataFacts, LoaderFacts
from lightning_ncclsafe.probes.data.loaders import loader_facts
from lightning_ncclsafe.probes.data.random_state import random_states
from lightning_ncclsafe.rules.kit.data import TRAIN
from lightning_ncclsafe.settings import AgreementSettings


@dataclass(kw_only=True)
class Stage:
    """The loaders that one of Lightning's hooks has given.

    Attributes:
        name: Name of the hook, ``"train_dataloader"``.
        mode: How Lightning combines the loaders.
        expected: Number of loaders.
        loaders: Those that Lightning has prepared so far.
    """

    name: str
    mode: str = ""
    expected: int = 1
    loaders: list[Any] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether Lightning has prepared them all."""
        return len(self.loaders) >= self.expected

    def facts(self, trainer: Any, strategy: Any, settings: AgreementSettings) -> DataFacts:
        """What this rank presents of the stage.

        Args:
            trainer: The ``Trainer``.
            strategy: Its strategy.
            settings: What the user has set.
        """
        limit = self._limit(trainer)
        loaders = tuple(
            loader_facts(loader, name=self._name_of(index), limit=limit, content=settings.content)
            for index, loader in enumerate(self.loaders)
        )
        share = getattr(strategy, "distributed_sampler_kwargs", None) or {}
        return DataFacts(
            stage=self.name,
            mode=self.mode,
            loaders=loaders,
            val_check_batch=self._val_check_batch(trainer, loaders) if self.name == TRAIN else None,
            data_rank=int(share.get("rank", strategy.global_rank)),
            data_ranks=int(share.get("num_replicas", strategy.world_size)),
            random=random_states(),
            forward_communicates=getattr(strategy, "forward_communicates", False)
            or _torch.sends_buffers(getattr(strategy, "model", None)),
            on_mismatch=settings.on_mismatch,
            content=settings.content,
            on_uneven=settings.on_uneven,
        )

    def most_batches(self, trainer: Any) -> int | None:
        """After how many batches of a loader Lightning stops to ask, where that is one number for each loader."""
        limit = self._limit(trainer)
        alone = len(self.loaders) == 1 or self.mode == "sequential"
        return limit if alone and isinstance(limit, int) else None

    def _name_of(self, index: int) -> str:
        return self.name if len(self.loaders) == 1 else f"{self.name}[{index}]"

    def _limit(self, trainer: Any) -> int | float | None:
        limit: int | float | None = getattr(trainer, f"limit_{self.name.partition('_')[0]}_batches", None)
        return limit

    def _val_check_batch(self, trainer: Any, loaders: tuple[LoaderFacts, ...]) -> int | None:
        """As in Lightning's ``_FitLoop.setup_data``."""
        interval = getattr(trainer, "val_check_interval", None)
        if getattr(trainer, "_val_check_time_interval", None) is not None:
            return None
        if isinstance(interval, int):
            return interval
        known = [loader.batches for loader in loaders if loader.batches is not None]
        if not known or len(known) < len(loaders) or not isinstance(interval, float):
            return None
        batches = min(known) if self.mode == "min_size" else max(known)
        return max(1, int(batches * interval))
