"""Attention of one device's rows over one shard of keys, and its gradients: what a step computes.

Rows stay on their device, shards travel. Both are pytrees of arrays with the batch as first axis,
so that a caller may join and halve them there. `Native` keeps the arrays as they are; `Float8`
quantises them once, and neither pass ever sees the wider shard of another device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jax_fa3 import _batching, _fp8_grad, _fp8_model, _images
from jax_fa3._ffi import Images
from jax_fa3._grad import Results
from jax_fa3._images import Form
from jax_fa3._local import Call
from jax_fa3._merge import cotangents_of_part

Partial = tuple[jax.Array, jax.Array]  # out f32 [batch, rows, heads, head_dim_v], logsumexp
# (query, key, value, softmax_scale, is_causal=...) on one device
Local = Callable[..., Partial]
Tree = Any
_LOG2_E = np.float32(_fp8_model.LOG2_E)


class Gradients(NamedTuple):
    """What steps add up, all float32: trees that `finish` understands."""

    rows: Tree
    shard: Tree
    scale: Tree


class Part(Protocol):
    """What the steps of one call compute.

    is_causal: row i sees keys <= i. is_own: rows and shard are those of one `prepare`.
    """

    @property
    def first_order(self) -> bool:
        """Whether the methods below must not be differentiated themselves."""

    def prepare(
        self, query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array
    ) -> tuple[Tree, Tree]:
        """(rows, shard) of operands [batch, seqlen, heads, head_dim]; scale f32 []."""

    def forward(
        self, rows: Tree, shard: Tree, scale: jax.Array, *, is_causal: bool, is_own: bool
    ) -> Partial:
        """The partial result."""

    def backward(
        self,
        rows: Tree,
        shard: Tree,
        scale: jax.Array,
        whole: Results,
        *,
        is_causal: bool,
        is_own: bool,
    ) -> Gradients:
        """The step's share of the gradients; whole: results over all keys, and their cotangents."""

    def finish(
        self, rows: Tree, scale: jax.Array, total: Gradients, whole: Results
    ) -> tuple[jax.Array, ...]:
        """Gradients of query, key, value and scale from what all steps added up."""


@dataclasses.dataclass(frozen=True)
class Native:
    """Rows are query, a shard is (key, value).

    Attributes:
      local: attention of one device.
      call: of the backward pass, with `of_part`; its config's is_causal is not read.
      path: what local takes.
    """

    local: Local
    call: Call
    path: Literal["cuda", "xla"]

    @property
    def first_order(self) -> bool:
        return self.path == "cuda"

    def prepare(
        self, query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array
    ) -> tuple[Tree, Tree]:
        return query, (key, value)

    def forward(
        self, rows: Tree, shard: Tree, scale: jax.Array, *, is_causal: bool, is_own: bool
    ) -> Partial:
        out, logsumexp = self.local(rows, *shard, scale, is_causal=is_causal)
        return out.astype(jnp.float32), logsumexp

    def backward(
        self,
        rows: Tree,
        shard: Tree,
        scale: jax.Array,
        whole: Results,
        *,
        is_causal: bool,
        is_own: bool,
    ) -> Gradients:
        if self.path == "xla":  # differentiable in its turn

            def run(query: Any, key: Any, value: Any, scale: Any) -> Partial:
                return self.local(query, key, value, scale, is_causal=is_causal)

            part, pull = jax.vjp(run, rows, *shard, scale)
            grads = pull(cotangents_of_part(part, *whole))
        else:
            config = dataclasses.replace(self.call.config, is_causal=is_causal)
            call = self.call._replace(config=config)
            grads = (*_batching.backward(call)(rows, *shard, scale[None], *whole),)
            dscale = jnp.zeros_like(scale) if call.constant_scale else grads[3][0]
            grads = (*grads[:3], dscale)
        dquery, dkey, dvalue, dscale = (x.astype(jnp.float32) for x in grads)
        return Gradients(dquery, (dkey, dvalue), dscale)

    def finish(
        self, rows: Tree, scale: jax.Array, total: Gradients, whole: Results
    ) -> tuple[jax.Array, ...]:
        return (total.rows, *total.shard, total.scale)


class _Rows(NamedTuple):
    """See `_ffi.Images`; codes are uint8."""

    q_image: jax.Array
    q_descale: jax.Array
    q_shift: jax.Array  # for the shard that was quantised with these rows
    key_mean: jax.Array | None  # f32 [batch, num_heads_kv, head_dim] of that shard, when smoothed
    query: jax.Array | None  # the input, where the mean of other keys or d scale asks for it


