"""Recipes of NeMo 2, evaluated beside a small clone of ours, never imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaloom.dsl import fingerprint
from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.dsl.facts.parameters import params
from megaloom.planner.contract.choices import GradReduce, Shard
from megaloom.planner.contract.workload import Precision
from megaloom.planner.runs.megatron.read import Hints
from megaloom.planner.runs.read import RunInputs, read_file
from megaloom.planner.runs.run import TrainingRun

MODEL = """
from typing import Optional
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
raise SystemError("this file was run")

class GPTConfig(TransformerConfig):
    share_embeddings_and_output_weights: bool = True
    position_embedding_type: str = "learned_absolute"
    def configure_model(self): ...

class LlamaConfig(GPTConfig):
    normalization: str = "RMSNorm"
    activation_func: object = F.silu
    gated_linear_unit: bool = True
    position_embedding_type: str = "rope"
    add_bias_linear: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    share_embeddings_and_output_weights: bool = False
    num_query_groups: int = 8
    rotary_base: int = 500_000
    persist_layer_norm: bool = True
    window: object = field(default_factory=list)

class Llama31Config(LlamaConfig):
    scale_factor: float = 8.0
    def configure_model(self): ...

class Llama3Config8B(LlamaConfig):
    num_layers: int = 32
    hidden_size: int = 4096
    ffn_hidden_size: int = 14336
    num_attention_heads: int = 32

class Llama31Config8B(Llama31Config, Llama3Config8B):
    pass

class OddConfig(Llama3Config8B):
    def configure_model(self): ...
"""
RECIPE = """
from typing import Optional
import nemo_run as run
from nemo import lightning as nl
from nemo.collections.llm.api import pretrain
from nemo.collections.llm.gpt.data.mock import MockDataModule
from nemo.collections.llm.gpt.model.llama import Llama3Config8B, Llama31Config8B, LlamaModel, OddConfig
from nemo.collections.llm.recipes.precision import bf16_mixed
from nemo.lightning.pytorch.callbacks import MegatronCommOverlapCallback
from megatron.core.distributed import DistributedDataParallelConfig

@run.cli.factory(name="llama")
def model() -> run.Config:
    return run.Config(LlamaModel, config=run.Config(Llama3Config8B))

def trainer(num_nodes: int = 1, tensor_parallelism: int = 1, callbacks: Optional[list] = None) -> run.Config:
    ddp = run.Config(DistributedDataParallelConfig, overlap_grad_reduce=True, overlap_param_gather=True)
    strategy = run.Config(nl.MegatronStrategy, tensor_model_parallel_size=tensor_parallelism, ddp=ddp)
    return run.Config(
        nl.Trainer, devices=8, num_nodes=num_nodes, callbacks=callbacks, plugins=bf16_mixed(), strategy=strategy
    )

def pretrain_recipe(num_nodes: int = 1, fast: bool = False, fn=pretrain) -> run.Partial:
    recipe = run.Partial(
        fn,
        model=model(),
        trainer=trainer(num_nodes=num_nodes, callbacks=[]),
        data=run.Config(MockDataModule, seq_length=4096, global_batch_size=512, micro_batch_size=2),
    )
    if fast:
        recipe.trainer.callbacks.append(run.Config(MegatronCommOverlapCallback, tp_comm_overlap=True))
        recipe.trainer.plugins.grad_reduce_in_fp32 = False
    return recipe
"""
PRECISION = """
import nemo_run as run
from nemo.lightning import MegatronMixedPrecision

def bf16_mixed() -> run.Config:
    return run.Config(MegatronMixedPrecision, precision="bf16-mixed", grad_reduce_in_fp32=True)
"""
SCRIPT = """
import nemo_run as run
from nemo.collections import llm

def configured():
    recipe = llm.ours.pretrain_recipe(num_nodes=4)
    recipe.trainer.strategy.tensor_model_parallel_size = 2
    recipe.trainer.strategy.sequence_parallel = True
    recipe.data.global_batch_size = 256
    return recipe

if __name__ == "__main__":
    with run.Experiment("x") as experiment:
        experiment.add(configured(), executor=run.SlurmExecutor(account="x"))
"""
DIRECT = """
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.llm.gpt.model.llama import Llama31Config8B

