"""Published models as Megatron-LM's flags, for files that only name their model: the declared examples, as exported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from attrs import frozen

from megaloom.dsl.catalog import examples, find
from megaloom.dsl.graph import Model, graph
from megaloom.planner.export.decoder import read_decoder
from megaloom.planner.export.megatron_lm import model_options
from megaloom.planner.export.target import Target
from megaloom.planner.runs.words import Word

FAMILIES = ("llama2", "llama3", "qwen2-5", "qwen3", "deepseek", "mistral", "mixtral", "glm4", "moonlight", "kimi-k2")
PUBLISHED_POSITIONS = 2**17  # of a model without learned positions
ENDINGS = ("instruct", "base", "hf", "chat", "bf16", "fp8", "v0-1", "2507", "thinking")
OTHER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "llama3-2-1b": "llama3-1b",
        "llama3-2-3b": "llama3-3b",
        "llama3-1-405b": "llama3-405b",
        "llama3-3-70b": "llama3-1-70b",
        "qwen2-0-5b": "qwen2-5-0-5b",
        "qwen2-1-5b": "qwen2-5-1-5b",
        "qwen2-7b": "qwen2-5-7b",
        "qwen2-72b": "qwen2-5-72b",
        "deepseek-r1": "deepseek-v3",
        "deepseek-v3-0324": "deepseek-v3",
        "kimi-k2-instruct-0905": "kimi-k2",
        "mistral-7b-v0-3": "mistral-7b-v3",
    }
)
"""Examples by names on huggingface.co that are not spelled alike, or whose sizes are those of another model."""
NOT_MODELLED: Mapping[str, str] = MappingProxyType(
    {
        "deepseek-v4": "its hyper-connections, compressed sparse attention and hash-routed experts are not modelled",
        "gpt-oss": "its windows in every other layer have no flags of Megatron-LM that are written",
        "glm5": "attention to the tokens that an indexer chooses is not modelled",
        "qwen3-5": "linear attention (gated delta nets) among its layers has no flags of Megatron-LM that are read",
        "nvidia-nemotron-3": "layers of Mamba among those of attention are not read",
    }
)
"""Reasons why models whose names begin so are not read. Source: the pages of these models in Megatron-Bridge 0.6."""
OF_EXPERTS = ("--moe-grouped-gemm", "--moe-token-dispatcher-type", "alltoall")
"""Flags that the frameworks which take models by their names set for experts, and that a dense model ignores."""
OF_THE_RUN = frozenset({"seq-length", "make-vocab-size-divisible-by", "moe-token-dispatcher-type"})
"""Options of an exported model that a run states itself."""


@frozen
class PublishedModel:
    """A published model: an example of which Megatron-LM has every layer."""

    model: Model

    def words(self, name: Word) -> Iterator[Word]:
        """Yield the flags of the model, on the line that names it. Raise UserError if Megatron-LM lacks a layer."""
        decoder = read_decoder(graph(self.model), Target.MEGATRON_LM)
        for option in model_options(decoder, PUBLISHED_POSITIONS, 1, Target.MEGATRON_LM):
            if option.name not in OF_THE_RUN:
                yield from (Word(text, name.origin) for text in option.words)
        yield from (Word(text, name.origin) for text in ("--vocab-size", str(decoder.vocab), *OF_EXPERTS))


def published_model(name: str) -> PublishedModel | None:
    """Return a model by its name on huggingface.co, or None if it is no example of these families."""
    plain = _plain(name)
    while ending := next((one for one in ENDINGS if plain.endswith(f"-{one}")), ""):
        plain = plain.removesuffix(f"-{ending}")
    plain = OTHER_NAMES.get(plain, plain)
    if not plain.startswith(FAMILIES) or plain not in examples():
        return None
    return PublishedModel(find(plain)[0])


def not_modelled(name: str) -> str:
    """Return why the model of this name is not read; empty if no reason is known."""
    plain = _plain(name)
    return next((why for beginning, why in NOT_MODELLED.items() if plain.startswith(beginning)), "")


def _plain(name: str) -> str:
    """Return a name on huggingface.co as examples are named: without its owner, with dashes."""
    plain = name.rstrip("/").rpartition("/")[2].lower().replace(".", "-").replace("_", "-")
    plain = plain.removeprefix("meta-").replace("llama-", "llama", 1)
    return f"glm{plain[4:]}" if plain.startswith("glm-") else plain
