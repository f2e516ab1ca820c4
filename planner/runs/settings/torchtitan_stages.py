"""Pipeline stages of torchtitan, as it cuts its models, in the letters of megatron-core's stage layouts."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from megaloom.dsl.errors import UserError
from megaloom.planner.export.whole_layers import StageLayers, pipeline_layout
from megaloom.planner.runs.words import Word

_SINGLE, _INTERLEAVED = "1F1B", "Interleaved1F1B"


def stage_words(options: Mapping[str, Word], pp: int, layers: int) -> tuple[Word, ...]:
    """Return the flag for the stages of a model with so many layers; none without a pipeline.

    Raise UserError for a schedule that is not modelled, and for stages that torchtitan refuses.
    """
    if pp == 1:
        return ()
    schedule = options.get("parallelism.pipeline_parallel_schedule")
    if schedule and schedule.text not in (_SINGLE, _INTERLEAVED):
        raise UserError(
            f"{schedule.origin}: torchtitan's schedule {schedule.text:.40} is not modelled\n"
            f"read are {_SINGLE} and {_INTERLEAVED}"
        )
    stated = options.get("parallelism.module_fqns_per_model_part")
    if stated:
        stages = [_stage(part.split(",")) for part in stated.text.split("|")]
        origin = stated.origin
    else:
        degree = options["parallelism.pipeline_parallel_degree"]
        origin = (schedule or degree).origin
        stages = _cut(options, pp, layers, several=bool(schedule and schedule.text == _INTERLEAVED))
    return Word("--pipeline-model-parallel-layout", origin), Word(pipeline_layout(stages), origin)


def _stage(modules: list[str]) -> StageLayers:
    """Return a stage by the names of its modules."""
    numbers = [int(name.removeprefix("layers.")) for name in modules if name.startswith("layers.")]
    first, last = (numbers[0], numbers[-1] + 1) if numbers else (0, 0)
    return StageLayers(first, last, "tok_embeddings" in modules, "output" in modules or "lm_head" in modules)


def _cut(options: Mapping[str, Word], pp: int, layers: int, *, several: bool) -> list[StageLayers]:
    """Return the stages that torchtitan cuts by itself: embedding and output count as some layers of the ends.

    The first stages have one layer more where the layers do not divide. Source: torchtitan 0.2.2,
    distributed/pipeline_parallel.py.
    """
    before, after, each = (
        _number(options, f"pipeline_parallel_{name}", default)
        for name, default in (("first_stage_less_layers", 1), ("last_stage_less_layers", 1), ("layers_per_stage", 0))
    )
    counted = layers + before + after
    count = ceil(counted / each) if each else pp * (2 if several else 1)
    if count % pp or counted // count < max(before, after, 1) or (count > pp) is not several:
        what = f"{count} stages of {layers} layers on pp {pp} with this schedule"
        raise UserError(f"{options['parallelism.pipeline_parallel_degree'].origin}: torchtitan refuses {what}")
    stages, first = list[StageLayers](), 0
    for i in range(count):
        own = counted // count + (i < counted % count) - before * (i == 0) - after * (i == count - 1)
        stages.append(StageLayers(first, first + own, i == 0, i == count - 1))
        first += own
    return stages


def _number(options: Mapping[str, Word], name: str, default: int) -> int:
    word = options.get(f"parallelism.{name}")
    return int(word.text) if word is not None and word.text.isdecimal() else default
