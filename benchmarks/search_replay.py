"""How many compilations searches need, and how good their picks are, on recorded spaces.

    python benchmarks/search_replay.py [--strategies model,local,random] [--seeds 5] [--share 4]
        [--match TEXT] [--folder DIR] [--json FILE]

Each strategy may score one candidate of `--share`. *pick* is the time of its pick over that of an exhaustive
search, the worst over all seeds. Nothing is compiled: see `record_spaces.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from autotune.search import STRATEGIES
from autotune.search.recorded import RecordedSpace
from autotune.tune import tune

FOLDER = Path(__file__).parent.parent / "tests" / "autotune" / "search" / "recorded"
RESULTS = Path(__file__).parent / "results" / "search_replay.json"
GOOD = 1.02
"""A pick is good if it takes no longer than this, of what an exhaustive search finds."""


@dataclass(frozen=True)
class Row:
    """How one strategy does on one space.

    Attributes:
        space: name of the file.
        candidates: how many there are.
        failed: how many of them have no time.
        strategy: its name.
        scored: candidates it scored, the most over all seeds.
        picks: time of the pick over the time of the best candidate, for each seed.
        default: the same for the default tiling; None if it has no time.
    """

    space: str
    candidates: int
    failed: int
    strategy: str
    scored: int
    picks: tuple[float, ...]
    default: float | None


def replay(name: str, space: RecordedSpace, strategy: str, seeds: int, share: int) -> Row:
    """Search a recorded space with several seeds."""
    subject, scorer = space.subject(), space.scorer()
    every = tune(subject, scorer, strategy="exhaustive", budget=len(space.candidates), check=False, tie=0.0)
    assert every.best is not None
    best = every.best.time_s
    found = [
        tune(subject, scorer, strategy=strategy, seed=s, budget=max(every.legal // share, 1), check=False)
        for s in range(seeds)
    ]
    defaults = [
        outcome.time_s / best
        for outcome in every.outcomes
        if outcome.candidate.tiling == subject.default and outcome.status == "scored"
    ]
    return Row(
        name,
        every.legal,
        every.legal - every.count("scored"),
        strategy,
        max(len(tuned.outcomes) for tuned in found),
        tuple(tuned.best.time_s / best for tuned in found if tuned.best is not None),
        defaults[0] if defaults else None,
    )


def show(rows: Sequence[Row]) -> None:
    """All rows, and a summary of each strategy."""
    width = max(len(row.space) for row in rows)
    for row in rows:
        default = "none" if row.default is None else f"{row.default:.3f}"
        print(
            f"{row.space:{width}}  {row.strategy:10}  scored {row.scored:3} of {row.candidates:3}  "
            f"pick {statistics.median(row.picks):.3f}, at worst {max(row.picks):.3f}  default {default}"
            + ("" if max(row.picks) <= GOOD else "  !")
        )
    for strategy in dict.fromkeys(row.strategy for row in rows):
        own = [row for row in rows if row.strategy == strategy]
        picks = [pick for row in own for pick in row.picks]
        print(
            f"{strategy}: {len(own)} spaces, within {GOOD - 1:.0%} with every seed: "
            f"{sum(max(row.picks) <= GOOD for row in own)}; of all searches "
            f"{sum(pick <= GOOD for pick in picks) / len(picks):.0%}; worst {max(picks):.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--strategies", default="model,local,random", help=f"of {', '.join(STRATEGIES)}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--share", type=int, default=4, help="one of so many candidates is scored")
    parser.add_argument("--match", default="", help="only spaces whose file name contains this")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()

    rows: list[Row] = []
    for path in sorted(options.folder.glob("*.json")):
        if options.match not in path.stem:
            continue
        space = RecordedSpace.load(path)
        if space.missing:
            print(f"{path.stem}: {space.missing} scores are missing; run record_spaces.py")
            continue
        for strategy in options.strategies.split(","):
            rows.append(replay(path.stem, space, strategy, options.seeds, options.share))
    if not rows:
        raise SystemExit("no space is recorded")
    show(rows)
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
