"""Picks tilings for TPU kernels. Knows the `KernelSpec` protocol and no kernel.

A catalog is a module with a tuple `CATALOG` of `KernelSpec`s; `tpu_kernels.catalog` is one, and anybody's
module can be another. Importing this package imports neither torch nor JAX.
"""

from autotune.problem import ArraySpec as ArraySpec
from autotune.problem import Problem as Problem
from autotune.spec import Candidate as Candidate
from autotune.spec import Cost as Cost
from autotune.spec import Example as Example
from autotune.spec import KernelSpec as KernelSpec
from bridge.chips import Chip as Chip
from bridge.chips import chip as chip
from bridge.chips import chips as chips
