// gpu/initialize.h - the first values of a weight. (Called by gpu/named_memory.cpp. The rules and the words
// of gpu/tensors.h and adamw.h hold here.)
#pragma once
#include "../adamw.h"

namespace coat::gpu {

// What initial_value() (common/random.h) needs besides a Param.
struct InitializeArguments {
    Range owned;           // the elements of the parameter that this rank owns
    uint64_t param_index;  // the number of the parameter
    int64_t used;          // used_elements() of common/architecture.h
    uint64_t seed;
};
// Writes the initial values of the parameter p to w, from element memory_offset of memory order on.
void initialize(const Weights& w, int64_t memory_offset, const Param& p, const InitializeArguments& a,
                cudaStream_t stream);

}  // namespace coat::gpu
