"""A patch of a run's own file with the changes that matter, where the flags stand literally in it.

What does not is named with its line, to be changed by hand. A patch without such a rest is read again before it is
written: the changed file must have the layout that was promised.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from difflib import unified_diff
from pathlib import Path

from megaloom.dsl.errors import UserError
from megaloom.dsl.quoting import printable

from .megatron.log import is_log
from .opinion import Opinion
from .own_plan import refuse_patch
from .read import RunInputs, file_text, read_text
from .run import Edit
from .text import edit_text, edits_of
from .words import Word
from .yaml_patch import insert_key, replace_key

NO_NEWLINE = "\\ No newline at end of file\n"


def write_patch(opinion: Opinion, given: RunInputs, output: str) -> str:
    """Write the patch to a file. Return what was written, and what is left to be done by hand.

    given: what the user gave with the run's file. Nothing is written if there is nothing to change.
    """
    refuse_patch(opinion.run)
    edits, path = edits_of(opinion, opinion.together), opinion.run.path
    if isinstance(edits, str) or not edits:
        return f"no patch: {edits or 'there is nothing to change'}"
    text = file_text(path)
    if is_log(text):
        raise UserError(
            f"{path} is a log, which is not patched\ngive the script to --from, or change its flags by hand"
        )
    changed, left = patched(text, path, edits)
    if not left and not _keeps_promise(changed, opinion, given):
        changed, left = text, list(edits)
    by_hand = [f"by hand: {edit_text(edit, path)}" for edit in left]
    if changed == text:
        return "\n".join(["no patch, because no change stands literally in the file", *by_hand])
    try:
        Path(output).write_text(difference(text, changed, path), newline="")
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}") from None
    command = f"patch {shlex.quote(path)} {shlex.quote(output)}"
    return "\n".join([f"wrote {printable(output)}; to apply it: {command}", *by_hand])


def patched(text: str, path: str, edits: Sequence[Edit]) -> tuple[str, list[Edit]]:
    """Return the text with the changes that stand literally in it, and the changes that do not."""
    lines, left = text.splitlines(keepends=True), []
    is_yaml = Path(path).suffix.lower() in (".yaml", ".yml")
    replace, insert = (replace_key, insert_key) if is_yaml else (_replace, _insert)
    for edit in sorted(edits, key=lambda edit: bool(not edit.old)):
        if not (replace if edit.old else insert)(lines, path, edit):
            left.append(edit)
    return "".join(lines), left


def _replace(lines: list[str], path: str, edit: Edit) -> bool:
    """ValuableChange or remove a flag that stands in the lines; return whether it did."""
    at = _literal(lines, path, edit.old)
    if at is not None:
        number, start, end = at
        words = shlex.join(edit.new)
        line = lines[number]
        rest = line[:start] + words + (line[end:] if words else line[end:].removeprefix(" "))
        lines[number] = rest if rest.strip(" \t\r\n\\") else ""  # a line without flags continues nothing
        return True
    if len(edit.new) != 2 or len(edit.old) != 2:
        return False
    value, new = edit.old[1], edit.new[1]  # a variable holds it
    if value.origin.path != path or not 1 <= value.origin.line_number <= len(lines):
        return False
    number = value.origin.line_number - 1
    found = list(re.finditer(rf"(?<![\w.]){re.escape(value.text)}(?![\w.])", lines[number]))
    if len(found) != 1 or edit.old[0].text in lines[number]:
        return False
    lines[number] = lines[number][: found[0].start()] + new + lines[number][found[0].end() :]
    return True


def _insert(lines: list[str], path: str, edit: Edit) -> bool:
    """Write a new flag after one that stands in the lines; return whether there is one."""
    for words in edit.after:
        if (at := _literal(lines, path, words)) is not None:
            number, _, end = at
            lines[number] = f"{lines[number][:end]} {shlex.join(edit.new)}{lines[number][end:]}"
            return True
    return False


def _literal(lines: Sequence[str], path: str, words: Sequence[Word]) -> tuple[int, int, int] | None:
    """Return the line, the first and the last character of a flag and its values, if all stand on one line."""
    flag, values = words[0], words[1:]
    number = flag.origin.line_number - 1
    if flag.origin.path != path or not 0 <= number < len(lines):
        return None
    name, equals, _ = flag.text.partition("=")
    parts = [rf"[\"']?{re.escape(word.text)}[\"']?" for word in values]
    pattern = re.escape(name) + "".join(f"{'=' if equals else r'[ ]+'}{part}" for part in parts)
    found = list(re.finditer(rf"(?<![\w-]){pattern}(?![\w.-])", lines[number]))
    return (number, found[0].start(), found[0].end()) if len(found) == 1 else None


def _keeps_promise(changed: str, opinion: Opinion, given: RunInputs) -> bool:
    """Return whether the changed file is read as the run with all changes."""
    assert opinion.together is not None
    try:
        run = read_text(changed, opinion.run.path, given)
    except UserError:
        return False
    plan = opinion.together
    same = run.layout == plan.layout and run.workload == plan.workload
    return same and run.stages == tuple(stage.start for stage in plan.stages)


def difference(old: str, new: str, path: str) -> str:
    """Return the unified difference of two texts, as `patch` takes it."""
    lines = unified_diff(old.splitlines(keepends=True), new.splitlines(keepends=True), path, path)
    return "".join(line if line.endswith("\n") else f"{line}\n{NO_NEWLINE}" for line in lines)
