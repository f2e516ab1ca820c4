"""Gemma 3 (arXiv:2503.19786), its text decoder: five local layers for each global one, norms on queries and keys."""

from itertools import groupby

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    GeGLU,
    Layer,
    LinearScaling,
    Model,
    NextToken,
    RMSNorm,
    Rope,
    Scale,
    Unembed,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.hf.architectures import Config, reads, rotation
from megaloom.dsl.hf.tensor_names import flat

from .gemma2 import LAYER, checked
from .llama3 import decoder

NORM = RMSNorm(1e-6, plus_one=True)
EACH = 6  # layers in a pattern: five local ones and a global one
LOCAL, GLOBAL = Rope(10_000), Rope(1e6)
STRETCHED = Rope(1e6, scaling=LinearScaling(8.0))
LOCAL_KIND, GLOBAL_KIND = "sliding_attention", "full_attention"  # Hugging Face's words


def usual_kinds(layers: int, each: int = EACH) -> tuple[str, ...]:
    """Return the kind of each layer where every `each`th one is global."""
    return tuple(LOCAL_KIND if i % each < each - 1 else GLOBAL_KIND for i in range(layers))


def gemma3(
    name: str,
    layers: int,
    heads: int,
    kv_heads: int,
    embed: int,
    ff: int,
    *,
    head_dim: int = 256,
    query_scale: float = 256,
    window: int = 1024,
    local_rope: Rope = LOCAL,
    rope: Rope = STRETCHED,
    vocab: int = 262208,
    attention_dropout: float = 0.0,
    kinds: tuple[str, ...] = (),
) -> Model:
    """A Gemma 3 of any size. local_rope, rope: rotary positions of local and of global layers.

    kinds: LOCAL_KIND or GLOBAL_KIND for each layer; by default every sixth is global.
    """

    def block(rope: Rope, window: int | None) -> Layer:
        attention = Attention(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope,
            scale=query_scale**-0.5,
            window=window,
            qk_norm=RMSNorm(1e-6, over="head_dim", plus_one=True),
            dropout=attention_dropout,
        )
        return residual(NORM, attention, NORM) >> residual(NORM, GeGLU(ff), NORM)

    local, whole = block(local_rope, window), block(rope, None)
    wte = weight("wte", Dim("vocab", vocab), Dim("embed", embed))
    x = ids() >> Embed(wte) >> Scale(embed**0.5)
    if kinds and kinds != usual_kinds(layers):
        for kind, run in groupby(kinds):
            x = x >> repeat(len(list(run)), whole if kind == GLOBAL_KIND else local)
    else:
        x = x >> repeat(layers // EACH, *[local] * (EACH - 1), whole) if layers >= EACH else x
        x = x >> repeat(layers % EACH, local) if layers % EACH else x
    return model(name, x >> NORM >> Unembed(wte) >> NextToken())


def gemma3_1b() -> Model:
    return gemma3("gemma3-1b", 26, 4, 1, 1152, 6912, window=512, rope=GLOBAL, vocab=262144)


def gemma3_4b() -> Model:
    return gemma3("gemma3-4b", 34, 8, 4, 2560, 10240)


def gemma3_12b() -> Model:
    return gemma3("gemma3-12b", 48, 16, 8, 3840, 15360)


def gemma3_27b() -> Model:
    return gemma3("gemma3-27b", 62, 32, 16, 5376, 21504, head_dim=128, query_scale=168)


QK_NORMS = {f"self_attn.{n}_norm.weight": flat(f"attention.0.{n}_norm.scale") for n in "qk"}


@reads("Gemma3ForCausalLM", names=decoder(LAYER | QK_NORMS))
def config(c: Config, name: str) -> Model:
    checked(c)
    layers = c.layers("num_hidden_layers")
    each = c.whole("sliding_window_pattern", c.whole("_sliding_window_pattern", EACH))  # transformers writes both
    kinds = tuple(c.array("layer_types", [*usual_kinds(layers, each)]))
    if len(kinds) != layers or any(kind not in (LOCAL_KIND, GLOBAL_KIND) for kind in kinds):
        raise c.unsupported("layer_types", f"supported: {layers} of {LOCAL_KIND} and {GLOBAL_KIND}")
    c.only("attn_logit_softcapping", default=None)
    c.only("final_logit_softcapping", default=None)
    if c.is_null("rope_parameters") or "rope_parameters" not in c.fields:
        local = Rope(c.number("rope_local_base_freq", 10_000.0))
    else:
        local = rotation(c, 10_000.0, kind="sliding_attention")
    return gemma3(
        name,
        layers=layers,
        heads=c.whole("num_attention_heads"),
        kv_heads=c.whole("num_key_value_heads"),
        embed=c.whole("hidden_size"),
        ff=c.whole("intermediate_size"),
        head_dim=c.whole("head_dim", 256),
        query_scale=c.whole("query_pre_attn_scalar", 256),
        window=c.whole("sliding_window", 4096),
        local_rope=local,
        rope=rotation(c, 1e6, kind="full_attention"),
        vocab=c.whole("vocab_size", 262208),
        attention_dropout=c.rate("attention_dropout", 0.0),
        kinds=kinds,
    )
