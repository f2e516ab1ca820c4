"""The first step on padded samples: loss, gradients and predictions of transformers, given its attention masks.

Classes of texts and of pairs, classes of tokens, masked tokens of pairs and of sentences with their order, pairs and
text infilling of T5 and BART; and masked tokens of running text at the positions that transformers' collator has
chosen.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve, frozen
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor

from megaloom.dsl import Model, graph, packed
from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.dsl.hf.architectures import open_config, reader
from megaloom.dsl.settings.reference import split_reference
from megaloom.examples.bert import bert
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe, shard
from megaloom.runtime.data.data_split import Window
from megaloom.runtime.data.description import DataKind
from megaloom.runtime.data.indexed import write_index, write_tokens
from megaloom.runtime.data.labels import IGNORED, Labels, LabelUnit
from megaloom.runtime.data.token_ids import Template, TokenIds
from megaloom.runtime.data.tokenizer import load_tokenizer
from megaloom.runtime.engine.results import EvaluationResult
from megaloom.runtime.samples.samples import SampleMaker
from megaloom.runtime.training.run_data import check_labels
from megaloom.runtime.weights.hugging_face_weights import open_folder
from tests.support.first_step import check_first_step
from tests.support.models.examples import model_named
from tests.support.models.hugging_face import built
from tests.support.parity.hf_oracle import WITHOUT_DROPOUT, gradients_of
from tests.support.parity.layouts import Results, under_layouts
from tests.support.parity.oracle import stacked

SEED, BATCH, SEQ, CLASSES = 7, 4, 24, 5
ORDER = "next_sentence_label"
CLS, SEP, PAD, MASK = 2, 3, 1, 4
TEMPLATE = Template((CLS,), (SEP,), ((CLS,), (SEP,), (SEP,)), (0, 0, 0, 1, 1))
IDS = TokenIds(61, eos=SEP, pad=PAD, mask=MASK, name="of 61 ids", template=TEMPLATE)
RECIPE = Recipe(steps=10, lr=1e-2, warmup=0)
HEAD = {"id2label": {str(i): str(i) for i in range(CLASSES)}, "label2id": {str(i): i for i in range(CLASSES)}}
DOCUMENT, TOKEN = (DataKind(Labels(unit, CLASSES)) for unit in (LabelUnit.DOCUMENT, LabelUnit.TOKEN))
OF_PAIRS = DataKind(pairs=True)


@frozen
class PaddedCase:
    """A config with changes, the kind of its data, and the layouts beside one process that run it."""

    config: str
    kind: DataKind
    layout: Layout
    architecture: str = ""
    collated: bool = False  # transformers' collator has masked the tokens
    further: tuple[Layout, ...] = ()
    orders: bool = False  # predicts the order of sentences, of rows without padding


ONE, SP = Layout(micro_batch=2), Layout(tp=2, sequence_parallel=True, micro_batch=2)
CASES = {
    "classes": PaddedCase("bert", DOCUMENT, SP, "BertForSequenceClassification"),
    "classes of pairs": PaddedCase(
        "bert", DataKind(DOCUMENT.labels, pairs=True), Layout(cp=2), "BertForSequenceClassification"
    ),
    "classes of tokens": PaddedCase("bert", TOKEN, Layout(cp=2), "BertForTokenClassification"),
    "masked tokens of pairs": PaddedCase("bert", OF_PAIRS, Layout(dp=2)),
    "masked tokens by the collator": PaddedCase("bert", DataKind(), SP, collated=True),
    "order": PaddedCase(
        "bert", DataKind(), SP, "BertForPreTraining", further=(Layout(pp=2), Layout(cp=2)), orders=True
    ),
    "T5 of pairs": PaddedCase("t5", OF_PAIRS, Layout(pp=2)),
    "BART of pairs": PaddedCase("bart", OF_PAIRS, SP),
    "BART of text": PaddedCase("bart", DataKind(), Layout(cp=2)),
}
FIELDS = {
    "bart": {"decoder_start_token_id": SEP, "pad_token_id": PAD},
    "t5": {"decoder_start_token_id": 0, "pad_token_id": 0},
}


def text(i: int, least: int, most: int) -> np.ndarray[Any, Any]:
    """Return a text of random tokens, of a random length."""
    random = np.random.default_rng(i)
    return random.integers(10, 61, random.integers(least, most))


def window(i: int, case: PaddedCase, maker: SampleMaker) -> Window:
    """Return document i: some are shorter than the sequence, and some are longer."""
    own = text(i, 3, 14 if case.kind.pairs else 40)
    own = text(i, maker.length, maker.length + 1) if case.kind == DataKind() else own
    labels = None
    if case.kind.labels is not None:
        random, tags = np.random.default_rng(100 + i), case.kind.labels.unit is LabelUnit.TOKEN
        labels = random.integers(CLASSES, size=len(own) if tags else 1)
        labels = np.where(random.random(len(labels)) < 0.3, IGNORED, labels) if tags else labels
    target = text(1000 + i, 3, 14) if case.kind.pairs else None
    sentences = np.array([4, 11, 15]) if case.orders else None
    return Window(own, np.zeros(len(own), np.int64), None, labels, target, sentences)


def batch_of(model: Model, case: PaddedCase) -> dict[str, Tensor]:
    """Return samples of made-up documents for a model, as a run makes them."""
    maker = SampleMaker.of(graph(model), SEQ, IDS, kind=case.kind)

    def sample(i: int) -> dict[str, Tensor]:
        chosen = window(i, case, maker)
        return maker.reading(chosen).make(torch.from_numpy(chosen.tokens), i, SEED)

    batch = stacked(sample, range(BATCH))
    return batch | collated(batch["labels"]) if case.collated else batch


def tokenizer() -> Any:
    """Return a tokenizer of transformers with a word for each id, and the special tokens of IDS."""
    transformers = pytest.importorskip("transformers")
    special = {"[PAD]": PAD, "[CLS]": CLS, "[SEP]": SEP, "[MASK]": MASK}
    words = {f"word{i}": i for i in range(IDS.vocab) if i not in special.values()} | special
    backend = Tokenizer(models.WordLevel(words, unk_token="word0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def collated(rows: Tensor) -> dict[str, Tensor]:
    """Return what transformers' collator makes of sequences of tokens, by the names of our inputs."""
    from transformers import DataCollatorForLanguageModeling

    torch.manual_seed(SEED)
    made = DataCollatorForLanguageModeling(tokenizer())([{"input_ids": row.tolist()} for row in rows])
    mask = made["labels"] != IGNORED
    return {"tokens": made["input_ids"], "labels": made["labels"].masked_fill(~mask, 0), "mask": mask}


