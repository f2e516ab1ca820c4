"""Whether the rules are megatron-core's: `python benchmarks/legality.py [LAYOUTS [SEED]]`, 10,000 drawn if not said.

Each layout is tried in megatron-core itself, as far as its first layers, and judged by the rules. Printed is how often
both say the same, every case in which they do not, where megatron-core gave up, and what only the rules refuse.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.legality import judged


def main() -> int:
    count, seed = (*map(int, sys.argv[1:]), *(10_000, 0)[len(sys.argv) - 1 :])
    began = perf_counter()
    found = judged(count, seed)
    legal = [v for v in found if v.refusal is None]
    wrong = [v for v in found if not v.agrees]
    print(f"{count:,} layouts by seed {seed}, {len(legal):,} of them legal, in {perf_counter() - began:.0f} s")
    print(f"agreement {1 - len(wrong) / count:.2%}")
    for v in wrong:
        print(f"  {v.case}\n    megatron-core: {v.refusal}\n    rules: {', '.join(v.theirs) or 'legal'}")
    for what, by in (
        ("megatron-core gave up at", Counter(v.refusal.where for v in found if v.refusal)),
        ("taken by megatron-core, refused by us", Counter(rule for v in legal for rule in v.stricter)),
    ):
        print(what)
        for name, times in by.most_common():
            print(f"  {times:>6,}  {name}")
    return len(wrong) > 0


if __name__ == "__main__":
    sys.exit(main())
