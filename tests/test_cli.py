"""The command line and the config of `train`."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from ports import free_port

from lightning_verl import GRPO, PPO, SFT, AdaptiveKL, SamplingParams, __version__
from lightning_verl.cli import main
from lightning_verl.config import ConfigError, make_algorithm, read_config
from lightning_verl.quickstart.curves import read_logs
from lightning_verl.rollout import engines
from lightning_verl.testing import char_tokenizer, tiny_model
from lightning_verl.train import import_function, make_fabric

SMALLEST: dict[str, Any] = {
    "model": {"actor": "model"},
    "data": {"source": "prompts.jsonl", "max_prompt_length": 8},
    "rewards": {"functions": ["my_rewards:score"]},
    "algorithm": {"name": "grpo"},
    "steps": 2,
    "output": "out",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model, prompts, and beside the config a module with a reward."""
    tokenizer = char_tokenizer()
    tiny_model("qwen3", vocab_size=len(tokenizer), num_hidden_layers=1).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(str(tmp_path / "model"))
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(8)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "my_rewards.py").write_text("def score(response, answer):\n    return len(response) / 4\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    return tmp_path


def write(folder: Path, **changes: Any) -> str:
    """Write a config and return its path."""
    path = folder / "configs" / "run.yaml"
    path.write_text(yaml.safe_dump({**SMALLEST, **changes}))
    return str(path)


def test_version_names_what_it_stands_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"lightning-verl {__version__} (torch ")
    assert "transformers " in line
    assert "lightning " in line


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(
        f"  {command} " in text for command in ("quickstart", "train", "plan", "tune", "tunings", "run", "version")
    )


def test_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["tarin"])
    assert "'tarin'" in capsys.readouterr().err


def test_run_knows_the_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["run", "--help"])
    assert "hybrid" in capsys.readouterr().out


@pytest.mark.slow
def test_run_starts_a_script_on_several_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport lightning_verl\nfrom lightning.fabric import Fabric\nfabric = Fabric(accelerator='cpu')\n"
        "print(type(fabric.strategy).__name__, fabric.world_size, sys.argv[1:])\n"
        "fabric.strategy.teardown()\n"
    )
    command = [sys.executable, "-m", "lightning_verl", "run", "--devices", "2", "--main-port", str(free_port())]
    command += ["--strategy", "hybrid", str(script), "--own", "1"]
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, env=environment)
    # Two processes write to one pipe: an end of line may come late.
    assert done.stdout.replace("\n", "") == "HybridStrategy 2 ['--own', '1']" * 2, done.stderr


# ---- reading a config ------------------------------------------------------------------------------------------------


def test_config_is_typed_and_options_go_before_it(folder: Path) -> None:
    path = write(folder, sampling={"temperature": 1}, strategy={"mesh_shape": [1, 1, 1, 1]})
    config = read_config([path, "--steps", "5", "--optimizer.learning_rates", "{actor: 1e-4}", "--algorithm.kl", "0.1"])
    assert config.steps == 5
    assert config.model.actor == "model"
    assert config.data.max_prompt_length == 8
    assert config.sampling.temperature == 1.0
    assert config.sampling.max_new_tokens == 256
    assert config.strategy.mesh_shape == (1, 1, 1, 1)
    assert config.optimizer.learning_rates == {"actor": 1e-4}
    assert config.algorithm == {"name": "grpo", "kl": 0.1}
    assert config.precision == "32-true"


def test_sampling_options_are_typed(folder: Path) -> None:
    sampling = {"min_p": 0.1, "repetition_penalty": 1.2, "min_new_tokens": 3, "logit_bias": {5: -1, 6: -math.inf}}
    path = write(folder, sampling=sampling)
    expected = SamplingParams(min_p=0.1, repetition_penalty=1.2, min_new_tokens=3, logit_bias={5: -1.0, 6: -math.inf})
    assert read_config([path]).sampling == expected
    assert read_config([path, "--sampling.logit_bias", "{7: 2.5}"]).sampling == replace(expected, logit_bias={7: 2.5})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stepz": 3}, "the config got an unknown key 'stepz'.*Did you mean 'steps'"),
        ({"batch": {"epoch": 3}}, "batch got an unknown key 'epoch'.*Did you mean 'epochs'"),
        ({"sampling": {"temprature": 0.5}}, "sampling got an unknown key 'temprature'.*Did you mean 'temperature'"),
        ({"data": "prompts.jsonl"}, "data must be a mapping of keys to values, got 'prompts.jsonl'"),
        ({"model": {}}, "model.actor"),
        ({"steps": "many"}, "steps.*\n.*int.*many"),
        ({"precision": "fp8"}, "precision.*\n.*bf16-mixed.*fp8"),
        ({"sampling": {"temperature": -1.0}}, "SamplingParams: temperature is -1.0"),
        ({"engine": {"name": "natve"}}, "engine.name.*\n.*native.*natve"),
        (
            {"engine": {"name": "native", "options": {"kv_cache": 1}}},
            "NativeOptions has no kv_cache; it has kv_cache_d",
        ),
        ({"sampling": {"logit_bias": {"a": 1.0}}}, "sampling.logit_bias.*\n.*int.*'a'"),
        ({"sampling": {"logit_bias": {5: math.inf}}}, "SamplingParams: logit_bias is {5: inf}"),
        ({"algorithm": {"name": "gpro"}}, "algorithm got an unknown name 'gpro'.*Did you mean 'grpo'"),
        ({"algorithm": {"kl": 0.1}}, "algorithm got an unknown name 'None'; known are 'grpo', 'ppo', 'sft'"),
        ({"algorithm": {"name": "grpo", "clips": 1}}, "algorithm grpo got an unknown option 'clips'.*mean 'clip'"),
        ({"algorithm": {"name": "ppo", "lam": "high"}}, "algorithm ppo:.*lam"),
        ({"algorithm": {"name": "ppo", "kl_in": "both"}}, "algorithm ppo:.*kl_in"),
    ],
)
def test_mistakes_in_a_config_are_named(folder: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s)run.yaml: .*{message}"):
        read_config([write(folder, **changes)])


