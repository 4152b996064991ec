// gpu/arena.cuh - the memory of a run on a GPU: one allocation, taken in the order of the code that uses it.
//
// What lasts for the run is taken first, by its owners' constructors. Then the memory is a stack: a scope
// gives back at its end what was taken in it. A step takes the same in the same order every time, so its
// addresses stay, also those that CUDA graphs hold.
//
// How much a run needs is found out by a dry run: the same code on a stream that launches nothing (DRY_RUN).
#pragma once
#include "plan.h"
#include "cuda.h"

namespace coat::gpu {

class Arena {
public:
    // bytes: of the allocation; 0: a dry run, whose addresses are never used.
    explicit Arena(int64_t bytes) : limit_(bytes ? bytes : INT64_MAX) {
        if (bytes == 0) return;
        check(cudaMalloc(&allocated_.handle, bytes), "Allocating the GPU's memory failed");
        memory_ = static_cast<uint8_t*>(allocated_.handle);
    }
    uint8_t* begin() const { return memory_; }

    template <class T = uint8_t> T* take(int64_t count) {
        uint8_t* const here = memory_ + used_;
        used_ += round_up(count * int64_t(sizeof(T)), GPU_ALIGNMENT);
        most_ = std::max(most_, used_);
        if (used_ > limit_) throw Error("A step on the GPU needs more memory than its dry run found.");
        return reinterpret_cast<T*>(here);
    }
    int64_t most() const { return most_; }  // bytes in use at one time, so far

    struct Scope {
        Arena& arena;
        const int64_t used = arena.used_;  // where it began

        explicit Scope(Arena& a) : arena(a) {}
        ~Scope() { arena.used_ = used; }
    };

private:
    Owned<void*, cudaFree> allocated_;
    uint8_t* memory_ = reinterpret_cast<uint8_t*>(1 << 30);
    const int64_t limit_;
    int64_t used_ = 0, most_ = 0;
};

}  // namespace coat::gpu
