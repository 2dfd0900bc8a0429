"""Trains a small GPT on the sources of Python's standard library, attention as you choose.

pip install ".[examples]" && python examples/train_gpt.py --attention fp8 --checkpoint runs/gpt

fp8 and native are this package, cudnn is the one of JAX; all three compute in bfloat16 on float32
parameters. xla is the reference, float32 throughout. --compare fp8,native,xla trains one model per
mode, from the same weights on the same batches. Ctrl-C stops; with --checkpoint the same command
goes on from there, at the next batch. The defaults suit one Hopper GPU; smaller sizes run anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gpt_report
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from gpt_model import GPT, MODES, Settings, loss_of, make_optimizer
from gpt_text import Text, standard_library, starts_of
from tqdm import tqdm

import jax_fa3

EVALUATED = 8  # batches of held-out text
SYNC = 10  # steps between two looks at the loss: the host runs ahead of the device in between


@dataclasses.dataclass
class Progress:
    """What a checkpoint holds beside the arrays. The next batch is number len(losses)."""

    settings: dict[str, Any]  # and the text's hash
    losses: list[float] = dataclasses.field(default_factory=list)
    step_ms: list[float] = dataclasses.field(default_factory=list)  # means over up to SYNC steps


class Checkpoints:
    """The newest two states of one run, in a folder; without a folder, none."""

    def __init__(self, folder: Path | None, every: int):
        self.every, self.manager = every, None
        if folder is not None:
            options = ocp.CheckpointManagerOptions(max_to_keep=2)
            self.manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def progress(self, fresh: Progress) -> Progress:
        """That of the newest checkpoint, or fresh if there is none; settings must agree."""
        if self.manager is None or (step := self.manager.latest_step()) is None:
            return fresh
        args = ocp.args.Composite(progress=ocp.args.JsonRestore())
        saved = Progress(**self.manager.restore(step, args=args)["progress"])
        for name, value in fresh.settings.items():
            if saved.settings.get(name) != value:
                raise SystemExit(
                    f"train_gpt.py: --checkpoint must name a folder of runs with {name} {value}, "
                    f"or a new one; got {name} {saved.settings.get(name)} in "
                    f"{self.manager.directory}."
                )
        return saved

    def state(self, fresh: Any) -> Any:
        """The arrays of the newest checkpoint, or fresh if there is none."""
        if self.manager is None or (step := self.manager.latest_step()) is None:
            return fresh
        like = jax.tree.map(ocp.utils.to_shape_dtype_struct, fresh)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(like))
        return self.manager.restore(step, args=args)["state"]

    def save(self, state: Any, progress: Progress, before: int, *, last: bool) -> None:
        """Saves if a multiple of `every` was reached since step `before`, or if it is the last."""
        step = len(progress.losses)
        if self.manager is None or step == before:
            return
        if last or step // self.every > before // self.every:
            args = ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                progress=ocp.args.JsonSave(dataclasses.asdict(progress)),
            )
            self.manager.save(step, args=args, force=True)

    def close(self) -> None:
        """Waits for what is being written."""
        if self.manager is not None:
            self.manager.close()


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """An event that Ctrl-C and SIGTERM set, once: the second ends the program as ever."""
    stop, old = threading.Event(), {}

    def on_signal(*_: Any) -> None:
        stop.set()
        restore()

    def restore() -> None:
        for number, handler in old.items():
            signal.signal(number, handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        old[number] = signal.signal(number, on_signal)
    try:
        yield stop
    finally:
        restore()


def train(settings: Settings, text: Text, folder: Path | None, every: int) -> dict[str, Any]:
    """Trains in one mode to the last step, or until stopped; returns a row of the result file.

    Args:
      folder, every: where checkpoints lie, and the number of steps between two.
    """
    checkpoints = Checkpoints(folder, every)
    progress = checkpoints.progress(Progress(dataclasses.asdict(settings) | {"text": text.sha256}))
    mode, runs = MODES[settings.attention], what_runs(settings)

    @nnx.jit
    def create() -> tuple[GPT, nnx.Optimizer]:
        model = GPT(mode, settings, nnx.Rngs(settings.seed))
        return model, nnx.Optimizer(model, make_optimizer(settings), wrt=nnx.Param)

    graphdef, state = nnx.split(create())

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, text: jax.Array, starts: jax.Array) -> tuple[Any, jax.Array]:
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(loss_of)(model, text, starts, settings.seqlen)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    @jax.jit
    def evaluate(state: Any, text: jax.Array, starts: jax.Array) -> jax.Array:
        return loss_of(nnx.merge(graphdef, state)[0], text, starts, settings.seqlen)

    def starts(number: int, text: jax.Array) -> np.ndarray:
        return starts_of(number, settings.batch, settings.seqlen, settings.seed, len(text))

    data, held_out = jnp.asarray(text.train), jnp.asarray(text.held_out)
    begun = time.perf_counter()
    # A product of float32 operands would be rounded to TF32 by default.
    exact = "float32" if mode.dtype == jnp.float32 else "default"
    with jax.default_matmul_precision(exact):
        run_step = step.lower(state, data, starts(0, data)).compile()
        run_evaluate = evaluate.lower(state, held_out, starts(0, held_out)).compile()
    compile_s = time.perf_counter() - begun

    def advance(state: Any, number: int) -> tuple[Any, jax.Array]:
        return run_step(state, data, starts(number, data))

    state = run_steps(advance, checkpoints.state(state), progress, checkpoints)
    held_out_loss = None
    if len(progress.losses) == settings.steps:
        held_out_loss = statistics.fmean(
            float(run_evaluate(state, held_out, starts(number, held_out)))
            for number in range(EVALUATED)
        )
    params = jax.tree.leaves(nnx.state(nnx.merge(graphdef, state)[0], nnx.Param))
    return {
        **gpt_report.row(settings, progress.losses, progress.step_ms),
        "impl": mode.impl,
        "precision": mode.precision,
        "runs": runs,
        "parameters": sum(x.size for x in params),
        "compile_s": compile_s,
        "held_out_loss": held_out_loss,
    }


def run_steps(
    advance: Callable[[Any, int], tuple[Any, jax.Array]],
    state: Any,
    progress: Progress,
    checkpoints: Checkpoints,
) -> Any:
    """Calls advance(state, number of the step) to the last step, or until a signal stops it.

    Returns the last state; progress grows along, and both are saved.
    """
    losses, steps, stopped = progress.losses, progress.settings["steps"], False
    bar = tqdm(total=steps, initial=len(losses), desc=progress.settings["attention"], unit="step")
    with bar, stopped_by_signals() as stop:
        while len(losses) < steps and not stopped:
            begun, before, pending = time.perf_counter(), len(losses), []
            for number in range(before, min(before + SYNC, steps)):
                state, loss = advance(state, number)
                pending.append(loss)
                if stop.is_set():
                    break
            losses += [float(loss) for loss in pending]  # waits for the device
            ms = 1e3 * (time.perf_counter() - begun) / len(pending)
            progress.step_ms += [ms] * len(pending)
            bar.update(len(pending))
            bar.set_postfix(loss=f"{losses[-1]:.3f}", ms=f"{ms:.1f}")
            stopped = stop.is_set()
            checkpoints.save(state, progress, before, last=stopped or len(losses) == steps)
        checkpoints.close()
    return state


def what_runs(settings: Settings) -> list[str]:
    """Lines on what computes attention in this mode, forward and backward; prints them too."""
    mode = MODES[settings.attention]
    lines = ["attention runs: jax.nn.dot_product_attention on cuDNN"]
    if mode.explained is not None:
        shape = (settings.batch, settings.seqlen, settings.num_heads, settings.head_dim)
        like = jax.ShapeDtypeStruct(shape, mode.dtype)
        plan = jax_fa3.explain(like, like, like, is_causal=True, **mode.explained)
        lines = str(plan).splitlines()
    print(f"{settings.attention}:", *lines, sep="\n", flush=True)
    return lines


def positive(text: str) -> int:
    """An argparse type, as those below."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer; got {text}")
    return int(text)


def seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"must be an integer from 0 to 2**32 - 1; got {text}")
    return int(text)


def rate(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a positive number; got {text}")


def figure(text: str) -> Path:
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"must end in .png, .svg or .pdf; got {text}")
    return Path(text)


def modes(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(MODES) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"must be distinct modes of {','.join(MODES)}, separated by commas; got {text}"
        )
    return names


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--attention", choices=tuple(MODES), default="fp8", help="default fp8")
    which.add_argument("--compare", type=modes, metavar="MODE,MODE,...", help="one run per mode")
    size = functools.partial(parser.add_argument, type=positive, metavar="N")
    size("--steps", default=1000, help="default 1000")
    size("--batch", default=4, help="windows of a step (default 4)")
    size("--seqlen", default=2048, help="bytes of a window (default 2048)")
    size("--layers", default=6, help="default 6")
    size("--width", default=768, help="default 768: 44 million parameters")
    parser.add_argument("--head-dim", type=int, choices=(64, 128), default=128, help="default 128")
    parser.add_argument("--learning-rate", type=rate, default=6e-4, help="peak (default 6e-4)")
    parser.add_argument("--seed", type=seed, default=0, help="of weights and batches (default 0)")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="save there, resume from it")
    size("--checkpoint-every", default=250, help="steps between two checkpoints (default 250)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write losses and step times")
    parser.add_argument("--plot", type=figure, metavar="FILE", help="write curves and a table")
    flags = parser.parse_args(arguments)
    if flags.width % flags.head_dim:
        parser.error(
            f"argument --width: must be a multiple of --head-dim {flags.head_dim}; "
            f"got {flags.width}"
        )
    if "cudnn" in (flags.compare or [flags.attention]) and jax.default_backend() != "gpu":
        parser.error(f"mode cudnn: must run on a CUDA GPU; got {jax.devices()[0].device_kind}")
    for name, folder in {
        "checkpoint": flags.checkpoint,
        "json": flags.json and flags.json.parent,
        "plot": flags.plot and flags.plot.parent,
    }.items():
        try:
            if folder is not None:  # now, not after an hour of training
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"argument --{name}: must lie in a folder that can be made; {error}")
    return flags


