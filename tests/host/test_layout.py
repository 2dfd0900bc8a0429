"""The operand images fit the tensor core: bijective, conflict-free, and P @ V comes out right."""

import numpy as np
import pytest

HEAD_DIMS = (64, 128, 256)


def tensor_core_swizzle(address: np.ndarray, row_bytes: int) -> np.ndarray:
    """Where the 64- or 128-byte swizzle puts a byte: address bits 4.. XOR 2 or 3 bits from 7 on."""
    mask = 7 if row_bytes == 128 else 3
    return address ^ ((address >> 7) & mask) << 4


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", [64, 128])
def test_row_image_is_the_swizzled_row_major_image(host, head_dim, group):
    """head_dim 256: of each half of the columns, group of rows after group."""
    rows, columns = np.meshgrid(np.arange(256), np.arange(head_dim), indexing="ij")
    offsets = host.row_image_offset(head_dim, group, rows, columns)
    width = min(head_dim, 128)
    tile = rows // group * (head_dim // width) + columns // width
    expected = tensor_core_swizzle(rows % group * width + columns % width, width)
    np.testing.assert_array_equal(offsets, tile * group * width + expected)
    np.testing.assert_array_equal(np.sort(offsets, axis=None), np.arange(offsets.size))


def test_row_image_offset_passes_2_to_the_31(host):
    row = 2**26 + 5
    assert host.row_image_offset(128, 64, row, 17) == tensor_core_swizzle(
        np.int64(row) * 128 + 17, 128
    )


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_value_image_is_the_swizzled_channel_major_image(host, head_dim):
    channels, keys = np.meshgrid(np.arange(head_dim), np.arange(128), indexing="ij")
    offsets = host.value_image_offset(channels, keys)
    position = keys // 16 * 16 + host.key_position(keys % 16)
    np.testing.assert_array_equal(offsets, tensor_core_swizzle(channels * 128 + position, 128))
    np.testing.assert_array_equal(np.sort(offsets, axis=None), np.arange(offsets.size))


def test_key_position(host):
    expected = [4 * t + 2 * a + i for a in range(2) for t in range(4) for i in range(2)]
    np.testing.assert_array_equal(host.key_position(np.arange(16)), expected)


@pytest.mark.parametrize("row_bytes", [64, 128])
def test_core_matrix_reads_touch_every_bank_once(host, row_bytes):
    """wgmma reads 8 rows x 16 bytes at a time: one line of 128 bytes' worth of banks."""
    rows = np.arange(8)
    for chunk in range(row_bytes // 16):
        offsets = rows * row_bytes + host.swizzled_chunk(row_bytes, rows, chunk) * 16
        assert len(set(offsets // 16 % 8)) == 8


def test_row_major_reads_without_swizzle_would_conflict():
    """The check above can fail: unswizzled, a column of chunks lies in one bank group."""
    assert len(set((np.arange(8) * 128) // 16 % 8)) == 1


# ---- wgmma, from its documented register layouts ---------------------------------------------


def accumulator_registers(scores: np.ndarray) -> np.ndarray:
    """[64, keys] scores as one warpgroup holds them: [4 warps, 32 lanes, keys / 2 registers]."""
    keys = scores.shape[1]
    registers = np.empty((4, 32, keys // 2), scores.dtype)
    for warp in range(4):
        for lane in range(32):
            g, t = lane // 4, lane % 4
            for j in range(keys // 8):
                for i in range(2):
                    registers[warp, lane, 4 * j + i] = scores[16 * warp + g, 8 * j + 2 * t + i]
                    registers[warp, lane, 4 * j + 2 + i] = scores[
                        16 * warp + g + 8, 8 * j + 2 * t + i
                    ]
    return registers


def matrix_of_a_fragments(fragments: np.ndarray) -> np.ndarray:
    """8-bit A operand of one k32 step: [4 warps, 32 lanes, 4 registers, 4 bytes] to [64, 32]."""
    matrix = np.empty((64, 32), fragments.dtype)
    for warp in range(4):
        for lane in range(32):
            g, t = lane // 4, lane % 4
            for register in range(4):
                row = 16 * warp + g + 8 * (register % 2)
                first = 4 * t + 16 * (register // 2)
                matrix[row, first : first + 4] = fragments[warp, lane, register]
    return matrix


def pack_p(registers: np.ndarray, step: int) -> np.ndarray:
    """What the forward packs for keys 32 step .. 32 step + 31: registers of the same lane."""
    fragments = np.empty((4, 32, 4, 4), registers.dtype)
    for half in range(2):  # 16 keys each
        j = 4 * step + 2 * half
        for rows in range(2):  # row g, row g + 8
            first = registers[..., 4 * j + 2 * rows : 4 * j + 2 * rows + 2]
            second = registers[..., 4 * (j + 1) + 2 * rows : 4 * (j + 1) + 2 * rows + 2]
            fragments[:, :, 2 * half + rows] = np.concatenate([first, second], axis=-1)
    return fragments


def value_operand(image: np.ndarray, step: int) -> np.ndarray:
    """B operand of one k32 step, [channels, 32], fetched through the 128-byte swizzle."""
    head_dim = image.size // 128
    channels, k = np.meshgrid(np.arange(head_dim), np.arange(32), indexing="ij")
    return image[tensor_core_swizzle(channels * 128 + 32 * step + k, 128)]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_packed_p_times_value_image_is_p_times_v(host, head_dim):
    rng = np.random.default_rng(head_dim)
    p = rng.integers(-9, 10, (64, 128))
    v = rng.integers(-9, 10, (128, head_dim))
    image = np.zeros(head_dim * 128, np.int64)
    channels, keys = np.meshgrid(np.arange(head_dim), np.arange(128), indexing="ij")
    image[host.value_image_offset(channels, keys)] = v.T
    registers = accumulator_registers(p)
    out = sum(
        matrix_of_a_fragments(pack_p(registers, step)) @ value_operand(image, step).T
        for step in range(4)
    )
    np.testing.assert_array_equal(out, p @ v)

    # the same product with the keys left in their natural order is wrong
    natural = np.zeros(head_dim * 128, np.int64)
    natural[tensor_core_swizzle(channels * 128 + keys, 128)] = v.T
    wrong = sum(
        matrix_of_a_fragments(pack_p(registers, step)) @ value_operand(natural, step).T
        for step in range(4)
    )
    assert (wrong != p @ v).mean() > 0.9


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_q_and_k_images_give_q_times_k(host, head_dim):
    rng = np.random.default_rng(1)
    q, k = rng.integers(-9, 10, (64, head_dim)), rng.integers(-9, 10, (128, head_dim))
    images = []
    width = min(head_dim, 128)
    for matrix in (q, k):  # one slab, one granule
        rows, columns = np.meshgrid(*map(np.arange, matrix.shape), indexing="ij")
        image = np.zeros(matrix.size, np.int64)
        image[host.row_image_offset(head_dim, len(matrix), rows, columns)] = matrix
        tile = columns // width * matrix.shape[0] * width
        images.append(image[tile + tensor_core_swizzle(rows * width + columns % width, width)])
    np.testing.assert_array_equal(images[0] @ images[1].T, q @ k.T)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_image_positions_are_a_permutation(host, head_dim):
    positions = host.image_position(np.arange(head_dim))
    np.testing.assert_array_equal(np.sort(positions), np.arange(head_dim))


def test_round_up(host):
    np.testing.assert_array_equal(
        host.round_up([1, 63, 64, 65, 2**40 + 1], 64), [64, 64, 64, 128, 2**40 + 64]
    )
