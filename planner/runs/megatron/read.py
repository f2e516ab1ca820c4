"""A run of Megatron-LM from its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import PurePath

from attrs import evolve, field, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import graph
from megaloom.dsl.quoting import shortened
from megaloom.planner.contract.workload import Precision
from megaloom.planner.runs.run import Devices, Note, TrainingRun

from .edits import edits
from .flag import Effect
from .layers import has_experts, hidden_channels, position_embedding
from .layout import read_layout, read_workload
from .model import REQUIRED, build_model, layer_starts
from .parser import EVERY_UNKNOWN, UNKNOWN_FLAG, Arguments, GivenArgument, Trouble
from .profile import framework_profile, predicted_flags
from .refusal import refuse_run
from .stages import first_layers, layers_of_stages
from .stated import stated_facts
from .versions import check_version, defaults_of, least_release, other_releases
from .vocabulary import vocabulary

PROGRAM = "Megatron-LM"
LOWER_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm"}
_FOR_WIDTH = ("multiple_of", "hidden_dim_multiplier")  # of FlagScale, where no width of the MLP is stated
USER_FLAGS = "--set"  # the path of flags that the user gives


@frozen(kw_only=True)
class Hints:
    """Facts that a user adds to a file: the vocabulary, the release whose defaults hold, flags to ignore."""

    vocab: int | None = None
    version: str | None = None
    ignored: tuple[str, ...] = ()


@frozen
class ArgumentSource:
    """Origin of arguments: the file, its devices, and what was assumed."""

    path: str
    devices: Devices
    assumed: tuple[Note, ...] = ()
    version: str | None = None
    hints: Hints = field(factory=Hints)


def read_run(a: Arguments, source: ArgumentSource) -> TrainingRun:
    """Return the run. Raise UserError with every flag that keeps it from being read."""
    hints = source.hints
    stated = hints.version or source.version
    version = check_version(stated or least_release(a.names))
    a = evolve(a, defaults={**a.defaults, **defaults_of(version)}).without(hints.ignored)
    absent = _absent(a, version) if stated and not a.complete else ()
    refused = [one for one in a.judged(Effect.REFUSED) if not (one.flag.dest in _FOR_WIDTH and a["ffn_hidden_size"])]
    if trouble := [*a.trouble, *absent, *map(_refused, refused)]:
        raise UserError(trouble_text(trouble))
    a = _with_own_names(a)
    for dest in REQUIRED:
        if a[dest] is None:
            refuse_run(a, f"--{dest.replace('_', '-')} is not stated, and Megatron-LM has no default for it")
    devices = source.devices
    layout = read_layout(a, devices.count)
    workload = read_workload(a, layout.dp)
    vocab, origin = vocabulary(a, hints.vocab)
    model = build_model(a, vocab, PurePath(source.path).stem or "run")
    starts = layer_starts(graph(model))
    firsts = first_layers(layers_of_stages(a))
    if len(set(firsts[1:])) < len(firsts) - 1:
        refuse_run(a, "a stage without layers between others is not modelled", "pipeline_model_parallel_layout")
    assumed = [*source.assumed, *_overridden(a), *_of_checkpoint(a)]
    if not a.complete and not a["deepspeed"] and not stated:
        assumed.append(Note(f"release {version} of Megatron-LM, for what the file leaves to defaults (`--version-of`)"))
    if origin and origin != "--vocab":
        assumed.append(Note(f"a vocabulary of {vocab:,} tokens: {origin} (`--vocab`)"))
    run = TrainingRun(
        path=source.path,
        program="Megatron-DeepSpeed" if a["deepspeed"] else PROGRAM,
        version=(stated and version) or "",
        defaults="" if a["deepspeed"] or a.complete or stated else f"{PROGRAM} {version}",
        model=model,
        layout=layout,
        workload=workload,
        stages=(0, *(starts[n] for n in firsts[1:])),
        profile=framework_profile(a),
        devices=devices,
        stated=stated_facts(a, layout, workload, vocab, devices),
        notes=tuple(notes(a)),
        assumed=tuple(assumed),
    )
    return run if a["deepspeed"] else evolve(run, edits=partial(edits, a, run))


def _overridden(a: Arguments) -> Iterator[Note]:
    """Yield the flags that the file states again with another value, of which the last counts."""
    for earlier, later in a.repeated:
        if later.flag.effect is not Effect.NOTHING and later.origin.path != USER_FLAGS:
            values = " and ".join(
                f"{shortened(_text(one), 40)} (line {one.origin.line_number})" for one in (earlier, later)
            )
            yield Note(f"{later.flag.name} stands with {values}: the last counts", later.origin)


def _of_checkpoint(a: Arguments) -> Iterator[Note]:
    """Yield the flags of a command whose values count less than those of the checkpoint that it loads."""
    what = {"use_checkpoint_args": "sizes of the model", "use_mp_args_from_checkpoint_args": "degrees of parallelism"}
    for dest in () if a.complete else what:
        if dest in a.given:
            flag = a.given[dest].flag.name
            yield Note(f"{flag} takes the {what[dest]} from the checkpoint; those of the file are read", a.origin(dest))


def _text(one: GivenArgument) -> str:
    """Return the value of an argument as the file has it; the name of a switch."""
    return " ".join(word.text for word in one.values) or one.word.text


def _with_own_names(a: Arguments) -> Arguments:
    """Return the arguments of an older release or of Megatron-DeepSpeed under Megatron-LM's names."""
    given = dict(a.given)
    if "num_layers" not in given and "encoder_num_layers" in given:
        given["num_layers"] = given["encoder_num_layers"]
    if groups := given.get("num_key_value_heads"):
        given |= {"num_query_groups": groups, "group_query_attention": evolve(groups, value=True)}
    if base := given.get("rotary_position_embeddings_theta"):
        given["rotary_base"] = base
    if (norm := given.get("normalization")) and norm.value in LOWER_NORMS:
        given["normalization"] = evolve(norm, value=LOWER_NORMS[norm.value])
    return evolve(a, given=given)


