"""A small decoder for conversations: its loss has a mask, and it reads document indices."""

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    Model,
    NextToken,
    RMSNorm,
    SwiGLU,
    Unembed,
    ids,
    mask,
    model,
    packed,
    repeat,
    residual,
    weight,
)


def chat_decoder() -> Model:
    """Return a decoder of 300 tokens for packed conversations."""
    d, v = Dim("embed", 32), Dim("vocab", 300)
    block = residual(RMSNorm(), Attention(heads=2, rope=10_000)) >> residual(RMSNorm(), SwiGLU(48))
    x = ids() >> Embed(weight("wte", v, d)) >> repeat(2, block) >> RMSNorm() >> Unembed(weight("head", v, d))
    return packed(model("chat-decoder", x >> NextToken(mask=mask())))