def test_running_text_is_between_the_special_tokens_of_its_tokenizer() -> None:
    """Neither these nor padding are masked, by us and by the collator."""
    tok = tokenizer()
    model = bert("small", 1, 2, 16, 16, vocab=61)
    maker = SampleMaker.of(graph(model), SEQ, load_ids(tok))
    assert maker.text_ids.template == TEMPLATE and (maker.text_ids.mask, maker.text_ids.pad) == (MASK, PAD)
    own = text(3, maker.length, maker.length + 1)
    for i in range(20):
        sample = maker.make(torch.from_numpy(own), i, SEED)
        assert sample["labels"].tolist() == tok(" ".join(f"word{x}" for x in own[: SEQ - 2]))["input_ids"]
        assert sample["mask"].any() and not sample["mask"][[0, -1]].any()
        assert (sample["tokens"] == sample["labels"])[~sample["mask"]].all()
    assert not collated(sample["labels"][None])["mask"][0, [0, -1]].any()


def test_sentences_make_pairs_of_running_text() -> None:
    """Each pair is cut at the beginning of a sentence; document indices are those of the text beside special tokens."""
    maker = SampleMaker.of(graph(bert("small", 1, 2, 16, 16, vocab=61)), SEQ, IDS)
    own = text(3, maker.length, maker.length + 1)
    documents = np.where(np.arange(len(own)) < 9, 0, 1)
    cuts = set()
    for i in range(30):
        chosen = Window(own, documents, sentences=np.array([4, 12, len(own) - 1]))
        x = maker.reading(chosen).make(torch.from_numpy(own), i, SEED)
        at = x["types"].tolist().index(1) - 2
        cuts.add(at)
        assert x["labels"].tolist() == [CLS, *own[:at], SEP, *own[at : SEQ - 3], SEP]
        assert x["types"].tolist() == [0] * (at + 2) + [1] * (SEQ - at - 2)
    assert cuts == {4, 12}
    packed_maker = SampleMaker.of(graph(packed(bert("small", 1, 2, 16, 16, vocab=61))), SEQ, IDS)
    x = packed_maker.reading(Window(own, documents, sentences=np.array([9]))).make(torch.from_numpy(own), 0, SEED)
    assert x["documents"].tolist() == [0] * 11 + [1] * 13


