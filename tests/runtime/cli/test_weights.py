"""Weights on the command line: `megaloom train --from`, `megaloom convert`."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megaloom.runtime.cli.main import main
from megaloom.runtime.data.indexed import open_indexed, write_indexed
from tests.runtime.data.test_chat_template import CHATML, TALKS, with_template
from tests.support.models.hugging_face import built, transformers

OPTIONS = ("--devices", "1", "--seq", "16", "--batch", "2")


def test_wrong_weights_are_refused_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "llama"
    built("llama", vocab_size=300).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert main(["train", "--from", str(folder), "--out", str(tmp_path / "run"), "--steps", "1", *OPTIONS]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"megaloom: --from {folder}: the tensors of the checkpoint are not those of model 'llama'",
        "missing: lm_head.weight [300, 32], which holds head",
    ]
    assert not (tmp_path / "run").exists()


def test_folders_that_are_no_weights_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text("{}")
    assert main(["train", "--from", str(tmp_path), "--out", str(tmp_path / "new")]) == 2
    assert f"{tmp_path} is not a run folder: it has no plan.json" in capsys.readouterr().err
    (tmp_path / "run.json").rename(tmp_path / "adapter_config.json")
    assert main(["train", "--from", str(tmp_path), "--out", str(tmp_path / "new")]) == 2
    assert "these are adapters of PEFT, which are not read\nmerge them" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_weights_go_into_a_run_and_out_of_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Steps too small for bfloat16: the folder that is written has the bits of the one that was read."""
    folder, run, out, text = (tmp_path / name for name in ("llama", "run", "out", "text"))
    built("llama", vocab_size=300).to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    write_indexed([np.frombuffer(b"The quick brown fox jumps over the lazy dog. " * 20, np.uint8)], text, "u1")
    train = ["train", "--from", str(folder), "--data", str(text), "--split", "95,5", "--out", str(run), *OPTIONS]
    train += ["--lr", "1e-12"]
    assert main([*train, "--steps", "1"]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert (
        f"weights from {folder} (21 tensors of bfloat16); the optimizer is fresh, and training starts at step 0" in said
    )
    assert main(["convert", str(run), "--to", "hf", "-o", str(out), "--precision", "bf16"]) == 0
    assert capfd.readouterr().out == f"wrote {out}: 21 tensors of bfloat16, of step 1\n"
    before, after = (load_file(x / "model.safetensors") for x in (folder, out))
    assert before.keys() == after.keys()
    assert all(torch.equal(x, after[name]) for name, x in before.items())
    assert json.loads((out / "config.json").read_text()) == json.loads((folder / "config.json").read_text())
    assert (out / "tokenizer.json").read_text() == "{}"
    check_generation(folder, run, capfd)
    check_shards(run, tmp_path / "shards", out, capfd)
    assert main(["convert", str(run), "--to", "hf", "-o", str(out)]) == 2
    assert "exists\nremove it, or give another folder with -o" in capfd.readouterr().err
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads((folder / "config.json").read_text()) | {"intermediate_size": 40}))
    assert main(["convert", str(run), "--to", "hf", "-o", str(tmp_path / "b"), "--config", str(config)]) == 2
    assert "down_proj.weight is [32, 40] by the config, and [32, 48] in the model" in capfd.readouterr().err
    assert not (tmp_path / "b").exists()
    assert main([*train, "--steps", "2"]) == 0
    assert f"--from {folder} is not read again" in " ".join(capfd.readouterr().out.split())
    check_damage(run, tmp_path / "d", capfd)
    assert main(["convert", str(folder), "--to", "hf", "-o", str(tmp_path / "c")]) == 2
    assert f"{folder} is not a run folder: it has no plan.json" in capfd.readouterr().err


