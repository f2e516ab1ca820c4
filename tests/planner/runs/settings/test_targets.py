"""Files of the programs that plans are exported to, as people write them: what an export never writes."""

from __future__ import annotations

from typing import Any

import pytest

from megaloom.dsl import graph
from megaloom.dsl.errors import UserError
from megaloom.planner.contract.choices import Recompute, Shard
from megaloom.planner.contract.workload import Precision
from megaloom.planner.export.decoder import read_decoder
from megaloom.planner.export.target import Target
from megaloom.planner.runs.read import RunInputs, read_text
from megaloom.planner.runs.run import TrainingRun
from megaloom.planner.runs.words import Origin, Word

MODEL = "num-layers=4 hidden-size=256 num-attention-heads=8 seq-length=512 max-position-embeddings=512 vocab-size=1000"


def run(text: str, path: str, devices: int | None = None, flags: str = "") -> TrainingRun:
    words = tuple(Word(f"--{flag}", Origin("--set", n)) for n, flag in enumerate(flags.split(), 1))
    return read_text(text, path, RunInputs(devices=devices, flags=words))


PLUGIN = """compute_environment: LOCAL_MACHINE
distributed_type: MEGATRON_LM
mixed_precision: bf16
num_machines: 2
num_processes: 16
megatron_lm_config:
  megatron_lm_tp_degree: 2
  megatron_lm_num_micro_batches: 4
"""


def test_accelerate_has_its_own_defaults() -> None:
    """Without keys it takes two context-parallel ranks and recomputes all layers."""
    read = run(PLUGIN, "run.yaml", flags=f"{MODEL} micro-batch-size=3")
    x = read.layout
    assert (x.tp, x.cp, x.dp, x.micro_batch, x.recompute) == (2, 2, 4, 3, Recompute.FULL)
    assert (read.workload.batch, read.devices.count, read.workload.precision) == (48, 16, Precision.BF16)
    facts = {fact.name: str(fact.origin) for fact in read.stated if fact.origin}
    assert (facts["tp"], facts["batch"], facts["layers"]) == ("run.yaml:7", "run.yaml:8", "--set:1")
    assert run(f"{PLUGIN}  megatron_lm_context_parallel_size: 1\n", "run.yaml", flags=f"{MODEL} micro-batch-size=3")


FSDP = """distributed_type: FSDP
num_processes: 8
fsdp_config:
  fsdp_sharding_strategy: SHARD_GRAD_OP
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", (Shard.GRADIENTS, 1)),
        ("SHARD_GRAD_OP", "1", (Shard.WEIGHTS, 1)),
        ("fsdp_sharding_strategy: SHARD_GRAD_OP", "fsdp_reshard_after_forward: true", (Shard.WEIGHTS, 1)),
        ("fsdp_config", "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\nfsdp_config", (2, 2)),
    ],
)
def test_fsdp_of_accelerate(old: str, new: str, expected: tuple[Any, int]) -> None:
    read = run(FSDP.replace(old, new, 1), "run.yaml", flags=f"{MODEL} micro-batch-size=1")
    assert (read.layout.shard, read.layout.replicas) == expected and read.layout.dp == 8


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (
            PLUGIN,
            "num-layers=4",
            "has the layout only\ngive model and batch .*--set hidden-size=… .*--set micro-batch-",
        ),
        (FSDP.replace("FSDP", "DEEPSPEED"), "", r"run\.yaml:1: DEEPSPEED of Accelerate is not read"),
        (FSDP.replace("SHARD_GRAD_OP", "HYBRID_SHARD"), "", r"run\.yaml:4: FSDP with HYBRID_SHARD is not read"),
        (f"{FSDP}  fsdp_offload_params: true\n", "", r"run\.yaml:5: weights in the memory of the host"),
        (FSDP.replace("8", "some"), "", r"run\.yaml:2: a count must be a number from 1, got some"),
    ],
)
def test_accelerate_files_that_are_refused(text: str, flags: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(text, "run.yaml", flags=flags or f"{MODEL} micro-batch-size=1")


BRIDGE = """model:
  num_layers: 4
  hidden_size: 256
  num_attention_heads: 8
  num_query_groups: 2
  seq_length: 512
  position_embedding_type: rope
  moe_layer_freq: [0, 1, 1, 1]
  num_moe_experts: 4
  moe_router_topk: 2
  gated_linear_unit: true
  add_bias_linear: false
  tensor_model_parallel_size: 2
  sequence_parallel: true
tokenizer: {tokenizer_type: NullTokenizer, vocab_size: 999}
train: {micro_batch_size: 1, global_batch_size: 16}
comm_overlap: {tp_comm_overlap: true}
mixed_precision: bf16_with_fp8_current_scaling_mixed
"""


def test_groups_experts_and_presets_of_a_bridge_file() -> None:
    read = run(BRIDGE, "run.yaml", devices=8)
    facts = {fact.name: fact.value for fact in read.stated}
    assert (facts["key/value heads"], facts["experts"], facts["activation"]) == ("2", "4 in 3 of 4 layers", "swiglu")
    assert read.workload.precision is Precision.FP8 and read.workload.batch == 16
    assert "tensor" in map(str, read.layout.overlaps)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ConfigContainer(model=Provider(\n", r"run\.py:1: this line is not Python"),
        ("a = ConfigContainer(model=M())\nb = ConfigContainer(model=N())\n", "builds 2 configurations"),
    ],
)
def test_bridge_scripts_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(text, "run.py", devices=8)


TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 8
seq_len = 4096
[parallelism]
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "none"
"""


def test_torchtitan_cuts_stages_by_itself() -> None:
    """The embedding and the output count as a layer each, and the first stages are the longer ones."""
    read = run(TITAN, "run.toml", devices=16)
    assert (read.layout.pp, read.layout.vpp, read.layout.dp, read.layout.shard) == (4, 2, 4, Shard.OPTIMIZER)
    assert _layers_before(read) == [0, 4, 9, 13, 17, 21, 25, 29]
    single = run(TITAN.replace("Interleaved1F1B", "1F1B"), "run.toml", devices=16)
    assert single.layout.vpp == 1 and _layers_before(single) == [0, 8, 17, 25]


def _layers_before(read: TrainingRun) -> list[int]:
    """Return the number of layers before each stage."""
    starts = (0, *read_decoder(graph(read.model), Target.MEGATRON_LM).layer_starts[1:])
    return [starts.index(first) for first in read.stages]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Interleaved1F1B", "ZBVZeroBubble", r"run\.toml:9: torchtitan's schedule ZBVZeroBubble is not modelled"),
        (
            "[activation",
            "pipeline_parallel_layers_per_stage = 9\n[activation",
            "refuses 4 stages of 32",
        ),
        ("[activation", "data_parallel_replicate_degree = 2\n[activation", "several replicas that keep"),
    ],
)
def test_torchtitan_pipelines_that_are_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(TITAN.replace(old, new), "run.toml", devices=16)
