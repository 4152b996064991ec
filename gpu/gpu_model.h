// gpu/gpu_model.h - what it takes to make the model on a GPU: the recipe as this GPU can run it, the memory
// that the model needs, the flags that would save some, and the model itself. (The rest of the program calls
// make_gpu_model() of common/model.h, which stands in gpu/make_gpu_model.cpp and calls these.) A program
// without CUDA has all of this but make_gpu_model_of_size(), for --plan.
#pragma once
#include "../common/model.h"

namespace coat {

namespace gpu {
class Transport;  // gpu/transport.h: how GPUs send each other bytes
}

// The recipe as a GPU of this compute capability (90 is 9.0) runs it (table: program/README.md), or an Error.
Recipe recipe_on_gpu(const Recipe& r, int capability);

// Whether it pays off to make all FP8 weights once per step, if memory allows.
bool should_cache_weights(const RunSettings& s);

// The bytes of GPU memory that the model needs, in one allocation: found by a dry run of a step, which needs
// no GPU. cache_weights: whether all FP8 weights are made once per step; otherwise they are made when a GEMM
// needs them. The result is 0 in a program without CUDA.
int64_t arena_bytes(const RunSettings& s, bool cache_weights);

// The flags that would save memory in this run: those that it can have (require_supported() of
// common/model.h), and does not have yet. They are separated by commas.
std::string flags_that_save_memory(const RunSettings& s);

// The model (model.cu). bytes: the size of its allocation, at least arena_bytes(). transport: to the other
// ranks; null with one rank, and in a dry run.
std::unique_ptr<Model> make_gpu_model_of_size(const RunSettings& s, int64_t bytes, bool cache_weights,
                                              std::shared_ptr<gpu::Transport> transport = nullptr);

}  // namespace coat
