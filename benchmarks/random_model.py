"""A model of Qwen3-0.6B's shape with random weights, for memory and speed.

python -m benchmarks.random_model models/qwen3 models/random

Tokenizer and generation config come from the first folder, a prepared model. What it writes is noise and earns nothing.
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from scripts.cli import errors_for_people
from scripts.prepared import model_files, verify, write_record

SHAPE = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip


def make(source: Path, out: Path) -> None:
    """Write the model to `out`, in bf16, with tokenizer and generation config of the model in `source`."""
    verify(source)
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).to(torch.bfloat16).save_pretrained(out)
    for path in model_files(source):
        if path.name != "config.json" and "safetensors" not in path.name:
            shutil.copyfile(path, out / path.name)
    write_record(out, source="random", name="qwen3-0.6b-shape", revision=None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="prepared model, models/<id>")
    parser.add_argument("out", type=Path, help="the new model's folder")
    with errors_for_people():
        args = parser.parse_args()
        make(args.model, args.out)
