// gpu/arena.h - the one allocation of GPU memory that a training run makes, and a stack in it.
#pragma once
#include "handles.h"

namespace coat::gpu {

// What takes the place of the size of the allocation in a dry run (gpu/cuda.h), which allocates nothing.
inline constexpr int64_t DRY_RUN_BYTES = 0;

// allocate() takes the next bytes, aligned to GPU_ALIGNMENT (gpu/memory_layout.h). It throws an Error if too
// few are left. When a Scope ends, it gives back what was allocated in it:
//
//   const Arena::Scope scope(arena);
//   float* const sums = arena.allocate<float>(n);   // lives as long as `scope`
//
// The host gives memory back while kernels that use it may not have run yet. That is safe: all kernels are
// put on one stream, so those that are given the memory next run after them.
//
// Equal micro-batches allocate the same sizes in the same order, so they get the same addresses, and a CUDA
// graph can record them. A dry run, whose addresses are never used, finds out how much memory a run needs.
class Arena {
public:
    explicit Arena(int64_t bytes);  // the size of the allocation, or DRY_RUN_BYTES
    uint8_t* begin() const { return memory_; }

    template <class T = uint8_t> T* allocate(int64_t count) {
        return reinterpret_cast<T*>(allocate_bytes(count * int64_t(sizeof(T))));
    }
    int64_t peak() const { return peak_; }  // the most bytes that were in use at one time

    class Scope {
    public:
        explicit Scope(Arena& arena) : arena_(arena) {}
        ~Scope() {
            if (!ended_) end();
        }
        Scope(const Scope&) = delete;
        // Ends the scope before the braces around it do. What is allocated from now on may get the memory
        // that was given back.
        void end() {
            arena_.used_ = used_at_begin_;
            ended_ = true;
        }

    private:
        Arena& arena_;
        const int64_t used_at_begin_ = arena_.used_;  // the bytes in use when the scope began
        bool ended_ = false;
    };

private:
    UniqueHandle<void*, cudaFree> allocated_;
    // Where the allocation begins. In a dry run this is a made-up address, aligned as a real one is. It is
    // not null, because null data means "no tensor".
    uint8_t* memory_ = reinterpret_cast<uint8_t*>(1 << 30);
    const int64_t limit_;
    int64_t used_ = 0, peak_ = 0;

    uint8_t* allocate_bytes(int64_t bytes);
};

}  // namespace coat::gpu
