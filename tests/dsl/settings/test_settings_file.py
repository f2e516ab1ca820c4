"""Settings files: their tables, and messages for files that are none."""

from pathlib import Path

import pytest

from megaloom.dsl import UserError
from megaloom.dsl.files import yaml_file
from megaloom.dsl.settings.arguments import Word
from megaloom.dsl.settings.settings_file import read_settings


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.toml", "layers = 3\n", "layers stands outside of a table\nput it below [model] or [train]"),
        ("a.toml", "[trian]\nlr = 1\n", "has an unknown table [trian]: did you mean [train]?"),
        ("a.toml", "[model\n", "is not TOML: "),
        ("a.toml", "model = 3\n", "model must be a table of names and values"),
        ("a.yaml", "model: [1\n", "is not YAML: "),
        ("a.yaml", "- 1\n", "has no tables"),
        ("a.yaml", "model: {3: 4}\n", "model must be a table"),
        ("a.txt", "", "its name must end in .toml, .yaml or .yml"),
        (".toml", None, "its name must end"),
        ("b.toml", None, "cannot read the settings in"),
    ],
)
def test_files_that_are_no_settings(name: str, text: str | None, says: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as error:
        read_settings(tmp_path / name)
    assert says in str(error.value)


def test_toml_and_yaml_have_the_same_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml, yaml = tmp_path / "a.toml", tmp_path / "a.yaml"
    toml.write_text('[model]\nlayers = 3\nname = "x"\n[train]\n')
    yaml.write_text("model:\n  layers: 3\n  name: x\ntrain:\n")
    assert read_settings(toml) == read_settings(yaml) == {"model": {"layers": 3, "name": "x"}, "train": {}}
    assert isinstance(read_settings(yaml)["model"]["name"], Word)  # 1e-3 is a text in YAML
    monkeypatch.setattr(yaml_file, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"needs PyYAML\ninstall it with: pip install pyyaml; or write TOML"):
        read_settings(yaml)
