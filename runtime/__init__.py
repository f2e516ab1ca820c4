"""Training of a plan: a declared model on megatron-core, laid out as planned."""

from __future__ import annotations

if __name__ != "megaloom.runtime":
    raise ImportError("import megaloom.runtime, not runtime")

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.own_loop import Engine as Engine
    from .engine.own_loop import FrozenModel as FrozenModel
    from .engine.own_loop import ParameterGroup as ParameterGroup
    from .engine.own_loop import ShardedLoader as ShardedLoader
    from .engine.own_loop import shard as shard
    from .engine.own_loop import shard_frozen as shard_frozen
    from .engine.own_loop import shard_loader as shard_loader
    from .engine.own_loop import token_log_probs as token_log_probs
    from .generation.generate import Generation as Generation
    from .generation.generate import generate as generate
    from .generation.settings import GenerationSettings as GenerationSettings
    from .optimizer.recipe import Recipe as Recipe
    from .samples.end_of_document import EndOfDocument as EndOfDocument
    from .training.artefact import pack as pack
    from .training.artefact import unpack as unpack
    from .training.data_reader import DataReader as DataReader
    from .training.data_reader import read_data as read_data
    from .training.initial_weights import read_weights as read_weights
    from .training.run import train as train
    from .training.run_folder import LoadedRun as LoadedRun
    from .training.run_folder import load_run as load_run
    from .training.run_folder import save_run as save_run
    from .training.training_run import Summary as Summary
    from .training.verify import Comparison as Comparison
    from .training.verify import compare as compare

# Public names and their modules. Each is imported on first use, so that `megaloom --help` loads no torch.
EXPORTS = {
    "Engine": "engine.own_loop",
    "ParameterGroup": "engine.own_loop",
    "FrozenModel": "engine.own_loop",
    "shard": "engine.own_loop",
    "shard_frozen": "engine.own_loop",
    "token_log_probs": "engine.own_loop",
    "ShardedLoader": "engine.own_loop",
    "shard_loader": "engine.own_loop",
    "Recipe": "optimizer.recipe",
    "EndOfDocument": "samples.end_of_document",
    "DataReader": "training.data_reader",
    "read_data": "training.data_reader",
    "Generation": "generation.generate",
    "GenerationSettings": "generation.settings",
    "generate": "generation.generate",
    "Summary": "training.training_run",
    "train": "training.run",
    "read_weights": "training.initial_weights",
    "LoadedRun": "training.run_folder",
    "load_run": "training.run_folder",
    "save_run": "training.run_folder",
    "pack": "training.artefact",
    "unpack": "training.artefact",
    "Comparison": "training.verify",
    "compare": "training.verify",
}
__all__ = list(EXPORTS)


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
