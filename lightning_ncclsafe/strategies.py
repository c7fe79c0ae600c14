"""An older path of the strategies, those for the package of Lightning that is chosen."""

from lightning_ncclsafe import SafeDDP as SafeDDP
from lightning_ncclsafe import SafeFSDP as SafeFSDP
from lightning_ncclsafe import SafeModelParallel as SafeModelParallel
