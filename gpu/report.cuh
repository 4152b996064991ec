// gpu/report.cuh - the quantization report (coat.h, QuantStats): what quantizing does to the values of a
// tensor. It has a kernel of its own, so that training pays nothing for it. Moments are measured on the host.
#pragma once
#include "coat.cuh"
#include "parameters.cuh"

namespace coat::gpu {

// Adds to *stats what x loses when it is quantized as `out` says: in 1x16 groups; per tensor, before the
// codes may overwrite x; or in blocks, whose scales have been made. Blocks count once for each set of scales:
// row-major, and transposed. Nothing where stats is null.
void measure(const Lazy& x, const Operand& out, QuantStats* stats, cudaStream_t s);

// The same for groups that are not stored.
inline void measure_groups(const Lazy& x, QuantStats* stats, cudaStream_t s) {
    measure(x, {View{nullptr, nullptr, x.rows, x.cols, Q_GROUP}}, stats, s);
}

// Adds the errors of storing the moments that a step with this gradient would give a parameter of `count`
// elements. Of a large parameter only a part is measured; the report then says so. Waits for the stream.
void measure_moments(const OptimizerFormat& o, const MomentView& m, const MomentView& v, const void* gradient,
                     Format format, int64_t count, QuantReport& report, cudaStream_t s);

#ifdef __CUDACC__

// What a thread has counted. add_to() first adds up over the warp: the totals are a single address for the
// whole GPU.
struct Counts {
    double signal = 0, noise = 0;
    unsigned elements = 0, saturated = 0, flushed = 0;

    __device__ void add(float value, float back) {
        const double error = double(value) - double(back);
        signal += double(value) * value;
        noise += error * error;
        elements++;
    }
    __device__ void add_to(QuantStats* stats) const {
        double sums[2] = {signal, noise};
        unsigned counts[3] = {elements, saturated, flushed};
        for (int lanes = 16; lanes > 0; lanes /= 2)
            for (double& sum : sums) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, lanes);
        for (unsigned& n : counts) n = __reduce_add_sync(0xFFFFFFFFu, n);
        if (threadIdx.x % 32 != 0) return;
        atomicAdd(&stats->signal, sums[0]);
        atomicAdd(&stats->noise, sums[1]);
        int64_t* const totals[3] = {&stats->elements, &stats->saturated, &stats->flushed};
        for (int i = 0; i < 3; i++) atomicAdd(reinterpret_cast<unsigned long long*>(totals[i]), counts[i]);
    }
};

#endif  // __CUDACC__

}  // namespace coat::gpu
