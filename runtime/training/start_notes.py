"""Lines at the start of a run: training samples, epochs, batch per device, padded vocabulary, backend, own steps."""

from __future__ import annotations

from collections.abc import Iterator

from megaloom.dsl.graph import Graph
from megaloom.dsl.layers.embeddings import Unembed
from megaloom.dsl.sharding_table import padded_vocabulary
from megaloom.runtime.data.synthetic import is_synthetic
from megaloom.runtime.samples.samples import SampleMaker

from .chosen_backend import backend_note
from .steps_reference import steps_note
from .training_run import TrainingRun


def start_notes(run: TrainingRun, graph: Graph, maker: SampleMaker) -> Iterator[str]:
    """Yield lines about what a run trains on in all its steps, those before a resume included."""
    batch, layout = run.plan.workload.batch, run.plan.layout
    seq, steps = maker.length - 1, run.recipe.steps
    if not is_synthetic(run.corpus):
        windows, samples = run.corpus.train.windows(seq), 0
        for _ in range(steps if run.recipe.rampup_batch else 0):
            samples += run.recipe.batch_at(samples, batch)
        epochs = (samples or steps * batch) / windows
        of = "steps" if run.recipe.rampup_batch else f"steps of {batch:,}"
        yield f"{windows:,} training samples of {seq:,} tokens; {steps:,} {of} are {epochs:.3g} epochs"
    each = f"{batch // layout.dp:,} on each data-parallel rank"
    yield f"batch of {batch:,}: {each}, in micro-batches of {layout.micro_batch:,}"
    for vocab in dict.fromkeys(n.op.table["vocab"].known for n in graph.nodes if isinstance(n.op, Unembed)):
        if (padded := padded_vocabulary(vocab, layout.split)) != vocab:
            yield f"vocabulary: {vocab:,} tokens, padded to {padded:,} (tp {layout.tp} x {layout.vocab_multiple})"
    if note := backend_note(run.plan, graph):
        yield note
    if note := steps_note(run.steps, None):
        yield note
