"""Conversations: the tokens are those of the chat template, and training predicts those of the assistant."""

import json
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from transformers import AutoTokenizer

from megaloom.dsl.errors import UserError
from megaloom.runtime.data.chat_template import load_chat_template
from megaloom.runtime.data.corpus import open_corpus
from megaloom.runtime.data.indexed import open_indexed
from megaloom.runtime.data.preprocess import preprocess
from megaloom.runtime.data.preprocess_options import Preprocessing
from megaloom.runtime.data.rows import Keys
from megaloom.runtime.data.tokenizer import train_bpe

HEADER = "<|im_start|>{{ m['role'] }}\n"
CHATML = (
    "{% for m in messages %}" + HEADER + "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}" + HEADER + "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
)
FORGETFUL = "{% for m in messages %}{% if loop.last %}{{ m['content'] }}{% endif %}{% endfor %}"
TALKS = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"What is {i} + {i}?"},
        {"role": "assistant", "content": f"{2 * i}, and the sum is even."},
        {"role": "user", "content": "Thanks!"},
        {"role": "assistant", "content": "You are welcome."},
    ][: 3 + 2 * (i % 2)]
    for i in range(20)
]


def with_template(folder: Path, template: str) -> Path:
    train_bpe((m["content"] for talk in TALKS for m in talk), 300, folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    return folder


def test_the_assistants_tokens_are_those_that_the_template_marks(tmp_path: Path) -> None:
    ours = load_chat_template(str(with_template(tmp_path / "chatml", CHATML)))
    theirs = AutoTokenizer.from_pretrained(with_template(tmp_path / "marked", MARKED))
    for talk in TALKS[:4]:
        tokens, counted = ours.encode(talk)
        expected = theirs.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        assert tokens.tolist() == expected["input_ids"]
        assert counted.tolist() == [bool(m) for m in expected["assistant_masks"]]
        answer = "".join(m["content"] + "<|im_end|>\n" for m in talk if m["role"] == "assistant")
        assert theirs.decode(tokens[counted]) == answer


def test_a_template_that_forgets_earlier_messages_is_refused(tmp_path: Path) -> None:
    template = load_chat_template(str(with_template(tmp_path / "x", FORGETFUL)))
    with pytest.raises(UserError, match=r"the chat template of .* changes earlier messages .*\ngive each turn"):
        template.encode(TALKS[1])


def test_conversations_are_packed_whole_with_their_mask(tmp_path: Path) -> None:
    source, tokenizer = tmp_path / "talks.jsonl", with_template(tmp_path / "chatml", CHATML)
    source.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    request = Preprocessing(
        sources=(str(source),), prefix=tmp_path / "out", tokenizer=str(tokenizer), keys=Keys("messages")
    )
    description, _ = preprocess(request, lambda text, done, total: None)
    data = open_indexed(tmp_path / "out")
    assert description.chat and data.has_mask and data.mask is not None
    assert AutoTokenizer.from_pretrained(tmp_path / "out-tokenizer").chat_template == CHATML
    corpus = open_corpus([str(tmp_path / "out")], "80,20", tmp_path / "run")
    assert corpus.counts_some and corpus.train.whole_documents
    assert corpus.train.ranges[0].stop == data.start(16)
    seq = 200
    seen = []
    for i in range(corpus.train.windows(seq)):
        window = corpus.train.sample(i, seq=seq, seed=1)
        assert window.counted is not None
        for document in range(int(window.documents[-1])):  # without the padding
            chosen = window.documents == document
            (index,) = [d for d in range(16) if np.array_equal(data.document(d), window.tokens[chosen])]
            start = data.start(index)
            assert window.counted[chosen].tolist() == data.mask[start : data.start(index + 1)].tolist()
            seen.append(index)
    assert sorted(seen) == list(range(16))


def test_sequences_without_an_answer_are_left_out(tmp_path: Path) -> None:
    """A prompt that fills the sequence leaves nothing to predict there. Without any answer there is no dataset."""
    tokenizer, source = with_template(tmp_path / "chatml", CHATML), tmp_path / "talks.jsonl"
    long = [{"role": "user", "content": "Why? " * 60}, {"role": "assistant", "content": "Why not?"}]
    source.write_text("".join(json.dumps({"messages": t}) + "\n" for t in (TALKS[0], long, TALKS[1], long, TALKS[2])))
    request = Preprocessing(
        sources=(str(source),), prefix=tmp_path / "out", tokenizer=str(tokenizer), keys=Keys("messages")
    )
    preprocess(request, lambda text, done, total: None)
    part = open_corpus([str(tmp_path / "out")], "100", tmp_path / "run").train
    assert part.windows(seq=200) == 3
    documents = [open_indexed(tmp_path / "out").document(i) for i in (0, 2, 4)]
    begins = sorted(part.sample(i, seq=200, seed=1).tokens[:60].tolist() for i in range(3))
    assert begins == sorted(document[:60].tolist() for document in documents)
    assert all(part.sample(i, seq=200, seed=1).counted.any() for i in range(9))
    assert part.windows(seq=2000) == 1
    with pytest.raises(UserError, match=r"no conversation of the training data has an answer within --seq 16 tokens\n"):
        part.windows(seq=16)
    roles = [{"role": "human", "content": "Hi"}, {"role": "gpt", "content": "Hi"}]
    source.write_text(json.dumps({"messages": roles}) + "\n")
    with pytest.raises(UserError, match=r"no message in .*talks.jsonl has the role 'assistant', .*\nname the roles"):
        preprocess(evolve(request, prefix=tmp_path / "other"), lambda text, done, total: None)
    assert not list(tmp_path.glob("other*"))