strategy = nl.MegatronStrategy(tensor_model_parallel_size=4, pipeline_model_parallel_size=2, sequence_parallel=True)
trainer = nl.Trainer(devices=8, num_nodes=2, strategy=strategy, plugins=nl.MegatronMixedPrecision("bf16-mixed"))
data = llm.MockDataModule(seq_length=8192, micro_batch_size=1, global_batch_size=64)
llm.pretrain(model=llm.LlamaModel(Llama31Config8B()), data=data, trainer=trainer)
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a folder with scripts beside a clone of NeMo."""
    llm = tmp_path / "nemo" / "collections" / "llm"
    for name, text in {
        "gpt/model/llama.py": MODEL,
        "recipes/__init__.py": "from nemo.collections.llm.recipes import ours\n",
        "recipes/ours.py": RECIPE,
        "recipes/precision.py": PRECISION,
    }.items():
        (llm / name).parent.mkdir(parents=True, exist_ok=True)
        (llm / name).write_text(text)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "direct.py").write_text(DIRECT)
    return tmp_path


def run(path: Path, command: str | None = None, **more: int) -> TrainingRun:
    return read_file(str(path), RunInputs(command=command, hints=Hints(vocab=128256), **more))


def changed(path: Path, old: str, new: str) -> Path:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


def test_a_script_that_changes_a_recipe_is_read(clone: Path) -> None:
    read = run(clone / "train.py")
    x, work = read.layout, read.workload
    assert (read.program, read.devices.count, read.devices.per_machine) == ("NeMo 2", 32, 8)
    assert (x.tp, x.dp, x.sequence_parallel, x.micro_batch, x.shard) == (2, 16, True, 2, Shard.OPTIMIZER)
    assert (work.seq, work.batch, work.precision) == (4096, 256, Precision.BF16)
    assert params(read.model) == params(find("llama3-8b")[0])
    assert x.grad_reduce is GradReduce.FP32


def test_a_recipe_is_read_with_its_callback_and_the_options_after_it(clone: Path) -> None:
    recipe = clone / "nemo/collections/llm/recipes/ours.py"
    assert run(recipe, "pretrain_recipe").layout.dp == 8
    fast = run(changed(recipe, "fast: bool = False", "fast: bool = True"), "pretrain_recipe")
    assert fast.layout.grad_reduce is GradReduce.BF16


def test_a_call_that_starts_training_is_read_without_a_recipe(clone: Path) -> None:
    read = run(clone / "direct.py")
    assert (read.layout.tp, read.layout.pp, read.devices.count, read.workload.seq) == (4, 2, 16, 8192)
    assert fingerprint(read.model) == fingerprint(find("llama3-1-8b")[0])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("nl.MegatronStrategy(", "nl.FSDPStrategy(", "the strategy FSDPStrategy of NeMo 2 is not modelled"),
        ("llm.LlamaModel(", "llm.GemmaModel(", "the model GemmaModel of NeMo 2 is not read"),
        ("Llama31Config8B()", "make_config()", "the sizes of make_config are not known"),
        ("Llama31Config8B", "OddConfig", "OddConfig of NeMo 2 builds its model in a way of its own"),
        ('"bf16-mixed"', '"64"', "precision of this plugin is none of"),
        (", plugins=", ", other=", "the precision is not known"),
        ("trainer=trainer)", "trainer=trainer, peft=llm.peft.LoRA())", "adapters"),
        ("devices=8", "devices=int(os.getenv('GPUS'))", "the number --nproc-per-node depends on variable GPUS"),
        ("sequence_parallel=True", "fsdp='pytorch'", "only Megatron-FSDP"),
    ],
)
def test_what_is_not_known_of_a_recipe_is_refused_by_name(clone: Path, old: str, new: str, message: str) -> None:
    path = changed(clone / "direct.py", old, new)
    path.write_text(f"import os\n{path.read_text()}")
    with pytest.raises(UserError, match=message):
        run(path)


def test_a_recipe_without_the_files_of_nemo_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with pytest.raises(UserError, match=r"the file of nemo\.collections\.llm\.ours\.pretrain_recipe is not there"):
        run(tmp_path / "train.py")
