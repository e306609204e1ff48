"""Stage F: the CPU taken out of the loop by CUDA graphs, overlap and fused kernels; then more GPUs."""

from stage_a_naive.outputs import GenerationOutput
from stage_a_naive.sampling import SamplingParams
from stage_f_graph_tp.llm import LLM

__all__ = ["LLM", "GenerationOutput", "SamplingParams"]
