// attention.cu - a ladder: causal attention, forward, from the formula to the kernels that train. Its text
// says what changes and why, which numbers were counted, and asks you to predict. The answer to each rung is
// at the end of this file: what limits it, what we predicted, what was measured, and why. `make read` shows
// each answer, folded, below its question. Rungs 2 and 4 make one change each, and rung 3 makes three. Tensor
// cores change the whole kernel: what they need is the subject of attention.cu and attention_sm90.cu in gpu/.
// The words of CUDA are explained in README.md, in this folder.
//
//   make build/ladder_attention && build/ladder_attention                        all rungs
//   build/ladder_attention 4                           rung 4 alone, for instance under a profiler
//
// The program prints the time of each rung for B 4, T 2048, 32 heads of 128, and in the last column the
// largest difference to the CPU reference in FP32, divided by the largest output. BF16 alone may make it
// 2^-8, 3.9e-03.
//
// What is computed for each head and each position, which is called a *query*. It has a vector q of 128
// numbers. It sees its own position and those before it, its *keys*. Each of them has a vector k and a
// vector v of 128 numbers. Positions after the query are masked.
//
//   score    s = q k / sqrt(128), a number for each key
//   weight   p = exp(s) / (the sum of exp(s) over all keys): softmax
//   output   o = the sum of p v over all keys, 128 numbers
//
// exp is taken of s minus the largest s of the query. That changes no p, and exp cannot overflow.
//
// The work is 4 B NH T^2 HS / 2 = 137 GFLOP: two matmuls, q k^T and p v, without the half that is masked.
// (NH: heads; HS: the size of a head.)
//
// What limits a rung. An H200 has 132 multiprocessors at about 1.8 GHz, so for this shape
//
//   tensor cores     the two matmuls at 823 TFLOP/s, the rate of a large BF16 GEMM                167 us
//   FP32 units       the same at 61 TFLOP/s: 128 lanes of a multiprocessor, a multiplication
//                    and an addition in one instruction (FMA) each clock                        2,260 us
//   instructions     4 a clock and multiprocessor. 268 million pairs of a query and a key that it sees:
//                    8.8 us for each instruction that every pair takes
//   sectors          about one of 32 bytes a clock and multiprocessor: 1,130 us for each that every pair
//                    takes
//   shared memory    a clock of a multiprocessor for every pair: 1,130 us, too
//
// q, k and v are rows of one tensor (B, T, 3 heads 128), so a key's 128 numbers are 256 bytes, and the next
// key is 24 KB away.
#include "attention_data.h"
#include "neighbours.h"

using namespace ladder;

