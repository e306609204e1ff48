// Stands in for the CUDA toolkit's header of this name.
#pragma once
#include "cuda_runtime.h"
