"""Pipeline stages in whole layers, as megatron-core divides them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from .parser import Arguments
from .refusal import refuse_run

StageCounts = tuple[int, int]  # decoder layers, and layers of multi-token prediction


def chunks(a: Arguments) -> int:
    """Return the model chunks of each pipeline rank (vpp)."""
    pp: int = a["pipeline_model_parallel_size"]
    stated = [
        dest
        for dest in (
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "pipeline_model_parallel_layout",
        )
        if a[dest] is not None
    ]
    if len(stated) > 1:
        refuse_run(a, "Megatron-LM takes only one of the flags that divide layers into chunks", *stated[1:])
    if layout := a["pipeline_model_parallel_layout"]:
        count = len(parse_layout(a, layout))
        if count % pp:
            refuse_run(a, f"{count} stages do not fill {pp} pipeline ranks", "pipeline_model_parallel_layout")
        return max(1, count // pp)
    if each := a["num_layers_per_virtual_pipeline_stage"]:
        layers = _counted(a)
        if layers % pp or layers // pp % each:
            what = f"{layers} layers do not divide into pp {pp} ranks with chunks of {each} layers"
            refuse_run(a, f"{what}: Megatron-LM does not start", "num_layers_per_virtual_pipeline_stage")
        return max(1, layers // pp // int(each))
    return max(1, int(a["num_virtual_stages_per_pipeline_rank"] or 1))


def _counted(a: Arguments) -> int:
    """Return the layers that are divided: the embedding and the loss count as one each where that is asked."""
    layers: int = a["num_layers"]
    return layers + sum(_ends(a))


def _ends(a: Arguments) -> tuple[int, int]:
    """Return whether the embedding and the loss count as a layer; DeepSpeed counts both or none."""
    both = a["deepspeed"] and "embedding" in (a["pp_partition_method"] or "")
    return (
        int(both or a["account_for_embedding_in_pipeline_split"]),
        int(both or a["account_for_loss_in_pipeline_split"]),
    )


def layers_of_stages(a: Arguments) -> tuple[StageCounts, ...]:
    """Return the layers of each stage, in model order: stage i is chunk i // pp of rank i % pp."""
    pp, vpp, ahead = a["pipeline_model_parallel_size"], chunks(a), a["mtp_num_layers"] or 0
    if layout := a["pipeline_model_parallel_layout"]:
        stages = parse_layout(a, layout)
        if sum(layers for layers, _ in stages) != a["num_layers"]:
            what = f"the stages have {sum(n for n, _ in stages)} layers, but the model {a['num_layers']}"
            refuse_run(a, what, "pipeline_model_parallel_layout")
        return tuple(stages)
    ranks = _rank_layers(a, pp)
    counts = [ranks[i % pp] // vpp for i in range(pp * vpp)]
    if any(layers % vpp for layers in ranks):
        refuse_run(a, f"the layers of a pipeline rank do not divide into {vpp} chunks", *_CHUNKS)
    first, last = _ends(a)
    counts[0] -= first
    counts[-1] -= last
    return tuple((n, ahead if i == len(counts) - 1 else 0) for i, n in enumerate(counts))


_CHUNKS = (
    "num_virtual_stages_per_pipeline_rank",
    "num_layers_per_virtual_pipeline_stage",
    "decoder_first_pipeline_num_layers",
    "pipeline_model_parallel_size",
)


def _rank_layers(a: Arguments, pp: int) -> list[int]:
    """Return the layers of each pipeline rank."""
    layers, ends = _counted(a), (a["decoder_first_pipeline_num_layers"], a["decoder_last_pipeline_num_layers"])
    if ends == (None, None):
        if layers % pp:
            what = f"{layers} layers do not divide into pp {pp} stages, so Megatron-LM does not start"
            refuse_run(a, what, "pipeline_model_parallel_size", "num_layers")
        return [layers // pp] * pp
    first, last = ends
    between = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if rest < 0 or (between and rest % between) or (not between and rest):
        what = f"{rest} layers do not divide into the {between} pipeline ranks between"
        refuse_run(a, what, "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    middle = [rest // between] * between if between else []
    return [*([] if first is None else [first]), *middle, *([] if last is None else [last])]


def parse_layout(a: Arguments, text: str) -> list[StageCounts]:
    """Return the stages of a text such as Et*3|(tt|)*29,m|L, in which commas mean nothing."""
    plain = "".join(_unrolled(a, text.replace(",", "").replace(" ", "")))
    parts = plain.split("|")
    if any(letter not in "EtmL" for part in parts for letter in part):
        refuse_run(a, "a pipeline layout has other letters than E, t, m, L", "pipeline_model_parallel_layout")
    return [(part.count("t"), part.count("m")) for part in parts]


def _unrolled(a: Arguments, text: str) -> Iterator[str]:
    """Yield the parts of a layout with its products written out."""
    at = 0
    while at < len(text):
        end = text.find(")", at) if text[at] == "(" else at
        if end < 0:
            refuse_run(a, "a pipeline layout has a bracket that is not closed", "pipeline_model_parallel_layout")
        unit = "".join(_unrolled(a, text[at + 1 : end])) if text[at] == "(" else text[at]
        at = end + 1
        digits = ""
        if text[at : at + 1] == "*":
            at += 1
            while text[at : at + 1].isdecimal():
                digits, at = digits + text[at], at + 1
        yield unit * int(digits or 1)


def first_layers(stages: tuple[StageCounts, ...]) -> tuple[int, ...]:
    """Return the number of layers before each stage, those of multi-token prediction included."""
    return tuple(accumulate((sum(stage) for stage in stages[:-1]), initial=0))
