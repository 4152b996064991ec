// gpu/arena.cpp - the allocation of a training run (gpu/arena.h).
#include "arena.h"

#include "memory_layout.h"  // for GPU_ALIGNMENT

namespace coat::gpu {

Arena::Arena(int64_t bytes) : limit_(bytes == DRY_RUN_BYTES ? INT64_MAX : bytes) {
    if (bytes == DRY_RUN_BYTES) return;
    check(cudaMalloc(&allocated_.handle, bytes), "Allocating the GPU's memory failed");
    memory_ = static_cast<uint8_t*>(allocated_.handle);
}

uint8_t* Arena::allocate_bytes(int64_t bytes) {
    uint8_t* const here = memory_ + used_;
    used_ += round_up(bytes, GPU_ALIGNMENT);
    peak_ = std::max(peak_, used_);
    if (used_ > limit_) throw Error("A step on the GPU needs more memory than its dry run found.");
    return here;
}

}  // namespace coat::gpu
