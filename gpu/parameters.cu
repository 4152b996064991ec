// parameters.cu - first values of weights, and their FP32 masters (interface: parameters.cuh).
//
// BF16 weight and 16-bit remainder make the FP32 master: bits = (weight << 16) + remainder.
#include "parameters.cuh"

namespace coat::gpu {
namespace {

__device__ void split(float master, uint16_t& weight, int16_t& remainder) {
    const uint32_t bits = __float_as_uint(master);
    // To nearest; ties go away from zero, so that the remainder fits.
    weight = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    remainder = static_cast<int16_t>(bits & 0xFFFFu);
}
__device__ float join(uint16_t weight, int16_t remainder) {
    return __uint_as_float((uint32_t(weight) << 16) + static_cast<uint32_t>(static_cast<int32_t>(remainder)));
}

constexpr int SIMPLE_THREADS = 256;
__device__ int64_t element() { return int64_t(blockIdx.x) * SIMPLE_THREADS + threadIdx.x; }

// i counts from the slice's first element. Any of values, weights and remainders may be null.
__global__ void initialize_kernel(float* values, uint16_t* weights, int16_t* remainders, int64_t first,
                                  int64_t count, int64_t padded, float std, bool ones, int64_t used,
                                  uint64_t seed, uint64_t index) {
    const int64_t i = element();
    if (i >= padded) return;
    const float value = i < count ? initial(std, ones, used, seed, index, first + i) : 0.0f;
    uint16_t weight;
    int16_t remainder;
    split(value, weight, remainder);
    if (values) values[i] = value;
    if (weights) weights[i] = weight;
    if (remainders) remainders[i] = remainder;
}
__global__ void split_kernel(const float* master, uint16_t* weight, int16_t* remainder, int64_t n) {
    const int64_t i = element();
    if (i < n) split(master[i], weight[i], remainder[i]);
}
__global__ void join_kernel(const uint16_t* weight, const int16_t* remainder, float* master, int64_t n) {
    const int64_t i = element();
    if (i < n) master[i] = join(weight[i], remainder[i]);
}

}  // namespace

void initialize(const Weights& w, const Param& p, const ShardPlace& at, uint64_t index, int64_t used,
                uint64_t seed, cudaStream_t s) {
    const bool f32 = w.format == Format::F32;
    auto launch = [&](const Slice& slice, float* values, uint16_t* weights, int16_t* remainders) {
        const int64_t n = padded(slice);
        if (n == 0) return;
        initialize_kernel<<<blocks(n, SIMPLE_THREADS), SIMPLE_THREADS, 0, s>>>(
            values, weights, remainders, slice.first, slice.count, n, p.init_std, p.role.weight, used,
            seed, index);
        CHECK_LAUNCH("initialize");
    };
    launch(at.weight, f32 ? static_cast<float*>(w.values) + at.weight_at : nullptr,
           f32 ? nullptr : static_cast<uint16_t*>(w.values) + at.weight_at, nullptr);
    if (w.remainder) launch(at.state, nullptr, nullptr, w.remainder + at.state_at);
}
void split_master(const float* master, uint16_t* weight, int16_t* remainder, int64_t n, cudaStream_t s) {
    if (n == 0) return;
    split_kernel<<<blocks(n, SIMPLE_THREADS), SIMPLE_THREADS, 0, s>>>(master, weight, remainder, n);
    CHECK_LAUNCH("split_master");
}
void join_master(const uint16_t* weight, const int16_t* remainder, float* master, int64_t n, cudaStream_t s) {
    if (n == 0) return;
    join_kernel<<<blocks(n, SIMPLE_THREADS), SIMPLE_THREADS, 0, s>>>(weight, remainder, master, n);
    CHECK_LAUNCH("join_master");
}

}  // namespace coat::gpu
