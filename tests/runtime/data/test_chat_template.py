"""Conversations: the tokens are those of the chat template, and training predicts those of the assistant."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from megaloom.dsl.errors import UserError
from megaloom.runtime.data.chat_template import load_chat_template
from megaloom.runtime.data.corpus import open_corpus
from megaloom.runtime.data.indexed import open_indexed
from megaloom.runtime.data.preprocess import Preprocessing, preprocess
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
    request = Preprocessing(sources=(str(source),), prefix=tmp_path / "out", tokenizer=str(tokenizer), key="messages")
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
