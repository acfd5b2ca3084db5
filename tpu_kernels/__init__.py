"""TPU kernels for PyTorch, written in JAX Pallas. They run on `tpu` and `cpu` tensors, with or without a TPU.

    import tpu_kernels

    y = tpu_kernels.rms_norm(x, (4096,), weight)
    y = tpu_kernels.splash_attention(q, k, v, mask=tpu_kernels.masks.causal())
    y = tpu_kernels.moe_layer(x, router, gate, up, down, k=2)
    parts = tpu_kernels.all_gather(x, mesh, "x")  # of several ranks, by remote copies
    tpu_kernels.replace_modules(model)      # torch.nn norms of a model become ours
    tpu_kernels.install()                   # torch's own attention and grouped_mm on tpu tensors become ours

`tpu_kernels.catalog` lists all kernels. `tiling=` takes a `SplashTiling` for attention, a `GroupedTiling` for
grouped products, a `MatmulTiling` for those of several ranks and a `RowTiling` for norms; a `ScoreMod` is a
score_mod that has been traced.
"""

import bridge as _bridge  # noqa: F401  before torch: it settles which package serves the device "tpu"
from tpu_kernels import masks as masks
from tpu_kernels import nn as nn
from tpu_kernels._rows import RowTiling as RowTiling
from tpu_kernels.collectives.api import all_gather as all_gather
from tpu_kernels.collectives.api import all_to_all as all_to_all
from tpu_kernels.collectives.api import halo_exchange as halo_exchange
from tpu_kernels.collectives.api import ppermute as ppermute
from tpu_kernels.collectives.api import reduce_scatter as reduce_scatter
from tpu_kernels.collectives.matmul_api import all_gather_matmul as all_gather_matmul
from tpu_kernels.collectives.matmul_api import matmul_reduce_scatter as matmul_reduce_scatter
from tpu_kernels.collectives.products import MatmulTiling as MatmulTiling
from tpu_kernels.collectives.ragged_api import ragged_all_to_all as ragged_all_to_all
from tpu_kernels.context_parallel.region import context_parallel as context_parallel
from tpu_kernels.dropins import huggingface as huggingface
from tpu_kernels.dropins.install import install as install
from tpu_kernels.dropins.install import is_installed as is_installed
from tpu_kernels.dropins.install import overrides as overrides
from tpu_kernels.dropins.install import uninstall as uninstall
from tpu_kernels.grouped_matmul.api import grouped_matmul as grouped_matmul
from tpu_kernels.grouped_matmul.tiling import GroupedTiling as GroupedTiling
from tpu_kernels.grouped_matmul.transposed import transposed_grouped_matmul as transposed_grouped_matmul
from tpu_kernels.layer_norm.api import layer_norm as layer_norm
from tpu_kernels.moe.layer import load_balancing_loss as load_balancing_loss
from tpu_kernels.moe.layer import moe_layer as moe_layer
from tpu_kernels.moe.mlp import gated_mlp as gated_mlp
from tpu_kernels.moe.permutation import Permuted as Permuted
from tpu_kernels.moe.permutation import permute as permute
from tpu_kernels.moe.permutation import unpermute as unpermute
from tpu_kernels.moe.routing import route_top_k as route_top_k
from tpu_kernels.nn import replace_modules as replace_modules
from tpu_kernels.ring_attention.api import ring_attention as ring_attention
from tpu_kernels.ring_attention.sequence import sequence_positions as sequence_positions
from tpu_kernels.ring_attention.sequence import shard_sequence as shard_sequence
from tpu_kernels.ring_attention.sequence import unshard_sequence as unshard_sequence
from tpu_kernels.rms_norm.api import rms_norm as rms_norm
from tpu_kernels.splash_attention.api import splash_attention as splash_attention
from tpu_kernels.splash_attention.terms import ScoreMod as ScoreMod
from tpu_kernels.splash_attention.tiling import SplashTiling as SplashTiling
from tpu_kernels.splash_attention.varlen import varlen_attention as varlen_attention
from tpu_kernels.ulysses import ulysses_attention as ulysses_attention
