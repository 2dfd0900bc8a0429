"""Gradients that the GPU tests compare with, and how they ask the kernels for theirs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from gpu import reference
from gpu.reference import MAIN, Result

import jax_fa3
from jax_fa3 import _explain, _fold, _fp8_model, _quantize

KEYS_OF_A_SUM = 32  # the quantiser adds up so many before it rounds
PRODUCTS = 16  # a tensor core adds up so many before it cuts the sum off


def of_call(
    inputs: Any, dout: Any, dlogsumexp: Any, attend: Any = jax_fa3.attention, **options: Any
) -> Any:
    """Of <out, dout> + <logsumexp, dlogsumexp> over rows that see a key."""

    def loss(x: dict[str, Any]) -> Any:
        out, logsumexp = attend(*(x[name] for name in MAIN), return_logsumexp=True, **options)
        finite = jnp.where(jnp.isneginf(logsumexp), 0.0, logsumexp)
        return jnp.sum(out.astype(jnp.float32) * dout) + jnp.sum(finite * dlogsumexp)

    return jax.grad(loss)({name: inputs[name] for name in MAIN})


def exact(
    inputs: dict[str, Any],
    dout: Any,
    dlogsumexp: Any,
    *,
    causal: str | None,
    scale: float,
    saved: Result | None = None,
) -> dict[str, Any]:
    """The same in float64, by formula, one query head after another.

    saved: what a forward rounded and the backward starts from, in place of exact results.
    """
    grads = {name: np.zeros(inputs[name].shape) for name in MAIN}
    for x in _heads(inputs, dout, dlogsumexp, causal, scale, saved):
        _add_gradients(grads, x)
    return grads


def exact_and_noise(
    inputs: dict[str, Any],
    dout: Any,
    dlogsumexp: Any,
    *,
    causal: str | None,
    scale: float,
    saved: Result,
    unit: float,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`exact`, and the expected size of what the kernels' roundings move the gradients by.

    The formula of the gradients with squares in place of values. `unit` is the rounding of the
    dtype in which P, dS and the results are written; sums are those of the tensor cores, which cut
    a float32 sum off after each 16 products and start or end with the row's logsumexp, so logits of
    thousands cost probabilities. The noise is a norm for each row, [..., 1].
    """
    grads = {name: np.zeros(inputs[name].shape) for name in MAIN}
    head_dim = inputs["query"].shape[-1]
    cut = 2.0**-24 * max(head_dim / 64, 1)
    squares = {name: np.zeros((*inputs[name].shape[:-1], 1)) for name in MAIN}
    for x in _heads(inputs, dout, dlogsumexp, causal, scale, saved):
        dquery, dkey = _add_gradients(grads, x)
        squared_q, squared_k = (x.q**2).sum(axis=1), (x.k**2).sum(axis=1)
        logit = _cut_of_logits(x, scale) ** 2
        difference = cut**2 * ((x.g**2) @ (x.v**2).T + x.delta[:, None] ** 2)
        ds = x.ds**2 * (unit**2 + logit) + (x.p * scale) ** 2 * difference
        own = unit**2 * (dquery**2).sum(axis=1)
        squares["query"][x.query_place] = (ds @ squared_k + own)[:, None]
        own = unit**2 * (dkey**2).sum(axis=1)
        squares["key"][x.key_place] += (ds.T @ squared_q + own)[:, None]
        p = x.p**2 * (unit**2 + logit)
        own = unit**2 * ((x.p.T @ x.g) ** 2).sum(axis=1)
        squares["value"][x.key_place] += (p.T @ (x.g**2).sum(axis=1) + own)[:, None]
    return grads, {name: np.sqrt(x) for name, x in squares.items()}


class _Head(NamedTuple):
    """One query head; p and ds [seqlen_q, seqlen_k], level and delta [seqlen_q]."""

    query_place: Any  # of its rows in the arrays of query's shape
    key_place: Any
    q: Any
    k: Any
    v: Any
    g: Any  # gradient of the output
    p: Any
    level: Any  # logsumexp, 0 for rows that see no key
    delta: Any
    ds: Any


def _cut_of_logits(x: _Head, scale: float) -> Any:
    """What cutting off costs each logit, [seqlen_q, seqlen_k]: half a last place of every sum.

    Cuts go towards 0, so those of a sum on one side of it add up, to at most twice as much.
    """
    total = np.broadcast_to(-x.level[:, None] / (scale or 1), x.p.shape)
    cut = np.zeros(x.p.shape)
    for first in range(0, x.q.shape[1], PRODUCTS):
        products = slice(first, first + PRODUCTS)
        total = total + x.q[:, products] @ x.k[:, products].T
        cut += np.spacing(np.abs(total).astype(np.float32)) / 2
    return cut * abs(scale)


def _add_gradients(grads: dict[str, Any], x: _Head) -> tuple[Any, Any]:
    """Adds those of one query head; returns its dquery and dkey."""
    dquery, dkey = x.ds @ x.k, x.ds.T @ x.q
    grads["query"][x.query_place] = dquery
    grads["key"][x.key_place] += dkey
    grads["value"][x.key_place] += x.p.T @ x.g
    return dquery, dkey