namespace {

constexpr int CHUNK_SIZE = 8;  // BF16 numbers that one instruction loads
constexpr uint32_t ALL_LANES = 0xFFFFFFFFu;

// A kernel is given a Shape s: s.B sequences of s.T tokens, s.heads heads of HEAD = 128 (attention_data.h).
enum { Q, K, V };
// The 128 numbers of q, k or v of one position. bh: the head, counted over the sequences of the batch.
__device__ const bf16* row(const Shape& s, const bf16* qkv, int which, int bh, int t) {
    const int64_t token = int64_t(bh / s.heads) * s.T + t;
    return qkv + token * s.cols() + (which * s.heads + bh % s.heads) * HEAD;
}
__device__ bf16* out_row(const Shape& s, bf16* out, int bh, int t) {
    const int64_t token = int64_t(bh / s.heads) * s.T + t;
    return out + (token * s.heads + bh % s.heads) * HEAD;
}

// ===========================================================================================================
// Rung 1: as the formula reads
//
// s = q k^T / sqrt(128), p = softmax(s), o = p v: a kernel each, with s and p in memory, (B, heads, T, T)
// FP32. In the first one a thread has one score. The lanes of a warp have neighbouring keys:
//
//   k     key  0   byte 0 - 1   lane 0           one load: 32 sectors of 32 bytes, of which 2 are used
//         key  1   byte 0 - 1   lane 1
//         ...
//         key 31   byte 0 - 1   lane 31
//
// Counted: a score takes 128 sectors, and the masked half is computed, too. The scores themselves are 2.1 GB,
// which are written once, and read and written again by softmax.
//
// Predict: what do sectors take, and what does memory take for the scores?
__global__ void scores_rung1(Shape s, const bf16* qkv, float* scores) {  // grid (T / 256, T, B heads)
    const int key = blockIdx.x * blockDim.x + threadIdx.x;
    const int query = blockIdx.y;
    const int bh = blockIdx.z;
    if (key >= s.T) return;
    const bf16* q = row(s, qkv, Q, bh, query);
    const bf16* k = row(s, qkv, K, bh, key);
    float sum = 0;
    for (int i = 0; i < HEAD; i++) sum += __bfloat162float(q[i]) * __bfloat162float(k[i]);
    const float score = sum / sqrtf(float(HEAD));
    scores[(int64_t(bh) * s.T + query) * s.T + key] = key <= query ? score : -INFINITY;
}
__global__ void softmax_rung1(Shape s, float* scores) {  // a thread for a query
    const int64_t query = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (query >= int64_t(s.B) * s.heads * s.T) return;
    float* p = scores + query * s.T;
    float max = -INFINITY, sum = 0;
    for (int i = 0; i < s.T; i++) max = fmaxf(max, p[i]);
    for (int i = 0; i < s.T; i++) {
        p[i] = expf(p[i] - max);
        sum += p[i];
    }
    for (int i = 0; i < s.T; i++) p[i] /= sum;
}
__global__ void output_rung1(Shape s, const bf16* qkv, const float* scores, bf16* out) {
    const int query = blockIdx.x;  // grid (T, B heads), a thread for a number of the head
    const int bh = blockIdx.y;
    const int i = threadIdx.x;
    const float* p = scores + (int64_t(bh) * s.T + query) * s.T;
    float sum = 0;
    for (int key = 0; key <= query; key++) sum += p[key] * __bfloat162float(row(s, qkv, V, bh, key)[i]);
    out_row(s, out, bh, query)[i] = __float2bfloat16(sum);
}
unsigned heads_of(const Shape& s) { return unsigned(s.B * s.heads); }
void launch_rung1(const Shape& s, const Tensors& t) {
    const unsigned T = unsigned(s.T);
    scores_rung1<<<dim3((T + 255) / 256, T, heads_of(s)), 256>>>(s, t.qkv, t.scores);
    softmax_rung1<<<(heads_of(s) * T + 255) / 256, 256>>>(s, t.scores);
    output_rung1<<<dim3(T, heads_of(s)), HEAD>>>(s, t.qkv, t.scores, t.out);
}

// ===========================================================================================================
// Rung 2: online softmax, a thread for a query
//
// What changes: one kernel, and no scores in memory. A thread walks over the keys and remembers the largest
// score so far, the sum of exp(score - largest), and the sum of exp(score - largest) v. When a larger score
// comes, both sums are multiplied by exp(old largest - new largest), as if that had been the largest from the
// start.
//
//   key                      0      1             2                  3
//   score                    1      3             2                  5
//   largest so far           1      3             3                  5
//   both sums times                 e^(1-3)       1                  e^(3-5)
//   sum of exp               1      e^-2 + 1      e^-2 + 1 + e^-1    (e^-2 + 1 + e^-1) e^-2 + 1
//
// The last sum is e^-4 + e^-2 + e^-3 + 1: every score minus 5.
//
// Now all lanes of a warp read the same number of the same key: one sector in place of 32, but each load
// still brings a lane 2 bytes.
//
// Counted: for a pair of a query and a key 256 loads, 256 conversions, 256 FMAs and 128 multiplications,
// about 1,000 instructions. q and the output are 256 numbers of a thread, which has 255 registers at most,
// and with so many only 256 threads fit on a multiprocessor.
//
// Predict: what do the instructions take? What happens to what does not fit into registers?
__global__ void rung2(Shape s, const bf16* qkv, bf16* out) {  // grid (T / 64, B heads)
    const int query = blockIdx.x * blockDim.x + threadIdx.x;
    const int bh = blockIdx.y;
    if (query >= s.T) return;
    float q[HEAD], o[HEAD] = {}, max = -INFINITY, sum = 0;
    for (int i = 0; i < HEAD; i++) q[i] = __bfloat162float(row(s, qkv, Q, bh, query)[i]) / sqrtf(float(HEAD));
    for (int key = 0; key <= query; key++) {
        const bf16* k = row(s, qkv, K, bh, key);
        const bf16* v = row(s, qkv, V, bh, key);
        float score = 0;
        for (int i = 0; i < HEAD; i++) score += q[i] * __bfloat162float(k[i]);
        const float larger = fmaxf(max, score);
        const float shrink = expf(max - larger);
        const float p = expf(score - larger);
        max = larger;
        sum = sum * shrink + p;
        for (int i = 0; i < HEAD; i++) o[i] = o[i] * shrink + p * __bfloat162float(v[i]);
    }
    for (int i = 0; i < HEAD; i++) out_row(s, out, bh, query)[i] = __float2bfloat16(o[i] / sum);
}
constexpr int QUERIES = 64;  // of a block, here and in the next rungs
dim3 by_queries(const Shape& s) { return dim3(unsigned(s.T + QUERIES - 1) / QUERIES, heads_of(s)); }
void launch_rung2(const Shape& s, const Tensors& t) { rung2<<<by_queries(s), QUERIES>>>(s, t.qkv, t.out); }

// ===========================================================================================================
// Rung 3: keys and values through shared memory
//
// What changes: a block of 64 queries copies 32 keys and their values to shared memory, 16 bytes a thread,
// and then all its threads use them. The GPU's memory (*global* memory) is asked once in place of 64 times,
// and a load from shared memory brings a lane 8 numbers. Loops over the numbers of a head are unrolled
// (#pragma unroll), because only an array whose indices the compiler knows can lie in registers. A masked key
// has the score -infinity, so it adds exp(-infinity) = 0. Neighbours<bf16, 8> (neighbours.h) is 8
// neighbouring numbers in registers; load() and store() move them with one instruction.
//
//   global    key  0   256 bytes: threads  0 ... 15       shared    key 0   all lanes read the same 16 bytes:
//             key  1   256 bytes: threads 16 ... 31                         no conflict
//             ...
//
// The kernel is also that of rung 4: LANES is how many lanes share a query, here 1.
//
// Counted: as rung 2, with 32 loads for a pair in place of 256. q and the output still do not fit into
// registers. A load of 16 bytes a lane takes 4 clocks of shared memory (README.md): 32 loads for the 32 pairs
// of a warp are 4 clocks for each pair.
//
// Predict: the time.
constexpr int KEYS = 32;  // in shared memory

template <int LANES, int THREADS = QUERIES* LANES>
__global__ void __launch_bounds__(THREADS) rungs3_and_4(Shape s, const bf16* qkv, bf16* out) {
    constexpr int CHUNKS = HEAD / LANES / CHUNK_SIZE;  // of a lane
    __shared__ __align__(16) bf16 k[KEYS][HEAD], v[KEYS][HEAD];
    const int bh = blockIdx.y;
    const int part = threadIdx.x % LANES;
    const int query = blockIdx.x * QUERIES + threadIdx.x / LANES;
    const int last = min(int(blockIdx.x + 1) * QUERIES, s.T) - 1;  // query of the block
    auto first_of = [&](int chunk) { return (chunk * LANES + part) * CHUNK_SIZE; };

    float q[CHUNKS][CHUNK_SIZE], o[CHUNKS][CHUNK_SIZE] = {}, max = -INFINITY, sum = 0;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        // A thread after the last query computes that one again, and stores nothing.
        const auto x = Neighbours<bf16, CHUNK_SIZE>::load(row(s, qkv, Q, bh, min(query, last)) + first_of(c));
        for (int j = 0; j < CHUNK_SIZE; j++) q[c][j] = __bfloat162float(x[j]) / sqrtf(float(HEAD));
    }
    for (int first = 0; first <= last; first += KEYS) {
        __syncthreads();  // the keys before are no longer needed
        for (int i = threadIdx.x; i < KEYS * HEAD / CHUNK_SIZE; i += THREADS) {
            const int key = i / (HEAD / CHUNK_SIZE);
            const int column = i % (HEAD / CHUNK_SIZE) * CHUNK_SIZE;
            const int t = min(first + key, s.T - 1);
            Neighbours<bf16, CHUNK_SIZE>::load(row(s, qkv, K, bh, t) + column).store(&k[key][column]);
            Neighbours<bf16, CHUNK_SIZE>::load(row(s, qkv, V, bh, t) + column).store(&v[key][column]);
        }
        __syncthreads();
        for (int key = 0; key < KEYS; key++) {
            float score = 0;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                const auto x = Neighbours<bf16, CHUNK_SIZE>::load(&k[key][first_of(c)]);
                for (int j = 0; j < CHUNK_SIZE; j++) score += q[c][j] * __bfloat162float(x[j]);
            }
            for (int lanes = 1; lanes < LANES; lanes *= 2) score += __shfl_xor_sync(ALL_LANES, score, lanes);
            if (first + key > query) score = -INFINITY;
            const float larger = fmaxf(max, score);
            const float shrink = expf(max - larger);
            const float p = expf(score - larger);
            max = larger;
            sum = sum * shrink + p;
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                const auto x = Neighbours<bf16, CHUNK_SIZE>::load(&v[key][first_of(c)]);
                for (int j = 0; j < CHUNK_SIZE; j++) o[c][j] = o[c][j] * shrink + p * __bfloat162float(x[j]);
            }
        }
    }
    if (query > last) return;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        Neighbours<bf16, CHUNK_SIZE> x;
        for (int j = 0; j < CHUNK_SIZE; j++) x[j] = __float2bfloat16(o[c][j] / sum);
        x.store(out_row(s, out, bh, query) + first_of(c));
    }
}
void launch_rung3(const Shape& s, const Tensors& t) {
    rungs3_and_4<1><<<by_queries(s), QUERIES>>>(s, t.qkv, t.out);
}

