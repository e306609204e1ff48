"""Serving: an engine behind the API that every client knows, with metrics and a live view of its work."""

from stage_a_naive.entrypoints.lazy import import_when_used

DEFINED_IN = {"AsyncLLM": "beyond.serving.async_llm"}
__all__ = list(DEFINED_IN)
__getattr__ = import_when_used(__name__, DEFINED_IN)
