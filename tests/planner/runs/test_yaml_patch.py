"""Patches of settings files: values, switches and new keys, which the file must then be read with."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.runs.opinion import second_opinion
from megaloom.planner.runs.patch import write_patch
from megaloom.planner.runs.read import RunInputs, read_file

pytest.importorskip("yaml")

HEAD = """modules:
  pre_trainer:
    framework: megatron
    overrides:
      num_layers: 16
      hidden_size: 2048
      num_attention_heads: 16
      seq_length: 4096
      max_position_embeddings: 4096
      vocab_size: 32000
      tokenizer_type: NullTokenizer
      global_batch_size: 128
      bf16: true
"""
SLOW = """      tensor_model_parallel_size: 8  # of a node
      micro_batch_size: 1
      sequence_parallel: true
      recompute_granularity: full
      recompute_method: uniform
      recompute_num_layers: 1
"""
UNSHARDED = "      micro_batch_size: 1\n      tensor_model_parallel_size: 1"


def applied(text: str, folder: Path) -> tuple[str, str]:
    """Return a file with the patch of its opinion applied, and what was told."""
    path, patch = folder / "run.yaml", folder / "run.patch"
    path.write_text(text)
    given = RunInputs(devices=16)
    opinion = second_opinion(read_file(str(path), given), cluster("16xH100"))
    assert opinion.together is not None
    told = write_patch(opinion, given, str(patch))
    subprocess.run(["patch", "-s", str(path), str(patch)], check=True, timeout=20)
    assert read_file(str(path), given).layout == opinion.together.layout
    return path.read_text(), told


@pytest.mark.skipif(not shutil.which("patch"), reason="patch is not installed")
def test_values_and_switches_change_where_they_stand(tmp_path: Path) -> None:
    text, told = applied(HEAD + SLOW, tmp_path)
    assert "by hand" not in told
    assert "      tensor_model_parallel_size: 1  # of a node\n" in text
    assert "      sequence_parallel: false\n" in text and "      recompute_granularity: null\n" in text


@pytest.mark.skipif(not shutil.which("patch"), reason="patch is not installed")
@pytest.mark.parametrize("ending", ["\n", ""])
def test_a_new_flag_is_a_key_beside_another(ending: str, tmp_path: Path) -> None:
    text, told = applied(HEAD + UNSHARDED + ending, tmp_path)
    assert "by hand" not in told
    assert "      use_distributed_optimizer: true" in text.splitlines()


def test_what_does_not_stand_plainly_is_left_to_do_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(HEAD + SLOW.replace("micro_batch_size: 1", "micro_batch_size: ${MBS:1}"))
    given = RunInputs(devices=16)
    opinion = second_opinion(read_file(str(path), given), cluster("16xH100"))
    told = write_patch(opinion, given, str(tmp_path / "run.patch"))
    assert "by hand: --micro-batch-size 8 (line 15, now 1)" in told
