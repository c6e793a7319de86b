"""Lends the actor's engine for a rollout: weights come before, optimizer states leave for it, and all is put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from lightning_verl.parallel.expert import expert_modules
from lightning_verl.parallel.fsdp import gathered, reshard
from lightning_verl.resharding.executor import ReshardReport
from lightning_verl.strategies.cache import KVDtype, check_cache, engine_options
from lightning_verl.strategies.engine import HybridEngine, RolloutWeights
from lightning_verl.strategies.offload import OffloadReport, StateOffload

if TYPE_CHECKING:
    from lightning_verl.strategies.hybrid import HybridStrategy


class LentEngine:
    """A rollout engine while its weights are in place. It refuses to generate with others, or once it was taken back.

    Everything else is the engine's own.

    Args:
        engine: Any ``RolloutEngine``.
        version: Tells the version of the trained weights now.
    """

    def __init__(self, engine: Any, version: Callable[[], int]) -> None:
        self._engine, self._version, self._lent = engine, version, True

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """What ``RolloutEngine.generate`` does.

        Raises:
            RuntimeError: The rollout is over, or the weights were trained since it began.
        """
        name = type(self._engine).__name__
        if not self._lent:
            raise RuntimeError(
                f"{name}.generate was called after its rollout: the weights are gone. Call it inside "
                "`with strategy.rollout(actor) as engine`."
            )
        held, trained = self._engine.weight_version, self._version()
        if held != trained:
            raise RuntimeError(
                f"{name}.generate holds version {held} of the weights, but the actor is at version {trained}: it was "
                "trained during the rollout. Leave the context before the update and enter it again."
            )
        return self._engine.generate(*args, **kwargs)

    def take_back(self) -> None:
        """End the loan."""
        self._lent = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Rollouts:
    """What a strategy needs for the rollouts of its actor.

    Args:
        strategy: Knows layouts, groups and weight versions.
        config: The strategy's ``hybrid_engine_config``: whether optimizer states and gradients wait in host memory.
        kv_cache_dtype: What the actor's engine keeps keys and values as, unless the actor says so itself.
        offload_kvcache: Whether it keeps those of samples that step back in host memory, unless the actor says so.

    Raises:
        ValueError: There is no such ``kv_cache_dtype`` or ``offload_kvcache``.
    """

    def __init__(
        self, strategy: HybridStrategy, config: Mapping[str, Any], kv_cache_dtype: KVDtype, offload_kvcache: bool
    ) -> None:
        check_cache(type(strategy).__name__, kv_cache_dtype, offload_kvcache)
        self._strategy = strategy
        self._offloads = bool(config.get("offload_to_cpu"))
        self._engine_options = engine_options(kv_cache_dtype, offload_kvcache)
        self._optimizers: list[Optimizer] = []
        self._engine: HybridEngine | None = None
        self._offload: StateOffload | None = None
        self._replaced = False

    @property
    def reshard_report(self) -> ReshardReport | None:
        """What the last resharding cost."""
        return None if self._engine is None else self._engine.report

    @property
    def offload_report(self) -> OffloadReport | None:
        """What the last trip of the optimizer states cost."""
        return None if self._offload is None else self._offload.report

    def prepare(self, actor: Any) -> None:
        """Give an actor that can generate with another module than its own a rollout module; before it is cut."""
        if hasattr(actor, "generate_with"):
            weights: RolloutWeights = getattr(actor, "rollout_weights", "shared")
            self._engine = HybridEngine(self._strategy, actor.model, self._strategy.reshard_bucket_bytes, weights)
            actor.generate_with(self._engine.module)

    def admit(self, actor: Any) -> None:
        """Tell the actor's engine what the strategy says of its cache, before anything of it is set up.

        Every rank does, also those without the actor, so that all of them refuse what cannot be.

        Raises:
            ValueError: The engine has no such cache; or it has weights of its own, and they cannot be handed over.
        """
        self._hand_options_on(actor)
        self._check_handover(actor)

    def _hand_options_on(self, actor: Any) -> None:
        take = getattr(actor, "take_engine_options", None)
        if take is not None:
            take(self._engine_options)
        elif self._engine_options:
            raise ValueError(
                f"HybridStrategy got {self._engine_options} for the actor's engine, but {type(actor).__name__} has "
                "no take_engine_options(options) that would hand them on; leave them out, or derive it from Actor."
            )

    def _check_handover(self, actor: Any) -> None:
        if getattr(actor, "rollout_weights", "shared") == "shared":
            return
        name = type(actor).__name__
        if not self._strategy.enable_3d_hybrid:
            raise ValueError(
                f"{name}: an engine with weights of its own takes them from the 3D hybrid engine; leave "
                "enable_3d_hybrid=False out of HybridStrategy(...), or choose engine='transformers'."
            )
        ranks, world = sorted(self._strategy.layout("rollout").ranks), self._strategy.world_size
        if ranks != list(range(world)):
            raise ValueError(
                f"{name}: vLLM starts on all {world} processes together, but the actor lies on ranks {ranks} only. "
                "Let no other role claim ranks of its own, or choose engine='transformers'."
            )

    def aligned_dims(self) -> dict[str, int]:
        """See ``HybridEngine.aligned_dims``."""
        return {} if self._engine is None else self._engine.aligned_dims()

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Have the states of an optimizer offloaded with the others."""
        self._optimizers.append(optimizer)

    @contextmanager
    def open(self, actor: nn.Module) -> Iterator[LentEngine]:
        """Lend the actor's engine with the weights as they are now (a collective call)."""
        role, engine = self._strategy.role_of(actor), actor.engine
        version = self._strategy.weight_version(role)
        reshard(actor)
        with self._states_away(), self._loaded(actor, engine, version):
            lent = LentEngine(engine, lambda: self._strategy.weight_version(role))
            try:
                yield lent
            finally:
                lent.take_back()
                engine.release()  # type: ignore[operator, union-attr]

    @contextmanager
    def _loaded(self, actor: nn.Module, engine: Any, version: int) -> Iterator[None]:
        """Have the engine ready with the weights of a version."""
        with ExitStack() as held:
            needs_weights = getattr(engine, "needs_weights", False)
            if needs_weights and self._replaced:
                engine.forget_weights()
            self._replaced = False
            if not (needs_weights and engine.holds(version)):
                held.enter_context(self._weights(actor))
            if self._offload is not None:
                self._offload.free()
            if needs_weights and self._engine is not None:
                engine.tensor_lines = self._strategy.layout("rollout").lines("tensor")
                engine.load_weights(self._engine.whole_weights(), version)
                held.close()  # the engine has a copy: ours need not wait for the end of the rollout
            else:
                engine.load_weights((), version)
                generating = "actor" if self._engine is None else "rollout"
                divided = self._strategy.layout(generating).expert > 1 and expert_modules(actor)
                engine.step_group = self._strategy.group(generating, "expert") if divided else None
                engine.tensor_group = self._strategy.group(generating, "tensor")
            yield

    def _weights(self, actor: nn.Module) -> AbstractContextManager[None]:
        return gathered(actor) if self._engine is None else self._engine.weights()

    def weights_replaced(self) -> None:
        """The trained weights were read from a checkpoint: what an engine holds of the same version may be others."""
        self._replaced = True

    def wait_for_states(self) -> None:
        """Have the optimizer states in place for what follows."""
        if self._offload is not None:
            self._offload.wait()

    @contextmanager
    def _states_away(self) -> Iterator[None]:
        if not self._offloads:
            yield
            return
        self._offload = self._offload or StateOffload(self._strategy.root_device)
        self._offload.start(self._optimizers)
        try:
            yield
        finally:
            self._offload.bring_back()
