from .data import ClipData
from .store import ClipStore, build_store
from .tagger import ClipTagger

__all__ = ["ClipData", "ClipStore", "ClipTagger", "build_store"]
