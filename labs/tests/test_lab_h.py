"""Drives lab H. No GPU is needed: the kernel runs in Triton's interpreter."""

from __future__ import annotations

from unittest.mock import patch

import torch

import beyond.quantization.formats as formats
from beyond.quantization import LLM, product_kernels, products
from beyond.quantization.attention.reference import QuantizedReferenceAttention
from beyond.quantization.formats import Quantized
from labs.driving import close, near, numbers
from labs.tests.support import Values, some
from stage_a_naive.sampling import SamplingParams

INT8, FP8 = torch.int8, torch.float8_e4m3fn
LARGEST = {INT8: 127.0, FP8: 448.0}


def random_matrix(rows: int, columns: int, group: int | None = None) -> Quantized:
    groups = 1 if group is None else -(-columns // group)
    return Quantized(torch.randint(-127, 128, (rows, columns), dtype=INT8), torch.rand(rows, groups) + 0.5)


class TestQuantizeRows:
    def found(self, given: str, x: torch.Tensor, dtype: torch.dtype) -> Values:
        values, scales = formats.quantize_rows(x, dtype)
        yield f"{given}: scales, the largest number of a row over the format's largest value", close(scales, 0, 1e-5)
        yield f"{given}: values, rounded to the nearest", values

    def test_every_row_has_its_own_scale(self) -> Values:
        for dtype in (INT8, FP8):
            for shape in ([3, 5, 33], some(3, 1, 9)):
                x = torch.randn(shape) * torch.rand(*shape[:-1], 1) * 10 ** numbers.uniform(-4, 4)
                yield from self.found(f"{dtype}, {shape}", x, dtype)

    def test_ties_go_to_even(self) -> Values:
        x = torch.tensor([[127.0, 0.5, 1.5, -2.5, 126.4]])
        yield from self.found("127, 0.5, 1.5, -2.5, 126.4: a half goes to the even neighbour", x, INT8)

    def test_a_row_of_zeros_has_the_scale_1(self) -> Values:
        for dtype in (INT8, FP8):
            yield from self.found(f"{dtype}, two rows of zeros: the scale of each is 1", torch.zeros(2, 4), dtype)

    def test_bfloat16_is_quantised_in_float32(self) -> Values:
        yield from self.found(
            "bfloat16 becomes float32 before anything is computed", torch.randn(8, 64).bfloat16(), INT8
        )


class TestDequantizeMatrix:
    def test_it_is_value_times_scale(self) -> Values:
        random = numbers.randint(20, 90), numbers.randint(3, 40)
        for columns, group in ((40, None), (40, 8), (43, 8), (5, 8), random):
            found = formats.dequantize_matrix(random_matrix(6, columns, group), torch.float32, group)
            yield f"{columns} columns in groups of {group}", close(found, 1e-5, 1e-5)

    def test_it_is_rounded_once(self) -> Values:
        found = formats.dequantize_matrix(random_matrix(6, 40), torch.bfloat16)
        yield "multiply in float32, then round to bfloat16", found

    def test_fp8_can_be_read_too(self) -> Values:
        weight = Quantized(torch.tensor([[448.0, -1.5]]).to(FP8), torch.tensor([[0.5]]))
        yield "448 and -1.5 in FP8 with the scale 0.5", formats.dequantize_matrix(weight, torch.float32)


class TestErrorBound:
    def test_no_number_is_further_off_and_some_come_near(self) -> Values:
        for dtype in (INT8, FP8):
            scales = torch.rand(16, 1) / LARGEST[dtype]
            values = (torch.rand(16, 4096) * LARGEST[dtype]).to(dtype)
            bound = formats.error_bound(Quantized(values, scales))
            yield f"{dtype}: half of the largest step between neighbours, one bound per scale", close(bound, 0, 0.01)


class TestStore:
    def test_every_head_of_every_token_goes_into_its_slot(self) -> Values:
        for dtype in (INT8, FP8):
            slots = torch.tensor([numbers.choice((5, 6)), -1, 0, 11, -1])
            key, value = torch.randn(2, 5, 3, 8) * torch.rand(2, 5, 3, 1)
            caches = [Quantized(torch.full((4, 3, 3, 8), 7.0).to(dtype), torch.full((4, 3, 3), 7.0)) for _ in "kv"]
            QuantizedReferenceAttention(torch.device("cpu")).store(key, value, *caches, slots)
            for cache, name in zip(caches, ("keys", "values"), strict=True):
                given = f"{dtype}, slots {slots.tolist()} of 4 blocks of 3; 7 where no token belongs: {name}"
                yield f"{given}, [blocks, 3, heads, head_dim]", cache.values
                yield f"{given}, the scales, [blocks, heads, 3]", close(cache.scales, 0, 1e-5)


class TestInnerLoop:
    """Without the product in slices, which is given."""

    def test_it_is_the_product_with_the_dequantised_matrix(self) -> Values:
        for group in (None, 128):
            for tokens, columns, rows in ((1, 256, 32), (5, 200, 40), (3, 40, 20)):
                weight, x = random_matrix(rows, columns, group), torch.randn(tokens, columns)
                with patch.object(product_kernels, "sliced_product", None):
                    found = products.product(x, weight)
                yield f"{tokens} tokens, {rows} × {columns}, groups of {group}", near(found, 1e-5)

    def test_a_part_of_the_columns_is_added_up_for_split_k(self) -> Values:
        weight, x = random_matrix(20, 300), torch.randn(2, 300)
        residual, counters = torch.zeros(2, 20), torch.zeros(64, dtype=torch.int32)
        with patch.object(product_kernels, "sliced_product", None):
            products.product_add(x, weight, residual, None, counters, products.Tiles(16, 32, 4, 2, splits=4))
        yield "four parts of the columns: begin at column `first`", near(residual, 1e-5)


class TestWholeStage:
    def test_the_tutor_answers_in_8_bits_as_it_does_in_float32(self) -> Values:
        chat = [{"role": "user", "content": "What is a KV cache?"}]
        params = SamplingParams(temperature=0.0, max_tokens=16)
        for options in ({}, {"quantization": "int8", "kv_cache_dtype": "int8"}):
            llm = LLM("tutor", device="cpu", num_kvcache_blocks=32, **options)
            yield f"with {options}: tokens", llm.chat(chat, params, False)[0]["token_ids"]
            llm.close()