// ===========================================================================================================
// Rung 4: four lanes for a query
//
// What changes: rungs3_and_4<4>. Four neighbouring lanes share a query. Each has 32 of the 128 numbers of q
// and of the output, which fit into registers, and adds up a quarter of the score; two shuffles add the
// quarters.
//
//   numbers of a head     0 - 7   8 - 15   16 - 23   24 - 31   32 - 39  ...
//   lane of the query       0        1        2         3         0           64 neighbouring bytes a load
//
// Counted: about 190 instructions of a lane for a pair, so 760 for the pair. Most are conversions and FMAs.
// Of shared memory 4 clocks a pair, as before: a warp has 8 loads for its 8 pairs.
//
// Predict: the time.
void launch_rung4(const Shape& s, const Tensors& t) {
    rungs3_and_4<4><<<by_queries(s), 4 * QUERIES>>>(s, t.qkv, t.out);
}

// ===========================================================================================================
// Rung 5: tensor cores, on any GPU since 2020
//
// What changes: everything but the online softmax. A tensor core multiplies tiles of 16 x 16 and more in one
// instruction (mma.sync), 13 times as fast as the FP32 units, so the whole kernel is arranged around it. In
// gpu/attention.cu a warp owns 16 queries, p stays in registers between the two matmuls, and tiles of keys
// are copied to shared memory before they are needed (cp.async).
//
// Counted: 268 million exponentials on the special function units (16 lanes a clock) take 71 us.
//
// Predict: guess how many times 167 us it takes. Nothing that was counted here tells it.
void launch_rung5(const Shape& s, const Tensors& t) {
    const gpu::AttentionShape shape = s.attention();
    gpu::any_gpu_attention(shape).forward(shape, t.qkv, t.out, t.lse, nullptr, nullptr);
}

