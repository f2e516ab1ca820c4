"""Make a Hugging Face folder: a Llama of random weights, with a tokenizer that `megaloom data --train-vocab` made.

python -m megaloom.examples.scripts.small_llama FOLDER --tokenizer text-tokenizer --vocab 2048
"""

import argparse
import shutil
from pathlib import Path


def make(folder: Path, tokenizer: Path, vocab: int, layers: int, embed: int, heads: int) -> None:
    """Write config.json, safetensors and the tokenizer's files into a folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=embed,
        intermediate_size=4 * embed,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for file in tokenizer.iterdir():
        shutil.copy(file, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, required=True)
    for name, default in (("vocab", 2048), ("layers", 4), ("embed", 128), ("heads", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    make(**vars(parser.parse_args()))