def test_files_that_are_no_config_are_refused(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    with pytest.raises(ConfigError, match=r"none.yaml: .*No such file"):
        read_config([str(tmp_path / "none.yaml")])
    with pytest.raises(ConfigError, match=r"list.yaml: the config must be a mapping of keys to values, got \[1\]"):
        read_config([str(tmp_path / "list.yaml")])
    with pytest.raises(ConfigError, match=r"(?s)broken.yaml: .*line 2"):
        read_config([str(tmp_path / "broken.yaml")])
    with pytest.raises(ConfigError, match="first word must be the path of a YAML file"):
        read_config(["--steps", "3"])


def test_train_help_shows_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    text = capsys.readouterr().out
    assert "--batch.rollout_batch_size" in text
    assert "--sampling.temperature" in text


# ---- what a config names ---------------------------------------------------------------------------------------------


def test_algorithms_are_made_with_typed_options() -> None:
    grpo = make_algorithm({"name": "grpo", "clip": [0.2, 0.28], "scale": "none"})
    assert isinstance(grpo, GRPO)
    assert (grpo.clip, grpo.scale, grpo.kl.value) == ((0.2, 0.28), "none", 0.0)
    controller = {"class_path": "lightning_verl.AdaptiveKL", "init_args": {"coef": 0.1, "target": 1.0, "horizon": 100}}
    ppo = make_algorithm({"name": "ppo", "kl": controller})
    assert isinstance(ppo, PPO)
    assert isinstance(ppo.kl, AdaptiveKL)
    assert ppo.kl.value == 0.1
    sft = make_algorithm({"name": "sft", "response_field": "answer"})
    assert isinstance(sft, SFT)
    assert sft.response_field == "answer"


def test_functions_are_imported_by_name() -> None:
    assert import_function("os.path:join") is __import__("os").path.join
    for path in ("os.path.join", "os.path:", ":join", "os:path.join", "os:1+1"):
        with pytest.raises(ConfigError, match="must be of the form 'package.module:function'"):
            import_function(path)
    with pytest.raises(ConfigError, match="there is no module 'no_such' for 'no_such.part:score'"):
        import_function("no_such.part:score")
    with pytest.raises(ConfigError, match=r"module 'json' has no function 'dmp'; it has .*dump, dumps"):
        import_function("json:dmp")


def test_a_missing_import_inside_a_users_module_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_rewards.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        import_function("broken_rewards:score")


# ---- planning --------------------------------------------------------------------------------------------------------


def test_plan_prints_a_plan_and_starts_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "model" / "model.safetensors").unlink()  # the config is enough
    path = write(folder, strategy={"mesh_shape": [2, 2, 1, 1], "hybrid_engine_config": {"rollout_tp": 1}})
    assert main(["plan", path, "--batch.rollout_batch_size", "64", "--memory", "24"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Plan: GRPO on 4 ranks, 32-true, 24 GiB a GPU\n")
    assert "  rollout    4 x 1 x 1 x 1: 4 data ranks, ranks 0-3\n" in text
    assert "Batches: 64 prompts x 8 samples a step" in text
    assert not (folder / "out").exists()
    assert main(["plan", path, "--ranks", "8", "--link", "1e3", "--precision", "bf16-mixed"]) == 0
    assert "Plan: GRPO on 8 ranks, bf16-mixed, 80 GiB a GPU" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"stepz": 3}, [], "the config got an unknown key 'stepz'"),
        ({"rewards": {}}, [], "algorithm grpo needs a reward; add rewards"),
        ({"model": {"actor": "nowhere"}}, [], "model.actor: 'nowhere' is neither a folder with a config.json nor in"),
        ({"strategy": {"mesh_shape": [2, 1, 1, 1]}}, ["--ranks", "3"], r"3 = k x \(2 x 1 x 1 x 1 = 2\)"),
        ({"strategy": {"hybrid_engine_config": {"rolout_tp": 2}}}, [], "unknown key 'rolout_tp'.*'rollout_tp'"),
        (
            {"strategy": {"parallelism_config": {"actor": {"tp": 4}}}},
            ["--ranks", "4"],
            "num_key_value_heads=2, which tp=4",
        ),
    ],
)
def test_plan_refuses_what_train_would(
    folder: Path, changes: dict[str, Any], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", write(folder, **changes), *options]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_plan_wants_a_positive_number_of_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--ranks", "--memory", "--link"):
        with pytest.raises(SystemExit, match="2"):
            main(["plan", write(folder), option, "0"])
        assert f"argument {option}: it must be above 0, got '0'" in capsys.readouterr().err


