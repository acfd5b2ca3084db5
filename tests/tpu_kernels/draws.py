"""Random draws for random calls: the same ones for the same seed."""

from __future__ import annotations

import random

import torch


class Draws(random.Random):
    """Python's generator with the draws that calls need; tensors come from torch's, with the same seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.torch = torch.Generator().manual_seed(seed)

    def chance(self, p: float) -> bool:
        return self.random() < p

    def normal(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=self.torch, dtype=torch.float64) * scale
