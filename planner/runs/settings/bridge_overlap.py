"""Communication overlap of Megatron-Bridge: what its section `comm_overlap` makes of the fields of other sections."""

from __future__ import annotations

from collections.abc import Mapping

from megaloom.planner.runs.settings.near_names import first_origin
from megaloom.planner.runs.settings.tree import Setting, Tree, found, overlaid, setting_at
from megaloom.planner.runs.words import Word

_OF_DATA = ("overlap_grad_reduce", "overlap_param_gather")


def with_overlap(tree: Tree | None) -> Tree | None:
    """Return the settings as `comm_overlap` changes them (training/comm_overlap.py, 0.2 to 0.7).

    Where the section stands, data-parallel overlap beside a distributed optimizer is on unless the section says
    otherwise, and tensor-parallel overlap is off without sequence parallelism.
    """
    section = found(tree, "comm_overlap")
    if not isinstance(tree, Mapping) or not isinstance(section, Mapping):
        return tree
    rest = {key: one for key, one in section.items() if key not in (*_OF_DATA, "tp_comm_overlap")}
    sequence, tp = setting_at(tree, "model.sequence_parallel"), setting_at(tree, "model.tensor_model_parallel_size")
    if (
        "tp_comm_overlap" in section
        and tp
        and tp.text != "1"
        and sequence
        and (sequence.word.unknown or sequence.is_true)
    ):
        rest["tp_comm_overlap"] = section["tp_comm_overlap"]
    shared = setting_at(tree, "ddp.use_distributed_optimizer") or setting_at(
        tree, "optimizer.use_distributed_optimizer"
    )
    if not (shared and (shared.word.unknown or shared.is_true)):
        return {**tree, "comm_overlap": rest}
    stated = {key: setting_at(section, key) for key in _OF_DATA}
    on = Setting(Word("true", first_origin(section)), "boolean")
    ddp = overlaid(found(tree, "ddp"), {key: one or on for key, one in stated.items()})
    return {**tree, "comm_overlap": rest, "ddp": ddp if ddp is not None else {}}
