"""Padding of prompts is removed by a mask; without one it is refused, as is a mask that does not fit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.runtime.data.tokenizer import train_bpe
from megaloom.runtime.decoding.decoding_graph import decoding_graph
from megaloom.runtime.generation.generate import Prompt, PromptReader, PromptText, open_trained
from tests.support.models.hugging_face import built, transformers


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptReader]:
    """A reader of a decoder and of an encoder-decoder. Token 7 is padding, 3 begins and ends texts."""
    found = {}
    for name in ("llama", "t5"):
        folder = tmp_path_factory.mktemp("models") / name
        model = built(name)
        model.generation_config = transformers.GenerationConfig(
            pad_token_id=7, bos_token_id=3, eos_token_id=3, decoder_start_token_id=1
        )
        model.save_pretrained(folder)
        trained = open_trained(folder)
        found[name] = PromptReader(PromptText.load("bytes"), trained, decoding_graph(trained.graph))
    return found


def test_a_mask_removes_padding(readers: dict[str, PromptReader]) -> None:
    rows, mask = torch.tensor([[7, 7, 5], [7, 4, 5]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    assert readers["llama"].read(rows, mask) == (Prompt((5,)), Prompt((7, 4, 5)))  # type: ignore[arg-type]
    assert readers["t5"].read([[5, 7, 7]], [[1, 0, 0]]) == (Prompt((1,), (5,)),)


WRONG: dict[str, tuple[str, Any, Any, str]] = {
    "left": ("llama", [[4, 5], [7, 5]], None, r"prompt 1 begins or ends with token 7, which is padding, and would be"),
    "right": (
        "t5",
        [[5, 7]],
        None,
        r"prompt 0 begins or ends with token 7, .*\ngive attention_mask, with 0 at padding",
    ),
    "text": ("llama", ["a"], [[1]], r"attention_mask is for prompts of token ids\nomit it"),
    "rows": ("llama", [[4], [5]], [[1]], r"attention_mask has 1 rows for 2 prompts"),
    "length": ("llama", [[4, 5]], [[1]], r"row 0 of attention_mask does not fit prompt 0, of 2 tokens"),
    "numbers": ("llama", [[4, 5]], [[2, 1]], r"row 0 of attention_mask does not fit prompt 0, of 2 tokens"),
    "nothing": ("llama", [[4, 5]], [[0, 0]], r"does not fit .*\ngive 1 for each token and 0 for padding, and at least"),
    "right side": ("llama", [[4, 7]], [[1, 0]], r"wrong side: llama writes on after its last token\npad on the left"),
    "left side": ("t5", [[7, 4]], [[0, 1]], r"wrong side: t5 reads from its first one\npad on the right"),
    "hole": ("llama", [[4, 5, 6]], [[1, 0, 1]], r"has 0 among tokens or on the wrong side"),
}


@pytest.mark.parametrize("case", WRONG)
def test_padding_that_would_be_read_is_refused(case: str, readers: dict[str, PromptReader]) -> None:
    name, prompts, mask, message = WRONG[case]
    with pytest.raises(UserError, match=message):
        readers[name].read(prompts, mask)


def test_add_bos_begins_a_prompt_once(readers: dict[str, PromptReader], tmp_path: Path) -> None:
    """With the token of the tokenizer or, if it names none, of the model's files."""
    reader = evolve(readers["llama"], add_bos=True)
    assert reader.read([[5, 6], [3, 5], []], None) == (Prompt((3, 5, 6)), Prompt((3, 5)), Prompt((3,)))
    assert evolve(readers["t5"], add_bos=True).read([[5]], None) == (Prompt((1,), (3, 5)),)
    train_bpe(["a b"], 257, tmp_path)  # its <|endoftext|>, token 0, ends and begins texts
    text = PromptText.load(str(tmp_path))
    assert evolve(reader, text=text).read([[5], "!"], None) == (Prompt((0, 5)), Prompt((0, 1)))
    model = shutil.copytree(reader.trained.folder, tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((model / name).read_text()) | {"bos_token_id": None}
        (model / name).write_text(json.dumps(fields))
    reader = evolve(reader, trained=open_trained(model))
    with pytest.raises(UserError, match=r"bytes names no token that begins a text, which --add-bos needs\nname its b"):
        reader.read([[5]], None)


def test_one_token_that_also_ends_texts_may_begin_a_prompt(readers: dict[str, PromptReader], tmp_path: Path) -> None:
    """GPT-2 is padded with the token that ends and begins its texts."""
    folder = shutil.copytree(readers["llama"].trained.folder, tmp_path / "model")
    train_bpe(["a b"], 260, folder)
    (folder / "generation_config.json").write_text('{"pad_token_id": 3, "bos_token_id": 3, "eos_token_id": 3}')
    trained = open_trained(folder)
    reader = PromptReader(PromptText.load(str(folder)), trained, readers["llama"].graph)
    assert reader.read([[3, 5]], None) == (Prompt((3, 5)),)
    with pytest.raises(UserError, match=r"prompt 0 begins or ends with token 3, which is padding"):
        reader.read([[3, 3, 5]], None)
