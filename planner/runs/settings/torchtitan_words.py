"""torchtitan's options as words of Megatron-LM: the same model and layout, with Megatron-FSDP for FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from attrs import evolve, frozen

from megaloom.dsl.errors import UserError
from megaloom.planner.export.megatron_fsdp import GATHERS_8_BITS
from megaloom.planner.export.megatron_lm import model_options
from megaloom.planner.export.target import Target
from megaloom.planner.export.torchtitan_fields import FLOAT8, RING
from megaloom.planner.export.torchtitan_flavors import Flavor, named_flavor
from megaloom.planner.runs.settings.torchtitan_judged import check_torchtitan_numbers, check_torchtitan_options
from megaloom.planner.runs.settings.torchtitan_older import current_options
from megaloom.planner.runs.settings.torchtitan_stages import stage_words
from megaloom.planner.runs.words import Origin, Word

SEQUENCE = 2048  # tokens, torchtitan's default
_CP = "parallelism.context_parallel_degree"
_PLAIN_DEGREES = (
    ("parallelism.tensor_parallel_degree", "--tensor-model-parallel-size"),
    ("parallelism.pipeline_parallel_degree", "--pipeline-model-parallel-size"),
    (_CP, "--context-parallel-size"),
)


def torchtitan_options(words: tuple[Word, ...]) -> dict[str, Word]:
    """Return pairs of words, `--section.name` and a value, as a mapping: section.name → value."""
    return current_options({w.text.removeprefix("--"): v for w, v in zip(words[::2], words[1::2], strict=True)})


def torchtitan_words(words: tuple[Word, ...], path: str, devices: int | None) -> Iterator[Word]:
    """Yield the words of Megatron-LM. Raise UserError for what they cannot say, and where devices are not known."""
    options = torchtitan_options(words)
    check_torchtitan_options(options)
    check_torchtitan_numbers(options)
    if devices is None:
        raise UserError(f"{path} does not state the number of GPUs\ngive it with their kind: --gpus 64xH100")
    flavor = _flavor(options, path)
    yield from _model(options, flavor)
    for name, flag in _PLAIN_DEGREES:
        yield from _valued(flag, options.get(name))
    rotate = options.get("parallelism.context_parallel_rotate_method")
    if _number(options, _CP, 1) > 1 and (rotate is None or rotate.text != RING):
        yield from _valued("--cp-comm-type", evolve(rotate or options[_CP], text="all_gather"))
    tp = options.get("parallelism.tensor_parallel_degree")
    divided = options.get("parallelism.enable_sequence_parallel")
    if tp is not None and tp.text != "1" and (divided is None or divided.text == "true"):
        yield Word("--sequence-parallel", tp.origin)  # 0.2 always has it, 0.3 by default
    yield from _experts(options, flavor, tp)
    pp = _number(options, "parallelism.pipeline_parallel_degree", 1)
    yield from stage_words(options, pp, len(flavor.decoder.layers))
    batch = _batch(options, path, devices)
    yield from _data_parallel(options, pp, batch)
    yield from batch.words()
    yield from _precision(options)
    yield from _recompute(options)


def _valued(flag: str, value: Word | None) -> Iterator[Word]:
    if value is not None:
        yield Word(flag, value.origin)
        yield value


def _number(options: Mapping[str, Word], name: str, default: int) -> int:
    word = options.get(name)
    return int(word.text) if word is not None and word.text.lstrip("-").isdecimal() else default


def _flavor(options: Mapping[str, Word], path: str) -> Flavor:
    """Return the model that torchtitan trains by these names."""
    name, flavor = options.get("model.name"), options.get("model.flavor")
    known = named_flavor(name.text, flavor.text) if name and flavor else None
    if known is None:
        shown = f"{name.text if name else 'no model'} {flavor.text if flavor else ''}".strip()
        raise UserError(f"{flavor.origin if flavor else path}: the sizes of torchtitan's {shown} are not known here")
    return known


def _model(options: Mapping[str, Word], flavor: Flavor) -> Iterator[Word]:
    """Yield the flags of a model of torchtitan, on the line that names it."""
    named, seq = options["model.flavor"], options.get("training.seq_len")
    tokens = int(seq.text) if seq is not None else SEQUENCE
    for one in model_options(flavor.own_decoder, tokens, 1, Target.TORCHTITAN):
        origin = seq.origin if seq and one.name == "seq-length" else named.origin
        yield from (Word(text, origin) for text in one.words)
    yield from (Word(text, named.origin) for text in ("--vocab-size", str(flavor.decoder.vocab)))
    if flavor.decoder.moe:
        yield Word("--moe-grouped-gemm", named.origin)


def _experts(options: Mapping[str, Word], flavor: Flavor, tp: Word | None) -> Iterator[Word]:
    """Yield the degrees of experts. Without expert parallelism, they are divided as all tensors are."""
    if not flavor.decoder.moe:
        return
    ep = options.get("parallelism.expert_parallel_degree")
    yield from _valued("--expert-model-parallel-size", ep)
    if ep is not None and ep.text != "1":
        etp = options.get("parallelism.expert_tensor_parallel_degree") or evolve(ep, text="1")
        yield from _valued("--expert-tensor-parallel-size", etp)
    else:
        yield from _valued("--expert-tensor-parallel-size", tp)


@frozen
class _Batch:
    """The micro-batch and the batch of a step, with their lines, and the number of micro-batches."""

    micro: Word
    whole: Word
    microbatches: int

    def words(self) -> Iterator[Word]:
        yield from _valued("--micro-batch-size", self.micro)
        yield from _valued("--global-batch-size", self.whole)


def _data_parallel(options: Mapping[str, Word], pp: int, batch: _Batch) -> Iterator[Word]:
    """Yield what data-parallel ranks share: the inverse of `export.torchtitan`.

    In a pipeline that keeps gathered weights, weights and gradients are whole for a step, as with a distributed
    optimizer.
    """
    shard = options.get("parallelism.data_parallel_shard_degree")
    replicas = options.get("parallelism.data_parallel_replicate_degree")
    origin = (shard or options["model.flavor"]).origin
    yield Word("--overlap-grad-reduce", origin)
    if shard is not None and shard.text == "1" and _number(options, _CP, 1) == 1:
        return
    policy = options.get("parallelism.fsdp_reshard_after_forward")
    kept = policy.text == "never" if policy and policy.text != "default" else pp > 1
    yield from (Word(text, origin) for text in ("--use-distributed-optimizer", "--overlap-param-gather"))
    several = replicas is not None and replicas.text != "1"
    if kept and pp > 1:
        if several:
            what = "several replicas that keep gathered weights for a step of a pipeline"
            raise UserError(f"{origin}: {what} are not modelled for Megatron-core")
        return
    strategy = "optim_grads" if kept and pp == 1 and batch.microbatches == 1 else "optim_grads_params"
    yield from (Word(text, origin) for text in ("--use-megatron-fsdp", "--data-parallel-sharding-strategy", strategy))
    yield from _gathers(options, origin)
    if several:
        yield from _valued("--num-distributed-optimizer-instances", replicas)


def _gathers(options: Mapping[str, Word], origin: Origin) -> Iterator[Word]:
    """Yield how wide weights are gathered beside products in 8 bits. Releases until 2025 have a section `float8`.

    Weights that stay gathered are in bf16: only Megatron-FSDP's optim_grads_params has them in 8 bits.
    """
    converters = options.get("model.converters")
    if converters is None or "float8" not in converters.text:
        return
    names = (f"{section}.enable_fsdp_float8_all_gather" for section in (FLOAT8, "float8"))
    wanted = next((word for name in names if (word := options.get(name)) is not None), None)
    if wanted is None or wanted.text.lower() != "true":
        yield Word("--gathers-in-16-bits", origin)
        return
    recipe = options.get(f"{FLOAT8}.recipe_name") or options.get("float8.recipe_name")
    if recipe is not None and recipe.text.lower() not in ("none", "null", ""):
        raise UserError(f"{wanted.origin}: torchtitan refuses gathers in 8 bits beside recipe_name {recipe.text:.40}")
    yield Word(f"--{GATHERS_8_BITS}", wanted.origin)


def _batch(options: Mapping[str, Word], path: str, devices: int) -> _Batch:
    local = options.get("training.local_batch_size") or options.get("training.batch_size")
    if local is None:
        raise UserError(f"{path} does not state training.local_batch_size")
    degrees = [_number(options, name, 1) for name, _ in _PLAIN_DEGREES]
    ranks, rest = divmod(devices, prod(degrees))
    if rest:
        raise UserError(f"{path}: {devices} GPUs are not a multiple of tp × pp × cp = {prod(degrees)}")
    shard = options.get("parallelism.data_parallel_shard_degree")
    replicas = _number(options, "parallelism.data_parallel_replicate_degree", 1)
    if shard is not None and shard.text != "-1" and int(shard.text) * replicas != ranks:
        what = f"{shard.text} shards of {replicas} replicas are not the {ranks} data-parallel ranks of {devices} GPUs"
        raise UserError(f"{shard.origin}: {what}, so torchtitan does not start")
    stated = options.get("parallelism.pipeline_parallel_microbatch_size") or evolve(local, text="1")
    micro = stated if degrees[1] > 1 else local
    for word in (local, micro):
        if not word.text.isdecimal() or int(word.text) == 0:
            raise UserError(f"{word.origin}: a batch size of torchtitan must be a whole number above 0")
    whole = options.get("training.global_batch_size")
    if whole is None or whole.text == "-1":
        whole = evolve(local, text=str(int(local.text) * ranks))
    return _Batch(micro, whole, int(whole.text) // max(1, ranks * int(micro.text)))


def _precision(options: Mapping[str, Word]) -> Iterator[Word]:
    param = options.get("training.mixed_precision_param")  # bfloat16 by default
    origin = (param or options["model.flavor"]).origin
    if param is None or param.text == "bfloat16":
        yield Word("--bf16", origin)
    reduce = options.get("training.mixed_precision_reduce")
    if reduce is not None and reduce.text == "bfloat16":
        yield Word("--grad-reduce-in-bf16", reduce.origin)
    else:
        yield Word("--accumulate-allreduce-grads-in-fp32", origin)
    converters = options.get("model.converters")
    if converters is not None and "float8" in converters.text:
        yield from _valued("--fp8-format", evolve(converters, text="hybrid"))
        yield from _valued("--fp8-recipe", evolve(converters, text="tensorwise"))


def _recompute(options: Mapping[str, Word]) -> Iterator[Word]:
    mode = options.get("activation_checkpoint.mode")
    if mode is None or mode.text not in ("full", "none"):
        shown = mode.text if mode else "selective"
        raise UserError(
            f"{(mode or options['model.flavor']).origin}: activation checkpointing `{shown}` of torchtitan keeps other "
            "activations than Megatron-LM\nread are `full` and `none`"
        )
    if mode.text == "full":
        for flag, value in (("granularity", "full"), ("method", "uniform"), ("num-layers", "1")):
            yield from _valued(f"--recompute-{flag}", evolve(mode, text=value))
