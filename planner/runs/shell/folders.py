"""Files that a script reads: those beside it, in the working folder, or at an absolute path."""

from __future__ import annotations

import posixpath
from pathlib import Path

from attrs import frozen

from megaloom.planner.runs.shell.parse.text import Text, known_text, literal, missing
from megaloom.planner.runs.words import Origin, Unknown

MOST_BYTES = 2_000_000


@frozen
class Folders:
    """The folder of a script, and the working folder."""

    script: Path
    working: Path

    def find(self, path: str, folder: str | None) -> Path | None:
        """Return the file or folder that a path names, seen from a folder, the script's or the working folder."""
        bases = [*([Path(folder)] if folder else []), self.script, self.working]
        try:
            return next((b / path for b in bases if (b / path).exists()), None)
        except (OSError, ValueError):
            return None

    def has(self, path: str, folder: str | None) -> bool:
        """Return True if a file or folder is there."""
        return self.find(path, folder) is not None

    def beside(self, path: str) -> tuple[str, str] | None:
        """Return the path and the text of a file in the script's folder or below; hidden files are not read."""
        at = Path(posixpath.normpath(path))
        if at.is_absolute() or any(part.startswith(".") for part in at.parts):
            return None
        return self.read(str(self.script / at), None) if (self.script / at).is_file() else None

    def read(self, path: str, folder: str | None) -> tuple[str, str] | None:
        """Return the path and the text of a file, or None if there is no such text."""
        found = self.find(path, folder)
        try:
            if found is None or not found.is_file() or found.stat().st_size > MOST_BYTES:
                return None
            content = found.read_bytes()
        except OSError:
            return None
        return (posixpath.normpath(str(found)), content.decode(errors="replace")) if b"\0" not in content else None

    def elsewhere(self, path: str) -> tuple[str, str] | None:
        """Return a file that an absolute path names elsewhere: its end, seen from a folder above the script."""
        parts = Path(path).parts[1:] if path.startswith("/") else ()
        for start in range(1, len(parts) - 1):
            for folder in self.script.absolute().parents:
                if (folder / Path(*parts[start:])).is_file():
                    return self.read(str(folder / Path(*parts[start:])), None)
        return None


def moved(folder: Text, path: Text) -> Text:
    """Return the folder after `cd PATH`."""
    target, start = known_text(path), known_text(folder)
    if target is None or (start is None and not target.startswith("/")):
        origin = path[0].origin if path else Origin("", 1)
        return missing(next((p.unknown for p in (*path, *folder) if p.unknown), Unknown("PWD", "variable", origin)))
    if not target:
        return folder
    return literal(posixpath.normpath(posixpath.join(start or "/", target)), path[0].origin)
