"""Checkpoints that tests damage, with checksums that fit what is there."""

import json
from pathlib import Path

from megaloom.runtime.checkpoints.checkpoint_folder import crc32_of
from megaloom.runtime.checkpoints.manifest import MANIFEST_NAME, manifest_checksum


def damage(folder: Path) -> None:
    """Overwrite the middle of each file of tensors, and correct the checksums in checkpoint.json."""
    for path in folder.glob("*.distcp"):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 4] + bytes(len(data) // 2) + data[len(data) // 4 + len(data) // 2 :])
    raw = json.loads((folder / MANIFEST_NAME).read_text())
    del raw["checksum"]
    for name, entry in raw["files"].items():
        entry["crc32"] = crc32_of(folder / name)
    (folder / MANIFEST_NAME).write_text(json.dumps({**raw, "checksum": manifest_checksum(raw)}))