// ===========================================================================================================
// Rung 6: tensor cores of Hopper
//
// What changes: in gpu/attention_sm90.cu matmuls run asynchronously, which means that a warp starts them and
// does something else until they are done (wgmma). Their operands lie in shared memory, where a unit for
// copies puts them, which one thread commands (TMA). Two groups of warps take turns, so that the exponentials
// of one overlap with the matmuls of the other.
//
// Counted: as rung 5.
//
// Predict: guess again. How much of the exponentials is hidden, if both limits were added up to 238 us?
void launch_rung6(const Shape& s, const Tensors& t) {
    if (gpu::device_attribute(cudaDevAttrComputeCapabilityMajor) != 9) return;  // shown as "not written yet"
    const gpu::AttentionShape shape = s.attention();
    gpu::hopper_attention(shape).forward(shape, t.qkv, t.out, t.lse, nullptr, nullptr);
}

// ===========================================================================================================
// Your rung
//
// Cover rungs 3 and 4, and write a kernel that takes a third of the time of rung 2. Begin with a copy of rung
// 2, and launch it in launch_my_kernel(). s.T is not a multiple of anything.
//
//   make build/ladder_attention && build/ladder_attention 2 7
//
// compares it with the reference and measures it beside rung 2. Hints stand at the end of this file. Without
// a GPU: layouts.py, in this folder, asks which numbers of a key a lane loads in rung 4, and checks your
// answer.
[[maybe_unused]] __global__ void my_kernel([[maybe_unused]] Shape s, [[maybe_unused]] const bf16* qkv,
                                           [[maybe_unused]] bf16* out) {}

void launch_my_kernel([[maybe_unused]] const Shape& s, [[maybe_unused]] const Tensors& t) {
    // my_kernel<<<blocks, threads>>>(s, t.qkv, t.out);
}

}  // namespace

int main(int argc, char** argv) {
    return climb_attention(argc, argv,
                           {{"as the formula reads: three kernels, T x T scores", launch_rung1},
                            {"online softmax: a thread for a query", launch_rung2},
                            {"keys and values through shared memory", launch_rung3},
                            {"four lanes for a query", launch_rung4},
                            {"tensor cores (mma.sync): attention.cu", launch_rung5},
                            {"Hopper (wgmma, TMA): attention_sm90.cu", launch_rung6},
                            {"my_kernel", launch_my_kernel}});
}

