"""A run folder loads without the model's source, in one file as well; foreign and damaged ones are refused."""

import json
import shutil
import stat
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_form import fingerprint
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plan_json import load
from megaloom.planner.contract.plans import Plan
from megaloom.planner.rules.plan_check import check_plan, check_trainable
from megaloom.runtime import train
from megaloom.runtime.checkpoints.manifest import Manifest, SavedFile, manifest_to_json
from megaloom.runtime.optimizer.recipe import Recipe
from megaloom.runtime.training.artefact import pack, unpack
from megaloom.runtime.training.run_folder import RunFile, load_run, save_run, write_run
from megaloom.runtime.training.run_options import RunOptions

SOURCE = """from megaloom.dsl import *
def tiny() -> Model:
    wte = weight("wte", Dim("vocab", 260), Dim("embed", 32))
    x = ids() >> Embed(wte) >> repeat(2, residual(RMSNorm(), MLP(64))) >> RMSNorm()
    return model("tiny", x >> Unembed(wte) >> NextToken())
"""


@pytest.fixture
def run(tmp_path: Path, plan_of: Callable[..., Plan]) -> Path:
    """A run folder with a checkpoint of one file, whose model's source is gone."""
    file, folder = tmp_path / "declared.py", tmp_path / "run"
    file.write_text(SOURCE)
    plan = plan_of(f"{file}:tiny", Layout(tp=2))
    folder.mkdir()
    options = RunOptions().changed(steps=7, lr=1e-2, save_every=5)
    write_run(folder, plan, find(plan.model)[0], RunFile(options=options))
    step = folder / "step-000005"
    step.mkdir()
    (step / ".metadata").write_bytes(b"abc")
    manifest = Manifest(
        step=5,
        samples=20,
        model=plan.model,
        fingerprint=plan.fingerprint,
        data="",
        recipe={},
        layout="tp2",
        files={".metadata": SavedFile(3, zlib.crc32(b"abc"))},
    )
    (step / "checkpoint.json").write_text(manifest_to_json(manifest))
    file.unlink()
    return folder


def test_a_run_loads_without_the_source_of_its_model(run: Path) -> None:
    loaded = load_run(run)
    assert (loaded.recipe, loaded.options) == (
        Recipe(steps=7, lr=1e-2),
        RunOptions(recipe=loaded.recipe).changed(save_every=5),
    )
    assert loaded.plan.fingerprint == fingerprint(loaded.model)
    assert loaded.graph.name == "tiny"
    check_plan(loaded.plan, find(loaded.plan.model)[0])
    check_trainable(loaded.plan, find(str(run))[0])


def test_a_run_that_was_moved_loads(run: Path, tmp_path: Path) -> None:
    moved = shutil.move(run, tmp_path / "moved")
    assert find(load_run(moved).plan.model)[1] == str((tmp_path / "moved" / "model.json").resolve())


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("run.json", "{", "run.json is damaged"),
        ("run.json", '{"version": 1, "options": {"steps": "many"}}', "run.json is damaged|out of range"),
        ("run.json", '{"version": 7, "options": {}}', "run.json has version 7; this megaloom reads version 1"),
        ("plan.json", "[]", "plan.json is JSON, but not a plan"),
        ("model.json", '{"version":1}', "model.json is not a model"),
    ],
)
def test_a_damaged_folder_is_refused(run: Path, name: str, text: str, says: str) -> None:
    (run / name).write_text(text)
    with pytest.raises(UserError, match=says):
        load_run(run)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("run.json", '{"version": 99, "options": {}}', r"run\.json has version 99; this megaloom reads version 1\n"),
        ("run.json", '{"version": 1, "opt', r"run\.json is damaged: it is not JSON with options\n"),
        ("latest_checkpointed_iteration.txt", "100", r"a file of a checkpoint of Megatron-LM\nchoose another .*--out"),
        (
            "model-00001-of-00002.safetensors",
            "",
            r"a file of a Hugging Face folder\nstart from .* --from",
        ),
    ],
)
def test_training_writes_nothing_into_a_newer_or_foreign_folder(
    tmp_path: Path, plan_of: Callable[..., Plan], name: str, text: str, says: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=says):
        train(plan_of("byte_llama", Layout()), Recipe(steps=1), folder=tmp_path, source=__file__)
    assert {path.name for path in tmp_path.iterdir()} - {".lock"} == {name}
    assert (tmp_path / name).read_text() == text


