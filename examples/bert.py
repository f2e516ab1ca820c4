"""BERT (Devlin et al., arXiv:1810.04805): an encoder with token types, for masked tokens, order and classes."""

from attrs import frozen

from megaloom.dsl import (
    MLP,
    Attention,
    Classification,
    Dim,
    Dropout,
    Embed,
    Layer,
    LayerNorm,
    Linear,
    MaskedToken,
    Model,
    Positions,
    Select,
    SentenceOrder,
    TokenClassification,
    Unembed,
    Value,
    apply,
    fn,
    ids,
    model,
    packed,
    repeat,
    residual,
    weight,
    weighted_sum,
)
from megaloom.dsl.errors import UserError
from megaloom.dsl.hf.architectures import Config, reads
from megaloom.dsl.hf.tensor_names import (
    Names,
    Stored,
    columns,
    flat,
    rows,
)

NORM = LayerNorm(1e-12)


@frozen
class Pooler(Layer):
    """tanh(dense(x)) of the first position, [CLS]: [batch seq embed] to [batch embed]."""

    def body(self, x: Value, /, **side: Value) -> Value:
        return fn("tanh", apply(Select("seq", 0), x) >> Linear(x["embed"], bias=True).named("dense"))


@frozen
class Transform(Layer):
    """norm(gelu(dense(x))): the transformation of hidden states before the logits of masked tokens."""

    norm: LayerNorm = NORM

    def body(self, x: Value, /, **side: Value) -> Value:
        h = x >> Linear(x["embed"], bias=True).named("dense")
        return fn("gelu", h) >> self.norm.named("norm")


def bert(
    name: str,
    layers: int,
    heads: int,
    embed: int,
    ff: int,
    *,
    vocab: int = 30522,
    seq: int = 512,
    types: int = 2,
    dropout: float = 0.0,
    attention_dropout: float | None = None,
    pre_norm: bool = False,
    norm: LayerNorm = NORM,
    classes: int | None = None,
    tags: int | None = None,
    order: bool = False,
    head_dropout: float | None = None,
) -> Model:
    """A BERT of any size. pre_norm: norms before the layers, as in Megatron-LM, instead of after.

    dropout: after the embeddings, attention and MLP. attention_dropout: of the probabilities; None is `dropout`.
    classes: instead of masked tokens, predict one of so many classes of a text or a pair. tags: predict one of so many
    classes of each token. Both read document indices, which mark padding. head_dropout: before the logits of classes;
    None is `dropout`. order: beside masked tokens, predict whether two texts are in their order or swapped.
    """
    if order and (classes is not None or tags is not None):
        raise UserError("order is a loss beside that of masked tokens, and classes and tags replace it\nomit order")
    d = Dim("embed", embed)
    wte = weight("wte", Dim("vocab", vocab), d)
    kinds, wpe = weight("types", Dim("vocab", types), d), weight("wpe", Dim("position", seq), d)
    drop = (Dropout(dropout),) if dropout else ()
    probabilities = dropout if attention_dropout is None else attention_dropout
    attention = Attention(heads=heads, causal=False, bias=True, dropout=probabilities)
    mlp = MLP(ff, "gelu", bias=True)
    if pre_norm:
        block = residual(norm, attention, *drop) >> residual(norm, mlp, *drop)
    else:
        block = residual(attention, *drop) >> norm >> residual(mlp, *drop) >> norm
    x = ((ids() >> Embed(wte)) + (ids("types") >> Embed(kinds))) >> Positions(wpe)
    x = x if pre_norm else x >> norm
    x = x >> Dropout(dropout) if dropout else x
    x = x >> repeat(layers, block)
    x = x >> norm if pre_norm else x
    if classes is not None or tags is not None:
        rate = dropout if head_dropout is None else head_dropout
        x = x >> Pooler() if classes is not None else x
        x = x >> Dropout(rate) if rate else x
        head = Unembed(weight("head", Dim("vocab", classes or tags), d), bias=True)
        return packed(model(name, x >> head >> (TokenClassification() if classes is None else Classification())))
    loss = x >> Transform(norm) >> Unembed(wte, bias=True) >> MaskedToken()
    if order:
        head = Unembed(weight("order", Dim("vocab", 2), d), bias=True)
        loss = weighted_sum((1.0, loss), (1.0, x >> Pooler() >> head >> SentenceOrder()))
    return model(name, loss)