def test_half_of_the_pairs_are_swapped_and_their_label_says_so() -> None:
    """A pair is the text cut at the beginning of a sentence, or at any token if none begins in it."""
    maker = SampleMaker.of(graph(bert("small", 1, 2, 16, 16, vocab=61, order=True)), SEQ, IDS)
    own, most = text(3, maker.length, maker.length + 1), SEQ - 3
    for sentences, cuts in (([4, 12], {4, 12}), ([], set(range(1, most)))):
        found, labels = set(), list[int]()
        for i in range(200):
            x = maker.reading(Window(own, np.zeros(len(own), np.int64), sentences=np.array(sentences, np.int64))).make(
                torch.from_numpy(own), i, SEED
            )
            labels.append(int(x[ORDER]))
            second = int(x["types"].sum()) - 1  # tokens of the second text, without [SEP]
            at = second if labels[-1] else most - second
            found.add(at)
            first, last = (own[at:most], own[:at]) if labels[-1] else (own[:at], own[at:most])
            assert x["labels"].tolist() == [CLS, *first, SEP, *last, SEP]
        assert found == cuts and 80 < sum(labels) < 120
    with pytest.raises(UserError, match="--seq 4 leaves no room for two sentences\ngive a larger --seq"):
        evolve(maker, seq=4).make(torch.from_numpy(own[:3]), 0, SEED)


def test_the_order_of_sentences_needs_sentences_and_cls(tmp_path: Path) -> None:
    model, prefix = bert("small", 1, 2, 16, 16, vocab=300, order=True), tmp_path / "x"
    lengths, make = write_tokens([np.arange(5), np.arange(9)], prefix, "u1"), "make a dataset of them: megaloom data"
    for firsts, message in ((None, "has no sentences"), (np.array([0, 2]), "from \\[CLS\\], .* has no tokenizer")):
        write_index(lengths, prefix, "u1", firsts)
        with pytest.raises(UserError, match=f"small predicts the order of sentences.*{message}\n{make}"):
            check_labels(graph(model), [str(prefix)])
    with pytest.raises(UserError, match="omit --set padded=true"):
        check_labels(graph(packed(model)), [str(prefix)])
    with pytest.raises(UserError, match="is pairs of texts, and small predicts the order of sentences"):
        SampleMaker.of(graph(model), SEQ, IDS, kind=OF_PAIRS).check_labels()
    with pytest.raises(UserError, match="classes and tags replace it\nomit order"):
        bert("small", 1, 2, 16, 16, classes=3, order=True)


def load_ids(tok: Any) -> TokenIds:
    """Return the ids of a tokenizer of transformers, as we read its files."""
    with TemporaryDirectory() as folder:
        tok.save_pretrained(folder)
        return load_tokenizer(folder).ids


def first_step(plan: Plan) -> tuple[float, dict[str, Tensor], EvaluationResult]:
    """Return the loss of the first step from a folder, its gradients, and the evaluation before it."""
    model = model_named(plan.model)
    folder = Path(split_reference(plan.model)[0]).parent
    engine = shard(model, plan, RECIPE, weights=open_folder(folder).of(model))
    batch = batch_of(model, CASES[folder.name])
    own = {name: x.chunk(plan.layout.dp)[engine.groups.dp_rank] for name, x in batch.items()}
    evaluation, gradients = engine.evaluate([own]), engine.gradients(own) or {}
    return engine.step(own).loss, {n: g.value for n, g in gradients.items()}, evaluation


