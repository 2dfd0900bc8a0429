"""The programs of benchmarks/, as far as a machine without a GPU can."""

from __future__ import annotations

import importlib
import importlib.util
import json
import types

import numpy as np
import pytest
from cli.helpers import BENCHMARKS, run
from gpu import reference, reference_gradients

from jax_fa3._cli import accuracy, grid
from jax_fa3._cli.accuracy import DATA

MATPLOTLIB = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs the bench extra"
)


def timing_row(**fields):
    return {
        "kind": "fwd", "impl": "jax_fa3", "precision": "fp8", "preset": "accurate", "batch": 2,
        "seqlen_q": 8192, "seqlen_k": 8192, "num_heads_q": 16, "num_heads_kv": 16,
        "head_dim": 128, "is_causal": False, "regime": "sustained", "with_quantize": False,
        "tflops": 812.3, "ms": 1.0, "ms_lo": 0.9, "ms_hi": 1.1, "ratio": {"fa3_fp8": 1.064},
        **fields,
    }  # fmt: skip


def accuracy_row(**fields):
    return {
        "kind": "accuracy", "impl": "jax_fa3", "precision": "fp8", "preset": "accurate",
        "data": "normal", "seqlen_k": 8192, "head_dim": 128, "rmse": 1e-3, "rel_l2": 0.05,
        "cosine": 0.999, "max_abs": 0.02, **fields,
    }  # fmt: skip


META = {
    "card": "NVIDIA H200", "driver": "580", "power_limit_w": 700.0, "versions": {"jax": "0.10.2"},
    "command": "bench_attention.py", "date": "2030-01-02 03:04 UTC",
}  # fmt: skip


@pytest.fixture
def result_file(tmp_path):
    path = tmp_path / "all.json"
    rows = [
        timing_row(),
        timing_row(impl="fa3_fp8", preset=None, tflops=763.4, ratio={}),
        timing_row(regime="burst", tflops=901.0),
        {"kind": "step", "devices": 2, "seqlen_k": 8192, "ms": 68.8},  # as two_gpus.py writes them
        accuracy_row(),
        accuracy_row(impl="fa3_fp8", preset=None, rel_l2=0.0532),
        accuracy_row(impl="jax_fa3_xla", seqlen_k=2048),
        accuracy_row(impl="fa3_fp8", preset=None, seqlen_k=2048, rel_l2=0.0532),
        accuracy_row(seqlen_k=2048, data="uniform"),
        accuracy_row(seqlen_k=131_072, rel_l2=None, rmse=None, cosine=None, max_abs=None),
    ]
    path.write_text(json.dumps({"meta": META, "rows": rows}))
    return path


@pytest.fixture
def readmes(tmp_path):
    paths = [tmp_path / "README.md", tmp_path / "DETAILS.md"]
    for path in paths:
        path.write_text("before\n<!-- table:begin -->\nold\n<!-- table:end -->\nafter\n")
    return paths


def table(result_file, readmes, *flags):
    files = ["--readme", readmes[0], "--details", readmes[1]]
    return run(BENCHMARKS / "table.py", result_file, *files, *flags, cwd=result_file.parent)


def test_table_fills_both_files(result_file, readmes):
    done = table(result_file, readmes)
    assert done.returncode == 0, done.stderr
    short, full = (path.read_text() for path in readmes)
    for content in (short, full):
        assert content.startswith("before\n<!-- table:begin -->\n")
        assert content.endswith("<!-- table:end -->\nafter\n")
        assert "old" not in content
        assert "NVIDIA H200, driver 580, 700 W, jax 0.10.2; 2030-01-02." in content
        assert "| shape | jax_fa3 accurate | fa3_fp8 |" in content
        assert "| B2_S8192_H16_D128_n | 812 | 763 |" in content
        assert "/ causal; FP8 is the kernel alone, as the rivals' is:" in content
        assert "| seqlen | 8192 |" in content
        assert "| forward, accurate, head_dim 128 | 1.06 / - |" in content
    assert "jax_fa3_xla is the kernels' quantised model" in short
    assert "| inputs | jax_fa3_xla accurate | jax_fa3 accurate | fa3_fp8 |" in short
    assert "| normal, 2,048 keys | 5.0e-02 | - | 5.3e-02 |" in short
    assert "| normal, 131,072 keys | - | not finite | - |" in short
    assert "8,192 keys" not in short
    assert "uniform" not in short
    assert "| normal, 8192 keys, D 128: fa3_fp8 | 1.00e-03 | 5.32e-02 |" in full
    assert "| B2_S8192_H16_D128_n jax_fa3 accurate | 1.06 |" in full
    assert "TFLOP/s of the forward pass, burst" in full
    assert "not finite" in full
    assert "burst" not in short


