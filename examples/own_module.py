"""A layer of your own with its own torch module, for speed: megatron-core's MLP runs in place of the body."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    Layer,
    Model,
    NextToken,
    RMSNorm,
    Unembed,
    Value,
    dot,
    fn,
    ids,
    model,
    repeat,
    residual,
    weight,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from megaloom.runtime.megatron.build_context import BuildContext
    from megaloom.runtime.modules.parameters import Weights


@frozen
class SquaredReLU(Layer):
    """down(relu(up(x))²). Source: Primer, So et al., arXiv:2109.08668."""

    channels: int
    splits: ClassVar[dict[str, str]] = {"channels": "tp"}

    def body(self, x: Value, /, **side: Value) -> Value:
        e, c = x["embed"], Dim("channels", self.channels)
        h = fn("relu2", dot(x, weight("up", e, c), "embed"))
        return dot(h, weight("down", c, e), "channels")

    def module(self, context: BuildContext) -> nn.Module:
        """Return the module that runs in place of the body. Only training calls it, so torch is imported here."""
        from megaloom.runtime.modules.layers import FeedForward
        from megaloom.runtime.ops.elementwise import UNARY

        return FeedForward(context, context.layer_config(ffn_hidden_size=self.channels, activation_func=UNARY["relu2"]))

    def parameters(self, w: Weights) -> dict[str, Tensor]:
        """Return the unsharded parameters of the module, from the weights of the body."""
        return {"linear_fc1.weight": w("up").T, "linear_fc2.weight": w("down").T}


def own_module() -> Model:
    """Return a small byte-level GPT."""
    vocab, d = Dim("vocab", 256), Dim("embed", 128)
    wte = weight("wte", vocab, d)
    block = residual(RMSNorm(), Attention(heads=4, rope=10_000)) >> residual(RMSNorm(), SquaredReLU(512))
    return model("own-module", ids() >> Embed(wte) >> repeat(4, block) >> RMSNorm() >> Unembed(wte) >> NextToken())
