"""The dual path: a memory tier in front of a store, and what decides which tensors are in it."""

from blockkv.residency.budget import Estimate, MemoryBudget
from blockkv.residency.growing import TieredGrowingChunk
from blockkv.residency.ranker import Candidate, Place, rank_by_layer
from blockkv.residency.tiered import TieredStore

__all__ = [
    "Candidate",
    "Estimate",
    "MemoryBudget",
    "Place",
    "TieredGrowingChunk",
    "TieredStore",
    "rank_by_layer",
]