// ===========================================================================================================
// Hints for your rung
//
// Read one, and try it, before you read the next.
//
// 1. How many times does a block of rung 2 load the same key? How many bytes does each load bring a lane?
// 2. Where can a block keep 32 keys and values? A thread has 255 registers at most: what does it hold?
// 3. Which numbers of q and of the output must be in one thread? A sum over a head can be added up by lanes.
// 4. Which numbers of a key should a lane have, so that neighbouring lanes load neighbouring bytes?

// ===========================================================================================================
// Measured on an H200
//
// B 4, T 2048, 32 heads of 128. The last column has the largest error (here it is no number of codes).
//
//   rung                                                           us  % of GEMM  speed-up  codes
//    1  as the formula reads: three kernels, T x T scores     317522.6         0%         -  2.6e-03
//    2  online softmax: a thread for a query                   51809.5         0%     6.13x  2.6e-03
//    3  keys and values through shared memory                  16349.8         1%     3.17x  2.6e-03
//    4  four lanes for a query                                  9755.3         2%     1.68x  2.6e-03
//    5  tensor cores (mma.sync): attention.cu                    723.7        23%    13.48x  2.6e-03
//    6  Hopper (wgmma, TMA): attention_sm90.cu                   246.5        68%     2.94x  2.6e-03

// ===========================================================================================================
// Answer to rung 1
//
//   limits      sectors 128 x 2 x 1,130 us = 290,000 us; memory for the scores, a few thousand us
//   predicted   300,000 us
//   measured    317,523 us
//
// The factor 2 is the masked half, which is computed, too.

// ===========================================================================================================
// Answer to rung 2
//
//   limits      instructions 9,000 us; and registers that are stored and loaded
//   predicted   several times 9,000 us
//   measured    51,810 us
//
// What does not fit into registers lies in memory (spilling). That each pair loads and stores it is the
// likely reason. Rung 3 spills, too, and takes a third of this time; but of a thread of rung 2, 752 bytes lie
// in memory, and of one of rung 3, 304 (nvcc 13.0).

// ===========================================================================================================
// Answer to rung 3
//
//   limits      instructions 6,800 us, rung 2's without 224 of its loads; shared memory 4,520 us
//   predicted   half of rung 2
//   measured    16,350 us, a third of rung 2
//
// It was better than predicted. A likely reason: each of rung 2's loads of 2 bytes goes to the cache of its
// multiprocessor, through which the numbers that do not fit into registers go, too.

// ===========================================================================================================
// Answer to rung 4
//
//   limits      instructions 6,700 us; shared memory 4,520 us; FP32 units alone 2,260 us
//   predicted   8,000 us
//   measured    9,755 us
//
// Everything fits into registers now. It takes a fifth longer than predicted, and we do not know why. Two
// things were not counted: a block of 64 queries walks to the last of them, which makes 3% more pairs; and
// each of four lanes takes two exponentials of a pair, 8 x 71 = 570 us of special functions. And with its 128
// registers a thread leaves room for 16 warps on a multiprocessor, of 64 that could hide waiting.

// ===========================================================================================================
// Answer to rung 5
//
//   limits      tensor cores 167 us, exponentials 71 us
//   predicted   2 to 4 times 167 us
//   measured    724 us, 4.3 times 167 us
//
// It is 13.5 times as fast as rung 4, and a little beyond the prediction.

// ===========================================================================================================
// Answer to rung 6
//
//   limits      tensor cores 167 us, exponentials 71 us: overlapped
//   predicted   less than 2 times 167 us
//   measured    247 us, 1.5 times 167 us
//
// The sum of both limits is 238 us. How these kernels became what they are is told below.

// ===========================================================================================================
// How the kernels that train were built
//
// This part is for those who know such kernels already (FlashAttention-3); nothing needs it. Names in it are
// those of gpu/attention_sm90.cu.
//
// Measured when gpu/attention.cu and gpu/attention_sm90.cu were built, of which the last versions remain.
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
// on (5% to 20%); two buffers of dq (no gain); no wait for dv before dk is issued, with dp issued after the
// next scores (1%; heads of 64: 4% at 64 x 1024); the scores issued a step ahead and dk from ds in shared
// memory, so that three GEMMs are always in flight (2%; heads of 64: 7%). So the loop does not wait for GEMMs
// to be issued.