def test_short_tables_join_files_of_several_commits(tmp_path, result_file, readmes):
    """The first file's row of a place counts, and every commit is named."""
    content = json.loads(result_file.read_text())
    files = []
    for commit, tflops in (("aaa", 900.0), ("bbb", 800.0), ("aaa", 700.0)):
        content["meta"]["commit"] = commit
        for row in content["rows"]:
            if row["kind"] == "fwd":
                row["tflops"] = tflops
        files.append(tmp_path / f"{tflops}.json")
        files[-1].write_text(json.dumps(content))
    done = run(
        BENCHMARKS / "table.py", *files, "--readme", readmes[0], "--details", readmes[1],
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    short, full = (path.read_text() for path in readmes)
    assert short.count("NVIDIA H200") == 1
    assert "commits aaa, bbb; 2030-01-02. A table for each commit stands" in short
    assert "| B2_S8192_H16_D128_n | 900 | 900 |" in short
    assert "800" not in short
    assert "700" not in short.replace("700 W", "")
    assert [full.count(f"commit {name};") for name in ("aaa", "bbb")] == [2, 1]


def test_table_check_tells_old_from_new(result_file, readmes):
    assert table(result_file, readmes, "--check").returncode == 1
    assert "old" in readmes[0].read_text()
    assert table(result_file, readmes).returncode == 0
    assert table(result_file, readmes, "--check").returncode == 0


def test_table_refuses_a_dry_run_and_lost_markers(result_file, readmes):
    readmes[0].write_text("no markers")
    done = table(result_file, readmes)
    assert done.returncode == 2
    assert "README.md must hold <!-- table:begin -->" in done.stderr
    content = json.loads(result_file.read_text())
    content["meta"]["dry_run"] = True
    result_file.write_text(json.dumps(content))
    done = table(result_file, readmes)
    assert done.returncode == 2
    assert "dry run" in done.stderr


@MATPLOTLIB
def test_plot_writes_pictures(result_file, tmp_path):
    done = run(BENCHMARKS / "plot.py", result_file, "--out", tmp_path / "p", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in (tmp_path / "p").iterdir()}
    assert names == {"fwd_sustained.png", "fwd_burst.png", "accuracy.png"}


def test_a_file_that_is_no_result_is_bad_usage(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    done = run(BENCHMARKS / "plot.py", tmp_path / "x.json", cwd=tmp_path)
    assert done.returncode == 2
    assert "is no result file" in done.stderr


@pytest.mark.slow
def test_bench_attention_dry_run(tmp_path):
    path = tmp_path / "fwd.json"
    flags = ["--dry-run", "--head-dims", "64", "--causal", "yes", "--native", "bf16,f16"]
    rivals = ["--rivals", "cudnn,cudnn_fp8,fa3,fa3_fp8,fa3jax,tokamax"]
    done = run(BENCHMARKS / "bench_attention.py", *flags, *rivals, "--json", path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(path.read_text())
    assert content["meta"]["dry_run"] is True
    kinds = {(row["preset"], row["precision"]) for row in content["rows"]}
    assert kinds == {("accurate", "fp8"), ("fast", "fp8"), (None, "bf16"), (None, "f16")}
    skipped = {entry["contender"]: entry["reason"] for entry in content["meta"]["skipped"]}
    for key in ("cudnn bf16", "cudnn_fp8 fp8", "fa3 bf16", "fa3_fp8 fp8", "tokamax bf16"):
        assert "needs a GPU" in skipped[key]
    assert "the kernel alone needs a GPU" in skipped["jax_fa3_xla accurate"]


@pytest.mark.parametrize(
    "name", ["bench_attention", "gradient_errors", "host_cost", "memory", "utilisation"]
)
def test_a_measurement_needs_a_gpu(tmp_path, name):
    done = run(BENCHMARKS / f"{name}.py", cwd=tmp_path)
    assert done.returncode == 2
    assert f"{name}.py: measuring needs a GPU; this process runs on cpu." in done.stderr


def test_errors_of_gradients(tmp_path):
    """Every way of ours, near float64."""
    path = tmp_path / "gradients.json"
    flags = ["--dry-run", "--head-dims", "64", "--json", path]
    done = run(BENCHMARKS / "gradient_errors.py", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 2 * 3
    variants = {(row["impl"], row["precision"], row["preset"]) for row in rows}
    ours = [("bf16", None), ("bf16", "deterministic"), ("fp8", "accurate")]
    assert variants == {("jax_fa3_xla", *variant) for variant in ours}
    for row in rows:
        worst = max(row[name] for name in ("dquery", "dkey", "dvalue"))
        assert 1e-3 < worst < (0.1 if row["precision"] == "fp8" else 4e-3), row


@pytest.mark.slow
def test_accuracy_dry_run(tmp_path):
    path = tmp_path / "accuracy.json"
    flags = ["--dry-run", "--head-dims", "64", "--presets", "accurate,per_tensor,native"]
    done = run(BENCHMARKS / "accuracy.py", *flags, "--json", path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["rows"]
    assert {row["data"] for row in rows} == set(DATA)
    assert len(rows) == 2 * len(DATA) * 3


def test_a_rival_that_does_not_run_says_why(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    rivals = importlib.import_module("rivals")
    monkeypatch.setattr(rivals.jax, "default_backend", lambda: "gpu")
    shape = grid.square(1, 48, 2, 64, False)

    def broken(shape):
        raise RuntimeError("no memory")

    own = {"key": "some", "head_dims": (128, 256)}
    for rival, precision, words in (
        (rivals.Rival(), "f16", " has no f16"),
        (type("Some", (rivals.Rival,), own)(), "bf16", "some serves head_dim 128, 256 only"),
        (type("Some", (rivals.Rival,), {"module": "no_such"})(), "bf16", "needs the package"),
        (rivals.Rival(), "bf16", "RuntimeError: no memory"),
    ):
        with pytest.raises(rivals.Unavailable, match=words):
            rival.contender(precision, broken).build(shape)


def test_tokamax_takes_configs_of_an_h100_where_it_has_none(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    rivals = importlib.import_module("rivals")
    here = rivals.jax.local_devices()[0].device_kind

    class Op:
        def __init__(self, vjp=None, **known):
            self.vjp = vjp
            self.caches = {"NVIDIA H100 80GB HBM3": {"shape": "config"}, here: known}

        def get_autotuning_cache(self, card):
            return self.caches[card]

    forward = Op(Op(own="tuned here"))
    rivals._share_tuning(types.SimpleNamespace(IMPLEMENTATIONS={"mosaic_gpu": forward}))
    assert forward.caches[here] == {"shape": "config"}
    assert forward.vjp.caches[here] == {"own": "tuned here"}


def test_errors_stand_beside_the_models(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    program = importlib.import_module("accuracy")
    model = accuracy_row(impl="jax_fa3_xla", data="shifted", rel_l2=0.002)
    row = accuracy_row(data="shifted", rel_l2=0.0027)
    assert program.over_model(row, [model]) == {"over_model": 1.35}
    assert program.over_model(row, [{**model, "preset": "fast"}]) == {}
    assert program.over_model(model, [model]) == {}
    assert program.model_verdict({**row, "over_model": 1.3}) is None
    assert "1.35 times the error of the model" in program.model_verdict({**row, "over_model": 1.35})
    assert program.model_verdict({**row, "data": "outlier", "over_model": 1.35}) is None
    row_tables = importlib.import_module("row_tables")
    assert row_tables.accuracy_table([model]).splitlines()[0].endswith("| largest |")
    both = [model, {**row, "over_model": 1.35}]
    assert row_tables.accuracy_table(both).splitlines()[3].endswith("| 1.35 |")
    line = f"| shifted, {row['seqlen_k']:,} keys, head_dim 128 | 1.35 |"
    assert row_tables.model_table(both).splitlines()[2:] == [line]
    assert row_tables.model_table([model]) == ""


def test_the_devices_float64_is_numpys(monkeypatch):
    """Formulas that share nothing with it; those of the gradients are by hand."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    float64 = importlib.import_module("float64")
    arrays = accuracy.draw(accuracy.Problem(270, 131, 3, 3, 32, batch=2))
    got = float64.attention(*arrays)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, accuracy.reference(*arrays, is_causal=False), atol=1e-12)
    arrays = accuracy.draw(accuracy.Problem(37, 37, 3, 3, 32, batch=2))
    dout = arrays[0][::-1]
    for causal in (None, "bottom_right"):
        found = float64.gradients(*arrays, dout, is_causal=causal is not None)
        found = dict(zip(reference.MAIN, found, strict=True))
        inputs = dict(zip(reference.MAIN, arrays, strict=True))
        expected = reference_gradients.exact(
            inputs, dout, np.zeros((2, 3, 37)), causal=causal, scale=32**-0.5
        )
        for name, x in expected.items():
            assert np.linalg.norm(x) > 1
            np.testing.assert_allclose(found[name], x, atol=1e-12)


LOWER_RIVALS = """
import sys
sys.path.insert(0, sys.argv[1])
import jax
import jax.numpy as jnp
from rivals import RIVALS
x = jax.ShapeDtypeStruct((2, 256, 4, 128), jnp.float8_e4m3fn)
fn = RIVALS["cudnn_fp8"].function("fp8", is_causal=True)
print(jax.eval_shape(fn, x, x, x).shape)
"""


def test_private_fp8_call_still_fits_jax(tmp_path):
    """Traces the call into JAX's private module, as far as that works without cuDNN."""
    done = run("-c", LOWER_RIVALS, BENCHMARKS, cwd=tmp_path)
    if "cuDNN" in done.stderr:
        assert "TypeError" not in done.stderr
    else:
        assert done.stdout.strip() == "(2, 256, 4, 128)", done.stderr
