"""Find a model by the reference that a user types."""

from __future__ import annotations

from collections.abc import Callable, Collection
from difflib import get_close_matches
from functools import cache
from inspect import isfunction, signature
from os.path import exists, isdir, isfile, join, realpath
from pathlib import Path
from types import ModuleType
from typing import Any

from megaloom.dsl.hf.architectures import (
    WANTED,
    changed_config,
    config_file,
    config_name,
    open_config,
    read,
)
from megaloom.dsl.hf.conversations import for_conversations
from megaloom.dsl.hf.nemo_bert import FIELDS, is_nemo_bert

from .errors import UserError, safe_repr
from .example_modules import EXAMPLES, example_modules, hyphenated
from .files.json_file import Content, content_of, read_json
from .files.model_file import load_model
from .files.yaml_file import YAML
from .graph import Model
from .neighbours import neighbours_of
from .settings.arguments import Arguments, checked_arguments, converted_like
from .settings.family import family_of, with_arguments_of_family
from .settings.reference import label, split_reference, with_arguments
from .transforms.packing import packed
from .user_modules import failure_of, module_of_file, module_of_name

CONFIG_ENDINGS = (".json", *YAML)
SUGGESTIONS = 8  # names of similar models that the error for an unknown model lists


def find(ref: str, arguments: Arguments = {}) -> tuple[Model, str]:  # noqa: B006 (a mapping)
    """Return the model that `ref` names, and its full reference, which names it in every process.

    `ref` is `file.py:name`, a `file.py` with one model, `package.module:name`, the name of an example (`llama3-8b`), a
    run folder or its model.json, or a Hugging Face config.json (any other .json file, or a folder with a config.json),
    whose arguments are its fields, `conversations`, `padded` and `balance`. Megatron's BERT may be in NeMo's JSON or
    YAML. The name is that of a `Model`, or of a function that returns one. A function that is found without its name
    must be annotated with `-> Model`. Its arguments are `arguments` and those in `ref`, as in
    `file.py:name(layers=24)`; the others need defaults. The full reference has them. Raises UserError that says what
    would work.
    """
    ref, own = split_reference(ref)
    arguments = {**own, **arguments}
    if (file := _model_file(ref)) is not None:
        _refuse_arguments(str(file), arguments)
        return load_model(file), str(file.resolve())
    if ref.endswith(CONFIG_ENDINGS) or (isfile(join(ref, "config.json")) and ref not in examples()):
        own, changes = _arguments_of_config(ref, arguments)
        if own.get("conversations") and own.get("padded"):
            raise UserError(
                f"{ref}: conversations=true and padded=true exclude each other, since conversations are packed\n"
                "omit one of them"
            )
        model = read(changed_config(ref, changes), balance=own.get("balance"))
        model = for_conversations(model) if own.get("conversations") else packed(model) if own.get("padded") else model
        return model, with_arguments(str(config_file(ref).resolve()), {**changes, **own})
    location, _, name = ref.rpartition(":") if ":" in ref else (ref, "", "")
    if location.endswith(".py"):
        path = Path(location)
        if not isfile(location):
            raise UserError(f"no file {location!r}\n{WANTED}")
        return _pick(module_of_file(path), realpath(path), name, arguments)
    if name:
        return _pick(module_of_name(location, ref, WANTED), location, name, arguments)
    wanted = ref.lower().replace(".", "-").replace("_", "-")  # gpt3-1.3b is a model's own name
    for module in example_modules(wanted):
        for name in _models(module):
            if hyphenated(name) == wanted:
                return _pick(module, module.__name__, name, arguments)
    if ref.endswith(".megaloom") and isfile(ref):
        raise UserError(f"{ref} is a packed run\nunpack it, and give the folder: megaloom unpack {ref}")
    if exists(ref):
        what = "a folder without a config.json" if isdir(ref) else "neither a .py nor a .json file"
        raise UserError(f"{ref} is {what}\n{WANTED}")
    models = examples()
    near = get_close_matches(wanted, models, SUGGESTIONS, 0.5)
    suggestion = f": did you mean {near[0]}?" if near else ""
    names = f"an example, such as {', '.join(near)}" if near else f"one of {', '.join(sorted(models))}"
    raise UserError(f"no model {ref!r}{suggestion}\nMODEL can be file.py:name, a config.json, or {names}")


def _arguments_of_config(ref: str, arguments: Arguments) -> tuple[dict[str, Any], dict[str, object]]:
    """Return the arguments of a config.json's model, and the fields of it that other arguments replace, converted."""
    takes = signature(_arguments_of_configs).parameters
    own = checked_arguments(_arguments_of_configs, {k: v for k, v in arguments.items() if k in takes}, ref)
    others = {k: v for k, v in arguments.items() if k not in takes}
    if not others:
        return own, {}
    fields = open_config(ref)[0].fields
    names = {name: name if name in fields or not _is_translated(ref) else FIELDS.get(name, name) for name in others}
    changes = {
        names[name]: converted_like(value, fields.get(names[name]), f"{ref}: {name}") for name, value in others.items()
    }
    return own, changes


