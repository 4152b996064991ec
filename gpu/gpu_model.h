// gpu/gpu_model.h - what the rest of the program asks of gpu/: whether there is a GPU, the recipe as this GPU
// runs it, the memory that the model needs, and the model itself.
//   gpu/make_gpu_model.cpp   this machine's GPU, and the model in as much of its memory as there is
//   gpu/recipe_on_gpu.cpp    what needs no CUDA, for --plan
//   model.cu                 arena_bytes(), make_gpu_model_of_size()
// A program that is built without CUDA has gpu/no_cuda.cpp in place of the first and the last of these files.
#pragma once
#include "../common/model.h"

namespace coat {

namespace gpu {
class Transport;  // gpu/transport.h: how GPUs send each other bytes
}

bool built_with_cuda();
// Selects GPU number `gpu` for this process. Returns why it cannot be used, and what to do; empty if it can
// be used.
std::string select_gpu(int gpu = 0);
// The compute capability of the selected GPU: 90 is 9.0. Without a GPU it is 90, in a program without CUDA 0.
int gpu_capability();
// The model on a GPU. It is an Error if this machine has no GPU that can run it.
std::unique_ptr<Model> make_gpu_model(const RunSettings& settings);

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

// The model in an allocation of `bytes` bytes, at least arena_bytes(). transport: to the other ranks; null
// with one rank, and in a dry run. make_gpu_model() calls this. (A program without CUDA does not have it.)
std::unique_ptr<Model> make_gpu_model_of_size(const RunSettings& s, int64_t bytes, bool cache_weights,
                                              std::shared_ptr<gpu::Transport> transport = nullptr);

}  // namespace coat
