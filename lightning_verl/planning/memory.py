"""Bytes on one rank in each phase of a step: arithmetic over shapes, with every formula written out.

c: bytes of an element in the forward pass. T: positions of a micro-batch. h, q, k, m: widths of the residual stream, of
queries, of keys, and of the feed-forward part; q, k, m and the heads are divided by the tensor axis, h is not.

A decoder layer keeps for its backward pass, in bytes a position (exact for the gated layers of the Llama and Qwen
families; others are close)::

    (8 + 4c) h + 8                          two RMS norms: fp32 input, normalised, output
    c (2q + 2k) + 4 heads                   attention: queries, keys, values, output, log-sum-exp
    4c m                                    feed-forward: gate, its activation, up, their product
    (4 + c)(q + k) + 4 (heads + kv heads)   norms of queries and keys, where there are any

Compiled it keeps ``2c (h + q + k + m) + 4 heads + 8``, and of such norms ``c (q + k) + 4 (heads + kv heads)``.
With ``"full"`` checkpointing it keeps ``c h``, its input; with ``"selective"`` also attention and the outputs of the
matrices around it: ``2c (h + q + k) + 4 heads``; one layer at a time then has everything. A list of suffixes counts as
nothing being recomputed. Where activations are offloaded, what layers keep is in host memory but for two layers at a
time and what ``staying_per_token`` says.

FSDP2 holds the root unit (embedding, final norm, head) while the model runs, and of the layers the one that runs and,
with several shards, the one that is being gathered, in the compute dtype. In the backward pass a unit's gradients exist
whole in the compute dtype and in an fp32 buffer on their way to the shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from lightning_verl.planning.batch import BatchSizes, RoleBatch
from lightning_verl.planning.model import Decoder, ParameterShape, RoleModel
from lightning_verl.planning.shards import Placement, numel_on, received_bytes, rollout_bytes, same_grid
from lightning_verl.resharding.buckets import BUCKET_BYTES
from lightning_verl.strategies.checkpoint import LEAST_IN_BLOCKS
from lightning_verl.strategies.layout import RoleLayout

RESHARDING = "resharding"
"""The moment of a rollout at which optimizer states are still there that are kept on the host for the rest of it."""
BLOCK = 256
"""Elements that share a scale in an 8-bit moment."""
LOGIT_CHUNK = 1024
"""Tokens whose logits live at once, the default of ``logprobs_from_hidden``."""
UPDATE_LOGIT_BYTES = 16
"""Bytes for each logit of a chunk in its backward pass, entropy included, above the logit: four fp32 copies. Compiled
kernels make its gradient alone."""
SCORE_LOGIT_BYTES = 4
"""The same without gradients: an fp32 copy, and another where logits are converted or divided by a temperature.
Compiled kernels make none."""
PART_LOGIT_BYTES = {"score": 8, "update": 9}
"""The same where a tensor axis cuts the vocabulary: two fp32 copies, and in the backward pass a mask beside them."""
LAYERS_ON_DEVICE = 2
"""Layers whose activations are on the device at once where they are offloaded: waiting for their copies, or back."""
PREFILL_TOKENS = 8192
"""Tokens of prompts that the native engine computes in one step on CUDA."""
SAMPLE_BYTES = {
    "greedy": 12,
    "sampled": 24,
    "top_p": 45,
    "greedy, adjusted": 22,
    "sampled, adjusted": 29,
    "top_p, adjusted": 50,
}
"""Bytes for each logit of a row while its token is sampled, above the logit; "adjusted" where a bias, a repetition
penalty and a minimum length change it first (with one of them it may be up to 6 less)."""


@dataclass(frozen=True)
class Item:
    """Something that takes memory."""

    role: str
    """Whose it is."""
    what: str
    """What it is."""
    bytes: int
    """How much, on the rank that has the most."""


@dataclass(frozen=True)
class Moment:
    """A point of a phase at which memory may be highest."""

    name: str
    """When it is."""
    items: tuple[Item, ...]
    """What there is then, what is always there included."""

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(item.bytes for item in self.items)


@dataclass(frozen=True)
class Phase:
    """A phase of a step."""

    name: str
    """rollout, scoring, critic_update or actor_update."""
    moments: tuple[Moment, ...]
    """Its points."""

    @property
    def peak(self) -> Moment:
        """The one at which memory is highest."""
        return max(self.moments, key=lambda moment: moment.bytes)


def saved_per_token(decoder: Decoder, compute_bytes: int, tensor: int, compiled: bool = False) -> int:
    """Bytes a position that a decoder layer keeps for its backward pass, if nothing is recomputed.

    Args:
        decoder: The sizes.
        compute_bytes: Bytes of an element in the forward pass.
        tensor: Ranks of the tensor axis.
        compiled: Whether it runs compiled: it keeps its input, the input of its MLP, queries, keys, values, the
            attention's output and both halves of a gated MLP, and sums of norms and softmax; with QK-norm, queries and
            keys from before and after it.
    """
    c, q, k, m, heads, kv_heads = _widths(decoder, compute_bytes, tensor)
    if compiled:
        normed = c * (q + k) + 4 * (heads + kv_heads) if decoder.qk_norm else 0
        return 2 * c * (decoder.hidden + q + k + m) + 4 * heads + 8 + normed
    saved = (8 + 4 * c) * decoder.hidden + 8 + c * (2 * q + 2 * k) + 4 * heads + 4 * c * m
    return saved + ((4 + c) * (q + k) + 4 * (heads + kv_heads) if decoder.qk_norm else 0)


def kept_per_token(role: RoleModel, tensor: int) -> int:
    """Bytes a position that a decoder layer keeps under the role's activation checkpointing."""
    c, q, k, _, heads, _ = _widths(role.decoder, role.compute_bytes, tensor)
    if role.checkpointing == "full":
        return c * role.decoder.hidden
    if role.checkpointing == "selective":
        return 2 * c * (role.decoder.hidden + q + k) + 4 * heads
    return saved_per_token(role.decoder, role.compute_bytes, tensor, role.compiled)


