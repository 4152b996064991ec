// gpu/sharding_kernels.h - kernels for several GPUs: sums of gradients, the amaxes of whole weights, and
// weights that arrive as codes. gpu/sharding.cpp calls the first two, and gpu/linear.cpp the last. The rules
// and the words of gpu/tensors.h and adamw.h hold here, too.
#pragma once
#include "../adamw.h"

namespace coat::gpu {

// The gradients that all ranks have of n elements.
struct GradientsOfRanks {
    const void* mine;      // (n) this rank's
    const void* received;  // (ranks - 1, n) the other ranks', in their order, with no gap for this rank
    Format format;
    int64_t n, rank, ranks;
};
// sum[i] = round(sum[i] + g_0[i] + g_1[i] + ...) over the ranks, added in FP32 and rounded once; or, with
// `overwrite`, without the old sum. sum (n) has the format of the gradients.
void add_gradients(void* sum, bool overwrite, const GradientsOfRanks& g, cudaStream_t stream);

// entries_of_ranks (ranks, n) has the entries of all ranks, this one's among them. mine (n): an amax becomes
// the largest of all ranks, and its scale is amax / FMAX, or the delayed scale.
void combine_amaxes(TensorScale* mine, const TensorScale* entries_of_ranks, int64_t n, int64_t ranks,
                    Format fp8, cudaStream_t stream);

// FP8 codes (rows, cols) -> transposed (cols, rows), byte by byte.
void transpose_codes(const TensorRef& codes, void* transposed, cudaStream_t stream);

}  // namespace coat::gpu