def trouble_text(trouble: list[Trouble]) -> str:
    """Return the message of a run that cannot be read: every cause on a line, and what is asked for."""
    strange = {one.flag: one.origin for one in trouble if UNKNOWN_FLAG in one.message}
    several = len(strange) > 1
    lines = list(dict.fromkeys(str(one) for one in trouble if not (several and UNKNOWN_FLAG in one.message)))
    if several:
        names = ", ".join(f"--{name} ({origin.line_number})" for name, origin in strange.items())
        lines.append(
            f"{next(iter(strange.values())).path}: {len(strange)} flags are not known, so they may change mathematics, "
            f"time or memory: {names}; `--ignore-flag {EVERY_UNKNOWN}` reads the run as if they were not there"
        )
    asked = dict.fromkeys(
        one.name for cause in trouble for one in cause.asked if one.kind == "variable" and one.name.isidentifier()
    )
    positions = {one.name for cause in trouble for one in cause.asked if one.kind == "positional"}
    if positions:
        needed = ", ".join(sorted(positions, key=_place))
        lines.append(f"give the script's arguments after all options, as in `-- FIRST SECOND`; it needs {needed}")
    if asked:
        lines.append(f"give {' '.join(f'--env {name}=…' for name in asked)}")
    return "\n".join(lines)


def _place(name: str) -> int:
    return int(name) if name.isdecimal() else 0


def _absent(a: Arguments, version: str) -> Iterator[Trouble]:
    for name, message in other_releases(a.names, version):
        yield Trouble(message, a.names[name], name.removeprefix("--"))


def _refused(one: GivenArgument) -> Trouble:
    name = one.flag.name
    return Trouble(f"{name}: {one.flag.why}", one.origin, name.removeprefix("--"))


def notes(a: Arguments) -> Iterator[Note]:
    """Yield what a prediction leaves out of these arguments, and where names mislead, each with its line."""
    for text, dest in _notes(a):
        yield Note(text, a.origin(dest))


def _notes(a: Arguments) -> Iterator[tuple[str, str]]:
    """Yield each note with the argument that it is about."""
    predicted = {*predicted_flags(a)}
    for one in a.judged(Effect.LITTLE):
        if one.flag.dest in predicted or not _relevant(a, one.flag.dest):
            continue
        yield f"{one.flag.name} is not in the prediction: {one.flag.why}", one.flag.dest
    if has_experts(a):
        yield from _expert_notes(a)
    if a["multi_latent_attention"] and not a["qk_layernorm"]:
        yield "the latent vectors have no norms without --qk-layernorm; the prediction has them", "qk_layernorm"
    if a["sequence_parallel"] and a["tensor_model_parallel_size"] == 1:
        yield "--sequence-parallel has no effect with tp 1", "sequence_parallel"
    if a["bf16"] and (a["fp8"] or a["fp4"]):
        yield f"matrix products are in {'fp8' if a['fp8'] else 'fp4'}; --bf16 is the format of the rest", "bf16"
    if a["deepspeed"]:
        yield "DeepSpeed runs this; the prediction is for Megatron-core with Transformer Engine", "deepspeed"
    if (positions := a["max_position_embeddings"]) and positions < (a["seq_length"] or a["encoder_seq_length"] or 0):
        yield f"Megatron-LM does not start with {positions} positions and longer sequences", "max_position_embeddings"
    if a["rampup_batch_size"]:
        yield "the batch grows; the prediction is for the last one", "rampup_batch_size"
    if a["recompute_method"] == "uniform" and (a["recompute_num_layers"] or 1) > 1:
        yield "layers are recomputed in groups; the prediction has them one by one", "recompute_num_layers"
    if a["fp8"] and a["fp8_recipe"] == "blockwise":
        yield "scales of blocks are predicted as one scale for each tensor", "fp8_recipe"
    if not (a["bf16"] or a["fp16"]):
        yield f"without --bf16 or --fp16 Megatron-LM trains in {Precision.FP32}", "bf16"


def _relevant(a: Arguments, dest: str) -> bool:
    """Return whether a flag that the prediction leaves out could change this run."""
    interleaved = (
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "pipeline_model_parallel_layout",
    )
    if dest in ("overlap_p2p_comm", "align_param_gather", "align_grad_reduce"):
        return any(a[one] for one in interleaved)
    if dest == "async_tensor_model_parallel_allreduce":
        return a["tensor_model_parallel_size"] > 1 and not a["sequence_parallel"]
    if dest == "apply_rope_fusion":  # latent attention has no fused kernel
        return position_embedding(a) == "rope" and not a["multi_latent_attention"]
    of = {"moe_": "num_experts", "fp8_": "fp8", "tp_comm_": "tp_comm_overlap"}
    return all(a[needed] for prefix, needed in of.items() if dest.startswith(prefix))


def _expert_notes(a: Arguments) -> Iterator[tuple[str, str]]:
    dispatcher = a["moe_token_dispatcher_type"]
    if dispatcher in ("allgather", "alltoall_seq"):
        yield f"the dispatcher {dispatcher} is predicted as alltoall", "moe_token_dispatcher_type"
    if not a["moe_grouped_gemm"]:
        yield "experts run one by one without --moe-grouped-gemm; the prediction has one kernel for all", ""
    if not (a["moe_ffn_hidden_size"] or a["ffn_hidden_size"]):
        yield f"experts have {hidden_channels(a)} channels, Megatron-LM's default of a dense layer", "num_experts"
