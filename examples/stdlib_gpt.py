"""A small byte-level GPT for the text of Python's standard library: the model of `make train`."""

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
    model,
    repeat,
    residual,
    weight,
)


def stdlib_gpt() -> Model:
    vocab, d = Dim("vocab", 256), Dim("embed", 128)
    wte = weight("wte", vocab, d)
    block = residual(RMSNorm(), Attention(heads=4, kv_heads=2, rope=10_000)) >> residual(RMSNorm(), SwiGLU(352))
    return model("stdlib-gpt", ids() >> Embed(wte) >> repeat(4, block) >> RMSNorm() >> Unembed(wte) >> NextToken())
