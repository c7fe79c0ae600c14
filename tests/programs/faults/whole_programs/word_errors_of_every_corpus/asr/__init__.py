from .data import Corpora
from .model import Recognizer

__all__ = ["Corpora", "Recognizer"]
