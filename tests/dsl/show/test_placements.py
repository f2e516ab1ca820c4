"""The table of transitions of a model: each once, with its operation and that of its gradient."""

from __future__ import annotations

from megaloom.dsl import Split, graph
from megaloom.dsl.show.placements import placement_rows
from tests.support.models.examples import example

GATHERED = "tp", "Shard(seq) → Replicate", "all-gather", "reduce-scatter"
SCATTERED = "tp", "Partial → Shard(seq)", "reduce-scatter", "all-gather"
SHARED = "tp", "Replicate → Shard(kv_heads, of 32 heads)", "slice", "zero-fill"


def rows(**axes: int) -> list[tuple[str, ...]]:
    return [*placement_rows(graph(example("llama3-8b")), Split(**axes))]


def test_a_value_that_several_ops_read_is_moved_once() -> None:
    """Queries, keys and values read one gathered value; equal layers are one."""
    attention = [row for row in rows(tp=2, sequence_parallel=True) if row[0] == "attention.0 and 31 more"]
    hidden = "[batch seq embed=4096]"
    assert attention == [(attention[0][0], "q", hidden, *GATHERED), (attention[0][0], "output", hidden, *SCATTERED)]


def test_shared_heads_and_the_order_of_a_shard_are_named() -> None:
    assert [row[1] for row in rows(tp=16) if row[3:] == SHARED] == ["attend", "attend"]
    assert {row[4] for row in rows(cp=2)} >= {"Shard(seq, zigzag) → Replicate", "Shard(seq, zigzag) → Partial"}
