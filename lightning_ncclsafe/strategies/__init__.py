"""Connects Lightning's strategies with everything below: the guard, the callbacks' features, the end of a run.

``guarded``, the entry point, is the base of all guarded strategies: it passes Lightning's hooks on. ``guarded_call`` is
one call of the Trainer: it makes the guard, the ``call_exchanges`` between ranks, and the ``features`` that callbacks
ask for, one of which is ``saved_at_end``. ``guarded_save`` is one save after such a call. ``launchers`` does this in
every process that Lightning starts.

Only ``lightning_ncclsafe.lightning`` and ``lightning_ncclsafe.pytorch_lightning`` import Lightning itself. The
strategies can still be imported from their older path here, for the package of Lightning that is chosen.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_ncclsafe.lightning import SafeDDP as SafeDDP
    from lightning_ncclsafe.lightning import SafeFSDP as SafeFSDP
    from lightning_ncclsafe.lightning import SafeModelParallel as SafeModelParallel

__all__ = ["SafeDDP", "SafeFSDP", "SafeModelParallel"]


# Imported late: the package itself imports this one.
def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(__name__.partition(".")[0]), name)