def bert_base() -> Model:
    return bert("bert-base", 12, 12, 768, 3072)


def bert_large() -> Model:
    return bert("bert-large", 24, 16, 1024, 4096)


def bert_large_pre_norm() -> Model:
    """BERT large with norms before its layers (Shoeybi et al., arXiv:1909.08053, figure 7)."""
    return bert("bert-large-pre-norm", 24, 16, 1024, 4096, pre_norm=True)


OUTSIDE = {
    "bert.embeddings.word_embeddings.weight": columns("wte"),
    "bert.embeddings.position_embeddings.weight": columns("wpe"),
    "bert.embeddings.token_type_embeddings.weight": columns("types"),
}
MASKED_HEAD = {
    "cls.predictions.transform.dense.weight": columns("transform.0.dense.weight"),
    "cls.predictions.transform.dense.bias": flat("transform.0.dense.bias"),
    "cls.predictions.transform.LayerNorm.weight": flat("transform.0.norm.scale"),
    "cls.predictions.transform.LayerNorm.bias": flat("transform.0.norm.shift"),
    "cls.predictions.bias": flat("unembed.0.bias"),
}
POOLER_NAMES = {
    "bert.pooler.dense.weight": columns("pooler.0.dense.weight"),
    "bert.pooler.dense.bias": flat("pooler.0.dense.bias"),
}
ORDER_HEAD = POOLER_NAMES | {  # it comes before the head of masked tokens, as nodes are sorted
    "cls.seq_relationship.weight": columns("order"),
    "cls.seq_relationship.bias": flat("unembed.0.bias"),
    "cls.predictions.bias": flat("unembed.1.bias"),
}
CLASSES_HEAD = {"classifier.weight": columns("head"), "classifier.bias": flat("unembed.0.bias")}
LAYER = {
    "attention.self.query.weight": columns("attention.0.q"),
    "attention.self.query.bias": flat("attention.0.q_bias"),
    "attention.self.key.weight": columns("attention.0.k"),
    "attention.self.key.bias": flat("attention.0.k_bias"),
    "attention.self.value.weight": columns("attention.0.v"),
    "attention.self.value.bias": flat("attention.0.v_bias"),
    "attention.output.dense.weight": rows("attention.0.o"),
    "attention.output.dense.bias": flat("attention.0.o_bias"),
    "intermediate.dense.weight": columns("mlp.0.up"),
    "intermediate.dense.bias": flat("mlp.0.up_bias"),
    "output.dense.weight": rows("mlp.0.down"),
    "output.dense.bias": flat("mlp.0.down_bias"),
}


def _norm(prefix: str, index: int) -> dict[str, Stored]:
    """Return the tensors of a norm."""
    name = f"layer_norm.{index}"
    return {f"{prefix}.weight": flat(f"{name}.scale"), f"{prefix}.bias": flat(f"{name}.shift")}


