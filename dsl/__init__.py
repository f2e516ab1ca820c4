"""Declare a language model as a graph of layers with named dims, and derive facts from it: shapes, FLOPs, memory."""

if __name__ != "megaloom.dsl":
    raise ImportError("import megaloom.dsl, not dsl")

from megaloom.dsl.facts.collectives import Collective
from megaloom.dsl.facts.costs import Costs, costs, saved
from megaloom.dsl.facts.flops import Flops, flops
from megaloom.dsl.facts.parameters import params
from megaloom.dsl.facts.saved import Saved
from megaloom.dsl.facts.work import Work
from megaloom.dsl.hf.architectures import read
from megaloom.dsl.hf.lora_targets import lora
from megaloom.dsl.layers.attention import Attention, CrossAttention
from megaloom.dsl.layers.delta_net import GatedDeltaNet
from megaloom.dsl.layers.embeddings import Embed, PatchEmbed, Positions, Unembed
from megaloom.dsl.layers.latent_attention import MLA
from megaloom.dsl.layers.linear import Activation, Dropout, Linear, Scale, SigmoidGated, Softcap
from megaloom.dsl.layers.losses import (
    Classification,
    MaskedToken,
    NextToken,
    SentenceOrder,
    SequenceToSequence,
    TokenClassification,
    WeightedSum,
    weighted_sum,
)
from megaloom.dsl.layers.mamba import Mamba2
from megaloom.dsl.layers.mlp import MLP, ClampedGLU, GeGLU, SwiGLU
from megaloom.dsl.layers.moe import MoE
from megaloom.dsl.layers.multi_token_prediction import Join
from megaloom.dsl.layers.norms import LayerNorm, RMSNorm
from megaloom.dsl.ops.attention_core import Attend, RelativeBuckets
from megaloom.dsl.ops.delta_rule import DeltaRule
from megaloom.dsl.ops.documents import DocumentIndices, DocumentPositions, documents
from megaloom.dsl.ops.dot import Dot, dot
from megaloom.dsl.ops.loss import CrossEntropy, Equals, LogSumExp, LossSums, StackLosses, Sum, is_loss, loss_sums
from megaloom.dsl.ops.norm import Drop, Normalize
from megaloom.dsl.ops.rope import (
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
)
from megaloom.dsl.ops.routing import Combine, Gate, Route
from megaloom.dsl.ops.sequence import Conv, Inside, Scan, Shift
from megaloom.dsl.ops.shape import Concat, MaskedScatter, Patches, Rename, Select, Slice
from megaloom.dsl.ops.weight import (
    Input,
    Lookup,
    PositionLookup,
    Weight,
    ids,
    image,
    labels,
    mask,
    token_weights,
    weight,
)
from megaloom.dsl.sharding_table import Sharded, Split

from .base_ops import AlongSequence, Contraction, Elementwise, GroupedScan, Rearrangement, TableLookup
from .combine import (
    Block,
    Each,
    Parallel,
    Residual,
    parallel,
    residual,
)
from .dims import (
    BATCH,
    SEQ,
    Dim,
    DType,
    Shape,
    Sizes,
)
from .errors import ShapeError, UserError
from .files.json_form import fingerprint, graph_to_json
from .graph import Graph, Model, graph, model, without_loss
from .layer import (
    Chain,
    Given,
    Layer,
    Named,
    chain,
)
from .low_rank import LoRA
from .node import Node, Slot
from .op import Decoding, Op, Reads
from .transforms.adapters import Adapted
from .transforms.freezing import freeze
from .transforms.packing import packed
from .transforms.repetition import Repeat, repeat
from .value import (
    Affine,
    Clamp,
    Pointwise,
    Value,
    apply,
    fn,
)
from .work_kinds import Extents, Traffic, WorkKind

__all__ = [
    "BATCH",
    "MLA",
    "MLP",
    "SEQ",
    "Activation",
    "Adapted",
    "Affine",
    "AlongSequence",
    "Attend",
    "Attention",
    "Block",
    "Chain",
    "Clamp",
    "ClampedGLU",
    "Classification",
    "Collective",
    "Combine",
    "Concat",
    "Contraction",
    "Conv",
    "Costs",
    "CrossAttention",
    "CrossEntropy",
    "DType",
    "Decoding",
    "DeltaRule",
    "Dim",
    "DocumentIndices",
    "DocumentPositions",
    "Dot",
    "Drop",
    "Dropout",
    "Each",
    "Elementwise",
    "Embed",
    "Equals",
    "Extents",
    "Flops",
    "Gate",
    "GatedDeltaNet",
    "GeGLU",
    "Given",
    "Graph",
    "GroupedScan",
    "Input",
    "Inside",
    "Join",
    "Layer",
    "LayerNorm",
    "Linear",
    "LinearScaling",
    "Llama3Scaling",
    "LoRA",
    "LogSumExp",
    "Lookup",
    "LossSums",
    "Mamba2",
    "MaskedScatter",
    "MaskedToken",
    "MoE",
    "Model",
    "Named",
    "NextToken",
    "Node",
    "Normalize",
    "Op",
    "Parallel",
    "PatchEmbed",
    "Patches",
    "Pointwise",
    "PositionLookup",
    "Positions",
    "RMSNorm",
    "Reads",
    "Rearrangement",
    "RelativeBuckets",
    "Rename",
    "Repeat",
    "Residual",
    "Rope",
    "Route",
    "Saved",
    "Scale",
    "Scan",
    "Select",
    "SentenceOrder",
    "SequenceToSequence",
    "Shape",
    "ShapeError",
    "Sharded",
    "Shift",
    "SigmoidGated",
    "Sizes",
    "Slice",
    "Slot",
    "Softcap",
    "Split",
    "StackLosses",
    "Sum",
    "SwiGLU",
    "TableLookup",
    "TokenClassification",
    "Traffic",
    "Unembed",
    "UserError",
    "Value",
    "Weight",
    "WeightedSum",
    "Work",
    "WorkKind",
    "YarnScaling",
    "apply",
    "chain",
    "costs",
    "documents",
    "dot",
    "fingerprint",
    "flops",
    "fn",
    "freeze",
    "graph",
    "graph_to_json",
    "ids",
    "image",
    "is_loss",
    "labels",
    "lora",
    "loss_sums",
    "mask",
    "model",
    "packed",
    "parallel",
    "params",
    "read",
    "repeat",
    "residual",
    "saved",
    "token_weights",
    "weight",
    "weighted_sum",
    "without_loss",
]
