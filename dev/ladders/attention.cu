// attention.cu - a ladder of four kernels: causal attention forward, from naive to fast. Kernels 3 and 4
// are the ones that train (attention.cu, attention_sm90.cu), each on the GPUs that support it.
//
//   make build/ladder_attention && build/ladder_attention
//
// 1  As the formula reads: s = q k^T, p = softmax(s) and p v, one kernel each. The T x T matrix goes through
//    memory four times.
// 2  Online softmax: one thread per query walks over the keys with a running maximum and sum, so no T x T
//    matrix exists. It is bound by the loads of k and v, which every thread repeats, and by a query and an
//    output that do not fit into registers.
// 3  Tensor cores (mma.sync): a warp owns 16 queries, p stays in registers between the two matmuls, and tiles
//    are copied ahead (cp.async).
// 4  Hopper: matmuls run asynchronously on operands in shared memory (wgmma), a dedicated thread moves tiles
//    (TMA), and the exponentials of one warpgroup overlap with the matmuls of another.
//
// H200, B 4, T 2048, 32 heads of 128, L2 flushed:
//   kernel  error      ms      TFLOP/s
//   1       2.6e-03   317.3        0.4
//   2       2.6e-03    40.5        3.4
//   3       2.6e-03     0.527      261
//   4       2.6e-03     0.261      527
//
// Backward on the same GPU, TFLOP/s, in the order in which it was built:   head 128   head 64
//   mma.sync, two passes (dk and dv; dq)                                       174       158
//   Hopper, one pass, dq summed in a fixed order, 64 queries per iteration     392       265
//   the last block of keys finishes dq, without a separate kernel              367       273
//   64 queries per iteration for head size 128, 128 for 64; p only in BF16     377       346
//   and dq is finished by a separate kernel again                              388       364
//   one head after another, no divisions before and after                      398       365
//
// Forward on an H100, B 64, T 1024, 12 heads of 64, in the order in which it was built:    microseconds
//   a block finishes a tile of queries before the next; a sequence's last tile is short          382
//   its first tile is short, where it sees the fewest keys                                       349
//   the scores of the next tile of queries run with the output of the tile before                305
//   fewer instructions: descriptors are added to, a warp knows that it agrees on its warpgroup,
//   the producer divides item numbers; and three tiles of keys are in flight (cuDNN 9.19: 297)   295
// What lost: a quarter of the exponentials as polynomials on the FMA units (9% slower), two consumer
// warpgroups (6%), tiles of 64 keys (12%), no turns (5% to 13%), no work on a warpgroup's masked tiles, with
// turns passed on (7%). In backward: dq finished by idle warps of the main kernel (7% to 20%), exponentials
// of the next tile during the GEMMs for dk and dq (3% to 17%: too few registers). Blocks that take one tile
// of keys after another win 1% to 2% in backward, for 30 lines.
//
// Backward of long sequences (2 x 8192, 32 heads of 128, 8 of keys) on an H200, in the order in which it was
// built:                                                                                  microseconds
//   as above                                                                                    6,728
//   two threads add dq in turns                                                                 6,195
//   a block has one query head; dk and dv are summed over heads in global memory                5,490
//   dq is finished by blocks at the end of the grid (FlashAttention-4: 5,163)                   5,447
// Without any dq traffic (a wrong result) the same loop takes 5,197 at 2 x 8192 with 32 heads of keys, 5,374
// with. What lost: dq one step later (3% at 8 x 2048); the longest blocks first, with dq from the first keys
// on (5% to 20%); two buffers of dq (no gain); no wait for dv before dk is issued, with dp issued behind the
// next scores (1%; heads of 64: 4% at 64 x 1024); the scores issued a step ahead and dk from ds in shared
// memory, so that three GEMMs are always in flight (2%; heads of 64: 7%). So the loop does not wait for GEMMs
// to be issued.
//
// The output is compared with the CPU reference in FP32. FLOPs are 4 B NH T^2 HS / 2; the masked half is not
// counted.
#include "gpu/attention.h"
#include "ladder.h"

using namespace ladder;

namespace {

struct Shape {
    int B, T, NH, HS;
    __host__ __device__ int cols() const { return 3 * NH * HS; }
    AttentionShape attention() const { return {B, T, NH, NH, HS, Format::BF16}; }
};

// Which: 0 q, 1 k, 2 v
__device__ const bf16* row(const Shape& s, const bf16* qkv, int which, int bh, int t) {
    return qkv + (int64_t(bh / s.NH) * s.T + t) * s.cols() + (which * s.NH + bh % s.NH) * s.HS;
}

// --- 1: scores (B, NH, T, T) in memory ---------------------------------------------------------------------

// Grid (T / 256, T, B NH): one thread per score
__global__ void scores_kernel1(Shape s, const bf16* qkv, float* scores) {
    const int key = blockIdx.x * blockDim.x + threadIdx.x, query = blockIdx.y, bh = blockIdx.z;
    if (key >= s.T) return;
    const bf16 *q = row(s, qkv, 0, bh, query), *k = row(s, qkv, 1, bh, key);
    float sum = 0;
    for (int i = 0; i < s.HS; i++) sum += __bfloat162float(q[i]) * __bfloat162float(k[i]);
    scores[(int64_t(bh) * s.T + query) * s.T + key] = key <= query ? sum / sqrtf(float(s.HS)) : -INFINITY;
}
__global__ void softmax_kernel1(Shape s, float* scores) {  // one thread per row
    const int64_t at = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= int64_t(s.B) * s.NH * s.T) return;
    float *p = scores + at * s.T, max = -INFINITY, sum = 0;
    for (int i = 0; i < s.T; i++) max = fmaxf(max, p[i]);
    for (int i = 0; i < s.T; i++) sum += p[i] = expf(p[i] - max);
    for (int i = 0; i < s.T; i++) p[i] /= sum;
}
// Grid (T, B NH): one thread per element of the head
__global__ void output_kernel1(Shape s, const bf16* qkv, const float* scores, bf16* out) {
    const int query = blockIdx.x, bh = blockIdx.y, i = threadIdx.x;
    const float* p = scores + (int64_t(bh) * s.T + query) * s.T;
    float sum = 0;
    for (int key = 0; key <= query; key++) sum += p[key] * __bfloat162float(row(s, qkv, 2, bh, key)[i]);
    out[((int64_t(bh / s.NH) * s.T + query) * s.NH + bh % s.NH) * s.HS + i] = __float2bfloat16(sum);
}