def test_data_of_another_tokenizer_than_that_of_the_weights_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Text is not read as bytes then. Without --from the weights are random, which is said, and bytes are fine."""
    folder, run, own, other = (tmp_path / name for name in ("llama", "run", "own", "other"))
    (tmp_path / "text.txt").write_text("".join(f"{i} foxes and {i * i} dogs. " for i in range(400)))
    (tmp_path / "second.txt").write_text("".join(f"{i} pipes or {i * i} ranks. " for i in range(400)))
    text, second = str(tmp_path / "text.txt"), str(tmp_path / "second.txt")
    built("llama", vocab_size=300).save_pretrained(folder)
    assert main(["data", text, "-o", str(own), "--train-vocab", "290"]) == 0
    assert main(["data", second, "-o", str(other), "--train-vocab", "290"]) == 0
    shutil.copytree(tmp_path / "own-tokenizer", folder, dirs_exist_ok=True)
    train = ["train", *OPTIONS, "--split", "90,10", "--steps", "1", "--out", str(run)]
    from_folder = [*train, "--from", str(folder)]
    assert main(["train", *OPTIONS, "--steps", "1", "--from", str(folder), "--data", text, "--out", str(run)]) == 2
    assert capfd.readouterr().err == (
        f"megaloom: --data {text} is read as bytes, and --from {folder} has a tokenizer\ntokenize the text, and give "
        f"--data PREFIX: megaloom data {text} -o PREFIX --tokenizer {folder}\n"
    )
    assert main([*from_folder, "--data", str(other)]) == 2
    assert f"was made with another tokenizer ({other}-tokenizer) than that of --from" in capfd.readouterr().err
    assert not run.exists()
    assert main([*from_folder, "--data", str(own)]) == 0
    assert main(["train", str(run), "--data", str(other), "--split", "90,10", "--steps", "2"]) == 2
    assert f"tokenizer ({other}-tokenizer) than that of the run in {run}\n" in capfd.readouterr().err
    assert main(["evaluate", str(run), "--data", text]) == 2
    assert f"--data {text} is read as bytes, and {run} has a tokenizer\n" in capfd.readouterr().err
    assert main(["evaluate", str(run), "--data", str(own)]) == 0
    random = tmp_path / "random"
    assert main(["train", str(folder), *OPTIONS, "--steps", "1", "--data", text, "--out", str(random)]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert f"the weights are random: --from {folder} would start from those in the folder" in said
    assert [p.name for p in (random / "hugging-face").iterdir()] == ["config.json"]  # not the tokenizer


def test_a_hugging_face_model_is_tuned_on_conversations(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The argument `conversations` gives the model a mask and the documents of each token."""
    folder, run, chats = tmp_path / "llama", tmp_path / "run", tmp_path / "chats"
    source = tmp_path / "talks.jsonl"
    source.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in TALKS))
    built("llama", vocab_size=300).save_pretrained(folder)
    shutil.copytree(with_template(tmp_path / "chatml", CHATML), folder, dirs_exist_ok=True)
    assert main(["data", str(source), "-o", str(chats), "--key", "messages", "--tokenizer", str(folder)]) == 0
    train = ["train", "--from", str(folder), "--data", str(chats), "--split", "80,20", "--out", str(run)]
    train += ["--devices", "1", "--seq", "256", "--batch", "2", "--steps", "2"]
    assert main(train) == 2
    assert "give --set conversations=true for a Hugging Face config.json, or declare" in capfd.readouterr().err
    assert main([*train, "--set", "conversations=true", "--evaluate-all"]) == 0
    said = " ".join(capfd.readouterr().out.split())
    assert "--set conversations=true" in said[said.index("to train further") :]
    kept = sum(open_indexed(chats).mask[open_indexed(chats).start(16) :])  # of the last fifth of the documents
    assert f"over {kept} held-out tokens" in said
    assert main(["convert", str(run), "--to", "hf", "-o", str(tmp_path / "out")]) == 0
    assert capfd.readouterr().out == f"wrote {tmp_path / 'out'}: 21 tensors of float32, of step 2\n"
    assert main(["train", str(folder), "--set", "layers=2", "--out", str(run)]) == 2
    assert "unknown field layers for LlamaForCausalLM" in capfd.readouterr().err


def check_shards(run: Path, folder: Path, single: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Files of at most 30 kB have the tensors of the single file."""
    convert = ["convert", str(run), "--to", "hf", "--precision", "bf16", "-o", str(folder), "--max-shard-size"]
    assert main([*convert, "30 lots"]) == 2
    assert "--max-shard-size 30 lots is not a size" in capfd.readouterr().err
    assert main([*convert, "30KB"]) == 0
    files = sorted(folder.glob("model-*.safetensors"))
    assert (
        1
        < len(files)
        == len(set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()))
    )
    assert all(sum(x.nbytes for x in load_file(file).values()) <= 30_000 for file in files)
    together = {name: x for file in files for name, x in load_file(file).items()}
    whole = load_file(single / "model.safetensors")
    assert together.keys() == whole.keys()
    assert all(torch.equal(x, whole[name]) for name, x in together.items())
    assert "wrote" in capfd.readouterr().out


def check_damage(run: Path, out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of two checkpoints the newer one is damaged: the older one is converted, and it is said."""
    file = max((run / "step-000002").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert main(["convert", str(run), "--to", "hf", "-o", str(out)]) == 0
    skipped, wrote = capfd.readouterr().out.splitlines()
    assert skipped.endswith(f"step-000002 is damaged: the contents of {file.name} have changed; using step-000001")
    assert wrote.endswith("of step 1")


def check_generation(folder: Path, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The run writes what transformers writes with the weights that it began with, under a layout of its own."""
    prompt, count = "The quick", 6
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([list(prompt.encode())])
    beyond = list(range(256, 300))  # ids that bytes do not have
    written = theirs.generate(ids, max_new_tokens=count, do_sample=False, suppress_tokens=beyond)
    expected = written[0, ids.shape[1] :].tolist()
    asked = ["--prompt", prompt, "--max-new-tokens", str(count), "--tokenizer", "bytes", "--precision", "fp32"]
    assert main(["generate", str(run), *asked, "--tp", "2", "--pp", "2", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["tokens"] == expected
    assert main(["generate", str(run), *asked, "--pp", "2"]) == 0
    assert capfd.readouterr().out == found["text"] + "\n"  # shown while it was written
