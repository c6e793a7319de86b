"""How weights get into a running vLLM.

From 0.22 on vLLM has weight updates: start, any number of buckets, finish. They come from a transfer engine, and ours
hands over tensors of this process. A vLLM that takes no transfer engine but its own reloads all weights in one call.
Around both stands what vLLM leaves out, and what then goes wrong without a word: on the CPU experts and a head that is
tied to the embedding are packed copies of their weights, which an update does not pack anew; and the prefix cache was
made by the old weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

_BACKEND = "lightning_verl"
BUCKET_BYTES = 256 << 20
"""Bytes of weights that one call hands to vLLM, or a single tensor if that is larger."""

Pairs = Iterable[tuple[str, Tensor]]


def transfer_config() -> Any | None:
    """vLLM's config for weight updates out of this process; None where it takes none but its own transports."""
    try:
        from vllm.config import WeightTransferConfig

        config = WeightTransferConfig(backend=_BACKEND)
    except (ImportError, ValueError):  # a ValidationError of pydantic is a ValueError
        return None
    _register_transfer()
    return config


def push_weights(engine: Any, pairs: Pairs, with_transfer: bool, bucket_bytes: int = BUCKET_BYTES) -> None:
    """Put new weights into vLLM and empty its prefix cache.

    Args:
        engine: vLLM's ``LLMEngine``, without requests.
        pairs: Whole tensors by their names in the checkpoint, tied ones once.
        with_transfer: Whether the engine was made with ``transfer_config``.
        bucket_bytes: Bytes that one call hands over.

    Raises:
        RuntimeError: A parameter of vLLM's model got no weight, or the prefix cache could not be emptied.
    """
    engine.collective_rpc(_mark, args=("none",))  # until all are in
    engine.collective_rpc(_forget_packed_experts)
    if with_transfer:
        _update(engine, pairs, bucket_bytes)
    else:
        engine.collective_rpc(_reload, args=(iter(pairs),))
    engine.collective_rpc(_prepare_tied_head)
    reset_prefix_cache(engine)


def mark_version(engine: Any, version: int) -> None:
    """Note on vLLM's model, on every rank, which version its weights are, and in vLLM's own record where it has one."""
    engine.collective_rpc(_mark, args=(str(version),))
    if hasattr(engine, "set_weight_version"):
        engine.set_weight_version(str(version))


def held_versions(engine: Any) -> set[str]:
    """The versions that are noted for vLLM's weights: one, unless others put weights in; ``"none"`` without a note."""
    found = set(engine.collective_rpc(_marked))
    if hasattr(engine, "get_weight_version"):
        found.add(engine.get_weight_version())
    return found


def reset_prefix_cache(engine: Any) -> None:
    """Empty vLLM's prefix cache.

    Raises:
        RuntimeError: Requests are running, so vLLM keeps it.
    """
    if not engine.reset_prefix_cache():
        raise RuntimeError(
            "VLLMEngine: vLLM did not empty its prefix cache, because requests are running. No request may be added to "
            "vLLM outside of VLLMEngine.generate."
        )