def test_another_models_plan_is_refused(run: Path, plan_of: Callable[..., Plan]) -> None:
    plan = plan_of("tiny_gpt", Layout())
    save_run(run, plan, find(plan.model)[0], Recipe())
    raw = json.loads((run / "model.json").read_text())
    assert raw["fingerprint"] == plan.fingerprint
    path = run / "plan.json"
    path.write_text(path.read_text().replace(plan.fingerprint, "1-0000000000000000"))
    with pytest.raises(UserError, match="is the plan of another model"):
        load_run(run)


def test_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is not the folder of a run: it has no run\.json"):
        load_run(tmp_path)


def test_a_packed_run_is_the_same_run(run: Path, tmp_path: Path) -> None:
    (run / "step-000003").mkdir()  # damaged, so it is left out
    (run / "hugging-face").mkdir()
    (run / "hugging-face" / "config.json").write_text("{}")
    (run / "tokenizer").mkdir()
    (run / "tokenizer" / "tokenizer.json").write_text("{}")
    said: list[str] = []
    again = unpack(pack(run, tmp_path / "run.megaloom", said.append), tmp_path / "again")
    assert not said  # the damaged one is older
    kept = sorted(p.relative_to(run).as_posix() for p in run.rglob("*") if p.is_file())
    assert sorted(p.relative_to(again).as_posix() for p in again.rglob("*") if p.is_file()) == kept
    assert all((again / name).read_bytes() == (run / name).read_bytes() for name in kept)
    with pytest.raises(UserError, match=r"again exists\nremove it, or give another folder with -o"):
        unpack(tmp_path / "run.megaloom", again)
    before = (tmp_path / "run.megaloom").read_bytes()
    with pytest.raises(UserError, match=r"run.megaloom exists\nremove it, or give another file with -o"):
        pack(run, tmp_path / "run.megaloom")
    assert (tmp_path / "run.megaloom").read_bytes() == before
    with pytest.raises(UserError, match=r"cannot write .*inside.megaloom: Not a directory\ngive another file with -o"):
        pack(run, tmp_path / "run.megaloom" / "inside.megaloom")
    with pytest.raises(UserError, match=r"no file .*nothing\ngive a file"):
        unpack(tmp_path / "nothing", tmp_path / "new")
    with pytest.raises(UserError, match="unpack it: megaloom unpack"):
        load_run(tmp_path / "run.megaloom")


OUTSIDE = ("../evil", "/tmp/evil", "step-000005/../../evil", "a/b", "..", "step-000005/..", "tokenizer/../x", ".x")


@pytest.mark.parametrize("name", OUTSIDE)
def test_a_path_that_leaves_the_folder_is_refused(run: Path, tmp_path: Path, name: str) -> None:
    artefact = pack(run, tmp_path / "run.megaloom")
    with zipfile.ZipFile(artefact, "a") as archive:
        archive.writestr(zipfile.ZipInfo(name), "x")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="has an entry that no run folder has"):
        unpack(artefact, tmp_path / "again")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_link_is_refused(run: Path, tmp_path: Path) -> None:
    artefact, info = pack(run, tmp_path / "run.megaloom"), zipfile.ZipInfo("link")
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(artefact, "a") as archive:
        archive.writestr(info, "/etc/passwd")
    with pytest.raises(UserError, match="has an entry that no run folder has: 'link'"):
        unpack(artefact, tmp_path / "again")


@pytest.mark.parametrize(
    ("head", "says"), [('{"version": 2}', "has version 2; this megaloom reads version 1"), (None, "but no artefact")]
)
def test_other_zips_are_refused(tmp_path: Path, head: str | None, says: str) -> None:
    with zipfile.ZipFile(tmp_path / "x.megaloom", "w") as archive:
        archive.writestr("artefact.json" if head else "other", head or "")
    with pytest.raises(UserError, match=says):
        unpack(tmp_path / "x.megaloom", tmp_path / "again")
    (tmp_path / "y.megaloom").write_bytes(b"PK\x03\x04 no zip")
    with pytest.raises(UserError, match="is damaged or no artefact"):
        unpack(tmp_path / "y.megaloom", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_continued_run_keeps_the_reference_of_its_model(tmp_path: Path, plan_of: Callable[..., Plan]) -> None:
    """The arguments of the model's function stay in plan.json, though a run loads its model from model.json."""
    plan = plan_of("stdlib-gpt(layers=1)", Layout(dp=2))
    save_run(tmp_path, plan, find(plan.model)[0], Recipe())
    loaded = load_run(tmp_path)
    assert loaded.plan.model == str(tmp_path / "model.json")
    save_run(tmp_path, loaded.plan, loaded.model, Recipe())
    assert load(tmp_path / "plan.json").model == "megaloom.examples.stdlib_gpt:stdlib_gpt(layers=1)"
