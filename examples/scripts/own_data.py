"""Data in a training loop of your own: an indexed dataset, a DataLoader with a collator, and Megatron's batches.

    python -m megaloom.examples.scripts.own_data    # under one process, tp2 and dp2: the same losses

Each loader but the first exists on the first rank of a data-parallel rank only.
"""

import email
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader

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
    ids,
    mask,
    model,
    packed,
    repeat,
    residual,
    weight,
)
from megaloom.planner import Plan, Precision, Workload, cluster, plan
from megaloom.runtime import EndOfDocument, Engine, Recipe, read_data, shard, shard_loader
from megaloom.runtime.data.preprocess import preprocess
from megaloom.runtime.data.preprocess_options import Preprocessing
from megaloom.runtime.launch import launcher

STEPS = 3  # with each kind of data
RECIPE = Recipe(steps=3 * STEPS, lr=1e-2, warmup=0)
ENDS = EndOfDocument(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
WORKLOAD = Workload(seq=64, batch=8, precision=Precision.FP32)
SPLIT, EOD = "80,15,5", 0


def decoder() -> Model:
    """Return a packed decoder of bytes with learned positions, whose loss has a mask."""
    d, v, p = Dim("embed", 64), Dim("vocab", 256), Dim("position", WORKLOAD.seq)
    block = residual(LayerNorm(), Attention(heads=4, kv_heads=4)) >> residual(LayerNorm(), MLP(128))
    x = ids() >> Embed(weight("wte", v, d)) >> Positions(weight("wpe", p, d)) >> repeat(2, block)
    return packed(model("decoder", x >> LayerNorm() >> Unembed(weight("head", v, d)) >> NextToken(mask=mask())))


def collated(rows: list[dict[str, str]]) -> dict[str, torch.Tensor]:
    """Return a batch of texts as the collators of transformers make it: padded, with -100 as the label of padding."""
    tokens = torch.zeros(len(rows), WORKLOAD.seq, dtype=torch.int64)
    is_text = torch.zeros_like(tokens)
    for i, row in enumerate(rows):
        text = torch.tensor(list(row["text"].encode()[: WORKLOAD.seq]))
        tokens[i, : len(text)], is_text[i, : len(text)] = text, 1
    return {"input_ids": tokens, "attention_mask": is_text, "labels": tokens.where(is_text == 1, -100)}


def collator_batches(engine: Engine, folder: Path, *, first: bool) -> Iterator[Any]:
    """Return the batches of a Hugging Face dataset, read by a DataLoader that other ranks do not have."""
    loader = None
    if first:
        from datasets import disable_progress_bars, load_dataset

        disable_progress_bars()
        rows = load_dataset("json", data_files=str(folder / "text.jsonl"), split="train", cache_dir=str(folder))
        loader = DataLoader(rows, batch_size=WORKLOAD.batch, shuffle=True, drop_last=True, collate_fn=collated)
    return shard_loader(engine, loader).from_step(0)


def megatron_batches(engine: Engine, folder: Path, *, first: bool) -> Iterator[Any]:
    """Return the batches of megatron-core's GPTDataset: tokens, labels, loss_mask, position_ids, attention_mask."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    config = GPTDatasetConfig(
        random_seed=RECIPE.seed,
        sequence_length=WORKLOAD.seq,
        blend=([str(folder / "text")], None),
        split=SPLIT,
        path_to_cache=str(folder / "cache"),
        tokenizer=SimpleNamespace(eod=EOD, pad=-1, vocab_size=256, unique_identifiers={"name": "bytes"}),
        reset_position_ids=ENDS.reset_position_ids,
        reset_attention_mask=ENDS.reset_attention_mask,
        eod_mask_loss=ENDS.eod_mask_loss,
    )
    sizes = [STEPS * WORKLOAD.batch, 0, 0]
    data, *_ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: first, config).build()
    return iter(shard_loader(engine, DataLoader(data, batch_size=WORKLOAD.batch, drop_last=True) if first else None))


def train(made: Plan, folder: Path) -> list[float]:
    """Train on this rank with each kind of data, and return the losses of the steps, and the validation loss."""
    engine = shard(decoder(), made, RECIPE)
    first = engine.groups.tp_rank == engine.groups.cp_rank == engine.groups.pp_rank == 0
    data = read_data(engine, str(folder / "text"), split=SPLIT, ends=ENDS)
    losses = [engine.step(batch).loss for batch in islice(data.training(), STEPS)]
    for batches in (collator_batches, megatron_batches):
        losses += [engine.step(batch).loss for batch in islice(batches(engine, folder, first=first), STEPS)]
    return [*losses, engine.evaluate(data.validation()).loss]


def main() -> None:
    """Make a dataset of the paragraphs of Python's own source files, and train on it under three layouts."""
    sources = sorted(Path(email.__path__[0]).glob("*.py"))
    texts = [text for path in sources for text in path.read_text().split("\n\n\n") if text.strip()]
    with TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        request = Preprocessing(
            sources=(str(folder / "text.jsonl"),), prefix=folder / "text", tokenizer="bytes", append_eos=True
        )
        preprocess(request, lambda text, done, total: None)
        for layout in ({"dp": 1}, {"tp": 2}, {"dp": 2}):
            world = max(layout.values())
            ref = "megaloom.examples.scripts.own_data:decoder"
            made = plan(decoder(), cluster(f"{world}xCPU"), WORKLOAD, ref=ref, fixed=layout).best
            losses = launcher.run(train, (made, folder), world)[0]
            print(" ".join(f"{axis}{degree}" for axis, degree in layout.items()), *(f"{x:.5f}" for x in losses))


if __name__ == "__main__":
    main()