// --- 2: online softmax, one thread per query ---------------------------------------------------------------

template <int HS> __global__ void kernel2(Shape s, const bf16* qkv, bf16* out) {  // grid (T / 64, B NH)
    const int query = blockIdx.x * blockDim.x + threadIdx.x, bh = blockIdx.y;
    if (query >= s.T) return;
    float q[HS], acc[HS] = {}, max = -INFINITY, sum = 0;
    for (int i = 0; i < HS; i++) q[i] = __bfloat162float(row(s, qkv, 0, bh, query)[i]) / sqrtf(float(HS));
    for (int key = 0; key <= query; key++) {
        const bf16 *k = row(s, qkv, 1, bh, key), *v = row(s, qkv, 2, bh, key);
        float score = 0;
        for (int i = 0; i < HS; i++) score += q[i] * __bfloat162float(k[i]);
        const float larger = fmaxf(max, score), shrink = expf(max - larger), p = expf(score - larger);
        sum = sum * shrink + p, max = larger;
        for (int i = 0; i < HS; i++) acc[i] = acc[i] * shrink + p * __bfloat162float(v[i]);
    }
    bf16* to = out + ((int64_t(bh / s.NH) * s.T + query) * s.NH + bh % s.NH) * HS;
    for (int i = 0; i < HS; i++) to[i] = __float2bfloat16(acc[i] / sum);
}

// --- The ladder --------------------------------------------------------------------------------------------

struct Case {
    const Shape s;
    const size_t rows = size_t(s.B) * s.T;
    const std::vector<uint16_t> host = random_bf16(rows * s.cols(), 1.0f);
    Buffer<uint16_t> qkv{host}, out{rows * s.NH * s.HS};
    Buffer<float> lse{rows * s.NH}, scores{rows * s.NH * s.T};  // scores: only for kernel 1

    void run(int kernel) const {
        const unsigned T = unsigned(s.T), heads = unsigned(s.B * s.NH);
        const bf16* const in = reinterpret_cast<const bf16*>(qkv.get());
        bf16* const to = reinterpret_cast<bf16*>(out.get());
        if (kernel == 1) {
            scores_kernel1<<<dim3((T + 255) / 256, T, heads), 256>>>(s, in, scores.get());
            softmax_kernel1<<<(heads * T + 255) / 256, 256>>>(s, scores.get());
            output_kernel1<<<dim3(T, heads), unsigned(s.HS)>>>(s, in, scores.get(), to);
        } else if (kernel == 2) {
            kernel2<128><<<dim3((T + 63) / 64, heads), 64>>>(s, in, to);
        } else {
            const AttentionShape shape = s.attention();
            const AttentionKernels kernels = kernel == 3 ? any_gpu_attention(shape) : hopper_attention(shape);
            kernels.forward(shape, in, to, lse.get(), nullptr);
        }
        gpu::check(cudaGetLastError(), "Launching failed");
    }

    // Largest |out - reference| / largest |reference|. The relative rounding error of BF16 is at most 2^-8.
    double error(int kernel) {
        out.poison();
        run(kernel);
        const std::vector<uint16_t> bits = out.read();
        std::vector<float> x(host.size()), expected(bits.size()), sums(rows * s.NH);
        for (size_t i = 0; i < x.size(); i++) x[i] = reference::from_bf16(host[i]);
        ModelConfig c{"ladder", LLAMA, 1, s.NH * s.HS, s.NH, s.NH, 16, 16, s.T, true};
        reference::attention_forward(c, s.B, s.T, x.data(), expected.data(), sums.data());
        double worst = 0, largest = 0;
        for (size_t i = 0; i < bits.size(); i++) {
            const double difference = std::abs(reference::from_bf16(bits[i]) - double(expected[i]));
            worst = difference <= worst ? worst : difference;  // keeps NaN
            largest = std::max(largest, std::abs(double(expected[i])));
        }
        return worst / largest;
    }
};

}  // namespace

int main() try {
    Case small{{1, 300, 2, 128}}, large{{4, 2048, 32, 128}};
    const Shape& s = large.s;
    const double flops = 4.0 * s.B * s.NH * s.T * double(s.T) * s.HS / 2;
    printf("causal attention forward, B %d, T %d, %d heads of %d\nkernel  error      ms       TFLOP/s\n", s.B,
           s.T, s.NH, s.HS);
    const bool hopper = gpu::device_attribute(cudaDevAttrComputeCapabilityMajor) == 9;
    for (int kernel = 1; kernel <= (hopper ? 4 : 3); kernel++) {
        const float ms = milliseconds(kernel < 3 ? 3 : 20, [&] { large.run(kernel); });
        printf("%d       %.1e    %-8.3f %.1f\n", kernel, small.error(kernel), ms, flops / ms * 1e-9);
    }
} catch (const Error& e) {
    fprintf(stderr, "%s\n", e.what());
    return 1;
}
