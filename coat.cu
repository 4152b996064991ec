// coat.cu - the paper's section 5 on the GPU: quantizers, group scaling and the kernels of the FP8 precision
// flow (interface and rules: coat.cuh; the same operators on the CPU, with the same names: reference.cpp).
// The types View, Values, Dense, Groups and AmaxAndScale are those of gpu/tensor.cuh.
//
// Part 1 is the simplest quantizer. From part 2 on, kernels go through a tensor in tiles, and a producer
// computes what is not stored: both are in gpu/tiles.cuh. Scales that the paper does not use are in
// gpu/other_scaling.cu.
//
// Words that all parts use:
//   code        an FP8 value as it is stored, before it is multiplied by its scale
//   1x16 group  16 neighbouring elements of a token that share a scale (section 5 of the paper)
//   chunk       8 neighbouring elements of a row: what a thread loads, computes and stores at once
//   tile        128 x 128 elements: what a thread block works on
//   live        false where a thread's place lies outside the tensor: it computes, but stores nothing
//   amax        the largest magnitude of a tensor; to take it is to update it with an atomicMax
//   Storage     how a tensor lies in memory: dense BF16 or FP32, or 1x16 groups (gpu/tensor.cuh)
//   Lazy        how a kernel gets a tensor: as it is stored, or computed by a producer inside the kernel
//
// Every kernel here is bound by memory bandwidth; what a kernel costs is the bytes that it moves.
// dev/ladders/quantize_transpose.cu shows how part 3 of this file became fast, starting from four lines.
#include "gpu/coat.cuh"

#include "gpu/other_scaling.cuh"
#include "gpu/report.cuh"
#include "gpu/tiles.cuh"

namespace coat::gpu {

// ===========================================================================================================
// 1. Quantize in groups of 1 x 16 (paper section 5, granularity)
//
// scale = amax / 448 of the group, code = E4M3(x / scale).
// Two neighbouring threads hold one group, eight elements each. The group never crosses a token: an outlier
// costs precision only in its own 16 elements. Groups::round_and_store (gpu/tensor.cuh) has the arithmetic.
//
// In a training step this kernel runs for --attention groups, and for gate and up where nobody needs the amax
// of the activation's output. embedding_forward, residual_add and quantize_gate_up_kernel write all other
// groups in passing.

constexpr int GROUP_THREADS = 256;
static __global__ void __launch_bounds__(GROUP_THREADS)
    quantize_groups_kernel(Dense<bf16> x, int64_t chunks, Groups groups, bool write_back) {
    const int64_t chunk = int64_t(blockIdx.x) * GROUP_THREADS + threadIdx.x,
                  i = min(chunk, chunks - 1) * CHUNK;
    const bool live = chunk < chunks;
    Values v;
    x.values(x.load(i), v);
    groups.round_and_store(i, v, live);  // v becomes scale * code
    if (write_back) x.round_and_store(i, v, live);
}

void quantize_groups(const View& x, const View& groups, bool write_back, QuantStats* stats, cudaStream_t s) {
    require(x.quant.format == Format::BF16, "only BF16 is quantized in groups");
    measure_groups(stored(x), stats, s);
    const int64_t chunks = x.rows * x.cols / CHUNK;
    launch("quantize_groups", quantize_groups_kernel, blocks(chunks, GROUP_THREADS), GROUP_THREADS, 0, s,
           dense<bf16>(x.data), chunks, groups_of(groups), write_back);
}

// ===========================================================================================================
// 2. Group scaling (paper section 5): the amax of a tensor in two stages
//
// Stage one: each warp takes the maximum of its values. (The paper takes 1xG groups; the result is the same.)
// Stage two: an atomicMax over the warps, which gives the same result in any order. Mostly both happen in
// passing, in a kernel that has the values anyway: the outputs of a norm and of an activation are never
// stored, so the kernels that write the inputs compute them for their amax. The kernel below is for the
// gradient of gate and up, which is not stored either, for attention's output, and for weights that AdamW did
// not just update.

template <class Producer>
static __global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS)
    amax_kernel(Producer x, int64_t rows, AmaxAndScale* out) {
    float top = 0;
    for_each_row(x, TilePlace(), rows, [&](int, const Values(&v)[Producer::PLANES], bool) {
#pragma unroll
        for (int p = 0; p < Producer::PLANES; p++)
#pragma unroll
            for (int j = 0; j < CHUNK; j++) top = larger_magnitude(top, v[p][j]);
    });
    update_amax_by_warp(&out->amax, magnitude(top));
}

void amax(const Lazy& x, AmaxAndScale* out, cudaStream_t s) {
    with_bf16_producer(x, [&](auto producer) {
        launch("amax", amax_kernel<decltype(producer)>, tile_grid(x.rows, producer.width), TILE_THREADS, 0, s,
               producer, x.rows, out);
    });
}

// ===========================================================================================================
// 3. Per-tensor FP8: codes = encode(x / s) with s = amax / FMAX, row-major and transposed
//
// A kernel multiplies by 1 / s, rounded to FP32, as the CPU does.