def _names(outside: dict[str, Stored], layer: dict[str, Stored], *, order: bool = False) -> Names:
    """Return the tensor names of an encoder with these norms, which predicts masked tokens.

    order: it predicts the order of sentences, too.
    """
    other_tasks = () if order else ("bert.pooler.", "cls.seq_relationship.")
    return Names(
        OUTSIDE | MASKED_HEAD | (ORDER_HEAD if order else {}) | outside,
        {"bert.encoder.layer.{layer}.": LAYER | layer},
        unused=(*other_tasks, "bert.embeddings.position_ids"),
        copies={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
    )


def _head_names(outside: dict[str, Stored], layer: dict[str, Stored], *unused: str) -> Names:
    """Return the tensor names of an encoder with these norms, which predicts classes."""
    unused = ("cls.", "bert.embeddings.position_ids", *unused)
    return Names(OUTSIDE | CLASSES_HEAD | outside, {"bert.encoder.layer.{layer}.": LAYER | layer}, unused=unused)


NORMS = _norm("bert.embeddings.LayerNorm", 0)
LAYER_NORMS = _norm("attention.output.LayerNorm", 0) | _norm("output.LayerNorm", 1)
PRE_NORMS, PRE_LAYER_NORMS = _norm("bert.encoder.ln", 0), _norm("attention.ln", 0) | _norm("ln", 1)
NAMES = _names(NORMS, LAYER_NORMS)
CLASSES_NAMES = _head_names(POOLER_NAMES | NORMS, LAYER_NORMS)
TAGS_NAMES = _head_names(NORMS, LAYER_NORMS, "bert.pooler.")
PRE_NORM_NAMES = _names(PRE_NORMS, PRE_LAYER_NORMS)
PRE_NORM_CLASSES_NAMES = _head_names(POOLER_NAMES | PRE_NORMS, PRE_LAYER_NORMS)
PRE_NORM_TAGS_NAMES = _head_names(PRE_NORMS, PRE_LAYER_NORMS, "bert.pooler.")
POOLER = ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")


@reads("BertForMaskedLM", names=NAMES)
def config(c: Config, name: str) -> Model:
    _check_encoder(c)
    return _model(c, name, pre_norm=False)


@reads("MegatronBertForMaskedLM", names=PRE_NORM_NAMES)
def pre_norm_config(c: Config, name: str) -> Model:
    return _model(c, name, pre_norm=True)


@reads("BertForPreTraining", names=_names(NORMS, LAYER_NORMS, order=True))
def order_config(c: Config, name: str) -> Model:
    _check_encoder(c)
    return _model(c, name, pre_norm=False, order=True)


@reads("MegatronBertForPreTraining", names=_names(PRE_NORMS, PRE_LAYER_NORMS, order=True))
def pre_norm_order_config(c: Config, name: str) -> Model:
    return _model(c, name, pre_norm=True, order=True)


@reads("BertForSequenceClassification", names=CLASSES_NAMES)
def classes_config(c: Config, name: str) -> Model:
    c.only("problem_type", "single_label_classification", None, default=None)
    return _model(c, name, pre_norm=False, classes=_head(c))


@reads("BertForTokenClassification", names=TAGS_NAMES)
def tags_config(c: Config, name: str) -> Model:
    return _model(c, name, pre_norm=False, tags=_head(c))


@reads("MegatronBertForSequenceClassification", names=PRE_NORM_CLASSES_NAMES)
def pre_norm_classes_config(c: Config, name: str) -> Model:
    c.only("problem_type", "single_label_classification", None, default=None)
    return _model(c, name, pre_norm=True, classes=c.length("id2label", 2))


@reads("MegatronBertForTokenClassification", names=PRE_NORM_TAGS_NAMES)
def pre_norm_tags_config(c: Config, name: str) -> Model:
    return _model(c, name, pre_norm=True, tags=c.length("id2label", 2))


def _check_encoder(c: Config) -> None:
    """Check the fields that only encoders with norms after the layers have."""
    c.only("position_embedding_type", "absolute", default="absolute")
    c.ignore("directionality", *(f"pooler_{of}" for of in POOLER))  # BERT's multilingual folders; they change nothing


def _head(c: Config) -> int:
    """Return the number of classes, after a check of fields that only encoders with norms after the layers have."""
    _check_encoder(c)
    return c.length("id2label", 2)


def _model(
    c: Config,
    name: str,
    *,
    pre_norm: bool,
    classes: int | None = None,
    tags: int | None = None,
    order: bool = False,
) -> Model:
    c.only("hidden_act", "gelu", default="gelu")
    has_head = classes is not None or tags is not None
    c.only("tie_word_embeddings", True, *((False,) if has_head else ()), default=True)
    dropout = c.rate("hidden_dropout_prob", 0.1)
    return bert(
        name,
        layers=c.layers("num_hidden_layers"),
        heads=c.whole("num_attention_heads"),
        embed=c.whole("hidden_size"),
        ff=c.whole("intermediate_size"),
        vocab=c.whole("vocab_size"),
        seq=c.whole("max_position_embeddings", 512),
        types=c.whole("type_vocab_size", 2),
        dropout=dropout,
        attention_dropout=c.rate("attention_probs_dropout_prob", 0.1),
        pre_norm=pre_norm,
        norm=LayerNorm(c.number("layer_norm_eps", 1e-12)),
        classes=classes,
        tags=tags,
        order=order,
        head_dropout=c.rate("classifier_dropout", dropout) if has_head else None,
    )
