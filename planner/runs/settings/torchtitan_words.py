"""torchtitan's options as words of Megatron-LM: the same model and layout, with Megatron-FSDP for FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.settings.published import published_model
from megaloom.planner.runs.words import Word

_FAMILIES = {"llama3": "llama-3.1-", "qwen3": "qwen3-"}  # names of published models, without the flavor
_PLAIN_DEGREES = (
    ("parallelism.tensor_parallel_degree", "--tensor-model-parallel-size"),
    ("parallelism.pipeline_parallel_degree", "--pipeline-model-parallel-size"),
    ("parallelism.context_parallel_degree", "--context-parallel-size"),
)


def torchtitan_words(words: tuple[Word, ...], path: str, devices: int | None) -> Iterator[Word]:
    """Yield the words of Megatron-LM. Raise UserError for what they cannot say, and where devices are not known."""
    options = {w.text.removeprefix("--"): v for w, v in zip(words[::2], words[1::2], strict=True)}
    if devices is None:
        raise UserError(f"{path} does not state the number of GPUs\ngive it with their kind: --gpus 64xH100")
    yield from _model(options, path)
    for name, flag in _PLAIN_DEGREES:
        yield from _valued(flag, options.get(name))
    tp = options.get("parallelism.tensor_parallel_degree")
    if tp is not None and tp.text != "1":
        yield Word("--sequence-parallel", tp.origin)  # torchtitan's plan for tp always shards the norms' inputs
    yield from _data_parallel(options)
    yield from _batch(options, path, devices)
    yield from _valued("--seq-length", options.get("training.seq_len"))
    yield from _precision(options)
    yield from _recompute(options)


def _valued(flag: str, value: Word | None) -> Iterator[Word]:
    if value is not None:
        yield Word(flag, value.origin)
        yield value


def _number(options: Mapping[str, Word], name: str, default: int) -> int:
    word = options.get(name)
    return int(word.text) if word is not None and word.text.lstrip("-").isdigit() else default


def _model(options: Mapping[str, Word], path: str) -> Iterator[Word]:
    name, flavor = options.get("model.name"), options.get("model.flavor")
    family = _FAMILIES.get(name.text if name else "")
    model = published_model(family + flavor.text) if family and flavor else None
    if flavor is None or model is None:
        shown = f"{name.text if name else 'no model'} {flavor.text if flavor else ''}".strip()
        raise UserError(f"{flavor.origin if flavor else path}: the sizes of torchtitan's {shown} are not known here")
    yield from model.words(flavor)


def _data_parallel(options: Mapping[str, Word]) -> Iterator[Word]:
    shard = options.get("parallelism.data_parallel_shard_degree")
    replicas = options.get("parallelism.data_parallel_replicate_degree")
    if shard is not None and shard.text == "1":
        return
    origin = (shard or options["model.flavor"]).origin
    yield from (Word(text, origin) for text in ("--use-megatron-fsdp", "--use-distributed-optimizer"))
    yield from (Word(text, origin) for text in ("--data-parallel-sharding-strategy", "optim_grads_params"))
    yield from (Word(text, origin) for text in ("--overlap-grad-reduce", "--overlap-param-gather"))
    if replicas is not None and replicas.text != "1":
        yield from _valued("--num-distributed-optimizer-instances", replicas)


def _batch(options: Mapping[str, Word], path: str, devices: int) -> Iterator[Word]:
    local = options.get("training.local_batch_size") or options.get("training.batch_size")
    if local is None:
        raise UserError(f"{path} does not state training.local_batch_size")
    degrees = [_number(options, name, 1) for name, _ in _PLAIN_DEGREES]
    ranks, rest = divmod(devices, prod(degrees))
    if rest:
        raise UserError(f"{path}: {devices} GPUs are not a multiple of tp × pp × cp = {prod(degrees)}")
    micro = options.get("parallelism.pipeline_parallel_microbatch_size")
    if degrees[1] > 1:
        yield from _valued("--micro-batch-size", micro or evolve(local, text="1"))
    else:
        yield from _valued("--micro-batch-size", local)
    whole = options.get("training.global_batch_size")
    stated = whole is not None and whole.text.isdigit() and whole.text != "0"
    yield from _valued("--global-batch-size", whole if stated else evolve(local, text=str(int(local.text) * ranks)))


def _precision(options: Mapping[str, Word]) -> Iterator[Word]:
    param = options.get("training.mixed_precision_param")
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
