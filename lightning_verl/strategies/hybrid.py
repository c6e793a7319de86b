"""``HybridStrategy``: the mesh, every role's layout, its groups, and its set-up, as a strategy of Lightning Fabric."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import ModelParallelStrategy
from lightning.fabric.utilities.types import _PATH
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh
from torch.distributed.fsdp import OffloadPolicy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_verl.models.compat import check_versions
from lightning_verl.parallel.checkpointing import ActivationCheckpointing
from lightning_verl.parallel.expert import ExpertAxes, check_experts, cut_experts, shard_experts
from lightning_verl.parallel.fsdp import apply_fsdp, reshard
from lightning_verl.parallel.layers import prepare_layers
from lightning_verl.parallel.tensor import apply_tensor_parallel, models_to_cut
from lightning_verl.pipeline.order import PipelineSchedule
from lightning_verl.pipeline.stages import StagedRole
from lightning_verl.resharding.buckets import BUCKET_BYTES
from lightning_verl.resharding.executor import ReshardReport
from lightning_verl.resharding.layouts import mesh_of
from lightning_verl.strategies import checkpoint
from lightning_verl.strategies.cache import KVDtype
from lightning_verl.strategies.clipping import clip_by_true_norm
from lightning_verl.strategies.codes import check_codes, expand_to, to_meta
from lightning_verl.strategies.gradient_sync import SyncControl
from lightning_verl.strategies.groups import DEFAULT_TIMEOUT, GroupRegistry, leave_groups_at_exit, operations_of
from lightning_verl.strategies.hosted import check_hosted, host_policy, warn_of_link
from lightning_verl.strategies.layout import ROLES, RoleLayout, check_config, check_names, is_trainable, resolve_layouts
from lightning_verl.strategies.mesh import DeviceMesh
from lightning_verl.strategies.meshes import make_role_mesh
from lightning_verl.strategies.offload import OffloadReport
from lightning_verl.strategies.precision import HybridPrecision
from lightning_verl.strategies.rollouts import Rollouts
from lightning_verl.strategies.staging import Staging, move_buffers
from lightning_verl.strategies.watchdog import NCCLMonitor, PhaseBoard


class HybridStrategy(ModelParallelStrategy):
    """Train and roll out the roles of RL post-training, each with its own layout, on one mesh of ranks.

    Works on CPU and CUDA with 1 to N processes. One CPU process without mixed precision needs no process group.

    Args:
        mesh_shape: Ranks of the axes (data, tensor, pipeline, expert), or a ``DeviceMesh``. None: data = world.
        parallelism_config: Sizes of single roles, such as ``{"actor": {"dp": 2, "tp": 2}}``; keys ``dp`` (shards),
            ``tp``, ``pp`` (layers), ``ep`` (experts), ``replicate`` (copies that fill the mesh), ``ranks`` (those of
            its own outside of the mesh; not for the actor). A role that is left out takes the mesh's numbers.
        hybrid_engine_config: ``rollout_tp``, the ranks that cut the actor while it generates (None: the actor's
            ``tp``); ``update_dp``, which must agree with the actor's entry; ``offload_to_cpu``, to keep optimizer
            states and gradients in host memory during rollouts.
        enable_3d_hybrid: Whether the actor generates in a layout of its own; else weights are gathered in the update's.
        pipeline_schedule: The order of micro-batches in a pipeline: ``"1f1b"``, ``"interleaved"`` or ``"gpipe"``.
        reshard_bucket_bytes: Most bytes of a resharding's bucket in buffers on a rank; two are in flight.
        activation_checkpointing: ``"selective"``, ``"full"``, module-name suffixes or None; a role's own wins.
        kv_cache_dtype: What the native engine keeps keys and values as, ``"auto"``, ``"bfloat16"`` or ``"fp8"``, and
        offload_kvcache: whether samples that step back leave theirs in host memory; the actor's own options win.
        activation_offload: Hold what decoder layers keep for their backward pass in host memory until then.
        compile_layers: Whether decoder layers run compiled while they train and score; None: on CUDA.
        defer_gradient_sync: Reduce gradients once a mini-batch: less traffic, for one whole fp32 copy of them.
        offload_parameters: Keep parameters, gradients and optimizer states in host memory, and step there (CUDA only).
        timeout: Longest time of a collective.
        process_group_backend: "nccl" or "gloo"; None takes the device's.

    Raises:
        ValueError: Sizes, names or options that cannot hold; before any process is launched.
        ImportError: A version of torch or transformers that is not supported.
    """

    def __init__(
        self,
        mesh_shape: DeviceMesh | Sequence[int] | None = None,
        parallelism_config: Mapping[str, Mapping[str, Any]] | None = None,
        hybrid_engine_config: Mapping[str, Any] | None = None,
        *,
        enable_3d_hybrid: bool = True,
        pipeline_schedule: PipelineSchedule = "1f1b",
        reshard_bucket_bytes: int = BUCKET_BYTES,
        activation_checkpointing: ActivationCheckpointing = None,
        kv_cache_dtype: KVDtype = "auto",
        offload_kvcache: bool = False,
        activation_offload: bool = False,
        compile_layers: bool | None = None,
        defer_gradient_sync: bool = False,
        offload_parameters: bool = False,
        timeout: timedelta = DEFAULT_TIMEOUT,
        process_group_backend: str | None = None,
    ) -> None:
        check_versions()
        super().__init__(
            parallelize_fn=lambda module, mesh: module, process_group_backend=process_group_backend, timeout=timeout
        )
        self.mesh = None if mesh_shape is None else DeviceMesh.of(mesh_shape)
        self.timeout = timeout
        self.activation_checkpointing = activation_checkpointing
        self.activation_offload = activation_offload
        self.compile_layers = compile_layers
        self.defer_gradient_sync = defer_gradient_sync
        self.offload_parameters = offload_parameters
        self._host_policy: OffloadPolicy | None = None
        self.enable_3d_hybrid = enable_3d_hybrid
        self.reshard_bucket_bytes = reshard_bucket_bytes
        self._config = dict(parallelism_config or {})
        self._engine_config = dict(hybrid_engine_config or {})
        check_config(self._config, self._engine_config, enable_3d_hybrid, offload_parameters)
        self._layouts: dict[str, RoleLayout] | None = None
        self._groups = GroupRegistry(timeout, process_group_backend)
        self._meshes: dict[str, TorchDeviceMesh] = {}
        self._expert_axes: dict[str, ExpertAxes | None] = {}
        self.pipeline_schedule: PipelineSchedule = pipeline_schedule
        self._staging = Staging(self)
        self._roles: dict[str, nn.Module] = {}
        self._rollouts = Rollouts(self, self._engine_config, kv_cache_dtype, offload_kvcache)
        self._role_of_parameter: dict[int, str] = {}
        self._versions: dict[str, int] = {}
        self._backward_sync_control = SyncControl()
        self._board = PhaseBoard(self)
        self._monitor: NCCLMonitor | None = None

    # ---- environment -------------------------------------------------------------------------------------------------

    @property
    @override
    def root_device(self) -> torch.device:
        # Under torchrun every CPU process sees one device, whatever its local rank.
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[0] if devices[0].type == "cpu" else devices[self.local_rank]

    @override
    def _configure_launcher(self) -> None:
        """Check the rank arithmetic before any process is started, then let Fabric start them."""
        environment = self.cluster_environment
        external = environment is not None and environment.creates_processes_externally
        self._resolve(environment.world_size() if external and environment else self.num_nodes * self.num_processes)
        if self.num_nodes * self.num_processes > 1:
            super()._configure_launcher()

    @property
    def is_distributed(self) -> bool:
        """Whether there is a world of processes: several ranks, CUDA, or mixed precision (FSDP2 does the casts)."""
        return self.world_size > 1 or self.root_device.type == "cuda" or self.hybrid_precision.needs_policy

    @override
    def setup_environment(self) -> None:
        self._resolve(self.world_size)
        self._host_policy = host_policy(self.root_device) if self.offload_parameters else None
        if self.accelerator is not None:
            self.accelerator.setup_device(self.root_device)
        if self.world_size > 1:
            self._setup_distributed()
            if self._board.on_nccl and self._monitor is None:
                self._monitor = NCCLMonitor(self._board)
                self._monitor.start()
        elif self.is_distributed and not dist.is_initialized():
            backend = self._get_process_group_backend()
            device_id = self.root_device if self.root_device.type == "cuda" else None
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=device_id)
        leave_groups_at_exit()

    def _resolve(self, world_size: int) -> None:
        host = int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or self.num_processes  # torchrun says, or Fabric started them
        self._layouts = resolve_layouts(world_size, self.mesh, self._config, self._engine_config, host)
        self._staging.check(self._layouts)

    @property
    @override
    def device_mesh(self) -> TorchDeviceMesh:
        """The actor's mesh of (replicate, shard, tensor) ranks. RuntimeError without a process group."""
        if not dist.is_initialized():
            raise RuntimeError("HybridStrategy.device_mesh exists after fabric.launch(); one CPU process has none.")
        return self.role_mesh("actor")

    # Fabric sets and reads the precision through this property, so it is where ours takes the place of its own.
    @property
    def precision(self) -> Precision:
        """The precision plugin, always a ``HybridPrecision``."""
        return self.hybrid_precision

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        if precision is not None and not isinstance(precision, HybridPrecision):
            precision = HybridPrecision(precision.precision)
        self._precision = precision

    @property
    def hybrid_precision(self) -> HybridPrecision:
        """The precision plugin, typed."""
        if self._precision is None:
            self._precision = HybridPrecision()
        return self._precision  # type: ignore[return-value]

    # ---- layouts and groups ------------------------------------------------------------------------------------------

    def layout(self, role: str) -> RoleLayout:
        """The layout of a role, or of the actor while it generates (``"rollout"``).

        Raises:
            RuntimeError: The strategy is not part of a Fabric yet, so the number of ranks is not known.
            ValueError: An unknown role.
        """
        check_names(type(self).__name__, [role], (*ROLES, "rollout"), "role")
        if self._layouts is None:
            raise RuntimeError("HybridStrategy.layout needs the number of ranks: pass the strategy to Fabric first.")
        return self._layouts[role]

    def data_rank(self, role: str) -> int:
        """This rank's data coordinate in a role: which rows it holds."""
        return self.layout(role).data_rank(self.global_rank)

    def tensor_rank(self, role: str) -> int:
        """This rank's tensor coordinate in a role; 0 speaks for the ranks that share its rows."""
        return self.layout(role).tensor_rank(self.global_rank)

    def group(self, role: str, operation: str) -> dist.ProcessGroup | None:
        """The group of a role's operation (see ``groups.OPERATIONS``); None without groups, and without the role."""
        return self._groups.get(self.layout(role), operation) if dist.is_initialized() else None

    def set_group(self, role: str, operation: str, group: dist.ProcessGroup | None) -> None:
        """Put a group in place for a role's operation, before the role is set up; ranks without the role give None.

        Raises:
            RuntimeError: The role is set up already.
            ValueError: The group's ranks do not fit.
        """
        if role in self._roles:
            raise RuntimeError(f"HybridStrategy.set_group: role {role!r} is set up already; set groups before that.")
        self._groups.put(self.layout(role), operation, group)

    def has_group(self, role: str, operation: str) -> bool:
        """Whether a group was put in place for a role's operation."""
        return self._groups.has(role, operation)

    def phase(self, role: str, name: str) -> AbstractContextManager[None]:
        """A context for what a role does together; where a collective in it fails, the error names the missing ranks.

        Args:
            role: Whose phase, or several roles' in words.
            name: What they do, such as ``"update"``.
        """
        return self._board.phase(role, name)

    def role_mesh(self, role: str) -> TorchDeviceMesh:
        """The torch mesh of a role: axes ``<role>_replicate``, ``<role>_shard``, ``<role>_tensor``.

        Names are a role's own because torch takes meshes with equal ranks and names for the same mesh, and would run
        one role's collectives on another role's groups.
        """
        if role not in self._meshes:
            layout = self.layout(role)
            layout.data_rank(self.global_rank)  # an error where the rank has no part of the role
            self._meshes[role], self._expert_axes[role] = make_role_mesh(
                layout, layout.stage(self.global_rank), self._groups, self.root_device.type
            )
        return self._meshes[role]

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        layout = self.layout("actor")
        return {"num_replicas": layout.data_size, "rank": layout.data_rank(self.global_rank)}

    @override
    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        return self._staging.building(super().module_init_context(empty_init))

    # ---- set-up of roles ---------------------------------------------------------------------------------------------

    def assign_role(self, module: nn.Module, role: str) -> nn.Module:
        """Give a plain module a role and return it."""
        check_names(f"{type(self).__name__}.assign_role", [role], ROLES, "role")
        module.role = role  # type: ignore[assignment]
        return module

    def role_of(self, module: nn.Module) -> str:
        """The role of a module.

        Raises:
            ValueError: It has none, or an unknown one.
        """
        role = getattr(module, "role", None)
        if not isinstance(role, str):
            raise ValueError(
                f"HybridStrategy cannot tell the role of {type(module).__name__}: set a class attribute role, one of "
                f"{ROLES}, or call strategy.assign_role(module, role)."
            )
        check_names(type(module).__name__, [role], ROLES, "role")
        return role

    @override
    def setup_module(self, module: nn.Module) -> nn.Module:
        role = self.role_of(module)
        if role == "actor":
            self._rollouts.admit(module)
        if self.offload_parameters:
            check_hosted(self.layout(role))
        if not is_trainable(module, role):
            module.requires_grad_(False)
        if dist.is_initialized():
            for operation in operations_of(role, self.layout(role)):  # now, while all ranks are here
                self.group(role, operation)
            if role == "actor":
                for operation in ("tensor", "expert") if self.layout(role).expert > 1 else ("tensor",):
                    self.group("rollout", operation)
        if not self.layout(role).holds(self.global_rank):
            to_meta(module)  # known here by name and shape, without memory
        elif next(module.parameters(), None) is not None:
            with self.phase(role, "set-up"):
                self._parallelize(module, role)
        self._roles[role] = module
        self._versions.setdefault(role, 0)
        self._role_of_parameter.update((id(parameter), role) for parameter in module.parameters())
        return module

    def _parallelize(self, module: nn.Module, role: str) -> None:
        layout = self.layout(role)
        check_experts(module, layout.expert, layout.tensor, layout.shards)
        models = models_to_cut(module, layout.tensor)
        check_codes(module, layout)
        self.hybrid_precision.convert_module(module)
        expand_to(module, self.hybrid_precision.compute_dtype)
        if layout.pipeline == 1:
            module.to(self.root_device)
        else:
            move_buffers(module, self.root_device)
        if role == "actor" and self.enable_3d_hybrid:
            self._rollouts.prepare(module)
        self._staging.cut(module, role)
        options = self.activation_checkpointing, self.compile_layers, self.activation_offload
        if not dist.is_initialized():
            prepare_layers(module, *options)
            return
        mesh, reduce = self.role_mesh(role), self._groups.get(layout, "reduce")
        self._staging.copy_weights(module, role)
        for model in models:
            apply_tensor_parallel(model, mesh[f"{role}_tensor"])
        cut_experts(module, self._expert_axes[role])
        prepare_layers(module, *options)
        cut = layout.data_size > 1 or self.hybrid_precision.needs_policy or self._host_policy is not None
        if cut and reduce is not None:
            axes = (f"{role}_replicate", f"{role}_shard") if layout.replicas > 1 else (f"{role}_shard",)
            dims = self._rollouts.aligned_dims() if role == "actor" else {}
            policy = self.hybrid_precision.policy()
            shard_experts(module, self._expert_axes[role], policy)
            apply_fsdp(module, mesh[axes], policy, reduce, dims, self._host_policy)
            if self._host_policy is not None and self.global_rank == layout.ranks[0]:
                warn_of_link(module, role)

    @override
    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Set up a role and point its optimizers, made before, at the parameters that sharding put in place."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        module = self.setup_module(module)
        sharded = dict(module.named_parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [sharded[names[id(p)]] if id(p) in names else p for p in group["params"]]
                if group.get("fused") and len({mesh_of(parameter) for parameter in group["params"]}) > 1:
                    group["fused"] = False  # torch's fused update takes the parameters of one mesh only
        return module, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    @override
    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self.role_of_optimizer(optimizer)
        self._rollouts.add_optimizer(optimizer)
        return optimizer

    def role_of_optimizer(self, optimizer: Optimizer) -> str:
        """The one role whose parameters an optimizer holds.

        Raises:
            ValueError: It holds parameters of several roles, or of none that is set up.
        """
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        roles = {self._role_of_parameter.get(id(parameter)) for parameter in parameters}
        role = roles.pop() if len(roles) == 1 else None
        if role is None:
            raise ValueError(
                "HybridStrategy: an optimizer takes the parameters of one role that is set up, got those of "
                f"{roles or None} (None: a module not set up, or parameters taken before sharding). Set the role up "
                "first, or both together with fabric.setup(module, optimizer)."
            )
        return role

    def staged(self, role: str) -> StagedRole | None:
        """The stages of a role that this rank holds; None where its layers are not divided."""
        return self._staging.of(role)

    # ---- training ----------------------------------------------------------------------------------------------------

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        role = self.role_of_optimizer(optimizer)
        self._rollouts.wait_for_states()
        result = super().optimizer_step(optimizer, **kwargs)
        self._versions[role] += 1
        return result

    @override
    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        stages, uncounted = self._staging.counted_once(self.role_of_optimizer(optimizer))
        return clip_by_true_norm(
            parameters, float(max_norm), float(norm_type), error_if_nonfinite, stages=stages, uncounted=uncounted
        )

    # ---- rollout and update ------------------------------------------------------------------------------------------

    def weight_version(self, role: str) -> int:
        """How many optimizer steps a role has taken since set-up (or since what a checkpoint said)."""
        return self._versions.get(role, 0)

    def rollout(self, actor: nn.Module) -> AbstractContextManager[Any]:
        """Hold the actor in its rollout layout and lend its engine, which may generate inside only (a collective call).

        Args:
            actor: The actor, set up; as Fabric returned it or the module itself.
        """
        return self._rollouts.open(getattr(actor, "module", actor))

    @property
    def reshard_report(self) -> ReshardReport | None:
        """What the last resharding cost on this rank; None before the first, and without the 3D hybrid engine."""
        return self._rollouts.reshard_report

    @property
    def offload_report(self) -> OffloadReport | None:
        """What the last trip of the optimizer states to the host cost on this rank; None without one."""
        return self._rollouts.offload_report

    @contextmanager
    def update(self, actor: nn.Module) -> Iterator[nn.Module]:
        """Hold the actor in its update layout and yield it."""
        reshard(getattr(actor, "module", actor))
        yield actor

    # ---- checkpoint --------------------------------------------------------------------------------------------------

    @override
    def save_checkpoint(
        self,
        path: _PATH,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save any number of roles and optimizers to one directory; see ``strategies.checkpoint``."""
        if storage_options is not None or filter is not None:
            raise TypeError("HybridStrategy.save_checkpoint takes neither storage_options nor filter; leave them out.")
        self._rollouts.wait_for_states()
        held = {role: self._versions[role] for role in self._roles if self.layout(role).holds(self.global_rank)}
        versions = checkpoint.join_over_ranks(held)
        with self.phase("all roles", "save"):
            checkpoint.save(Path(self.broadcast(path)), {**state, "weight_versions": versions}, self.role_of_optimizer)

    @override
    def load_checkpoint(
        self, path: _PATH, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a directory that ``save_checkpoint`` wrote, on any layout, and return what ``state`` lacks."""
        if not isinstance(state, dict) or not state:
            raise ValueError(
                f"HybridStrategy.load_checkpoint got state={type(state).__name__}; pass a dictionary with the names "
                "used at saving, such as {'actor': actor}."
            )
        self._rollouts.wait_for_states()
        with self.phase("all roles", "load"):
            rest = checkpoint.load(Path(self.broadcast(path)), state, self.role_of_optimizer, strict)
        self._versions.update(rest.pop("weight_versions", {}))
        self._rollouts.weights_replaced()
        return rest

    @override
    def teardown(self) -> None:
        """Leave the process group. Fabric itself never calls this; scripts that end their process need not either."""
        if self._monitor is not None:
            self._monitor.stop()
        if dist.is_initialized():
            dist.destroy_process_group()
