// coat.cu - the paper's section 5 on the GPU: quantizers, group scaling and the kernels of the FP8 precision
// flow (interface and rules: coat.cuh; the same operators on the CPU, with the same names: reference.cpp).
// Types are those of gpu/tensor.cuh. Kernels go through a tensor in tiles, and a producer computes what is
// not stored: both are in gpu/tiles.cuh.
//
// Words that all parts use:
//   code        an FP8 value as it is stored, before it is multiplied by its scale
//   1x16 group  16 neighbouring elements of a token that share a scale (section 5 of the paper)
//   chunk       8 neighbouring elements of a row: what a thread loads, computes and stores at once
//   tile        128 x 128 elements: what a thread block works on
//   live        false where a thread's place lies outside the tensor: it computes, but stores nothing
//   amax        the largest magnitude of a tensor; to take it is to update it with an atomicMax
//
// Every kernel here is bound by memory bandwidth; what a kernel costs is the bytes that it moves.
// dev/ladders/quantize_transpose.cu shows how part 3 of this file became fast, starting from four lines.
#include "gpu/coat.cuh"

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
// The kernel quantizes what attention saves (--attention groups), and the input of the activation. In the
// same pass it may take the amax of the activation's output, the operand of the next GEMM. residual_add
// writes all other groups in passing.

template <class Producer, bool TAKES_AMAX>
static __global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS)
    quantize_groups_kernel(Producer x, int64_t rows, Groups groups, bool write_back, bool reads_saved,
                           AmaxAndScale* activation) {
    constexpr int PLANES = Producer::PLANES;
    const TilePlace at;
    float top = 0;
    for_each_row(x, at, rows, [&](int i, Values(&v)[PLANES], bool live) {
        auto take_amax = [&] {
            for (int j = 0; j < CHUNK; j++)
                top = larger_magnitude(top, activated<PLANES == 2>(v[0][j], v[PLANES - 1][j]));
        };
        if (TAKES_AMAX && !reads_saved) take_amax();
        for (int p = 0; p < PLANES; p++) {
            const int64_t first = (at.row * PLANES + p) * x.width + at.col;
            const uint32_t offset = row_offset(i, PLANES * x.width);
            groups.from(first).round_and_store(offset, v[p], live);  // v becomes scale * code
            if (!TAKES_AMAX && write_back) x.in.from(first).round_and_store(offset, v[p], live);
        }
        if (TAKES_AMAX && reads_saved) take_amax();
    });
    // Lanes outside the tensor hold a copied chunk with a meaningless group scale: they do not count.
    if (TAKES_AMAX) update_amax_by_warp(&activation->amax, at.col < x.width ? magnitude(top) : 0);
}

void quantize_groups(const View& x, const View& groups, bool write_back, const ActivationAmax& activation,
                     QuantStats* stats, cudaStream_t s) {
    require(x.quant.format == Format::BF16, "only BF16 is quantized in groups");
    measure(stored(x), {groups}, stats, s);
    auto run = [&](auto producer, auto takes_amax) {
        const auto kernel = quantize_groups_kernel<decltype(producer), takes_amax()>;
        launch("quantize_groups", kernel, tile_grid(x.rows, producer.width), TILE_THREADS, 0, s, producer,
               x.rows, groups_of(groups), write_back, activation.reads_saved, activation.place);
    };
    const Producer<LazyOp::Stored, Dense<bf16>> one{dense<bf16>(x.data), x.cols, stored(x)};
    const Producer<LazyOp::Stored, Dense<bf16>, true> halves{dense<bf16>(x.data), x.cols / 2, stored(x)};
    if (!activation.place) run(one, std::false_type());
    else if (activation.gated) run(halves, std::true_type());
    else run(one, std::true_type());
}

// ===========================================================================================================
// 2. Group scaling (paper section 5): the amax of a tensor in two stages
//
// Stage one: each warp takes the maximum of its values. (The paper takes 1xG groups; the result is the same.)
// Stage two: an atomicMax over the warps. Mostly both happen in passing, in a kernel that has the values
// anyway: the kernels that write the inputs of norms and activations compute the outputs for their amax. The
// kernel below is for what no other kernel has at hand, for instance the gradient of gate and up.

template <class Producer>
static __global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS)
    amax_kernel(Producer x, int64_t rows, AmaxAndScale* out) {
    float top = 0;
    for_each_row(x, TilePlace(), rows, [&](int, const Values(&v)[Producer::PLANES], bool) {
        for (int p = 0; p < Producer::PLANES; p++) top = larger_magnitude(top, v[p]);
    });
    update_amax_by_warp(&out->amax, magnitude(top));
}

void amax(const Lazy& x, AmaxAndScale* out, cudaStream_t s) {
    with_producer<true>(x, [&](auto producer) {
        launch("amax", amax_kernel<decltype(producer)>, tile_grid(x.rows, producer.width), TILE_THREADS, 0, s,
               producer, x.rows, out);
    });
}

// ===========================================================================================================
// 3. FP8 operands of GEMMs: codes = encode(x / s), row-major and transposed; s = amax / FMAX per tensor
//
// A kernel multiplies by 1 / s, rounded to FP32, as the CPU does.

