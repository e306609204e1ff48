"""Judges lab H. No GPU is needed: the kernel runs in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import beyond.quantization.formats as formats
from beyond.quantization import LLM, product_kernels, products
from beyond.quantization.attention.reference import QuantizedReferenceAttention
from beyond.quantization.formats import Quantized
from stage_a_naive.sampling import SamplingParams

INT8, FP8 = torch.int8, torch.float8_e4m3fn
LARGEST = {INT8: 127.0, FP8: 448.0}


def quantized(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition."""
    scales = x.float().abs().amax(-1) / LARGEST[dtype]
    scales = scales.masked_fill(scales == 0, 1.0)
    scaled = x.float() / scales[..., None]
    return (scaled.round() if dtype == INT8 else scaled).to(dtype), scales


def random_matrix(rows: int, columns: int, group: int | None = None) -> Quantized:
    torch.manual_seed(rows)
    groups = 1 if group is None else -(-columns // group)
    return Quantized(torch.randint(-127, 128, (rows, columns), dtype=INT8), torch.rand(rows, groups) + 0.5)


def dequantized(weight: Quantized, group: int | None) -> torch.Tensor:
    scales = weight.scales.double().repeat_interleave(group or weight.values.shape[1], 1)[:, : weight.values.shape[1]]
    return weight.values.double() * scales


class TestQuantizeRows:
    @pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
    def test_every_row_has_its_own_scale(self, dtype):
        torch.manual_seed(0)
        x = torch.randn(3, 5, 33) * torch.rand(3, 5, 1) * 10
        values, scales = formats.quantize_rows(x, dtype)
        expected, expected_scales = quantized(x, dtype)
        assert values.dtype == dtype and values.shape == x.shape, f"values: {values.dtype} {list(values.shape)}"
        assert scales.dtype == torch.float32 and scales.shape == (3, 5), f"scales: {scales.dtype} {list(scales.shape)}"
        assert torch.allclose(scales, expected_scales), "the largest number of a row is the format's largest value"
        assert torch.equal(values.float(), expected.float()), "values are rounded to the nearest"

    def test_ties_go_to_even(self):
        x = torch.tensor([[127.0, 0.5, 1.5, -2.5, 126.4]])
        assert formats.quantize_rows(x, INT8)[0].tolist() == [[127, 0, 2, -2, 126]], "a half goes to the even neighbour"

    @pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
    def test_a_row_of_zeros_has_the_scale_1(self, dtype):
        values, scales = formats.quantize_rows(torch.zeros(2, 4), dtype)
        assert scales.tolist() == [1.0, 1.0], "two rows of zeros: the scale of each is 1"
        assert not values.float().any(), f"a row of zeros is stored as zeros, got {values.float().tolist()}"

    def test_bfloat16_is_quantised_in_float32(self):
        torch.manual_seed(1)
        x = torch.randn(8, 64).bfloat16()
        same = torch.equal(formats.quantize_rows(x, INT8)[0], quantized(x, INT8)[0])
        assert same, "numbers in bfloat16 become float32 before anything is computed with them"


class TestDequantizeMatrix:
    @pytest.mark.parametrize(("columns", "group"), [(40, None), (40, 8), (43, 8), (5, 8)])
    def test_it_is_value_times_scale(self, columns, group):
        weight = random_matrix(6, columns, group)
        found = formats.dequantize_matrix(weight, torch.float32, group)
        assert found.shape == (6, columns), f"[6, {columns}] expected, got {list(found.shape)}"
        assert torch.allclose(found.double(), dequantized(weight, group)), f"{columns} columns in groups of {group}"

    def test_it_is_rounded_once(self):
        weight = random_matrix(6, 40)
        found = formats.dequantize_matrix(weight, torch.bfloat16)
        assert torch.equal(found, (weight.values.float() * weight.scales).bfloat16()), "multiply in float32, then round"

    def test_fp8_can_be_read_too(self):
        weight = Quantized(torch.tensor([[448.0, -1.5]]).to(FP8), torch.tensor([[0.5]]))
        assert formats.dequantize_matrix(weight, torch.float32).tolist() == [[224.0, -0.75]]


class TestErrorBound:
    @pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
    def test_no_number_is_further_off_and_some_come_near(self, dtype):
        torch.manual_seed(0)
        x = torch.rand(16, 4096) * torch.rand(16, 1)
        values, scales = quantized(x, dtype)
        bound = formats.error_bound(Quantized(values, scales[:, None]))
        worst = (values.float() * scales[:, None] - x).abs().amax(1, keepdim=True)
        assert bound.shape == (16, 1), f"one bound per scale: [16, 1] expected, got {list(bound.shape)}"
        assert (worst <= bound * 1.0001).all(), "a number is further off than the bound"
        assert (worst >= bound * 0.98).all(), "the bound is larger than it need be"


class TestStore:
    @pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
    def test_every_head_of_every_token_goes_into_its_slot(self, dtype):
        torch.manual_seed(0)
        slots = torch.tensor([5, -1, 0, 11, -1])
        key, value = torch.randn(2, 5, 3, 8) * torch.rand(2, 5, 3, 1)
        caches = [Quantized(torch.full((4, 3, 3, 8), 7.0).to(dtype), torch.full((4, 3, 3), 7.0)) for _ in "kv"]
        QuantizedReferenceAttention(torch.device("cpu")).store(key, value, *caches, slots)
        for cache, rows in zip(caches, (key, value), strict=True):
            values, scales = quantized(rows, dtype)
            for slot in range(12):
                block, offset = divmod(slot, 3)
                found = cache.values[block, offset].float(), cache.scales[block, :, offset]
                if slot in slots:
                    token = slots.tolist().index(slot)
                    assert torch.equal(found[0], values[token].float()), f"the values of slot {slot}"
                    assert torch.allclose(found[1], scales[token]), f"the scales of slot {slot}, [kv_heads]"
                else:
                    assert (found[0] == 7.0).all() and (found[1] == 7.0).all(), f"slot {slot} belongs to no token"


class TestInnerLoop:
    @pytest.fixture(autouse=True)
    def alone(self, monkeypatch):
        """Without the same product in slices, which is given."""
        monkeypatch.setattr(product_kernels, "sliced_product", None)

    @pytest.mark.parametrize("group", [None, 128])
    @pytest.mark.parametrize(("tokens", "columns", "rows"), [(1, 256, 32), (5, 200, 40), (3, 40, 20)])
    def test_it_is_the_product_with_the_dequantised_matrix(self, tokens, columns, rows, group):
        weight, x = random_matrix(rows, columns, group), torch.randn(tokens, columns)
        found = products.product(x, weight)
        expected = x.double() @ dequantized(weight, group).t()
        error = ((found.double() - expected).norm() / expected.norm()).item()
        assert error < 1e-5, f"{tokens} tokens, {rows} × {columns}, groups of {group}: relative error {error:.1e}"

    def test_a_part_of_the_columns_is_added_up_for_split_k(self):
        weight, x = random_matrix(20, 300), torch.randn(2, 300)
        residual, counters = torch.zeros(2, 20), torch.zeros(64, dtype=torch.int32)
        products.product_add(x, weight, residual, None, counters, products.Tiles(16, 32, 4, 2, splits=4))
        expected = x.double() @ dequantized(weight, None).t()
        assert torch.allclose(residual.double(), expected, rtol=1e-4, atol=1e-3), "begin at column `first`"


class TestWholeStage:
    def test_the_tutor_answers_in_8_bits_as_it_does_in_float32(self):
        chat = [{"role": "user", "content": "What is a KV cache?"}]
        params = SamplingParams(temperature=0.0, max_tokens=16)
        answers = []
        for options in ({}, {"quantization": "int8", "kv_cache_dtype": "int8"}):
            llm = LLM("tutor", device="cpu", num_kvcache_blocks=32, **options)
            answers.append(llm.chat(chat, params, False)[0]["token_ids"])
            llm.close()
        assert answers[0] == answers[1]