def buckets(pairs: Pairs, most_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Cut pairs into lists of at most ``most_bytes`` bytes, in order; a larger tensor is a list of its own."""
    bucket: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in pairs:
        if bucket and size + tensor.nbytes > most_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


def _update(engine: Any, pairs: Pairs, bucket_bytes: int) -> None:
    engine.collective_rpc("start_weight_update")
    try:
        for bucket in buckets(pairs, bucket_bytes):
            names, tensors = [name for name, _ in bucket], [tensor for _, tensor in bucket]
            engine.collective_rpc("update_weights", args=({"names": names, "tensors": tensors},))
    except BaseException:
        with suppress(Exception):  # the error above is the one to show; vLLM may have ended the update by itself
            engine.collective_rpc("finish_weight_update")
        raise
    engine.collective_rpc("finish_weight_update")


def _mark(worker: Any, version: str) -> None:
    """Runs on the worker."""
    worker.model_runner.get_model().lightning_verl_version = version


def _marked(worker: Any) -> str:
    """Runs on the worker."""
    return getattr(worker.model_runner.get_model(), "lightning_verl_version", "none")


def _reload(worker: Any, pairs: Pairs) -> None:
    """Runs on the worker."""
    worker.reload_weights(weights_iterator=pairs)


def _forget_packed_experts(worker: Any) -> None:
    """Runs on the worker: let experts be packed again, as at the first load; vLLM takes an update for packed already.

    Only on the CPU: elsewhere nothing is packed, and graphs hold what the first load made.
    """
    if worker.device.type != "cpu":
        return
    for module in worker.model_runner.get_model().modules():
        method = getattr(module, "quant_method", None)
        if method is not None and hasattr(method, "moe_kernel"):
            method.moe_kernel = None


def _prepare_tied_head(worker: Any) -> None:
    """Runs on the worker: a tied head is loaded with the embedding, but what it derived from its weight is not.

    Without this it keeps giving the old logits on the CPU, and nothing says so.
    """
    model = worker.model_runner.get_model()
    if not worker.model_runner.model_config.hf_text_config.tie_word_embeddings:
        return
    for name, module in model.named_modules(remove_duplicate=False):
        if name.rpartition(".")[2] == "lm_head" and hasattr(module, "quant_method"):
            module.quant_method.process_weights_after_loading(module)


def _register_transfer() -> None:
    """Make the local transfer known to vLLM; again for a vLLM that knows it already does nothing."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with suppress(ValueError):  # registered already
        WeightTransferEngineFactory.register_engine(_BACKEND, _local_transfer(*_messages()))


def _messages() -> tuple[type, type]:
    """What is said at the start of a transfer, and what each bucket is; subclasses of vLLM's."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

    @dataclass
    class NothingToAgree(WeightTransferInitInfo):  # type: ignore[misc]
        """Both ends are this process."""

    @dataclass
    class Bucket(WeightTransferUpdateInfo):  # type: ignore[misc]
        """Weights by name."""

        names: list[str] = field(default_factory=list)
        tensors: list[Tensor] = field(default_factory=list)

    return NothingToAgree, Bucket


def _local_transfer(start: type, bucket: type) -> type:
    """The transfer engine within this process, a subclass of vLLM's.

    Args:
        start: What is said at the start of a transfer.
        bucket: What each bucket is.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    class LocalTransfer(WeightTransferEngine):  # type: ignore[misc]
        """Loads tensors that are in this process already.

        Before 0.25 vLLM's worker began and finished the layers itself and passed ``load_weights``.
        """

        init_info_cls = start
        update_info_cls = bucket

        def init_transfer_engine(self, init_info: Any) -> None:
            """There is no connection."""

        def start_weight_update(self) -> None:
            """Have layers load by themselves when they are complete."""
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            self._loaded: set[str] | None = set()
            initialize_layerwise_reload(self.model)

        def receive_weights(self, update_info: Any, load_weights: Callable[[Any], Any] | None = None) -> None:
            """Load a bucket."""
            pairs = list(zip(update_info.names, update_info.tensors, strict=True))
            if load_weights is not None:
                load_weights(pairs)
                return
            loaded = self.model.load_weights(pairs)
            self._loaded = None if loaded is None or self._loaded is None else self._loaded | set(loaded)

        def finish_weight_update(self) -> None:
            """Finish the layers, and check that each parameter got its weight."""
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)
            if self._loaded is not None:  # None: this model does not say what it has loaded
                check_complete(dict(self.model.named_parameters()), self._loaded)

        def shutdown(self) -> None:
            """There is no connection."""

        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
            """Older versions of vLLM demand it of every engine; weights come from ``push_weights`` here."""
            raise RuntimeError("VLLMEngine hands weights over within this process; no trainer sends them.")

    return LocalTransfer


def check_complete(parameters: dict[str, Any], loaded: set[str]) -> None:
    """Refuse an update that left out a parameter, which would keep its old weight.

    Raises:
        RuntimeError: It did.
    """
    missing = sorted(name.replace(".base_layer.", ".") for name in parameters)
    missing = [name for name in missing if name not in loaded and ".lora_" not in name]
    if missing:
        raise RuntimeError(
            f"VLLMEngine: {len(missing)} parameters of vLLM's model got no weight, such as {missing[:3]}: the names of "
            "the trained model are not those that vLLM expects for it, so this architecture cannot be rolled out "
            "with vLLM. Use engine='transformers'."
        )
