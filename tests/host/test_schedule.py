"""Masks and tile order of the forward, against brute force."""

import heapq
import itertools

import numpy as np
import pytest


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("diagonal", [-200, -3, 0, 5, 300])
@pytest.mark.parametrize("seqlen_k", [1, 129, 300])
def test_mask_against_brute_force(host, is_causal, diagonal, seqlen_k):
    block_kv = 128
    rows = np.arange(260)
    sees = np.ones((260, seqlen_k), bool)
    if is_causal:
        sees = np.arange(seqlen_k)[None, :] <= rows[:, None] + diagonal
    np.testing.assert_array_equal(host.visible(seqlen_k, is_causal, diagonal, rows), sees.sum(1))
    for first, last in ((0, 63), (64, 127), (128, 255), (200, 259)):
        blocks = host.num_blocks(seqlen_k, is_causal, diagonal, last, block_kv)
        seen = sees[first : last + 1]
        assert not seen[:, int(blocks) * block_kv :].any()
        if blocks > 0:
            assert seen[:, (int(blocks) - 1) * block_kv :].any()
        for block in range(int(blocks)):
            part = seen[:, block * block_kv : (block + 1) * block_kv]
            full = part.shape[1] == block_kv and part.all()
            assert host.needs_mask(seqlen_k, is_causal, diagonal, first, block, block_kv) == (
                not full
            )


def test_mask_does_not_wrap(host):
    assert host.visible(2**31 - 1, True, 2**31 - 2, 2**31 - 2) == 2**31 - 1


@pytest.mark.parametrize("longest_first", [False, True])
@pytest.mark.parametrize(
    ("q_blocks", "heads", "batch", "section"), [(3, 4, 2, 3), (5, 2, 3, 6), (1, 7, 1, 2)]
)
def test_tile_order_is_a_bijection(host, q_blocks, heads, batch, section, longest_first):
    args = (q_blocks, heads, batch, section, longest_first)
    tiles = [host.tile(*args, index) for index in range(host.num_tiles(*args))]
    everything = itertools.product(range(q_blocks), range(heads), range(batch))
    assert sorted(tiles) == sorted(everything)
    first = (heads * batch - 1) % section + 1  # the first section takes what does not divide
    ranks = [tile[0] for tile in tiles]
    assert set(ranks[:first]) == {q_blocks - 1 if longest_first else 0}
    for start in range(first * q_blocks, len(tiles), section * q_blocks):
        heads_here = {tile[1:] for tile in tiles[start : start + section * q_blocks]}
        assert len(heads_here) == section
        assert (
            sorted(ranks[start : start + section * q_blocks], reverse=longest_first)
            == (ranks[start : start + section * q_blocks])
        )