def main(arguments: Sequence[str] | None = None) -> int:
    flags = parse(arguments)
    text = standard_library()
    for name, data in {"train": text.train, "held-out": text.held_out}.items():
        if len(data) < (flags.batch + 1) * flags.seqlen:
            raise SystemExit(
                f"train_gpt.py: --batch and --seqlen must fit into the {len(data):,} bytes of "
                f"{name} text; got {flags.batch} windows of {flags.seqlen}."
            )
    print(f"text: {len(text.train):,} bytes, held out: {len(text.held_out):,}")

    rows = []
    own = [field.name for field in dataclasses.fields(Settings) if field.name != "attention"]
    for name in flags.compare or [flags.attention]:
        settings = Settings(attention=name, **{x: getattr(flags, x) for x in own})
        folder = None if flags.checkpoint is None else flags.checkpoint / name
        rows.append(train(settings, text, folder, flags.checkpoint_every))
        if flags.json is not None:  # after every run: an interrupted comparison keeps what it has
            found = {"meta": gpt_report.meta(text), "rows": rows}
            flags.json.write_text(json.dumps(found) + "\n")
        if flags.plot is not None:
            gpt_report.plot(rows, flags.plot)
        if rows[-1]["steps"] < flags.steps:
            cure = "the same command goes on" if flags.checkpoint else "--checkpoint would keep it"
            print(f"stopped after step {rows[-1]['steps']}; {cure}")
            return 130
    print(gpt_report.as_text(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
