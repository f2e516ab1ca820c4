"""Changes of a run's Megatron-LM flags that give it the layout of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from attrs import evolve

from megaloom.dsl.graph import graph
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.export.megatron_lm import megatron_options
from megaloom.planner.export.option import Option
from megaloom.planner.runs.run import Edit, TrainingRun
from megaloom.planner.runs.words import Word

from .parser import Arguments, by_dest, table

_CHUNKS = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
_RECOMPUTE = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
    "recompute_activations",
    "moe_layer_recompute",
)
_SHARD = (
    "use_distributed_optimizer",
    "use_megatron_fsdp",
    "use_custom_fsdp",
    "data_parallel_sharding_strategy",
    "gradient_accumulation_fusion",
    "ckpt_format",
    "fp8_param_gather",
)
# The arguments that express each field of a layout.
ARGUMENTS_OF: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "tp": ("tensor_model_parallel_size",),
        "pp": ("pipeline_model_parallel_size", *_CHUNKS),
        "vpp": _CHUNKS,
        "cp": ("context_parallel_size",),
        "ep": ("expert_model_parallel_size",),
        "etp": ("expert_tensor_parallel_size",),
        "sequence_parallel": ("sequence_parallel",),
        "micro_batch": ("micro_batch_size",),
        "recompute": _RECOMPUTE,
        "recompute_modules": _RECOMPUTE,
        "recompute_layers": _RECOMPUTE,
        "shard": _SHARD,
        "microbatch_group": ("microbatch_group_size_per_vp_stage",),
        "overlaps": (
            "overlap_grad_reduce",
            "overlap_param_gather",
            "tp_comm_overlap",
            "overlap_moe_expert_parallel_comm",
        ),
    }
)
# Arguments that a new layout sets where it needs them, and that stay as they are where it does not.
_KEPT = ("gradient_accumulation_fusion", "ckpt_format", "fp8_param_gather")


def edits(a: Arguments, run: TrainingRun, plan: Plan) -> tuple[Edit, ...]:
    """Return the changes of the arguments that make the run that of a plan of its model. Empty if there are none.

    Raise UserError where Megatron-LM has no flag for the plan.
    """
    options = megatron_options(plan, graph(run.model))
    wanted = {table()[f"--{one.name}"].dest: one for one in (*options.layout, *options.step)}
    out = [edit for dest in _touched(run, plan) for edit in _edit(a, dest, wanted.get(dest))]
    x = plan.layout
    if not a["global_batch_size"] and x.micro_batch * x.dp != plan.workload.batch:
        out.append(Edit("--global-batch-size", ("--global-batch-size", str(plan.workload.batch))))
    return tuple(edit if edit.old else evolve(edit, after=_anchors(a)) for edit in out)


def _anchors(a: Arguments) -> tuple[tuple[Word, ...], ...]:
    """Return the words of the given flags after which a new one may stand: those of the layout first."""
    first = [dest for dests in ARGUMENTS_OF.values() for dest in dests if dest in a.given]
    order = dict.fromkeys([*first, *(dest for dest in a.given if a.given[dest].flag.nargs in "01")])
    return tuple((a.given[dest].word, *a.given[dest].values) for dest in order)


def _touched(run: TrainingRun, plan: Plan) -> Iterable[str]:
    """Return the arguments of the fields in which a plan differs from the run."""
    x = plan.layout
    fields = [name for name in ARGUMENTS_OF if getattr(x, name) != getattr(run.layout, name)]
    if tuple(stage.start for stage in plan.stages) != run.stages:
        fields.append("vpp")
    if run.layout.dp * run.layout.cp == 1 < x.dp * x.cp:  # overlaps had no meaning before
        fields.append("overlaps")
    if "tp" in fields and _expert_axes(x, run.layout):
        fields.append("etp")
    return dict.fromkeys(dest for name in fields for dest in ARGUMENTS_OF[name])


def _expert_axes(*layouts: Layout) -> bool:
    """Return whether experts are sharded under a layout, so that etp, which follows tp, must be stated."""
    return any(x.ep > 1 or x.etp > 1 for x in layouts)


def _edit(a: Arguments, dest: str, wanted: Option | None) -> Iterator[Edit]:
    """Yield the change of one argument, if there is one. wanted: the option of the plan; None for the default."""
    given, flag = a.given.get(dest), by_dest()[dest]
    if wanted is None:
        if given is not None and dest not in _KEPT and given.value != flag.default:
            yield Edit(flag.name, (), (given.word, *given.values))
        return
    values = wanted.values
    have = () if given is None else tuple(word.text for word in given.values)
    if flag.nargs == "0":
        same = a[dest] == flag.sets if dest in a.defaults else given is not None
    else:
        same = have == values or (given is None and values == (str(flag.default),))
    if not same:
        yield Edit(flag.name, wanted.words, () if given is None else (given.word, *given.values))
