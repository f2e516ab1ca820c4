"""Bring a torch.nn.Module: declare it, compare the declaration with the module, and train from the module's weights.

`python -m megaloom.examples.scripts.own_torch_module` compares, and trains five steps on two ranks.
"""

import torch
from torch import Tensor, nn

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Embed,
    LayerNorm,
    Model,
    NextToken,
    Positions,
    Unembed,
    Value,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.catalog import find
from megaloom.planner import cluster, plan
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.runtime import Recipe, shard
from megaloom.runtime.launch import launcher
from megaloom.runtime.reference.interpret import interpret

LAYERS, HEADS, EMBED, VOCAB, SEQ = 2, 4, 64, 256, 32


class Decoder(nn.Module):  # type: ignore[misc]
    """The module to bring: a small decoder of torch's own layers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, EMBED), nn.Embedding(SEQ, EMBED)
        layer = nn.TransformerEncoderLayer(
            EMBED, HEADS, 4 * EMBED, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(EMBED), enable_nested_tensor=False)
        self.head = nn.Linear(EMBED, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.blocks(x, mask, is_causal=True))


def logits() -> Value:
    """Step 1. Declare the module's mathematics with layers of Megaloom, or with layers of your own."""
    vocab, embed = Dim("vocab", VOCAB), Dim("embed", EMBED)
    attention, mlp = Attention(heads=HEADS, bias=True), MLP(4 * EMBED, "gelu", bias=True)
    x = ids() >> Embed(weight("tokens", vocab, embed)) >> Positions(weight("positions", Dim("position", SEQ), embed))
    x = x >> repeat(LAYERS, residual(LayerNorm(), attention), residual(LayerNorm(), mlp)) >> LayerNorm()
    return x >> Unembed(weight("head", vocab, embed))


def declared() -> Model:
    """Return the model to train: the logits and their loss."""
    return model("own-torch-module", logits() >> NextToken())


def weights_of(module: Decoder) -> dict[str, Tensor]:
    """Step 2. Map the module's parameters to the names and dims of `graph(declared()).weights`."""
    out = {"tokens": module.tokens.weight, "positions": module.positions.weight, "head": module.head.weight}
    norms = [norm for block in module.blocks.layers for norm in (block.norm1, block.norm2)]
    for i, norm in enumerate([*norms, module.blocks.norm]):
        out |= {f"layer_norm.{i}.scale": norm.weight, f"layer_norm.{i}.shift": norm.bias}
    for i, block in enumerate(module.blocks.layers):
        qkv, bias = block.self_attn.in_proj_weight.chunk(3), block.self_attn.in_proj_bias.chunk(3)
        for name, w, b in zip("qkv", qkv, bias, strict=True):  # rows [heads · head_dim], columns [embed]
            out[f"attention.{i}.{name}"] = w.T.unflatten(1, (HEADS, -1))
            out[f"attention.{i}.{name}_bias"] = b.unflatten(0, (HEADS, -1))
        out[f"attention.{i}.o"] = block.self_attn.out_proj.weight.T.unflatten(0, (HEADS, -1))
        out[f"attention.{i}.o_bias"] = block.self_attn.out_proj.bias
        out |= {f"mlp.{i}.up": block.linear1.weight.T, f"mlp.{i}.up_bias": block.linear1.bias}
        out |= {f"mlp.{i}.down": block.linear2.weight.T, f"mlp.{i}.down_bias": block.linear2.bias}
    return {name: w.detach() for name, w in out.items()}


def difference(module: Decoder) -> float:
    """Step 3. Return the largest difference between the logits of the module and of the declaration."""
    tokens = torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(0))
    (out,) = interpret(model("logits", logits()), weights_of(module), {"tokens": tokens})
    return float((module.eval()(tokens) - out).detach().abs().max())


def train(plan: Plan, weights: dict[str, Tensor], steps: int = 5) -> list[float]:
    """Step 4. Train from the module's weights, under any plan of the declaration."""
    engine = shard(find(plan.model)[0], plan, Recipe(steps=steps, warmup=0, lr=1e-3), weights=weights)
    rows = torch.arange(plan.workload.batch // plan.layout.dp)[:, None]
    texts = [(rows + step + torch.arange(SEQ + 1)) % VOCAB for step in range(steps)]
    return [engine.step({"tokens": text[:, :-1], "labels": text[:, 1:]}).loss for text in texts]


if __name__ == "__main__":
    mine = Decoder()
    print(f"the logits differ by at most {difference(mine):.1e}")
    declaration, ref = find(f"{__file__}:declared")
    workload = Workload(seq=SEQ, batch=4, precision=Precision.FP32)
    made = plan(declaration, cluster("2xCPU"), workload, ref=ref).best
    print(launcher.run(train, (made, weights_of(mine)), made.layout)[0])