class _Shard(NamedTuple):
    """See `_ffi.Images`; codes are uint8. Two of three arrays are bytes: one transfer each."""

    k_image: jax.Array
    v_image: jax.Array
    # f32 [batch, num_heads_kv, ...]: v_descale, v_mean, key_mean (smoothed keys only), k_descale.
    factors: jax.Array


@dataclasses.dataclass(frozen=True)
class Float8:
    """Rows and shards as quantised images.

    A shard's keys have a mean of their own, which rows meet in their shift. In the backward pass
    all keys are counted from the mean of the rows' own shard, since only over all of them a row's
    gradients sum to a known number, that of its logsumexp; see `_images.backward`.

    Attributes:
      form: how operands are quantised.
      seqlen_q, seqlen_k: of one step.
      constant_scale: softmax_scale has no gradient.
    """

    form: Form
    seqlen_q: int
    seqlen_k: int
    constant_scale: bool

    @property
    def first_order(self) -> bool:
        return True

    @property
    def _smooth(self) -> bool:
        return bool(self.form.config.quantization.smooth_key)

    def prepare(
        self, query: jax.Array, key: jax.Array, value: jax.Array, scale: jax.Array
    ) -> tuple[Tree, Tree]:
        per_example = jnp.broadcast_to(scale, query.shape[:1])
        images = _images.quantize(self.form, query, key, value, per_example)
        means = [_fp8_model.key_mean(key)] if self._smooth else []
        wants_query = self._smooth or not self.constant_scale
        rows = _Rows(
            images.q_image,
            images.q_descale,
            images.q_shift,
            means[0] if means else None,
            query if wants_query else None,
        )
        factors = [images.v_descale, images.v_mean, *means, images.k_descale]
        return rows, _Shard(images.k_image, images.v_image, jnp.concatenate(factors, axis=-1))

    def forward(
        self, rows: Tree, shard: Tree, scale: jax.Array, *, is_causal: bool, is_own: bool
    ) -> Partial:
        images, _ = self._images(rows, shard, scale, is_own)
        out, logsumexp = _images.forward(
            self.form,
            images,
            seqlen_q=self.seqlen_q,
            seqlen_k=self.seqlen_k,
            is_causal=is_causal,
        )
        return out.astype(jnp.float32), logsumexp

    def backward(
        self,
        rows: Tree,
        shard: Tree,
        scale: jax.Array,
        whole: Results,
        *,
        is_causal: bool,
        is_own: bool,
    ) -> Gradients:
        images, offset = self._images(rows, shard, scale, is_own)
        dquery, dkey, dvalue = _images.backward(
            self.form,
            images,
            offset,
            whole,
            seqlen_k=self.seqlen_k,
            is_causal=is_causal,
        )
        return Gradients(dquery, (dkey, dvalue), None)

    def finish(
        self, rows: Tree, scale: jax.Array, total: Gradients, whole: Results
    ) -> tuple[jax.Array, ...]:
        dkey, dvalue = total.shard
        grads = _fp8_grad.of_inputs(
            total.rows,
            dkey,
            softmax_scale=scale,
            rotated=self.form.rotated,
            key_mean=rows.key_mean,
            row_sums=jnp.where(jnp.isfinite(whole.logsumexp), whole.dlogsumexp, 0.0),
            query=None if self.constant_scale else rows.query,
        )
        dscale = jnp.zeros_like(scale) if grads.dscale is None else jnp.sum(grads.dscale)
        return grads.dquery, grads.dkey, dvalue, dscale

    def _images(
        self, rows: _Rows, shard: _Shard, scale: jax.Array, is_own: bool
    ) -> tuple[Images, jax.Array | None]:
        """All operands of a step, and by how much the shard's mean differs from that of the rows'
        own (None: not at all)."""
        head_dim = rows.q_image.shape[-1]
        granules = -(-self.seqlen_k // self.form.paddings[1])
        head_dim_v = (shard.factors.shape[-1] - granules - head_dim * self._smooth) // 2
        ends = np.cumsum([head_dim_v, head_dim_v, head_dim * self._smooth])
        v_descale, v_mean, mean, k_descale = jnp.split(shard.factors, ends, axis=-1)
        offset, q_shift = None, rows.q_shift
        if rows.key_mean is not None and rows.query is not None and not is_own:
            offset = mean - rows.key_mean
            moved = _images.row_products(rows.query, offset) * scale * _LOG2_E
            missing = q_shift.shape[2] - self.seqlen_q
            q_shift += jnp.pad(moved, ((0, 0), (0, 0), (0, missing)))
        images = Images(
            rows.q_image,
            rows.q_descale,
            q_shift,
            shard.k_image,
            k_descale,
            shard.v_image,
            v_descale,
            v_mean,
        )
        return images, offset
