// gpu/initialize.cu - the first values of a weight (gpu/initialize.h).
#include "initialize.h"
#include "../common/random.h"
#include "../common/ranks.h"
#include "device.cuh"

namespace coat::gpu {

constexpr int THREADS = 256;  // threads of a block

// Writes the first values of the elements of a parameter that this rank owns. Thread i writes number i of
// them, which is element memory_offset + i of memory order. The weight is the master, rounded to nearest.
// Ties go away from zero, so that the remainder fits into 16 bits.
static __global__ void initialize_kernel(Weights w, int64_t memory_offset, Range owned, int64_t padded,
                                         float init_std, bool ones, int64_t used, uint64_t seed,
                                         uint64_t param_index) {
    const int64_t i = thread_of_grid(), to = memory_offset + i;
    if (i >= padded) return;
    const float value =
        i < owned.count ? initial_value(init_std, ones, used, seed, param_index, owned.first + i) : 0.0f;
    const uint32_t bits = __float_as_uint(value);
    if (w.format == Format::FP32) static_cast<float*>(w.values)[to] = value;
    else static_cast<uint16_t*>(w.values)[to] = uint16_t((bits + 0x8000u) >> 16);
    if (w.remainders) w.remainders[to] = int16_t(bits & 0xFFFFu);
}

void initialize(const Weights& w, int64_t memory_offset, const Param& p, const InitializeArguments& a,
                cudaStream_t stream) {
    const int64_t n = padded_count(a.owned);
    launch("initialize", initialize_kernel, block_count(n, THREADS), THREADS, /*shared_bytes=*/0, stream, w,
           memory_offset, a.owned, n, p.init_std, p.starts_at_one(), a.used, a.seed, a.param_index);
}

}  // namespace coat::gpu
