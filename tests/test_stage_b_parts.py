"""The parts of stage B: the static cache, attention over it, the token log."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import CPU
from no_gpu import H200, PretendedDevice
from torch.overrides import TorchFunctionMode

from stage_a_naive.checkpoints.presets import preset_config
from stage_b_decode_step.attention import attention_and_matmul_settings
from stage_b_decode_step.static_cache import StaticKVCache, cache_length
from stage_b_decode_step.token_log import TokenLog

pytestmark = pytest.mark.fast


def test_cache_sizes_hold_what_is_asked_with_little_to_spare_and_are_few() -> None:
    sizes = [cache_length(n) for n in range(1, 40000)]
    assert sizes[0] == 256 and cache_length(640) == 768 and cache_length(1025) == 1536 and cache_length(4097) == 6144
    for needed, size in enumerate(sizes, start=1):
        assert needed <= size and size % 256 == 0 and (size == 256 or size < 2 * needed)
        assert needed <= 512 or size < 1.5 * needed
    assert len(set(sizes)) == 15


def make_cache(length: int = 256) -> StaticKVCache:
    return StaticKVCache(preset_config("qwen2-tiny"), length, torch.float32, CPU)


def test_the_cache_stores_by_position_and_shows_what_is_filled() -> None:
    cache = make_cache()
    prompt, token = torch.randn(1, 2, 5, 32), torch.randn(1, 2, 1, 32)  # [1, kv_heads, tokens, head_dim]
    assert cache.update(prompt, -prompt, 1)[0] is prompt
    cache.end_prefill(5)
    cache.begin_step()
    keys, values = cache.update(token, -token, 1)
    assert keys.shape == (1, 2, 256, 32)
    assert torch.equal(keys[:, :, :6], torch.cat([prompt, token], 2)) and torch.equal(values, -keys)
    assert cache.mask[0, 0, 0].tolist() == [0.0] * 6 + [-torch.inf] * 250
    cache.end_step()
    assert cache.position.tolist() == [6]
    addresses = [layer.keys.data_ptr() for layer in cache.layers]
    cache.reset()
    assert cache.position.tolist() == [0] and not keys.any() and cache.mask.max() == -torch.inf
    assert [layer.keys.data_ptr() for layer in cache.layers] == addresses


class FullDevice(TorchFunctionMode):
    """A device that has no room for zeros."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.zeros:
            raise torch.OutOfMemoryError("full")
        return function(*args, **(kwargs or {}))


def test_a_cache_that_does_not_fit_says_how_large_it_would_be() -> None:
    message = r"KV cache of 1048576 positions takes 1\.00 GiB.*lower max_tokens"
    with FullDevice(), pytest.raises(ValueError, match=message):
        make_cache(2**20)


def test_settings_are_put_back_after_an_error() -> None:
    before = torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError, match="inside"), attention_and_matmul_settings("medium"):
        assert torch.get_float32_matmul_precision() == "medium"
        assert not torch.backends.cuda.cudnn_sdp_enabled() and torch.backends.cuda.flash_sdp_enabled()
        raise RuntimeError("inside")
    assert torch.get_float32_matmul_precision() == before and torch.backends.cuda.cudnn_sdp_enabled()


class Arrival:
    """Stands for a CUDA event."""

    made: list[Arrival]

    def __init__(self) -> None:
        self.done, self.waited_for = False, False
        self.made.append(self)

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = self.waited_for = True


@pytest.mark.parametrize("reuse", [True, False])
def test_the_log_gives_ids_in_order_and_waits_only_as_it_is_told(reuse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Arrival)
    Arrival.made = arrivals = []
    with PretendedDevice(H200, memory="cpu"):
        log = TokenLog(16, H200, reuse=reuse, pinned=False)
        address = log.next_input.data_ptr()
        for first in (10, 20, 30):
            for token_id in (first, first + 1):
                log.write(torch.tensor([token_id]))
                assert log.next_input.tolist() == [[token_id]]
                assert not reuse or log.next_input.data_ptr() == address
            log.send()
        arrivals[0].done = True
        assert log.receive(max_in_flight=2) == [10, 11] and not arrivals[1].waited_for
        assert log.receive(max_in_flight=1) == [20, 21] and arrivals[1].waited_for and not arrivals[2].waited_for
        assert log.receive(max_in_flight=1) == []
        assert log.receive(max_in_flight=0) == [30, 31] and arrivals[2].waited_for
        log.clear()
        log.write(torch.tensor([7]))
        log.send()
        assert log.receive(max_in_flight=0) == [7]
