"""The data of --data in a loop of the user's own: the samples that `megaloom train` reads, in its order.

data = read_data(engine, "wiki", split="949,50,1")
for batch in data.training(step=engine.done): engine.step(batch)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import frozen
from torch import Tensor

from megaloom.dsl.errors import UserError
from megaloom.runtime.data.corpus import Corpus, is_dataset
from megaloom.runtime.data.data_split import DataSplit
from megaloom.runtime.data.split import SPLIT_NAMES
from megaloom.runtime.data.synthetic import SYNTHETIC
from megaloom.runtime.engine.row_share import RowShare
from megaloom.runtime.launch.agreement import from_first_rank
from megaloom.runtime.options.groups import STDLIB, DataOptions
from megaloom.runtime.samples.end_of_document import NO_ENDS, EndOfDocument
from megaloom.runtime.samples.sample_checks import stacked
from megaloom.runtime.samples.samples import Sample, SampleMaker

from .rank_inputs import check_same_data
from .run_data import (
    check_labels,
    empty_split,
    held_out_sample,
    of_corpus,
    open_data,
    training_sample,
)

if TYPE_CHECKING:
    from megaloom.runtime.engine.engine import Engine  # its module imports megatron-core, which must be prepared before


@frozen(eq=False)
class DataReader:
    """The training, validation and test parts of data, read by the ranks of an engine.

    Batches are those of this data-parallel rank, equal on its tp, cp and pp ranks. A sample is a function of its number
    and the seed of the recipe, so an iterator begins at any step without reading what is before.
    """

    engine: Engine
    corpus: Corpus
    maker: SampleMaker
    split: str | None  # as given

    def training(self, *, step: int = 0) -> Iterator[dict[str, Tensor]]:
        """Yield the batches of steps `step`, `step` + 1, … without end, named tensors [batch / dp ..].

        Raise UserError for a batch that grows by the recipe.
        """
        recipe, plan = self.engine.recipe, self.engine.plan
        if recipe.rampup_batch is not None:
            raise UserError(
                f"rampup_batch={recipe.rampup_batch} of the recipe: batches of an iterator are those of the plan\n"
                "train on samples by number: engine.step(lambda i: data.sample(first + i), count)"
            )
        batch = plan.workload.batch
        rows = RowShare(plan.layout, self.engine.groups.dp_rank, batch).of(batch)
        return self._batches(step, batch, rows)

    def _batches(self, step: int, batch: int, rows: list[int]) -> Iterator[dict[str, Tensor]]:
        while True:
            yield stacked([self.sample(step * batch + i) for i in rows])
            step += 1

    def sample(self, i: int) -> Sample:
        """Return sample i of training, named tensors without a dim of sequences."""
        seed = self.engine.recipe.seed
        return training_sample(self.corpus.train, self.maker, self.engine.steps, i, seed)

    def validation(self, batches: int | None = None) -> Iterator[dict[str, Tensor]]:
        """Yield batches of the validation split, for `engine.evaluate`: all of it, or so many global batches."""
        return self._held_out(SPLIT_NAMES[1], self.corpus.validation, batches)

    def test(self, batches: int | None = None) -> Iterator[dict[str, Tensor]]:
        """Yield batches of the test split, for `engine.evaluate`: all of it, or so many global batches."""
        return self._held_out(SPLIT_NAMES[2], self.corpus.test, batches)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the number of samples of each split that is not empty: of training, those of an epoch."""
        seq = self.maker.length - 1
        held_out = {
            data.name: data.held_out_samples(seq) for data in (self.corpus.validation, self.corpus.test) if data
        }
        return {SPLIT_NAMES[0]: self.corpus.train.windows(seq), **held_out}

    def _held_out(self, name: str, data: DataSplit | None, batches: int | None) -> Iterator[dict[str, Tensor]]:
        """Return an iterator over a split. Raise UserError if it is empty, or a data-parallel rank would have none."""
        plan, groups = self.engine.plan, self.engine.groups
        if data is None:
            raise UserError(f"{empty_split(name, self.split)}\ngive it a larger share")
        if batches is not None and batches < 1:
            raise UserError(f"batches must be at least 1, got {batches}")
        count, batch, dp = data.held_out_samples(self.maker.length - 1), plan.workload.batch, plan.layout.dp
        count = count if batches is None else min(count, batches * batch)
        if count < dp:
            raise UserError(f"the {name} part has {count} samples, fewer than dp {dp}\ngive it a larger share")
        own, share = range(groups.dp_rank, count, dp), batch // dp
        parts = (own[k : k + share] for k in range(0, len(own), share))
        return (stacked([held_out_sample(data, self.maker, self.engine.steps, i) for i in rows]) for rows in parts)


def read_data(
    engine: Engine,
    source: str | Sequence[str] = STDLIB,
    *,
    split: str | None = None,
    folder: Path | None = None,
    ends: EndOfDocument = NO_ENDS,
) -> DataReader:
    """Return the data that `megaloom train --data … --split …` reads, for an engine. Every rank calls it.

    source: prefixes of indexed datasets, each after its weight if they have any; "stdlib", a file or folder of text, or
    "synthetic". split: shares of training, validation and test of indexed datasets, such as "949,50,1". folder: that of
    the run, where text is copied to; indexed datasets need none. ends: what happens at end-of-document tokens. The
    engine's own `data_step` makes the samples, if it has one.

    Raise UserError on all ranks for bad data, data that the model cannot train on, or files that differ between hosts.
    """
    options = DataOptions(data=(source,) if isinstance(source, str) else tuple(source), split=split)
    maker = SampleMaker.of(engine.graph, engine.plan.workload.seq)
    corpus = from_first_rank(lambda: _opened(engine, options, ends, maker, folder))
    check_same_data(corpus)
    return DataReader(engine, corpus, of_corpus(maker, corpus, ends), split)


def _opened(
    engine: Engine, options: DataOptions, ends: EndOfDocument, maker: SampleMaker, folder: Path | None
) -> Corpus:
    """Return the data of these options. Text is copied into a folder `data` of the run's."""
    check_labels(engine.graph, options.data, engine.steps, ref=engine.plan.model)
    copied = options.data == (SYNTHETIC,) or not is_dataset(options.data[-1])
    if copied and folder is None:
        raise UserError(
            f"{' '.join(options.data)} is copied before it is read, and there is no folder for it\n"
            "give read_data(…, folder=RUN), or prefixes of indexed datasets"
        )
    return open_data(options, ends, maker, (folder or Path()) / "data")
