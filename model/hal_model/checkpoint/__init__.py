"""Checkpoints in the official format: read (`Checkpoint`), verified, and made from nothing (`init_checkpoint`)."""

from __future__ import annotations

from hal_model.checkpoint.reader import Checkpoint
from hal_model.checkpoint.verify import Report
from hal_model.checkpoint.writer import Written, init_checkpoint

__all__ = ["Checkpoint", "Report", "Written", "init_checkpoint"]
