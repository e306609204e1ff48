"""The words of the tables of engines, by language."""

from __future__ import annotations

WORDS = {
    "en": {
        "workloads": {"single": "one request", "decode32": "batch", "mixed": "load", "prefix": "shared prefix",
                      "ttft": "first token"},
        "front": ("stage", "adds", "ms per token, one request", "tokens/s under load",
                  "× the stage before: one request · load"),
        "adds": {
            "transformers": "(`generate` of the library, for comparison)",
            "A": "prefill and decode with a KV cache",
            "B": "static cache, SDPA, fewer synchronisations",
            "B compiled": "`torch.compile`",
            "C": "the MLP as one CUDA kernel",
            "C compiled": "`torch.compile`",
            "D": "a model of our own, paged KV cache, batches",
            "E": "continuous batching",
            "F": "CUDA graphs, overlap, fused kernels",
            "elsewhere": "(measured elsewhere, same workload)",
            "floor": "(weights and KV cache read once)",
        },
        "comma": ", ", "colon": ": ", "not_run": "not run: ", "error": "failed: ",
        "first": "{}, {}: {} ms per token the first time that a process serves requests of these lengths, "
                 "{} ms from then on",
        "too_long": "{}: not run, because serving it once would take longer than the limit of {} s (estimated: {})",
        "seconds": "{} {:,} s",
        "elsewhere": "measured elsewhere, same workload: ", "source": "source",
    },
    "zh": {
        "workloads": {"single": "单个请求", "decode32": "批处理", "mixed": "高负载", "prefix": "共享前缀",
                      "ttft": "首个 token"},
        "front": ("阶段", "增加了什么", "单个请求，毫秒/token", "高负载，token/秒", "× 前一阶段：单个请求 · 高负载"),
        "adds": {
            "transformers": "（库自带的 `generate`，作对比）",
            "A": "带 KV cache 的预填充与解码",
            "B": "静态缓存、SDPA、更少的同步",
            "B compiled": "`torch.compile`",
            "C": "MLP 融合成一个 CUDA kernel",
            "C compiled": "`torch.compile`",
            "D": "自己写的模型、分页 KV cache、批处理",
            "E": "连续批处理",
            "F": "CUDA graph、重叠调度、融合 kernel",
            "elsewhere": "（在别处测量，负载相同）",
            "floor": "（权重与 KV cache 各读一次）",
        },
        "comma": "，", "colon": "：", "not_run": "没有运行：", "error": "失败：",
        "first": "{}，{}：进程第一次处理这些长度的请求时 {} 毫秒/token，此后 {} 毫秒/token",
        "too_long": "{}：没有运行，因为完成一遍会超过上限 {} 秒（估计：{}）",
        "seconds": "{} {:,} 秒",
        "elsewhere": "在别处测量，负载相同：", "source": "source_zh",
    },
}  # fmt: skip
