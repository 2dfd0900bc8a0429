"""Gradients that the GPU tests compare with, and how they ask the kernels for theirs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu import reference
from gpu.reference import MAIN, Result

import jax_fa3
from jax_fa3 import _explain, _fold, _fp8_model


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
    query, key, value = (np.asarray(inputs[name]).astype(np.float64) for name in MAIN)
    group = query.shape[2] // key.shape[2]
    grads = {name: np.zeros(x.shape) for name, x in zip(MAIN, (query, key, value), strict=True)}
    seen = reference.visible(query.shape[1], key.shape[1], causal)
    for batch in range(query.shape[0]):
        for head in range(query.shape[2]):
            q, g = query[batch, :, head], dout[batch, :, head].astype(np.float64)
            k, v = key[batch, :, head // group], value[batch, :, head // group]
            logits = np.where(seen, q @ k.T * scale, -np.inf)
            top = logits.max(axis=1, keepdims=True, initial=-1e300)
            p = np.exp(logits - top)
            p /= np.maximum(p.sum(axis=1, keepdims=True), 1e-300)
            dp = g @ v.T
            delta = (p * dp).sum(axis=1)
            if saved is not None:
                level = np.asarray(saved.logsumexp[batch, head], np.float64)
                some = np.isfinite(level)
                p = np.exp(logits - np.where(some, level, 0)[:, None]) * some[:, None]
                delta = (g * np.asarray(saved.out[batch, :, head], np.float64)).sum(axis=1)
            delta -= dlogsumexp[batch, head]
            ds = p * (dp - delta[:, None]) * scale
            grads["query"][batch, :, head] = ds @ k
            grads["key"][batch, :, head // group] += ds.T @ q
            grads["value"][batch, :, head // group] += p.T @ g
    return grads


def model(
    inputs: Any,
    dout: Any,
    dlogsumexp: Any,
    causal: str | None,
    options: dict[str, Any],
    saved: Result | None = None,
) -> dict[str, Any]:
    """Of attention over the quantised operands, straight through every rounding."""
    main = {name: jnp.asarray(np.asarray(inputs[name]).astype(np.float32)) for name in MAIN}
    config, _ = _explain.plan_of("attention", *main.values(), **options)

    def effective(x: dict[str, Any]) -> Any:
        found = _fp8_model.effective_operands(
            _fold.fold_operands(*(x[name] for name in MAIN)), config
        )
        value = found.value
        if found.value_mean is not None:
            value = value + found.value_mean[:, None]
        shift = found.query_shift
        return found.query, found.key, value, jnp.zeros(()) if shift is None else shift

    (query, key, value, shift), pull = jax.jit(lambda x: jax.vjp(effective, x))(main)
    ln_2 = float(np.log(2))
    multiplied = dict(zip(MAIN, (query, key, value), strict=True))
    if saved is not None:
        saved = saved._replace(logsumexp=saved.logsumexp - ln_2 * np.asarray(shift))
    grads = exact(multiplied, dout, dlogsumexp, causal=causal, scale=ln_2, saved=saved)
    seen = reference.visible(query.shape[1], key.shape[1], causal).any(axis=1)
    dshift = ln_2 * dlogsumexp * seen if shift.ndim else np.zeros(())
    cotangents = (*grads.values(), dshift)
    return dict(pull(tuple(jnp.asarray(g, jnp.float32) for g in cotangents))[0])
