"""Tokens per second of `generate`, and of transformers' with the same weights, if it is installed.

`python -m benchmarks.generation` draws the weights of a Llama, and writes greedily after a prompt of random tokens. It
prints for each program the new tokens per second, prompt included, and the milliseconds of one more token: those of all
tokens less those of half of them. Times are medians, after a first call that is not counted. `--size tiny` is for CPUs.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from attrs import evolve, frozen
from safetensors.torch import save_file

from megaloom.dsl.hf.tensor_layout import stored_tensors
from megaloom.planner import Precision
from megaloom.runtime.convert.hugging_face import describe
from megaloom.runtime.generation.settings import GenerationSettings
from megaloom.runtime.launch import launcher
from megaloom.runtime.launch.rank_environment import threads_per_rank

SIZES = {
    "tiny": {"layers": 16, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 128},
    "1b": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocab": 128256},
}
TIMES = 3


@frozen
class Result:
    """Seconds of the whole length and of half of it, and the tokens of the first sequence."""

    seconds: float
    half: float
    tokens: tuple[int, ...]

    def line(self, name: str, rows: int) -> str:
        """Return a line of the table."""
        count = len(self.tokens)
        each = (self.seconds - self.half) / (count - count // 2)
        return f"{name:<14}{rows * count / self.seconds:>10.1f}{1e3 * each:>12.2f}"


def write_model(folder: Path, given: Namespace) -> None:
    """Write a Hugging Face folder of a Llama with random weights."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": given.layers,
        "hidden_size": given.hidden,
        "num_attention_heads": given.heads,
        "num_key_value_heads": given.kv_heads,
        "intermediate_size": given.ffn,
        "vocab_size": given.vocab,
        "max_position_embeddings": given.prompt + given.new,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    model, dtype = describe(folder / "config.json"), dtype_of(given)
    torch.manual_seed(0)
    tensors = {
        t.name: torch.empty(t.shape).normal_(std=0.05).to(dtype) for t in stored_tensors(model.names, model.model)
    }
    norms = {name: x + 1 for name, x in tensors.items() if x.ndim == 1}
    save_file(tensors | norms, folder / "model.safetensors", metadata={"format": "pt"})


def dtype_of(given: Namespace) -> torch.dtype:
    """Return the type of the weights."""
    return {Precision.BF16: torch.bfloat16, Precision.FP32: torch.float32}[given.precision]


def prompts_of(given: Namespace) -> list[list[int]]:
    """Return prompts of random tokens."""
    return torch.randint(given.vocab, (given.rows, given.prompt), generator=torch.Generator().manual_seed(1)).tolist()


def timed(write: Callable[[int], tuple[float, tuple[int, ...]]], new: int) -> Result:
    """Return the medians of the seconds. write: from the number of new tokens to seconds and the first sequence."""
    write(new)
    wholes, halves = zip(*((write(new), write(new // 2)) for _ in range(TIMES)), strict=True)
    return Result(median(x for x, _ in wholes), median(x for x, _ in halves), wholes[-1][1])


def ours(folder: Path, given: Namespace) -> Result | None:
    """On each rank: the result of megaloom, on the rank that chooses the tokens."""
    from megaloom.runtime.generation.generate import Asked, decoder_of, make_job, write
    from megaloom.runtime.generation.trained_model import open_trained

    settings = GenerationSettings(max_new_tokens=given.new, eos_token_id=())
    asked = Asked(given.tp, given.pp, given.precision, "bytes", batch_size=given.rows)
    job = make_job(open_trained(folder), prompts_of(given), settings, asked)
    decoder, chooses = decoder_of(job), []

    def written(new: int) -> tuple[float, tuple[int, ...]]:
        found = write(evolve(job, settings=evolve(settings, max_new_tokens=new)), decoder)
        chooses.append(found is not None)
        return (0.0, (0, 0)) if found is None else (found[1], found[0][0].tokens)

    result = timed(written, given.new)
    return result if chooses[0] else None


def theirs(folder: Path, given: Namespace) -> Result:
    """Return the result of transformers."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads_per_rank(1))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype_of(given)).to(device).eval()
    ids = torch.tensor(prompts_of(given), device=device)
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}

    def written(new: int) -> tuple[float, tuple[int, ...]]:
        start = time.perf_counter()
        found = model.generate(ids, max_new_tokens=new, **options)[:, ids.shape[1] :].tolist()
        return time.perf_counter() - start, tuple(found[0])

    return timed(written, given.new)


def arguments() -> Namespace:
    """Return the options, with the sizes of the model."""
    gpu = torch.cuda.is_available()
    parser = ArgumentParser(prog="benchmarks.generation", formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="1b" if gpu else "tiny", help="sizes that are not given")
    for name in SIZES["tiny"]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="another number than that of --size")
    for name, default in {"prompt": 128, "new": 128, "rows": 1, "tp": 1, "pp": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--precision", type=Precision, default=Precision.BF16 if gpu else Precision.FP32)
    given = parser.parse_args()
    sizes = {name: n if getattr(given, name) is None else getattr(given, name) for name, n in SIZES[given.size].items()}
    return Namespace(**vars(given) | sizes)


def main() -> None:
    given = arguments()
    print(", ".join(f"{name} {value}" for name, value in vars(given).items()))
    print(f"{'':<14}{'tokens/s':>10}{'ms a token':>12}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, given)
        found = next(x for x in launcher.run(ours, (folder, given), given.tp * given.pp) if x is not None)
        print(found.line("megaloom", given.rows), flush=True)
        if find_spec("transformers") is None:
            print("transformers is not installed")
            return
        with multiprocessing.get_context("spawn").Pool(1) as pool:  # this process may have replaced CUDA's functions
            other = pool.apply(theirs, (folder, given))
        print(other.line("transformers", given.rows))
        pairs = zip(found.tokens, other.tokens, strict=True)
        equal = next((i for i, (x, y) in enumerate(pairs) if x != y), len(found.tokens))
        print(f"the first {equal} of {len(found.tokens)} tokens are equal")


if __name__ == "__main__":
    main()
