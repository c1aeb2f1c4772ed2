"""Checksums: blind to how a tensor is cut, not to where its bits are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.core import weights
from verl.core.errors import WeightsError
from verl.core.weights import Receipt, Weights, block_sum, block_sums, checksum, fold, receipt_of

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.int8, torch.float8_e4m3fn]


def random_tensor(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-128, 128, (*shape, dtype.itemsize), generator=generator, dtype=torch.int8)
    return bits.view(dtype).reshape(shape)


def cut(tensor, cuts):
    """The tensor's blocks (block, start) after cutting all of them at each (axis, place)."""
    blocks = [(tensor, [0] * tensor.dim())]
    for axis, place in cuts if tensor.dim() else ():
        axis, halves = axis % tensor.dim(), []
        for block, start in blocks:
            at = max(0, min(place - start[axis], block.shape[axis]))
            later = [s + at * (d == axis) for d, s in enumerate(start)]
            halves += [(block.narrow(axis, 0, at), start), (block.narrow(axis, at, block.shape[axis] - at), later)]
        blocks = halves
    return blocks


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 19), max_size=3), st.sampled_from(DTYPES), st.integers(0, 99),
       st.lists(st.tuples(st.integers(0, 2), st.integers(0, 19)), max_size=4))
def test_blocks_add_up_to_the_whole_however_it_is_cut(shape, dtype, seed, cuts):
    tensor = random_tensor(shape, dtype, seed)
    total = sum(block_sum(block, start, shape).item() for block, start in cut(tensor, cuts))
    assert fold(total, shape) == checksum(tensor)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 19), max_size=3), st.sampled_from(DTYPES), st.integers(0, 19)), min_size=1,
                max_size=6), st.sampled_from([(30, 50), (1000, 5000)]))
def test_sums_of_many_blocks_are_those_of_each(described, limits):
    blocks = []
    for i, (shape, dtype, place) in enumerate(described):
        blocks += [(block, start, shape) for block, start in cut(random_tensor(shape, dtype, i), [(i, place)])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "_SMALL", {"cpu": limits[0]})
        patch.setattr(weights, "_TOGETHER", limits[1])
        assert block_sums(blocks).tolist() == [block_sum(*block).item() for block in blocks]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.sampled_from(DTYPES), st.data())
def test_every_flipped_bit_shows(shape, dtype, data):
    tensor = random_tensor(shape, dtype)
    flipped = tensor.clone()
    raw = flipped.view(-1).view(torch.uint8)
    at = data.draw(st.integers(0, raw.numel() - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(flipped) != checksum(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moved_bits_show(dtype):
    square = random_tensor((12, 12), dtype)
    raw = square.view(torch.uint8)
    others = [square.t(), raw.roll(1, 0).view(dtype), raw.roll(dtype.itemsize, 1).view(dtype), raw.flip(0).view(dtype),
              square.reshape(6, 24), square.reshape(144)]
    sums = [checksum(t) for t in (square, *others)]
    assert len(set(sums)) == len(sums)
    assert checksum(square.t()) == checksum(square.t().contiguous())


def test_the_receipt_of_who_holds_all_tensors_is_that_of_the_stream():
    tensors = {"a": torch.randn(5, 7), "b": torch.randn(3), "c": torch.randn(70, 40).bfloat16(), "d": torch.randn(2, 3, 4),
               "e": torch.tensor(2.0)}
    assert receipt_of(3, tensors) == Weights(3, tensors.items).receipt()
    assert receipt_of(3, {}) == Weights(3, {}.items).receipt()


def test_a_receipt_counts_names_and_sums():
    tensors = {"a": random_tensor((3, 5), torch.float32), "b": random_tensor((4,), torch.float32, 1)}
    receipt = Weights(3, tensors.items).receipt()
    assert (receipt.version, receipt.count) == (3, 2)
    swapped = Weights(3, {"a": tensors["a"], "c": tensors["b"]}.items).receipt()
    with pytest.raises(WeightsError, match="rollout 1 holds weights with checksum"):
        receipt.expect(swapped, "rollout 1")
    with pytest.raises(WeightsError, match="version 2, the trainer sent 3"):
        receipt.expect(Receipt(2, 2, receipt.checksum), "rollout 1")
