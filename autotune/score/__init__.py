"""Scores: predicted times, each with its source and how far it can be trusted."""

from autotune.score.protocol import KernelScore as KernelScore
from autotune.score.protocol import Score as Score
from autotune.score.protocol import Scorer as Scorer
from autotune.score.protocol import Workload as Workload
from autotune.score.protocol import best as best
from autotune.score.protocol import rank as rank
