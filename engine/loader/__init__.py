"""From what the user names to a checkpoint, and from a checkpoint to a model."""

from octavo.engine.loader.checkpoint import Checkpoint, EncoderCheckpoint
from octavo.engine.loader.sources import check_local, resolve_checkpoint

__all__ = ["Checkpoint", "EncoderCheckpoint", "check_local", "resolve_checkpoint"]