// Just-in-time scaling, as in coat: the amax is known, the scale follows from it; `delayed` is false, and
// for_later does nothing. Delayed scaling: the scale is known, and DelayedAmax (gpu/other_scaling.cuh) takes
// the amax for later steps. codes may be null; transposed is used if TRANSPOSED.
template <class Producer, bool TRANSPOSED>
static __global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS)
    quantize_kernel(Producer x, int64_t rows, AmaxAndScale* tensor, float fmax, bool e5m2, uint8_t* codes,
                    uint8_t* transposed) {
    constexpr int PLANES = Producer::PLANES;
    __shared__ __align__(16) TransposeTile tiles[PLANES];
    const TilePlace at;
    const bool delayed = tensor->from_history > 0;  // 0 where scaling is just in time
    const float scale = delayed ? tensor->from_history : scale_of(fmax, tensor->amax),
                inverse = __frcp_rn(scale);
    const DelayedAmax for_later(delayed);
    uint8_t* to[PLANES];
#pragma unroll
    for (int p = 0; p < PLANES; p++) to[p] = codes + (at.row * PLANES + p) * x.width + at.col;
    uint2 last_four[PLANES][4];
    for_each_row(x, at, rows, [&](int i, const Values(&v)[PLANES], bool live) {
#pragma unroll
        for (int p = 0; p < PLANES; p++) {
            for_later.take(v[p], live);
            last_four[p][i % 4] = encode(e5m2, v[p], inverse);
            if (live && codes) put(to[p] + row_offset(i, PLANES * x.width), last_four[p][i % 4]);
            if (TRANSPOSED && i % 4 == 3) tiles[p].write(at, i / 4, last_four[p]);
        }
    });
    if (TRANSPOSED) store_transposed(tiles, rows, x.width, transposed);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        tensor->scale = scale;  // written last, so that it delays no load of x
    for_later.finish(&tensor->amax);
}

// ===========================================================================================================
// 4. quantize(): the kernel for each format

// Values rounded to BF16 or stored as FP32.
template <class Producer>
static __global__ void __launch_bounds__(TILE_THREADS, 2)
    round_kernel(Producer x, int64_t rows, EitherDense out) {
    const TilePlace at;
    for_each_row(x, at, rows, [&](int i, Values(&v)[Producer::PLANES], bool live) {
#pragma unroll
        for (int p = 0; p < Producer::PLANES; p++)
            out.round_and_store(((at.row + i) * Producer::PLANES + p) * x.width + at.col, v[p], live);
    });
}

void quantize(const Lazy& x, const Operand& out, QuantStats* stats, cudaStream_t s) {
    const Quant& q = out.view.quant;
    if (!q.fp8())
        return with_producer(x, [&](auto producer) {
            launch("round", round_kernel<decltype(producer)>, tile_grid(x.rows, producer.width), TILE_THREADS,
                   0, s, producer, x.rows, either_dense(out.view));
        });
    if (in_groups(q)) return quantize_groups(x.input, out.view, false, stats, s);
    if (q.granularity == PER_TENSOR) {
        measure(x, out, stats, s);  // first, because the codes may overwrite x
        with_bf16_producer(x, [&](auto producer) {
            using Producer = decltype(producer);
            const auto kernel =
                out.transposed ? quantize_kernel<Producer, true> : quantize_kernel<Producer, false>;
            launch("quantize", kernel, tile_grid(x.rows, producer.width), TILE_THREADS, 0, s, producer,
                   x.rows, amax_and_scale(out.view), info(q.format).max, q.format == Format::E5M2,
                   static_cast<uint8_t*>(out.view.data), static_cast<uint8_t*>(out.transposed));
        });
    } else {
        quantize_blocks(x, out, s);
        measure(x, out, stats, s);
    }
}

void convert(const View& x, const View& out, cudaStream_t s) { quantize(stored(x), {out}, nullptr, s); }

// ===========================================================================================================
// 5. A fused kernel of the precision flow

// The input of the activation is quantized in groups. The same pass takes the amax of the activation's
// output.
template <class Producer>
static __global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS)
    quantize_gate_up_kernel(Producer x, int64_t rows, Groups groups, bool reads_saved, AmaxAndScale* act) {
    constexpr int PLANES = Producer::PLANES;
    const TilePlace at;
    Groups to[PLANES];
#pragma unroll
    for (int p = 0; p < PLANES; p++) to[p] = groups.from((at.row * PLANES + p) * x.width + at.col);
    float top = 0;
    for_each_row(x, at, rows, [&](int i, Values(&v)[PLANES], bool live) {
        auto measure_amax = [&] {
#pragma unroll
            for (int j = 0; j < CHUNK; j++)
                top = larger_magnitude(top, activated<PLANES == 2>(v[0][j], v[PLANES - 1][j]));
        };
        if (!reads_saved) measure_amax();
#pragma unroll
        for (int p = 0; p < PLANES; p++) to[p].round_and_store(row_offset(i, PLANES * x.width), v[p], live);
        if (reads_saved) measure_amax();  // v: what the groups hold of it
    });
    // Lanes outside the tensor hold a copied chunk with a meaningless group scale: they do not count.
    update_amax_by_warp(&act->amax, at.col < x.width ? magnitude(top) : 0);
}

void quantize_gate_up(bool gated, const View& x, const View& groups, bool reads_saved, AmaxAndScale* act_amax,
                      QuantStats* stats, cudaStream_t s) {
    if (!act_amax) return quantize(stored(x), {groups}, stats, s);
    measure_groups(stored(x), stats, s);
    auto run = [&](auto producer) {
        launch("quantize_gate_up", quantize_gate_up_kernel<decltype(producer)>,
               tile_grid(x.rows, producer.width), TILE_THREADS, 0, s, producer, x.rows, groups_of(groups),
               reads_saved, act_amax);
    };
    if (gated) run(StoredProducer<Dense<bf16>, 2>{dense<bf16>(x.data), x.cols / 2});
    else run(StoredProducer<Dense<bf16>>{dense<bf16>(x.data), x.cols});
}

}  // namespace coat::gpu