def staying_per_token(role: RoleModel, tensor: int) -> int:
    """Bytes a position of what a decoder layer keeps that never go to the host; all, where nothing is offloaded.

    What goes is large tensors that autograd itself keeps. Sums of norms and softmax are small; what ``"selective"``
    keeps goes of compiled layers only, of others the input alone.
    """
    c, *_, heads, kv_heads = _widths(role.decoder, role.compute_bytes, tensor)
    if not role.offloads:
        return kept_per_token(role, tensor)
    if role.checkpointing == "full":
        return 0
    if role.checkpointing == "selective":
        return 4 * heads if role.compiled else kept_per_token(role, tensor) - c * role.decoder.hidden
    return 4 * heads + 8 + (4 * (heads + kv_heads) if role.decoder.qk_norm else 0)


def activation_bytes(role: RoleModel, tensor: int, waiting: float = 1.0) -> tuple[int, int]:
    """Bytes a position that wait for the backward pass, and bytes a position while one layer is in it.

    Args:
        role: Whose they are.
        tensor: Ranks of the tensor axis.
        waiting: Micro-batches that wait at once.
    """
    decoder, c = role.decoder, role.compute_bytes
    outside = (4 + 4 * c) * decoder.hidden  # final norm, embeddings, and the rows that predict responses
    stays = staying_per_token(role, tensor)
    comes_and_goes = min(LAYERS_ON_DEVICE, decoder.layers) * (kept_per_token(role, tensor) - stays)
    again = saved_per_token(decoder, c, tensor, role.compiled) if role.checkpointing in ("full", "selective") else 0
    whole = again + c * (2 * decoder.hidden + decoder.inner // tensor)
    return math.ceil(waiting * (decoder.layers * stays + outside)) + comes_and_goes, whole


def score_logit_bytes(role: RoleModel, tensor: int, temperature: float = 1.0) -> int:
    """Bytes for each logit of a chunk in a pass without gradients.

    Args:
        role: Whose they are.
        tensor: Ranks of the tensor axis.
        temperature: What logits are divided by; 0 counts as 1.
    """
    c = role.compute_bytes
    if role.fused:
        return c
    if tensor > 1 and role.cuts_vocabulary:
        return PART_LOGIT_BYTES["score"] + c
    return SCORE_LOGIT_BYTES * (1 if c == 4 and temperature in (0, 1) else 2) + c


def update_logit_bytes(role: RoleModel, tensor: int) -> int:
    """Bytes for each logit of a chunk in its backward pass.

    Args:
        role: Whose they are.
        tensor: Ranks of the tensor axis.
    """
    c = role.compute_bytes
    if role.fused:
        return 2 * c
    return (PART_LOGIT_BYTES["update"] if tensor > 1 and role.cuts_vocabulary else UPDATE_LOGIT_BYTES) + c


def running_per_token(decoder: Decoder, compute_bytes: int, tensor: int) -> int:
    """Bytes a position while a layer runs without gradients: ``c (4h + 3m)``."""
    return compute_bytes * (4 * decoder.hidden + 3 * -(-decoder.inner // tensor))


def _widths(decoder: Decoder, compute_bytes: int, tensor: int) -> tuple[int, int, int, int, int, int]:
    heads, kv_heads = -(-decoder.heads // tensor), -(-decoder.kv_heads // tensor)
    inner = -(-decoder.inner // tensor)
    return compute_bytes, heads * decoder.head_dim, kv_heads * decoder.head_dim, inner, heads, kv_heads


@dataclass(frozen=True)
class RoleMemory:
    """One role on its rank with the most: what it holds, and what it needs when it works."""

    model: RoleModel
    """Its shapes."""
    place: Placement
    """Where it lies."""
    batch: RoleBatch
    """Its rows."""
    adapter_is_reference: bool = False
    """Whether a copy of its adapter as it was at step 0 is the reference."""
    stage: int = 0
    """The pipeline rank that is meant."""
    waiting: float = 1.0
    """Micro-batches whose activations wait for their backward pass at once, see ``pipeline.cut.micro_batches_kept``."""

    @property
    def layout(self) -> RoleLayout:
        """Its layout in training."""
        return self.place.layout

    @cached_property
    def _rank(self) -> int:
        """A world rank of the stage: the one with the most."""
        return self.layout.stage_ranks(self.stage)[0]

    @property
    def _layers(self) -> int:
        """Layers on the rank."""
        return self.model.stage_layers[self.stage] if self.model.stage_layers else self.model.decoder.layers

    @property
    def _has_head(self) -> bool:
        """Whether logits are made on the rank."""
        return self.model.has_head and self.stage == self.layout.pipeline - 1

    # ---- held always -------------------------------------------------------------------------------------------------

    @cached_property
    def parameters(self) -> int:
        """Bytes of its shards."""
        return self._held(lambda parameter: True)

    @cached_property
    def trained(self) -> int:
        """Bytes of the trained ones among its shards; its gradients take the same."""
        return self._held(lambda parameter: parameter.trained)

    @cached_property
    def optimizer(self) -> int:
        """Bytes of AdamW's two moments."""
        return 2 * self._held(lambda parameter: parameter.trained, self._moment)

    def held(self) -> tuple[Item, ...]:
        """What it holds in every phase, from the first update on."""
        items = [self._item("parameters", self.parameters)]
        if self.trained:
            items.append(self._item("optimizer state", self.optimizer))
        if self.adapter_is_reference:
            items.append(self._item("adapter of step 0", self.trained))
        return tuple(items)

    # ---- while it works ----------------------------------------------------------------------------------------------

    def scoring(self, temperature: float = 1.0) -> dict[str, tuple[Item, ...]]:
        """The points of a pass without gradients at which memory may be highest.

        Args:
            temperature: What logits are divided by; 0 counts as 1.
        """
        decoder, tokens, c = self.model.decoder, self.batch.scoring_tokens, self.model.compute_bytes
        buffers = self._in_flight - 1
        moments = {
            # What the root was gathered into is freed only once the first layer is there.
            "gathering": (self._item("gathered units", c * self._in_flight * (self._root + buffers * self._layer)),),
            "layers": (
                self._item("gathered units", c * (self._root + self._in_flight * self._layer)),
                self._item("activations", tokens * running_per_token(decoder, c, self.layout.tensor)),
                *self._expanded(),
            ),
        }
        if self._has_head:
            logits = min(LOGIT_CHUNK, self.batch.scoring_responses) * self._tokens
            bytes_each = score_logit_bytes(self.model, self.layout.tensor, temperature)
            moments["head"] = (
                self._item("gathered units", c * (self._root + buffers * self._layer)),
                self._item("activations", self.batch.scoring_responses * 2 * c * decoder.hidden),
                self._item("logits", logits * bytes_each),
            )
        return moments

    def update(self) -> dict[str, tuple[Item, ...]]:
        """The points of an update at which memory may be highest."""
        model, batch, c = self.model, self.batch, self.model.compute_bytes
        layers, whole = self.activations()
        gradients = self._item("gradients", self.trained)
        accumulated = (gradients,) if batch.micro_batches > 1 else ()
        head_gradient = c * self._trained_head
        # The fp32 buffer of one layer meets the activations of those before it: its own are gone by then.
        own = batch.micro_batch_tokens * kept_per_token(model, self.layout.tensor)
        reduction = max(0, 4 * self._trained_layer - own)
        moments = {
            "backward of the layers": (
                *accumulated,
                self._item("gathered units", c * (self._root + self._in_flight * self._layer)),
                self._item("activations", layers + whole),
                self._item("gradients on their way", head_gradient + c * self._trained_layer + reduction),
                *self._expanded(),
            ),
            "backward of the embedding": (
                gradients,
                self._item("gathered units", c * self._root),
                self._item("gradients on their way", c * self._trained_root + head_gradient + 4 * self._trained_layer),
            ),
            "reduction of the root": (
                gradients,
                self._item(
                    "gradients on their way", (c + 4) * self._trained_root + 4 * self._trained_root // self._shards
                ),
            ),
        }
        if model.optimizer == "adamw8bit":  # parameter by parameter; fused AdamW makes nothing on the way
            moments["optimizer step"] = (gradients, self._item("AdamW's temporaries", self._moments_in_fp32))
        if self._has_head:
            chunks = 2 if batch.micro_batch_responses > LOGIT_CHUNK else 1  # a chunk's gradient beside the sum so far
            logits = min(LOGIT_CHUNK, batch.micro_batch_responses) * self._tokens
            moments["backward of the head"] = (
                *accumulated,
                self._item("gathered units", c * (self._root + (self._in_flight - 1) * self._layer)),
                self._item("activations", layers),
                self._item("logits", logits * update_logit_bytes(model, self.layout.tensor)),
                self._item("gradients on their way", chunks * head_gradient),
            )
        return moments

    def activations(self) -> tuple[int, int]:
        """Bytes that wait for the backward pass, and bytes while one layer is in it."""
        here = replace(self.model, decoder=replace(self.model.decoder, layers=self._layers))
        layers, whole = activation_bytes(here, self.layout.tensor, self.waiting)
        tokens = self.batch.micro_batch_tokens
        return tokens * layers, tokens * whole

    @property
    def on_host(self) -> int:
        """Bytes of activations that lie in host memory before the backward pass begins."""
        tensor, tokens = self.layout.tensor, math.ceil(self.waiting * self.batch.micro_batch_tokens)
        return tokens * self._layers * (kept_per_token(self.model, tensor) - staying_per_token(self.model, tensor))

    # ---- rollout -----------------------------------------------------------------------------------------------------

    def rollout(self, sizes: BatchSizes, sampling: str) -> dict[str, tuple[Item, ...]]:
        """The points of a rollout at which memory may be highest; all rows are sampled together.

        Args:
            sizes: The batches.
            sampling: A key of ``SAMPLE_BYTES``.
        """
        decoder, c, generating = self.model.decoder, self.model.compute_bytes, self.place.generating
        rows = self.batch.rows[1]
        if not same_grid(self.layout, generating):
            rows = -(-sizes.rollout_batch_size // generating.data_size) * sizes.samples_per_prompt
        running = running_per_token(decoder, c, generating.tensor)
        weights = self._item("rollout weights", self.rollout_weights)
        cache = self._item("key-value cache", self.cache(rows * sizes.row_tokens))  # made before the first token
        return {
            RESHARDING: (weights, self._item("buckets", 2 * min(BUCKET_BYTES, max(self.received)))),
            "prefill": (
                weights,
                cache,
                self._item("activations", min(rows * sizes.prompt_tokens, PREFILL_TOKENS) * running),
            ),
            "last token": (
                weights,
                cache,
                self._item("logits", rows * decoder.vocabulary * (SAMPLE_BYTES[sampling] + c)),
            ),
        }

    @cached_property
    def received(self) -> list[int]:
        """Bytes that each rank receives on the way to the rollout."""
        return received_bytes(self.model, self.place)

    @cached_property
    def rollout_weights(self) -> int:
        """Bytes of the rollout's weights, in the compute dtype, less what a rank has just so already."""
        return max(rollout_bytes(self.model, self.place))

    def cache(self, tokens: int) -> int:
        """Bytes of keys and values: 2 x layers x kv heads x head dim x tokens x c."""
        decoder = self.model.decoder
        kv_heads = -(-decoder.kv_heads // self.place.generating.tensor)
        return 2 * decoder.layers * kv_heads * decoder.head_dim * tokens * self.model.compute_bytes

    # ---- sizes of units ----------------------------------------------------------------------------------------------

    @property
    def _shards(self) -> int:
        return self.layout.shards * self.layout.expert

    @property
    def _in_flight(self) -> int:
        """Layers that are gathered at once."""
        return 2 if self._shards > 1 else 1

    @cached_property
    def _units(self) -> dict[int | None, tuple[int, int]]:
        """Elements of each unit while it is gathered, and of its trained part."""
        units: dict[int | None, tuple[int, int]] = {None: (0, 0)}
        for parameter in self.model.parameters:
            if parameter.codes:  # used where they lie
                units.setdefault(parameter.layer, (0, 0))
                continue
            numel = numel_on(parameter, self.place.gathered(parameter), self._rank)
            all_of_it, trained = units.get(parameter.layer, (0, 0))
            units[parameter.layer] = (all_of_it + numel, trained + numel * parameter.trained)
        return units

    @property
    def _root(self) -> int:
        return self._units[None][0]

    @property
    def _trained_root(self) -> int:
        return self._units[None][1]

    @property
    def _layer(self) -> int:
        return max((unit[0] for layer, unit in self._units.items() if layer is not None), default=0)

    @property
    def _trained_layer(self) -> int:
        return max((unit[1] for layer, unit in self._units.items() if layer is not None), default=0)

    @property
    def _trained_head(self) -> int:
        """Elements of a trained head, tied or not."""
        vocabulary = self._tokens * self.model.decoder.hidden
        return vocabulary if self._has_head and self._trained_root >= vocabulary else 0

    def _expanded(self) -> tuple[Item, ...]:
        """The largest weight of 4 bits while it is expanded for a matrix product, if there is one."""
        largest = max((parameter.numel for parameter in self.model.parameters if parameter.codes), default=0)
        return (self._item("expanded weight", self.model.compute_bytes * largest),) if largest else ()

    @property
    def _tokens(self) -> int:
        """Tokens that the rank makes logits of."""
        return self.model.tokens_on(self.layout.tensor)

    @property
    def _moments_in_fp32(self) -> int:
        """Bytes of both moments of the largest trained parameter, which an 8-bit step holds in fp32 for a while."""
        trained = (parameter for parameter in self.model.parameters if parameter.trained)
        return 2 * 4 * max(map(self._numel, trained), default=0)

    def _moment(self, parameter: ParameterShape) -> int:
        """Bytes of one moment of a parameter: ``n + 4 n / 256 + 1024`` for n elements in 8 bits, with their table."""
        numel = self._numel(parameter)
        if self.model.optimizer == "adamw" or numel < LEAST_IN_BLOCKS or numel % BLOCK:
            return numel * parameter.itemsize
        return numel + 4 * numel // BLOCK + 4 * 256

    def _held(
        self, wanted: Callable[[ParameterShape], bool], size: Callable[[ParameterShape], int] | None = None
    ) -> int:
        """Bytes of some parameters' shards, or of what belongs to each of them."""
        size = size or (lambda parameter: parameter.held_bytes(self._numel(parameter)))
        return sum(size(parameter) for parameter in self.model.parameters if wanted(parameter))

    def _numel(self, parameter: ParameterShape) -> int:
        return numel_on(parameter, self.place.held(parameter), self._rank)

    def _item(self, what: str, size: int) -> Item:
        return Item(self.model.role, what, size)