// Just-in-time scaling, as in coat: the amax is known, the scale follows from it. Delayed scaling (te): the
// scale is known, and the amax is taken for later steps; in shared memory, so that it costs just-in-time
// scaling no register. In BLOCKS (rowwise, deepseek), row-major and transposed codes have scales of their own
// (gpu/other_scaling.cu). codes may be null; transposed too, in BLOCKS and where not TRANSPOSED.
template <class Producer, bool TRANSPOSED, bool BLOCKS>
static __global__ void __launch_bounds__(TILE_THREADS, BLOCKS ? 2 : TILE_BLOCKS)
    quantize_kernel(Producer x, int64_t rows, AmaxAndScale* tensor, ScaleGrid by_row, ScaleGrid by_column,
                    float fmax, bool e5m2, uint8_t* codes, uint8_t* transposed) {
    constexpr int PLANES = Producer::PLANES;
    __shared__ __align__(16) TransposeTile tiles[PLANES];
    __shared__ uint32_t for_later;
    const TilePlace at;
    const bool transposes = BLOCKS ? transposed != nullptr : TRANSPOSED;
    const bool delayed = !BLOCKS && tensor->from_history > 0;  // 0 where scaling is just in time
    const float scale = BLOCKS    ? 0
                        : delayed ? tensor->from_history
                                  : scale_of(fmax, tensor->amax),
                inverse = __frcp_rn(scale);
    if (delayed) {
        if (threadIdx.x == 0) for_later = 0;
        __syncthreads();
    }
    uint8_t* to[PLANES];
    Values inverses[PLANES] = {};  // in blocks: of the thread's columns, for the transposed codes
    for (int p = 0; p < PLANES; p++) {
        to[p] = codes + (at.row * PLANES + p) * x.width + at.col;
        for (int j = 0; j < CHUNK; j++)
            if (BLOCKS && transposes && at.col < x.width)
                inverses[p][j] =
                    __frcp_rn(*by_column.at(int64_t(blockIdx.y) * TILE, p * x.width + at.col + j));
    }
    uint2 last_four[PLANES][4];
    for_each_row(x, at, rows, [&](int i, Values(&v)[PLANES], bool live) {
        for (int p = 0; p < PLANES; p++) {
            if (delayed) {  // a dead place may have read codes where values were: it does not count
                const uint32_t top = __reduce_max_sync(~0u, live ? magnitude(larger_magnitude(0, v[p])) : 0);
                if (threadIdx.x % 32 == 0) atomicMax(&for_later, top);
            }
            const bool stores = live && codes;
            float of_row = inverse;
            if (BLOCKS && stores) of_row = __frcp_rn(*by_row.at(at.row + i, p * x.width + at.col));
            last_four[p][i % 4] = encode(e5m2, v[p], of_row);
            if (stores) put(to[p] + row_offset(i, PLANES * x.width), last_four[p][i % 4]);
            if (!transposes) continue;
            if (BLOCKS) {
                for (int j = 0; j < CHUNK; j++) v[p][j] = __fmul_rn(v[p][j], inverses[p][j]);
                last_four[p][i % 4] = encode(e5m2, v[p], 1.0f);
            }
            if (i % 4 == 3) tiles[p].write(at, i / 4, last_four[p]);
        }
    });
    if (transposes) store_transposed(tiles, rows, x.width, transposed);
    if (delayed) __syncthreads();
    if (BLOCKS || threadIdx.x != 0) return;
    if (delayed) update_amax(&tensor->amax, for_later);
    if (blockIdx.x == 0 && blockIdx.y == 0) tensor->scale = scale;  // last, so that it delays no load of x
}

// ===========================================================================================================
// 4. quantize(): the kernel for each format

// Values rounded to BF16 or stored as FP32.
template <class Producer>
static __global__ void __launch_bounds__(TILE_THREADS, 2)
    round_kernel(Producer x, int64_t rows, EitherDense out) {
    const TilePlace at;
    for_each_row(x, at, rows, [&](int i, Values(&v)[Producer::PLANES], bool live) {
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
    if (q == Q_GROUP) return quantize_groups(x.input, out.view, false, {}, stats, s);
    const bool in_blocks = !(q.granularity == PER_TENSOR);
    if (in_blocks) block_scales(x, out, s);
    measure(x, out, stats, s);  // first, because the codes may overwrite x
    with_producer<true>(x, [&](auto producer) {
        using P = decltype(producer);
        const auto kernel = in_blocks        ? quantize_kernel<P, true, true>
                            : out.transposed ? quantize_kernel<P, true, false>
                                             : quantize_kernel<P, false, false>;
        launch("quantize", kernel, tile_grid(x.rows, producer.width), TILE_THREADS, 0, s, producer, x.rows,
               amax_and_scale(out.view), scale_grid(out, false), scale_grid(out, true), info(q.format).max,
               q.format == Format::E5M2, static_cast<uint8_t*>(out.view.data),
               static_cast<uint8_t*>(out.transposed));
    });
}

void convert(const View& x, const View& out, cudaStream_t s) { quantize(stored(x), {out}, nullptr, s); }

}  // namespace coat::gpu
