"""Model files: quantise, inspect, convert and verify safetensors checkpoints of any size.

Everything streams: besides the file's own pages, memory holds a few pieces of one tensor. Imports
no compiler and no CUDA package.
"""

from __future__ import annotations

from .compare import verify
from .container import Entry, TensorFile
from .convert import convert
from .errors import CheckpointError
from .jobs import Result
from .model import Checkpoint, open_checkpoint
from .quantize import quantize
from .schemes import CONVENTIONS, StoredWeight
from .survey import inspect
from .writer import TensorWriter, Written

__all__ = [
    "CONVENTIONS",
    "Checkpoint",
    "CheckpointError",
    "Entry",
    "Result",
    "StoredWeight",
    "TensorFile",
    "TensorWriter",
    "Written",
    "convert",
    "inspect",
    "open_checkpoint",
    "quantize",
    "verify",
]
