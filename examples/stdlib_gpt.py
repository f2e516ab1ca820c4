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


def stdlib_gpt(
    layers: int = 4, heads: int = 4, kv_heads: int = 2, embed: int = 128, ff: int = 352, vocab: int = 256
) -> Model:
    """Return a small GPT. A vocabulary of 256 reads text as bytes; give a tokenizer's own with `--set vocab=8192`."""
    v, d = Dim("vocab", vocab), Dim("embed", embed)
    wte = weight("wte", v, d)
    attention = Attention(heads=heads, kv_heads=kv_heads, rope=10_000)
    block = residual(RMSNorm(), attention) >> residual(RMSNorm(), SwiGLU(ff))
    return model("stdlib-gpt", ids() >> Embed(wte) >> repeat(layers, block) >> RMSNorm() >> Unembed(wte) >> NextToken())