def _heads(
    inputs: dict[str, Any],
    dout: Any,
    dlogsumexp: Any,
    causal: str | None,
    scale: float,
    saved: Result | None,
) -> Iterator[_Head]:
    query, key, value = (np.asarray(inputs[name]).astype(np.float64) for name in MAIN)
    group = query.shape[2] // key.shape[2]
    seen = reference.visible(query.shape[1], key.shape[1], causal)
    for batch in range(query.shape[0]):
        for head in range(query.shape[2]):
            query_place = (batch, slice(None), head)
            key_place = (batch, slice(None), head // group)
            q, g = query[query_place], dout[query_place].astype(np.float64)
            k, v = key[key_place], value[key_place]
            logits = np.where(seen, q @ k.T * scale, -np.inf)
            top = logits.max(axis=1, initial=-1e300)
            p = np.exp(logits - top[:, None])
            total = np.maximum(p.sum(axis=1), 1e-300)
            p /= total[:, None]
            dp = g @ v.T
            delta = (p * dp).sum(axis=1)
            level = np.where(seen.any(axis=1), top + np.log(total), 0)
            if saved is not None:
                level = np.asarray(saved.logsumexp[batch, head], np.float64)
                some = np.isfinite(level)
                level = np.where(some, level, 0)
                p = np.exp(logits - level[:, None]) * some[:, None]
                delta = (g * np.asarray(saved.out[query_place], np.float64)).sum(axis=1)
            delta -= dlogsumexp[batch, head]
            ds = p * (dp - delta[:, None]) * scale
            yield _Head(query_place, key_place, q, k, v, g, p, level, delta, ds)


def model(
    inputs: Any,
    dout: Any,
    dlogsumexp: Any,
    causal: str | None,
    options: dict[str, Any],
    saved: Result | None = None,
    unit: float = 0.0,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of attention over the quantised operands, straight through every rounding; and, with `saved`,
    the noise of its gradients.

    saved: also says that the kernels' backward is meant, which multiplies the value that it reads
    back from the images in bfloat16. Where the values of the keys that a row sees nearly agree,
    that rounding alone moves its gradient by a tenth.
    """
    main = {name: jnp.asarray(np.asarray(inputs[name]).astype(np.float32)) for name in MAIN}
    config, _ = _explain.plan_of("attention", *main.values(), **options)
    few = saved is not None and main["key"].shape[1] <= KEYS_OF_A_SUM
    few_read_back = _read_back(main, config) if few and config.quantization.center_value else None

    def effective(x: dict[str, Any]) -> Any:
        found = _fp8_model.effective_operands(
            _fold.fold_operands(*(x[name] for name in MAIN)), config
        )
        value = found.value
        if found.value_mean is not None:
            value = value + found.value_mean[:, None]
        if saved is not None:
            read_back = value if few_read_back is None else few_read_back
            value = _fp8_model.straight_through(
                value, read_back.astype(jnp.bfloat16).astype(jnp.float32)
            )
        shift = found.query_shift
        return found.query, found.key, value, jnp.zeros(()) if shift is None else shift

    (query, key, value, shift), pull = jax.jit(lambda x: jax.vjp(effective, x))(main)
    ln_2 = float(np.log(2))
    multiplied = dict(zip(MAIN, (query, key, value), strict=True))
    size: dict[str, Any] = {}
    given = {"causal": causal, "scale": ln_2}
    if saved is not None:
        saved = saved._replace(logsumexp=saved.logsumexp - ln_2 * np.asarray(shift))
        grads, size = exact_and_noise(multiplied, dout, dlogsumexp, **given, saved=saved, unit=unit)
    else:
        grads = exact(multiplied, dout, dlogsumexp, **given)

    def back(g: dict[str, Any], dshift: Any) -> dict[str, Any]:
        cotangents = (*(jnp.asarray(g[name], jnp.float32) for name in MAIN), jnp.asarray(dshift))
        return dict(pull(cotangents)[0])

    seen = reference.visible(query.shape[1], key.shape[1], causal).any(axis=1)
    dshift = ln_2 * dlogsumexp * seen if shift.ndim else np.zeros(())
    if size:
        # The rotation keeps a row's norm up to a factor, wherever in the row it stands.
        alone = {name: np.zeros(multiplied[name].shape) for name in MAIN}
        for name, x in size.items():
            alone[name][..., :1] = x
        turned = back(alone, np.zeros(np.shape(dshift)))
        size = {n: np.linalg.norm(turned[n], axis=-1, keepdims=True) for n in size}
    return back(grads, dshift), size


def _read_back(main: dict[str, Any], config: Any) -> Any:
    """A centred value of few 16-bit keys as the kernels read it back, float32, by their steps.

    Many are ties of bfloat16, which the last bit of the mean takes to either side: where the
    roundings to codes cancel, a key reads back as the number it was, and every eighth of float16 is
    a tie; keys of one code read back as their average. XLA rounds that mean in other places.
    """

    def quantise(x: dict[str, Any]) -> Any:
        folded = _fold.fold_operands(*(x[name] for name in MAIN))
        found = _fp8_model.quantize_operands(folded, config)
        return found.value, found.value_descale

    codes, descale = (np.asarray(x, np.float64) for x in jax.jit(quantise)(main))
    value = np.asarray(main["value"])
    count = np.float32(value.shape[1])
    total = value.sum(axis=1, dtype=np.float64).astype(np.float32)
    mean = total / count
    amax = np.abs(value - mean[:, None]).max(axis=1)
    limit = np.float32(jnp.finfo(_quantize.FORMAT_DTYPES[config.quantization.dtype]).max)
    inverse = np.where(amax > 0, limit / np.maximum(amax, np.float32(2.0**-100)), np.float32(1))
    # A float64 expression that is rounded once is a fused multiply-add.
    left = (total - np.float64(count) * mean).astype(np.float32)
    errors = (np.float64(left) * inverse - codes.sum(axis=1)).astype(np.float32)
    mean = (np.float64(errors / count) * descale + mean).astype(np.float32)
    return (codes * descale[:, None] + mean[:, None]).astype(np.float32)
