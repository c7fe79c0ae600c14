from .generation import complete
from .harness import Harness
from .tasks import TASKS

__all__ = ["TASKS", "Harness", "complete"]