def theirs(folder: Path, model: Model, dtype: torch.dtype) -> tuple[float, dict[str, Tensor], Tensor, Tensor]:
    """Return the loss that transformers computes of the samples, its gradients, its logits, and the labels."""
    transformers = pytest.importorskip("transformers")
    config, _ = open_config(str(folder))
    it = getattr(transformers, config.fields["architectures"][0]).from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )
    batch = batch_of(model, CASES[folder.name])
    labels = batch["labels"].masked_fill(~batch["mask"], IGNORED) if "mask" in batch else batch["labels"]
    if "source_tokens" in batch:
        inputs = {"input_ids": batch["source_tokens"], "attention_mask": (batch["source_documents"] == 0).long()}
    else:
        documents = batch.get("documents", torch.zeros_like(batch["tokens"]))
        inputs = {"input_ids": batch["tokens"], "attention_mask": (documents == 0).long()}
        inputs |= {"token_type_ids": batch["types"]} | {n: batch[n] for n in (ORDER,) if n in batch}
    case = CASES[folder.name]
    assert case.collated or case.orders or (inputs["attention_mask"] == 0).any(), "some samples are padded"
    out = it.eval()(**inputs, labels=labels)
    out.loss.backward()
    logits = out.prediction_logits if case.orders else out.logits
    return out.loss.item(), gradients_of(it, reader(config).names, model), logits.detach(), labels


@pytest.fixture(scope="module")
def references(tmp_path_factory: Any) -> dict[str, str]:
    """Write small models with random weights, and return the references of their padded models."""
    folder, out = tmp_path_factory.mktemp("folders"), {}
    for name, case in CASES.items():
        torch.manual_seed(0)
        changes: dict[str, Any] = WITHOUT_DROPOUT[case.config] | FIELDS.get(case.config, {})
        changes |= {"architectures": [case.architecture], **HEAD} if case.architecture else {}
        built(case.config, **changes).save_pretrained(folder / name)
        out[name] = f"{folder / name / 'config.json'}" + "(padded=True)" * (not case.orders)
    return out


def layouts_of(case: PaddedCase) -> dict[str, Layout]:
    """Return the layouts of a case by their names."""
    return {"one": ONE, "many": case.layout} | {f"further {i}": x for i, x in enumerate(case.further)}


@pytest.fixture(scope="module")
def results(references: dict[str, str], plan_of: Any) -> Results:
    layouts = {(name, kind): x for name, case in CASES.items() for kind, x in layouts_of(case).items()}
    plans = {f"{n} {k}": plan_of(references[n], x, batch=BATCH, seq=SEQ) for (n, k), x in layouts.items()}
    return under_layouts(first_step, plans)


@pytest.mark.parametrize("name", CASES)
def test_the_first_step_on_padded_samples_is_that_of_transformers(
    name: str, references: dict[str, str], results: Results
) -> None:
    model = find(references[name])[0]
    folder = Path(split_reference(references[name])[0]).parent
    expected_loss, expected, logits, labels = theirs(folder, model, torch.float64)
    rounded_loss, rounded, *_ = theirs(folder, model, torch.float32)
    for kind in layouts_of(CASES[name]):
        loss, gradients, evaluation = results[f"{name} {kind}"][0]
        check_first_step((loss, gradients), (expected_loss, expected), (rounded_loss, rounded), kind)
        assert evaluation.loss == pytest.approx(expected_loss, rel=1e-5)
        if CASES[name].kind.labels is None:
            assert evaluation.scores is None and len(evaluation.terms) == 2 * CASES[name].orders
            assert not evaluation.terms or evaluation.loss == pytest.approx(sum(evaluation.terms.values()))
            continue
        given, predicted = labels[labels != IGNORED], logits.argmax(-1)[labels != IGNORED]
        assert evaluation.scores is not None
        assert evaluation.scores.accuracy == float((given == predicted).double().mean())
        assert evaluation.tokens == len(given)
