"""The `megaloom` command: train, generate, convert, verify, plan, show, measure, calibrate, explain, export.

`training_commands` and `run_commands` declare the options of each command.

Exit codes: 0; 1 for a failed verification or a failed rank; 2 for errors that the user can correct; 130 and 143 when
stopped by SIGINT and SIGTERM. Errors go to stderr, once and without a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from cyclopts import App, ArgumentCollection, CycloptsError
from cyclopts.argument import update_argument_collection

from megaloom.dsl.errors import UserError, full_message
from megaloom.planner.cli.arguments import reject_rounded, unwrap_help, usage_error
from megaloom.planner.cli.calibrate import calibrate
from megaloom.planner.cli.compare import compare
from megaloom.planner.cli.explain import explain
from megaloom.planner.cli.export import export
from megaloom.planner.cli.main import app as planning
from megaloom.planner.cli.process import run_and_flush
from megaloom.planner.cli.settings import options_of_settings
from megaloom.planner.cli.versions import VERSION_HELP, installed_versions
from megaloom.runtime.launch.stop_signals import until_stopped

from .address_space import within_address_space
from .printing import fail
from .run_commands import RUN_COMMANDS
from .training_commands import TRAINING_COMMANDS


def options_of_run(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Give `megaloom train RUN` the options with which the run was started, where the command line gives none."""
    first = next((argument.tokens for argument in arguments if argument.index == 0), [])
    if commands != ("train",) or not first or not Path(first[0].value, "run.json").is_file():
        return
    from megaloom.runtime.training.run_folder import read_values

    folder = Path(first[0].value)
    given = [token.value for argument in arguments if argument.name == "--schedule" for token in argument.tokens]
    dropped = {"steps_from"}  # `train` takes it from the run itself, unless its file has changed
    dropped |= {"min_lr"} if "constant" in given else set()  # it has no effect there
    config = {n.replace("_", "-"): value for n, value in read_values(folder).items() if n not in dropped}
    update_argument_collection(config, str(folder / "run.json"), arguments, (), root_keys=(), allow_unknown=True)


app = App(
    name="megaloom",
    help="Declare a model, plan how to lay it over devices, train it that way.",
    version=installed_versions,
    version_flags=["--version"],
    version_format="plaintext",
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # `main` prints it
    config=[options_of_settings, options_of_run, reject_rounded],
)
app["--help"].group = app["--version"].group = "Parameters"
app["--version"].help = VERSION_HELP
app.command(planning, name="plan")
for planned in (explain, export, compare, calibrate):
    app.command(unwrap_help(planned))
for name, command in {**TRAINING_COMMANDS, **RUN_COMMANDS}.items():
    app.command(command, name=name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["plan"]:  # a search takes Ctrl-C itself, and has nothing to save
        return _run(argv)
    return until_stopped(lambda: within_address_space(lambda: _run(argv)))


def _run(argv: Sequence[str] | None) -> int:
    """Run the command, and return its exit code. Print errors that the user can correct."""
    try:
        return run_and_flush(lambda: app(argv, exit_on_error=False, print_error=False, result_action="return_value"))
    except CycloptsError as error:
        chain = " ".join(("megaloom", *(error.command_chain or ())))
        listed = "options" if error.command_chain else "commands"
        return fail(f"{usage_error(error)}\n`{chain} --help` lists the {listed}")
    except UserError as error:
        return fail(full_message(error))
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except RuntimeError as error:
        if type(error).__name__ != "RankError":  # by name: its module imports torch
            raise
        return fail(str(error), 1)


if __name__ == "__main__":
    sys.exit(main())
