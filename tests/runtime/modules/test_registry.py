"""Messages for models that the runtime cannot train: each names the cause and what works instead."""

import re

import pytest
from attrs import frozen

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    Layer,
    Model,
    MoE,
    NextToken,
    Positions,
    RMSNorm,
    SwiGLU,
    Unembed,
    UserError,
    Value,
    graph,
    ids,
    model,
    repeat,
    weight,
)
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.module_kinds import MODULES
from megaloom.planner.contract.plans import Stage
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.rules.capabilities import runtime_violations
from megaloom.runtime.launch import launcher
from tests.support.limits import LIMIT

SEQ = 32
VOCAB, D = Dim("vocab", 64), Dim("embed", 16)
WTE, HEAD, WPE = weight("wte", VOCAB, D), weight("head", VOCAB, D), weight("wpe", Dim("position", SEQ), D)


@frozen
class Inside(Layer):
    inner: Layer

    def body(self, x: Value, /, **side: Value) -> Value:
        return x >> self.inner


@frozen
class WithModule(Layer):
    """Hidden states times a given weight, by a torch module."""

    scale: Value

    def body(self, x: Value, /, **side: Value) -> Value:
        return x * self.scale

    def module(self, context: object) -> None:
        raise AssertionError("refused before a module is built")


def lm(*layers: Layer) -> Model:
    x = ids() >> Embed(WTE)
    for layer in layers:
        x = x >> layer
    return model("lm", x >> Unembed(HEAD) >> NextToken())


def added(by: Value) -> Model:
    return model("lm", (ids() >> Embed(WTE)) + by >> Unembed(HEAD) >> NextToken())


def both(x: Value) -> Model:
    return model("lm", *(x >> Unembed(table) for table in (WTE, HEAD)))


REFUSED = {
    "a balancing loss inside a layer of one's own": (
        lm(Inside(MoE(SwiGLU(8), experts=2, top_k=1, balance=0.01))),
        r"inside.0 \(.*test_registry.py:\d+\) contains a MoE with a balancing loss, .*\nset balance=0 in that MoE",
    ),
    "a weight between layers": (
        added(weight("offset", D)),
        r"the weight 'add.0.offset' \(.*test_registry.py:\d+\) is used outside of any layer\nthe runtime trains",
    ),
    "a weight shared by layers with torch modules": (
        lm(repeat(2, WithModule(weight("scales", D)))),
        "the weight 'scales' is shared by with_module.0, which has a torch module of its own, and with_module.1\n"
        "leave out the method `module` of WithModule, or give it a weight of its own",
    ),
    "too few positions": (
        lm(Positions(weight("wpe", Dim("position", 8), D))),
        r"--seq 32 is longer than the model's 8 learned positions \(.*\)\nuse --seq 8 or less",
    ),
    "no logits": (
        model("lm", ids() >> Embed(WTE) >> RMSNorm()),
        "lm ends in rms_norm.0, not in a loss\nend it in a loss, such as `… >> Unembed",
    ),
    "a loss of the next token without a causal mask": (
        lm(Attention(heads=2, causal=False)),
        "attention.0 of lm is not causal, so each position reads the token that next_token.0 asks it to predict\n"
        "set causal=True, or end the model in another loss",
    ),
    "two outputs": (
        both(ids() >> Embed(WTE)),
        "lm ends in unembed.0, unembed.1, not in a loss\n",
    ),
}


def messages() -> dict[str, str]:
    """On the only rank: what is said of each model."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megaloom.runtime.megatron.build_context import make_build_context
    from megaloom.runtime.megatron.process_groups import create_process_groups
    from megaloom.runtime.modules.model_chunk import ModelChunk

    layout, load, devices = Layout(), Workload(seq=SEQ, batch=2, precision=Precision.FP32), cluster("1xCPU")
    groups, refusals = create_process_groups(layout), {}
    model_parallel_cuda_manual_seed(0)
    for what, (refused, _) in REFUSED.items():
        g = graph(refused)
        whole = Stage(rank=0, chunk=0, start=0, stop=len(g.nodes), params=0, forward_seconds=0.0, backward_seconds=0.0)
        if violations := runtime_violations(layout, g, load, devices):
            refusals[what] = f"{violations[0].message}\n{violations[0].fix}"
            continue
        with pytest.raises(UserError) as raised:
            ModelChunk(g, whole, make_build_context(g, layout, load, groups))
        refusals[what] = str(raised.value)
    return refusals


@pytest.fixture(scope="module")
def messages_by_model() -> dict[str, str]:
    return launcher.run(messages, (), 1, timeout=LIMIT)[0]


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_that_cannot_be_trained_is_refused(what: str, messages_by_model: dict[str, str]) -> None:
    assert re.match(REFUSED[what][1], messages_by_model[what])


def test_a_precision_that_only_the_planner_knows_is_refused() -> None:
    narrow = Workload(seq=SEQ, batch=2, precision=Precision.MXFP8)
    violation, *_ = runtime_violations(Layout(), graph(lm(RMSNorm())), narrow, cluster("1xCPU"))
    assert (violation.message, violation.fix) == ("the runtime does not train in mxfp8", "use fp32, bf16 or fp16")


def test_each_layer_that_runs_as_a_module_has_its_constructor() -> None:
    from megaloom.runtime.megatron import device

    device.prepare()
    from megaloom.runtime.modules.registry import CONSTRUCTORS

    assert CONSTRUCTORS.keys() == {row.op for row in MODULES.values() if row.runs}