def config_fields(ref: str) -> dict[str, object] | None:
    """Return the fields of the config.json of a full reference, if --set or a translation has made them; else None."""
    path, arguments = split_reference(ref)
    if config_of(ref) is None:
        return None
    changes = _arguments_of_config(path, arguments)[1]
    return {**open_config(path)[0].fields, **changes} if changes or _is_translated(path) else None


def _is_translated(file: str) -> bool:
    """Return whether the fields of a configuration have other names in its file: it is one of NeMo's."""
    path = config_file(file)
    return path.suffix in YAML or is_nemo_bert(read_json(path))


def _arguments_of_configs(
    conversations: bool = False, padded: bool = False, balance: float | None = None
) -> tuple[bool, bool, float | None]:
    """Return the arguments that a Hugging Face config.json takes.

    conversations: whether its model is to train on conversations. padded: whether its samples may end with padding,
    which attention then does not read. balance: the coefficient of the balancing loss. Any other argument is a field
    of the file.
    """
    return conversations, padded, balance


def config_of(ref: str) -> Path | None:
    """Return the Hugging Face config.json that a full reference names; None for a model from elsewhere."""
    path, _ = split_reference(ref)
    return Path(path) if content_of(path) is Content.CONFIG else None


def _refuse_arguments(file: str, arguments: Arguments) -> None:
    if arguments:
        raise UserError(
            f"{file} is not a function, so it takes no --set {next(iter(arguments))}\n"
            "give a file.py with a function `-> Model`"
        )


def _model_file(ref: str) -> Path | None:
    """Return the model.json of a run folder, or the file itself if it is one; None for other references."""
    path = Path(ref)
    file = path / "model.json" if isfile(join(ref, "run.json")) else path
    return file if file.suffix == ".json" and content_of(file) is Content.MODEL else None


def file_name(ref: str) -> str:
    """Return the name for files and folders of the model with this full reference."""
    ref, arguments = split_reference(ref)
    if ref.endswith("model.json") and content_of(ref) is Content.MODEL:
        return Path(ref).parent.name
    name = config_name(Path(ref)) if ref.endswith(CONFIG_ENDINGS) else hyphenated(ref.rpartition(":")[2])
    return f"{name}{label(arguments)}"


def examples() -> dict[str, str]:
    """Return the models of the examples: name → full reference."""
    return {hyphenated(name): f"{m.__name__}:{name}" for m in example_modules() for name in _models(m)}


def _models(module: ModuleType, given: Collection[str] = ()) -> dict[str, Model | Callable[..., Model]]:
    """Return the models of a module: `Model` values, and functions `-> Model` that need no argument but the given."""
    return {
        name: it
        for name, it in vars(module).items()
        if not name.startswith("_")
        and (
            isinstance(it, Model)
            or (
                isfunction(it)
                and it.__module__ == module.__name__
                and it.__annotations__.get("return") in (Model, "Model")
                and not {*_needed(it)}.difference(given)
            )
        )
    }


def _needed(function: Callable[..., object]) -> list[str]:
    """Return the names of the parameters that have no default."""
    parameters = signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def _pick(module: ModuleType, location: str, name: str, arguments: Arguments) -> tuple[Model, str]:
    """Return a model of a module, and its full reference. An example that is given no arguments is built once."""
    is_example = module.__name__.rpartition(".")[0] == EXAMPLES
    return (
        _example(module, location, name) if is_example and not arguments else _built(module, location, name, arguments)
    )


@cache  # all of them take 15 MB
def _example(module: ModuleType, location: str, name: str) -> tuple[Model, str]:
    return _built(module, location, name, {})


def _built(module: ModuleType, location: str, name: str, arguments: Arguments) -> tuple[Model, str]:
    models = _models(module, arguments)
    if not name:
        if len(models) != 1:
            if not models:
                raise UserError(f"{location} has no model: write a function without arguments, `-> Model`")
            raise UserError(f"{location} has several models: name one as {location}:name; it has {', '.join(models)}")
        (name,) = models
    model = getattr(module, name, None)
    if not isfunction(model):
        given: Arguments = {}
        if isinstance(model, Model):
            _refuse_arguments(f"{location}:{name}", arguments)
    else:
        where = f"{location}:{name}"
        if arguments and (family := family_of(model)):
            model, given = with_arguments_of_family(model, family, arguments, where)
        else:
            given = checked_arguments(model, arguments, where)
        try:
            with neighbours_of(module.__file__):
                model = model(**given) if signature(model).parameters else model()
        except (UserError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise failure_of(f"{location}:{name} fails", error, module.__file__) from error
        if name in models and not isinstance(model, Model):
            raise UserError(f"{location}:{name} is annotated with `-> Model`, but returns {safe_repr(model)}")
    if not isinstance(model, Model):
        instead = f"it has {', '.join(models)}" if models else "write a function without arguments, `-> Model`"
        raise UserError(f"{location} has no model {name!r}: {instead}")
    return model, with_arguments(f"{location}:{name}", given)
