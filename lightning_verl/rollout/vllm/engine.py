"""``VLLMEngine``: rollouts with vLLM inside the trainer's process, on weights that are handed over for each version."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from lightning_verl.data.experience import PromptBatch
from lightning_verl.models.compat import checkpoint_weights
from lightning_verl.rollout.base import Rollouts
from lightning_verl.rollout.inputs import check_lengths, check_tokens, indices_of, token_lists
from lightning_verl.rollout.sampling import SamplingParams, sample_seeds
from lightning_verl.rollout.stopping import Decoder, StopRule
from lightning_verl.rollout.vllm.adapter import adapter_arguments, push_adapter, split_adapter
from lightning_verl.rollout.vllm.options import VLLMOptions, cache_bytes, engine_arguments, longest_sequence
from lightning_verl.rollout.vllm.process import (
    check_vllm,
    groups_of_ranks,
    own_shared_memory,
    process_kept,
    spare_process_group,
    torch_random_kept,
)
from lightning_verl.rollout.vllm.sampling import check_sampling, request_options, request_seed
from lightning_verl.rollout.vllm.weights import (
    held_versions,
    mark_version,
    push_weights,
    reset_prefix_cache,
    transfer_config,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class VLLMEngine:
    """Samples with vLLM, which runs in this process and shares the device with training.

    vLLM holds weights of its own. It starts at the first ``load_weights``, in the dtype of the weights that come, with
    a model of random weights; then and at every later version the weights are handed over whole, and its prefix cache
    is emptied. With several processes it runs under vLLM's ``external_launcher``: the ranks of each of ``tensor_lines``
    divide the model, and must be given the same prompts; the lines generate by themselves.

    Prompts go in as token ids and responses come out as such; vLLM has no tokenizer. Stop strings are looked for by
    the same rule as in the other engines, after each token.

    Args:
        model: A causal language model; only its config and class are used.
        pad_token_id: Fills the right of short responses.
        eos_token_ids: The model's end tokens; may be empty, and may hold ``pad_token_id``.
        tokenizer: Decodes responses, for stop strings only.
        options: See :class:`~lightning_verl.rollout.vllm.options.VLLMOptions`.

    Raises:
        ImportError: vLLM is missing, or older than 0.22.
        ValueError: An unknown option, or one out of its range.
    """

    needs_weights = True
    """It generates with weights of its own, which ``load_weights`` must bring: whole tensors, by their names."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        pad_token_id: int,
        eos_token_ids: Sequence[int],
        tokenizer: Decoder | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        check_vllm()
        self.model = model
        self.options = VLLMOptions.of(options or {})
        self.pad_token_id = pad_token_id
        self.eos_token_ids = tuple(eos_token_ids)
        self.tokenizer = tokenizer
        self.step_group: dist.ProcessGroup | None = None
        self.tensor_lines: Sequence[Sequence[int]] | None = None
        """World ranks that divide the model, one list for each copy, together all; None: each rank holds it whole."""
        self.weight_version = 0
        self._longest = longest_sequence(model.config, self.options)
        self._vllm: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._device = torch.device("cpu")
        self._with_transfer = False
        self._has_weights = False
        self._asleep: set[str] = set()
        self._requests = 0
        self._adapter: Any = None
        self._adapters = 0

    # ---- weights -----------------------------------------------------------------------------------------------------

    def holds(self, version: int) -> bool:
        """Whether vLLM has the weights of this version, so that none need be handed over."""
        return self._has_weights and self.weight_version == version

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Hand weights over to vLLM, which starts at the first call (a collective call of all processes then).

        Args:
            weights: Whole tensors by the names of the model's parameters, tied ones once; not read where vLLM holds
                this version.
            version: Their version.

        Raises:
            ValueError: There are no weights, but vLLM does not hold this version.
            RuntimeError: vLLM did not take them.
        """
        woken = self._wake("weights")
        if self.holds(version):
            if woken:  # what its prefix cache pointed to is gone
                reset_prefix_cache(self._vllm)
            return
        plain, adapter = split_adapter({name: tensor.detach() for name, tensor in weights})
        if not plain:
            raise ValueError(
                f"VLLMEngine holds {self._held()}, got no weights for version {version}; vLLM has weights of its own, "
                "so pass all of the model's."
            )
        if adapter and self.options.lora == "merged":
            raise ValueError(
                f"VLLMEngine got an adapter ({next(iter(adapter))!r}); merge it into the weights, or build the engine "
                "with options={'lora': 'adapter'}."
            )
        self._has_weights = False  # until all are in
        if self._vllm is None:
            self._start(plain, adapter)
        if self.options.lora == "merged":
            pairs = checkpoint_weights(self.model, plain)
            push_weights(self._vllm, pairs.items(), self._with_transfer)
        else:
            self._adapters += 1
            folder = Path(self._folder_name()) / "adapter"
            self._adapter = push_adapter(self._vllm, adapter, self._adapters, folder)
        mark_version(self._vllm, version)
        self.weight_version, self._has_weights = version, True

    def forget_weights(self) -> None:
        """Have the next ``load_weights`` hand over everything, whatever its version."""
        self._has_weights = False
        if self.options.lora == "adapter":
            self.close()  # the weights below the adapter are read when vLLM starts

    def release(self) -> None:
        """Let vLLM sleep, which frees its memory on CUDA as ``VLLMOptions.sleep_level`` says. No-op on the CPU."""
        level = self.options.sleep_level
        sleeps = self._asleep == {"weights", "kv_cache"}
        if self._vllm is None or sleeps or level == 0 or self._device.type == "cpu":
            return
        self._wake("kv_cache")  # nothing was generated since the weights came: vLLM cannot sleep by halves
        before, _ = torch.cuda.mem_get_info(self._device)
        self._vllm.sleep(level)
        self._asleep = {"weights", "kv_cache"}
        self._has_weights = self._has_weights and level == 1
        freed = torch.cuda.mem_get_info(self._device)[0] - before
        cache = self._vllm.vllm_config.cache_config.kv_cache_memory_bytes
        if freed < cache // 2:
            warnings.warn(
                f"VLLMEngine: sleeping freed {freed / 2**30:.2f} GiB, but the key-value cache alone has "
                f"{cache / 2**30:.2f} GiB; training will miss that memory.",
                stacklevel=2,
            )

    def close(self) -> None:
        """End vLLM in this process; the next ``load_weights`` starts it again."""
        engine, self._vllm = self._vllm, None
        self._has_weights, self._asleep, self._adapter, self._adapters = False, set(), None, 0
        if engine is not None:
            engine.engine_core.shutdown()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _held(self) -> str:
        return f"version {self.weight_version} of the weights" if self._has_weights else "no weights"

    def _wake(self, what: str) -> bool:
        """Give vLLM back the memory that sleep took: for the weights before they come, for the cache when needed."""
        if what not in self._asleep:
            return False
        self._vllm.wake_up([what])
        self._asleep.discard(what)
        return True

    def _folder_name(self) -> str:
        """A folder for what vLLM reads from disk, until the engine is closed."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="lightning_verl-vllm-")
        return self._folder.name

    def _start(self, weights: dict[str, Tensor], adapter: dict[str, Tensor]) -> None:
        """Start vLLM with random weights of the model's shapes; with an adapter, with the weights below it."""
        first = next(tensor for tensor in weights.values() if tensor.is_floating_point())
        with process_kept():
            from vllm import EngineArgs, LLMEngine
            from vllm.distributed import parallel_state

            spare_process_group(parallel_state)
            transfer = transfer_config()
            folder = self._folder_name()
            config = deepcopy(self.model.config)
            config.architectures = [type(self.model).__name__]
            config.save_pretrained(folder)
            ranks = len(self.tensor_lines[0]) if self.tensor_lines else 1
            arguments = engine_arguments(folder, config, self.options, first.dtype, first.device)
            arguments["kv_cache_memory_bytes"] = cache_bytes(config, self.options, first.dtype, ranks)
            arguments["tensor_parallel_size"] = ranks
            if self.options.lora == "adapter":
                tensors = checkpoint_weights(self.model, weights)
                save_file(
                    {name: tensor.contiguous() for name, tensor in tensors.items()}, f"{folder}/model.safetensors"
                )
                arguments.update(adapter_arguments(adapter))
            elif transfer is not None:
                arguments["weight_transfer_config"] = transfer
            with ExitStack() as several:
                if dist.is_initialized() and dist.get_world_size() > 1:
                    arguments["distributed_executor_backend"] = "external_launcher"
                    several.enter_context(own_shared_memory())
                    # Ascending in a line, because torch 2.11 sorts the ranks of a group; whole weights fit any order.
                    order = [rank for line in self.tensor_lines or () for rank in sorted(line)]
                    if order:
                        several.enter_context(groups_of_ranks(parallel_state, order))
                self._vllm = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._device, self._with_transfer = first.device, transfer is not None

    # ---- generation --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptBatch | Sequence[Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        step: int = 0,
        prompt_indices: Sequence[int] | None = None,
    ) -> Rollouts:
        """Sample ``sampling.n`` responses for each prompt; see :class:`~lightning_verl.rollout.base.RolloutEngine`.

        Args:
            prompts: A prompt batch, or plain lists of token ids.
            sampling: How to sample; None takes ``SamplingParams()``.
            step: The training step.
            prompt_indices: The index of each prompt; None takes ``PromptBatch.indices``, or 0, 1, 2... for plain lists.

        Returns:
            The responses, on the device of the weights; at least one column wide.

        Raises:
            ValueError: A prompt is empty, has a token out of the vocabulary or leaves too little room for
                ``max_new_tokens``, the indices do not match the prompts, there are stop strings but no tokenizer, or
                vLLM samples otherwise than asked.
            RuntimeError: vLLM has no weights, or others than those of ``weight_version``.
        """
        sampling = sampling or SamplingParams()
        name = type(self).__name__
        rows = token_lists(name, prompts)
        rule = StopRule(sampling, self.eos_token_ids, self.tokenizer)
        check_sampling(sampling)
        indices = indices_of(name, prompts, prompt_indices)
        check_lengths(name, SimpleNamespace(max_model_len=self._longest), rows, sampling, "max_model_len")
        check_tokens(name, self.model.config, rows)
        self._check_weights()
        self._wake("kv_cache")
        seeds = sample_seeds(sampling.seed, step, indices, sampling.n).tolist()
        responses = [_Response(rows[number // sampling.n], seed) for number, seed in enumerate(seeds)]
        with torch_random_kept():
            self._run(responses, sampling, rule)
        return self._collect(responses, rule, sampling.n)

    def _check_weights(self) -> None:
        if not self._has_weights:
            raise RuntimeError(
                "VLLMEngine.generate: vLLM has no weights: none were loaded, or it sleeps without them, or the last "
                "load_weights failed. Generate inside `with strategy.rollout(actor) as engine`, or call load_weights."
            )
        others = held_versions(self._vllm) - {str(self.weight_version)}
        if others:
            raise RuntimeError(
                f"VLLMEngine.generate: vLLM holds version {min(others)!r} of the weights, but version "
                f"{self.weight_version} was loaded last; nothing else may update vLLM's weights."
            )

    def _run(self, responses: Sequence[_Response], sampling: SamplingParams, rule: StopRule) -> None:
        """Let vLLM produce the responses; if it cannot, it is left without requests."""
        from vllm import SamplingParams as RequestParams
        from vllm.sampling_params import RequestOutputKind

        stops = bool(sampling.stop_strings)  # then each token must be seen, else the whole response at its end
        kind = RequestOutputKind.DELTA if stops else RequestOutputKind.FINAL_ONLY
        vocabulary = self.model.config.get_text_config().vocab_size
        options = request_options(sampling, self.eos_token_ids, vocabulary)
        running: dict[str, _Response] = {}
        try:
            for response in responses:
                self._requests += 1
                name = f"response-{self._requests}"
                running[name] = response
                params = RequestParams(**options, seed=request_seed(response.seed), output_kind=kind)
                self._vllm.add_request(name, {"prompt_token_ids": response.prompt}, params, lora_request=self._adapter)
            while running:
                for output in self._vllm.step():
                    self._take(output, running, rule if stops else None)
                if running and not self._vllm.has_unfinished_requests():
                    raise RuntimeError(
                        f"VLLMEngine.generate: vLLM dropped {len(running)} of {len(responses)} requests."
                    )
        except BaseException:
            self._recover(list(running))
            raise

    def _take(self, output: Any, running: dict[str, _Response], rule: StopRule | None) -> None:
        """Take what one request has produced, and end it where a stop string is complete."""
        name = output.request_id
        if name not in running:  # ended here, but vLLM had a token under way
            return
        response, ended = running[name], output.finished
        completion = output.outputs[0]
        for token, logprobs in zip(completion.token_ids, completion.logprobs or (), strict=True):
            response.tokens.append(token)
            response.logprobs.append(logprobs[token].logprob)
            if rule is not None and rule.reason(response.tokens) is not None:
                if not output.finished:
                    self._vllm.abort_request([name])
                ended = True
                break
        if ended:
            del running[name]

    def _recover(self, names: list[str]) -> None:
        """After an error or an interrupt: take vLLM's requests away, or end vLLM where that fails too."""
        try:
            self._vllm.abort_request(names)
            self._vllm.collective_rpc(_forget_half_a_step)
            while self._vllm.has_unfinished_requests():
                self._vllm.step()
            reset_prefix_cache(self._vllm)  # blocks of the interrupted step were entered, but perhaps never computed
        except Exception as error:  # the engine is usable again once weights are loaded, which starts a new vLLM
            warnings.warn(f"VLLMEngine: vLLM could not go on after an error ({error}); it is ended.", stacklevel=2)
            with suppress(Exception):
                self.close()

    def _collect(self, responses: Sequence[_Response], rule: StopRule, n: int) -> Rollouts:
        reasons = []
        for response in responses:
            reason = rule.reason(response.tokens) if response.tokens else None
            if reason is None:
                raise RuntimeError(
                    f"VLLMEngine.generate: vLLM ended a response after {len(response.tokens)} tokens, without an end "
                    "token or stop string and before max_new_tokens."
                )
            reasons.append(reason)
        count = len(responses)
        width = max((len(response.tokens) for response in responses), default=1)
        ids = torch.full((count, width), self.pad_token_id, dtype=torch.int64)
        logprobs = torch.zeros(count, width)
        for row, response in enumerate(responses):
            ids[row, : len(response.tokens)] = torch.tensor(response.tokens)
            logprobs[row, : len(response.tokens)] = torch.tensor(response.logprobs)
        lengths = torch.tensor([len(response.tokens) for response in responses], dtype=torch.int64)
        return Rollouts(
            response_ids=ids.to(self._device),
            lengths=lengths.to(self._device),
            logprobs=logprobs.to(self._device),
            finish_reasons=reasons,
            prompt_rows=torch.arange(count, device=self._device) // n,
            weight_version=self.weight_version,
        )


class _Response:
    """A response in the making."""

    def __init__(self, prompt: list[int], seed: int) -> None:
        self.prompt = prompt
        self.seed = seed
        self.tokens: list[int] = []
        self.logprobs: list[float] = []


def _forget_half_a_step(worker: Any) -> None:
    """Runs on the worker: a step computed its logits but did not sample from them, and the next would refuse to run."""
    if hasattr(worker.model_runner, "execute_model_state"):
        worker.model_runner.execute_model_state = None
