"""Plugs everything into Lightning's strategies: ``guarded`` is their base, ``guarded_call`` one call of a Trainer, with
its ``call_exchanges`` and ``features``, one of which is ``saved_at_end``.

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
