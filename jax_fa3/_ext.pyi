"""Compiled extension: the CUDA handlers and what was built into it."""

from typing import Any

ffi_api_version: tuple[int, int]
cuda_version: int
nvcc_version: str
ptxas_version: str
gpu_architecture: str
host_compiler: str

def registrations() -> dict[str, Any]: ...
def kernels() -> list[dict[str, Any]]: ...
def graph_launches() -> int: ...
def is_paired(
    *, block_q: int, seqlen_q: int, seqlen_k: int, group_size: int, is_causal: bool
) -> bool: ...