@pytest.mark.parametrize(("q_blocks", "heads", "batch"), [(1, 7, 9), (3, 8, 5), (4, 10, 6)])
@pytest.mark.parametrize("section", [1, 2, 5, 12, 40])
@pytest.mark.parametrize("fewest_tiles", [1, 24, 60])
def test_heads_ahead_start_later(host, q_blocks, heads, batch, section, fewest_tiles):
    """Nobody can wait for a CTA that starts later than its own, and most heads are served."""
    order = (q_blocks, heads, batch, section, False)
    distance, first = host.heads_ahead(*order, fewest_tiles)
    tiles = [host.tile(*order, index) for index in range(host.num_tiles(*order))]
    starts = {}
    for index, (_, head, b) in enumerate(tiles):
        starts.setdefault(b * heads + head, []).append(index)
    total = heads * batch
    assert first == total if distance == 0 else distance <= first < total
    tiles_ahead = -(-fewest_tiles // (section * q_blocks)) * section * q_blocks
    assert first <= tiles_ahead // q_blocks + section or distance == 0
    assert (distance > 0) or total <= tiles_ahead // q_blocks + section
    for head in range(first, total):
        assert max(starts[head - distance]) < min(starts[head])
        assert min(starts[head]) - min(starts[head - distance]) >= fewest_tiles


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("q_blocks", [1, 2, 3, 4])
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (3, 1), (4, 2), (6, 3), (6, 2), (8, 4)])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_pairs_walk_over_the_same_keys(host, is_causal, q_blocks, heads, group, batch):
    assert host.pairing(q_blocks, group, 2047 if is_causal else 1023, is_causal) == "none"
    pairing = host.pairing(q_blocks, group, 4096, is_causal)
    halves = pairing == "halves"
    can_halve = q_blocks % 2 == 0
    assert pairing == ("neighbours" if group % 2 == 0 else "halves" if can_halve else "none")
    if halves:
        assert (host.pairing(q_blocks, group, 4095, is_causal) == "none") == is_causal
    for kv_heads in (1, 2, 100) if is_causal else (1,):  # whose keys a section has
        section = min(kv_heads * group, heads * batch) if is_causal else 1
        order = (q_blocks // 2 if halves else q_blocks, heads, batch, section, is_causal)
        count = host.num_tiles(*order) * (2 if halves else 1)
        tile = host.half_tile if halves else host.tile
        tiles = [tile(*order, index) for index in range(count)]
        assert sorted(tiles) == sorted(
            itertools.product(range(q_blocks), range(heads), range(batch))
        )
        if halves:
            assert [q for q, *_ in tiles[::2]] == [q + 1 for q, *_ in tiles[1::2]]
        if pairing != "none":
            # What two CTAs of a cluster must have in common.
            seen = [q // 2 if halves else q for q, *_ in tiles] if is_causal else [0] * count
            keys = [
                (b, head // group, last) for (_, head, b), last in zip(tiles, seen, strict=True)
            ]
            assert keys[::2] == keys[1::2]


@pytest.mark.parametrize(("head_dim", "least", "most"), [(64, 25, 25), (128, 8, 25), (256, 8, 16)])
def test_short_sequences_share_less_of_the_cache(host, head_dim, least, most):
    found = [host.section_bytes(head_dim, seqlen_k) for seqlen_k in (1, 512, 1024, 2048, 2**31 - 1)]
    middle = min(max(16, least), most)
    assert found == [mib << 20 for mib in (least, least, middle, most, most)]
    between = [host.section_bytes(head_dim, seqlen_k) for seqlen_k in range(1, 2100)]
    assert between == sorted(between)


def test_section_heads(host):
    assert host.section_heads(64, 4, 2**20, 32 * 2**20) == 64
    assert host.section_heads(512, 4, 2**20, 32 * 2**20) == 128
    assert host.section_heads(512, 4, 2**30, 32 * 2**20) == 4


@pytest.mark.parametrize("tiles", [*range(1, 150), 256, 257, 1000])
def test_section_heads_by_tiles_fill_the_card(host, tiles):
    for total in (1, 2, 3, 8, 24, 32, 10**6):
        heads = host.section_heads_by_tiles(total, tiles)
        if heads * tiles <= 132 and heads < total:
            assert heads * tiles >= 124
            assert total % (2 * heads) == 0
        else:
            assert heads == total or heads * tiles >= 256 > (heads - 1) * tiles


def test_any_section_of_a_tile_for_every_sm_may_pair_up(host):
    assert host.section_heads_by_tiles(512, 4) == 32  # 33 would not
    assert host.section_heads_by_tiles(2048, 1) == 128


def last_end(host, blocks, heads, section):
    """When 132 SMs are done that take a tile whenever they are free; first blocks are longest."""
    ends = [0] * 132
    for index in range(blocks * heads):
        block, _, _ = host.tile(blocks, heads, 1, section, False, index)
        heapq.heapreplace(ends, ends[0] + 2 * (blocks - block) + 3)
    return max(ends)


@pytest.mark.parametrize("blocks", [5, 16, 24, 32, 47, 64, 90])
def test_sections_by_tiles_end_together(host, blocks):
    for heads in (1, 3, 4, 5, 6, 10, 16, 24, 33):
        section = host.section_heads_by_tiles(heads, blocks)
        least = last_end(host, blocks, heads, heads)  # all in one section, the longest first
        assert last_end(host, blocks, heads, section) <= 1.08 * least
