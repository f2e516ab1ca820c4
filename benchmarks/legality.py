"""Compare the rules with megatron-core: `python benchmarks/legality.py [LAYOUTS [SEED]]`, by default 10,000 layouts.

Each drawn layout is built in megatron-core up to its first layers, and checked by the rules. The output is the share of
layouts on which they agree, every other case, the places where megatron-core raised, and what only the rules refuse.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.legality.comparison import judged


def main() -> int:
    count, seed = (*map(int, sys.argv[1:]), *(10_000, 0)[len(sys.argv) - 1 :])
    start = perf_counter()
    verdicts = judged(count, seed)
    legal = [v for v in verdicts if v.refusal is None]
    wrong = [v for v in verdicts if not v.agrees]
    print(f"{count:,} layouts by seed {seed}, {len(legal):,} of them legal, in {perf_counter() - start:.0f} s")
    print(f"agreement {1 - len(wrong) / count:.2%}")
    for v in wrong:
        print(f"  {v.case}\n    megatron-core: {v.refusal}\n    rules: {', '.join(v.theirs) or 'legal'}")
    for what, by in (
        ("megatron-core raised in", Counter(v.refusal.where for v in verdicts if v.refusal)),
        ("refused by the rules only", Counter(rule for v in legal for rule in v.stricter)),
    ):
        print(what)
        for name, times in by.most_common():
            print(f"  {times:>6,}  {name}")
    return len(wrong) > 0


if __name__ == "__main__":
    sys.exit(main())