def test_train_takes_the_layout_of_the_rollout(folder: Path) -> None:
    fabric = make_fabric(read_config([write(folder, strategy={"hybrid_engine_config": {"rollout_tp": 1}})]))
    assert fabric.strategy.layout("rollout").tensor == 1
    with pytest.raises(ValueError, match="rollout_tp=2 does not divide"):
        make_fabric(read_config([write(folder, strategy={"hybrid_engine_config": {"rollout_tp": 2}})]))


# ---- training --------------------------------------------------------------------------------------------------------


TINY = {
    "accelerator": "cpu",
    "sampling": {"max_new_tokens": 4},
    "batch": {"rollout_batch_size": 4, "update_batch_size": 1, "samples_per_prompt": 2},
}


def test_train_runs_and_resumes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(folder, **TINY)
    before = list(sys.path)
    assert main(["train", path]) == 0
    assert sys.path == before
    assert "GRPO step 2/2: reward/mean" in capsys.readouterr().out
    assert (folder / "out" / "model" / "tokenizer.json").is_file()
    assert main(["train", path, "--steps", "3"]) == 2
    assert "output: out holds the run of step-000002; set resume: true" in capsys.readouterr().err
    assert main(["train", path, "--steps", "3", "--resume", "true"]) == 0
    logs = read_logs(folder / "out" / "logs")
    assert list(logs) == [0, 1, 2]
    assert all(0 <= figures["reward/mean"] <= 1 for figures in logs.values())
    assert (folder / "out" / "logs" / "version_1").is_dir()


def test_train_generates_with_the_engine_of_the_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, dict[str, Any]]] = []
    build = engines.build_engine

    def watched(name: str, *arguments: Any, options: dict[str, Any], **others: Any) -> Any:
        made.append((name, options))
        return build(name, *arguments, options=options, **others)

    monkeypatch.setattr("lightning_verl.roles.actor.build_engine", watched)
    engine = {"name": "native", "options": {"kv_cache_dtype": "bfloat16"}}
    assert main(["train", write(folder, **TINY, engine=engine, steps=1)]) == 0
    assert made == [("native", {"kv_cache_dtype": "bfloat16"})]


def test_train_without_the_library_of_the_engine(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise ImportError("lightning_verl needs vllm>=0.22")

    monkeypatch.setattr("lightning_verl.rollout.vllm.process.check_vllm", missing)
    assert main(["train", write(folder, **TINY, engine={"name": "vllm"}, steps=1)]) == 2
    assert "engine: lightning_verl needs vllm>=0.22" in capsys.readouterr().err


def test_train_without_the_library_of_the_optimizer(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "torchao" else found(name))
    assert main(["train", write(folder, **TINY, optimizer={"name": "adamw8bit"}, steps=1)]) == 2
    assert "optimizer.name: optimizer='adamw8bit' needs torchao" in capsys.readouterr().err


def test_train_with_a_critic_and_a_penalty(folder: Path) -> None:
    algorithm = {"name": "ppo", "kl": 0.1}
    assert main(["train", write(folder, **TINY, algorithm=algorithm, steps=1)]) == 0
    logs = read_logs(folder / "out" / "logs")
    assert {"critic/loss", "rollout/kl"} <= set(logs[0])


def test_train_without_the_reward_that_it_needs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", write(folder, **TINY, rewards={})]) == 2
    assert "algorithm grpo needs a reward; add rewards" in capsys.readouterr().err
    assert main(["train", write(folder, **TINY, rewards={"functions": ["my_rewards:scor"]})]) == 2
    assert "module 'my_rewards' has no function 'scor'; it has score" in capsys.readouterr().err


def test_sft_needs_no_reward(folder: Path) -> None:
    algorithm = {"name": "sft", "response_field": "answer"}
    changes = {**TINY, "batch": {"rollout_batch_size": 4}}
    assert main(["train", write(folder, **changes, algorithm=algorithm, rewards={}, steps=1)]) == 0
    assert "actor/loss" in read_logs(folder / "out" / "logs")[0]
