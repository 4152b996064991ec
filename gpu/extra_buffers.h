// gpu/extra_buffers.h - buffers that some runs need besides: runs on several GPUs, and with --gradients none.
// This file can wait.
#pragma once
#include "memory_layout.h"

namespace coat {

// The sizes of the buffers of gradients (gpu/memory_map.cpp). The bucket of a tied embedding has a buffer of
// its own, because the head adds to this gradient at the beginning of backward, and the embedding at the end.
struct GradientBufferSizes {
    int64_t largest = 0;    // elements of the largest of the other buckets
    int64_t embedding = 0;  // elements of the bucket of a tied embedding; 0 if nothing is tied
};
GradientBufferSizes gradient_buffer_sizes(const RunSettings& s);

// -----------------------------------------------------------------------------------------------------------
// Several GPUs

// What a rank receives of the others at a time: gradients of a bucket, and a weight set, which is the
// matrices that are gathered together (gpu/sharding.h).
struct ReceivedBytes {
    int64_t gradients = 0;  // the most bytes that it receives of a bucket's gradients
    int64_t matrices = 0;   // the most bytes that a weight set takes
};
ReceivedBytes received_bytes(const RunSettings& s);
// The bytes from the beginning of a gathered matrix to that of the next one.
inline int64_t gathered_bytes(const RunSettings& s, const Param& p) {
    return round_up(p.padded_size() * format_info(s.recipe.compute_format).bytes, GPU_ALIGNMENT);
}

namespace gpu {
struct TensorScale;

// Where other ranks write in this rank's memory: a part of the MemoryMap. With one rank all pointers are
// null. A rank finds these places, and MemoryMap::loss_and_squares, on another rank, because they are equally
// far from the beginning of the allocation on all ranks.
struct PlacesOfReceived {
    uint32_t* flags;            // two for each rank (gpu/transport.h)
    uint8_t* gradients;         // the other ranks' gradients of the part of a bucket that this rank owns
    uint8_t* matrices[2];       // those that are computed with, and those that come next
    TensorScale* scale_tables;  // (ranks, scale_entry_count): the tables of all ranks
};
}  // namespace gpu

// The bytes of page tables that CUDA's driver needs. A GPU maps the allocations of the other ranks of its
// machine, at most seven, and page tables take 8 bytes for each 4 KiB of them (measured on two and four
// H100). allocated: the bytes that this rank has allocated; the others have allocated about as many.
inline int64_t page_table_bytes(int64_t ranks, int64_t allocated) {
    return (std::min<int64_t>(ranks, 8) - 1) * (allocated / 512);
}

}  // namespace coat
