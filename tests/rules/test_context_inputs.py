"""The zigzag order, and what context_parallel_attention refuses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rules.sequences import (
    NEEDS_EIGHT,
    mesh_of,
    parallel,
)
from rules.sharded import put
from rules.support import (
    inputs,
)

import jax_fa3

pytestmark = NEEDS_EIGHT


class TestZigzag:
    def test_order_and_inverse(self) -> None:
        x = jnp.arange(2 * 12 * 3).reshape(2, 12, 3)
        moved = jax_fa3.zigzag_shard(x, 3)
        np.testing.assert_array_equal(moved[0, :, 0] // 3, [0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7])
        np.testing.assert_array_equal(jax_fa3.zigzag_unshard(moved, 3), x)
        other = jax_fa3.zigzag_shard(jnp.swapaxes(x, 1, 2), 3, axis=-1)
        np.testing.assert_array_equal(jnp.swapaxes(other, 1, 2), moved)

    def test_on_an_explicit_mesh(self, explicit: Mesh) -> None:
        x = jnp.arange(4 * 16 * 3.0).reshape(4, 16, 3)
        by_batch, by_rows = put(explicit, (x, x), P("dp"), P("dp", "tp"))
        with jax.set_mesh(explicit):
            moved = jax.jit(lambda x: jax_fa3.zigzag_shard(x, 4))(by_batch)
            message = r"^zigzag_shard: axis 1 of x must not be sharded on .*; got .*\('tp',\)"
            with pytest.raises(ValueError, match=message):
                jax.eval_shape(lambda x: jax_fa3.zigzag_shard(x, 4), by_rows)
        np.testing.assert_array_equal(moved, jax_fa3.zigzag_shard(x, 4))

    @pytest.mark.parametrize("function", ["zigzag_shard", "zigzag_unshard"])
    def test_refusals(self, function: str) -> None:
        fn, x = getattr(jax_fa3, function), np.zeros((2, 10, 3))
        with pytest.raises(
            ValueError, match=rf"^{function}: x must have a multiple of 4 .*; got \[2, 10, 3\]\.$"
        ):
            fn(x, 2)
        with pytest.raises(ValueError, match=f"^{function}: num_shards must be at least 1; got 0."):
            fn(x, 0)
        with pytest.raises(ValueError, match=rf"^{function}: axis must be an axis of x .*; got 3."):
            fn(x, 5, axis=3)
        with pytest.raises(TypeError, match=rf"^{function}: num_shards must be an int; got 2\.0\."):
            fn(x, 2.0)
        with pytest.raises(TypeError, match=f"^{function}: x must be an array; got str."):
            fn("x", 2)


class TestRefusals:
    def refuse(
        self, error: type[Exception], message: str, *, seqlen_k: int = 8, **options: Any
    ) -> None:
        args = inputs(seqlen_q=8, seqlen_k=seqlen_k)
        with pytest.raises(error, match=f"(?m)^context_parallel_attention: {message}$"):
            jax.eval_shape(parallel(mesh_of(4), **options), *args)

    def test_choices(self) -> None:
        self.refuse(
            ValueError,
            'strategy must be "ring" or "all_gather" or "ulysses"; got \'rings\'.',
            strategy="rings",
        )
        self.refuse(ValueError, 'layout must be "contiguous" or "zigzag"; got None.', layout=None)
        self.refuse(ValueError, "precision must be .*; got \"?'?fp4.*", precision="fp4")

    def test_axis_name(self) -> None:
        args = inputs(seqlen_q=8, seqlen_k=8)
        message = r"axis_name must name a manual axis .* around the call; got 'cq'\."

        def call(axis_name: Any) -> Any:
            return jax_fa3.context_parallel_attention(*args, axis_name=axis_name)

        with pytest.raises(ValueError, match=message):
            call("cq")
        fn = jax.shard_map(lambda x: call("cq"), mesh=mesh_of(2), in_specs=P(), out_specs=P())
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(fn, args[0])
        with pytest.raises(TypeError, match=r"axis_name must be the name .*; got 3\."):
            call(3)
        with pytest.raises(
            ValueError, match=r"axis_name must name each mesh axis once; got \('cp',"
        ):
            call(("cp", "cp"))

    def test_sizes(self) -> None:
        self.refuse(
            ValueError,
            r"query must have a num_heads_q that is a multiple of the 4 devices with"
            r' strategy="ulysses"; got 6\. Pass strategy="ring"\.',
            strategy="ulysses",
        )
        self.refuse(
            ValueError,
            'key must have an even seqlen per device with layout="zigzag"; got 3.',
            layout="zigzag",
            seqlen_k=12,
        )
        self.refuse(
            ValueError,
            r"key must have the seqlen of query \(2 per device\) with is_causal=True; got 4\.",
            is_causal=True,
            seqlen_k=16,
        )

    def test_float8_inputs(self) -> None:
        args = [x.astype(jnp.float8_e4m3fn) for x in inputs(seqlen_q=8, seqlen_k=8)]
        with pytest.raises(TypeError, match="query must be bfloat16, float16 or float32; got"):
            jax.eval_shape(parallel(mesh_of(4)), *args)

    def test_what_attention_refuses(self) -> None:
        args = inputs(dtype=jnp.float32, seqlen_q=8, seqlen_k=8)
        message = "^context_parallel_attention: float32 inputs are not served by the kernels"
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(parallel(mesh_of(4), implementation="cuda"), *args)
