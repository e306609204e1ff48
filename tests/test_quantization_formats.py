"""The two 8-bit formats: stored values, error bounds, and refused options."""

from __future__ import annotations

import pytest
import torch

from beyond.quantization.formats import FORMATS, dequantize_matrix, error_bound, quantize_matrix, quantize_rows
from beyond.quantization.options import QuantizationOptions

pytestmark = pytest.mark.fast
WEIGHT = torch.randn(7, 300, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("name", FORMATS)
def test_no_number_is_further_off_than_the_bound(name, group):
    weight = WEIGHT.clone()
    weight[2, 5], weight[3] = 40.0, 1e-6 * weight[3]
    quantized = quantize_matrix(weight, FORMATS[name], group)
    assert quantized.scales.shape == (7, 3 if group else 1) and quantized.values.dtype == FORMATS[name]
    error = (dequantize_matrix(quantized, torch.float32, group) - weight).abs()
    bound = error_bound(quantized).repeat_interleave(group or 300, 1)[:, :300]
    assert (error <= bound * (1 + 1e-5)).all()
    assert error.max() > bound[error == error.max()] / 2, "the bound is not idle"


def test_an_outlier_makes_its_own_group_coarse_and_no_other():
    weight = WEIGHT.clone()
    weight[:, 0] = 100.0
    error = {
        group: (dequantize_matrix(quantize_matrix(weight, torch.int8, group), torch.float32, group) - weight).abs()
        for group in (None, 128)
    }
    assert error[None][:, 128:].mean() > 10 * error[128][:, 128:].mean()
    assert error[None][:, :128].mean() < 1.1 * error[128][:, :128].mean()


@pytest.mark.parametrize("name", FORMATS)
def test_the_largest_number_is_exact_and_zeros_stay_zeros(name):
    x = torch.tensor([[0.3, -2.5, 1.0], [0.0, 0.0, 0.0]])
    values, scales = quantize_rows(x, FORMATS[name])
    assert values[0, 1].float() * scales[0] == -2.5 and scales[1] == 1.0
    assert not values[1].float().any()


def test_rounding_is_to_the_nearest_and_ties_go_to_even():
    x = torch.tensor([[127.0, 0.49, 0.5, 1.5, -0.51, -2.5]])
    assert quantize_rows(x, torch.int8)[0].tolist() == [[127, 0, 0, 2, -1, -2]]


def test_a_matrix_that_is_in_8_bits_already_comes_back_as_it_was():
    again = quantize_matrix(dequantize_matrix(quantize_matrix(WEIGHT, torch.int8), torch.float32), torch.int8)
    assert torch.equal(again.values, quantize_matrix(WEIGHT, torch.int8).values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "awq"}, "quantization must be None or one of int8, fp8, got 'awq'"),
        ({"quantization": 8}, "quantization must be None or one of int8, fp8, got 8"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype must be one of auto, int8, fp8, got 'int4'"),
        ({"quantization": "int8", "quantization_group_size": 64}, "must be None .* or 128, got 64"),
        ({"quantization_group_size": 128}, "needs quantization='int8' or 'fp8'"),
        ({"quantize_lm_head": True}, "quantize_lm_head=True needs quantization="),
    ],
)
def test_a_format_or_combination_that_is_not_there_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        QuantizationOptions(**options)
