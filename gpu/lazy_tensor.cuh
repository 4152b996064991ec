// gpu/lazy_tensor.cuh - how kernels go through a tensor, tile by tile, and compute its values on the way if
// it is a LazyTensor (gpu/tensors.h). All kernels of coat.cu are built on it.
//
//   1. tiles: how the threads of a thread block share out a tensor
//   2. the equations of norms and activation functions, for one element
//   3. producers: how a thread loads or computes eight neighbouring elements
//   4. rows: a thread's loop over its eight rows
//
// For example, these lines of a kernel find the largest magnitude of a tensor x. `producer` is an argument of
// the kernel; the host chose it:
//
//   constexpr int PLANES = Producer::PLANES;
//   const ThreadTile thread_tile(blockIdx.y);
//   float largest = 0;
//   for_each_row(producer, thread_tile, [&](int, const ChunkValues(&v)[PLANES], bool) {
//       for (int p = 0; p < PLANES; p++) largest = larger_magnitude(largest, v[p]);
//   });
//
// What they use of this file:
//   ThreadTile       where the thread's 8 x 8 elements of x are (part 1)
//   Producer         the type of the producer, which loads or computes the values of x (part 3). PLANES is 2
//                    where a thread takes gate and up together, else 1
//   for_each_row()   calls the lambda for each of the thread's 8 rows (part 4). The lambda is given the
//                    number of the row, its values v, and whether they are live. Here it needs only v
#pragma once
#include "groups.cuh"

namespace coat::gpu {

// ===========================================================================================================
// 1. Tiles
//
// A thread block works on a tile of 128 rows x 128 columns. A thread works on 8 rows x 8 columns of it, its
// thread tile:
//
//   tensor, tiles side by side        tile, 16 x 16 threads           thread tile, 8 rows x 1 chunk
//   +-------+-------+-------+         t0   t1   t2  ... t15           row 0  x x x x x x x x
//   |  128  |       |       |         t16  t17  t18 ... t31           row 1  x x x x x x x x
//   | x 128 |       |       |         ...                             ...
//   +-------+-------+-------+         t240 ...          t255          row 7  x x x x x x x x
//
// So 16 neighbouring threads read 128 BF16 values of a row, 256 bytes, and write their 128 codes, 128 bytes.
// These are whole sectors. (A sector is 32 bytes. A warp's load or store takes time for each sector that it
// touches, however little of it is used.)
//
// Planes. Where a thread takes gate and up together, [gate | up] has two planes side by side, gate and up,
// each with plane_cols columns. A thread block has a tile of both, with the same rows and columns, and a
// thread a thread tile of both. So it is with their gradients. Any other tensor has one plane.

constexpr int TILE_SIDE = 128;                        // rows and columns of a tile
constexpr int THREAD_ROWS = 8;                        // rows of a thread tile
constexpr int SIDE_THREADS = TILE_SIDE / CHUNK_SIZE;  // threads across a tile, and as many down
constexpr int TILE_THREADS = SIDE_THREADS * SIDE_THREADS;
// Thread blocks that a multiprocessor (SM) has at once. Four leave 64 registers for each thread. (With
// three, or with five, the kernels were slower.)
constexpr int TILE_BLOCKS_PER_SM = 4;

// Where the thread tile of this thread is. The tiles of a tensor lie in rows and columns. A thread block has
// the tile in the row of tiles tile_row, which is blockIdx.y, and in the column of tiles blockIdx.x. (This
// can wait: in gpu/column_sums.cu a thread block has several tiles, one after the other: one in each of
// several rows of tiles.)
struct ThreadTile {
    int across, down;  // the thread's number across and down the 16 x 16 threads of its tile
    int64_t row, col;  // of the first element, in the tensor (in each plane, if there are two)
    __device__ explicit ThreadTile(int64_t tile_row)
        : across(threadIdx.x % SIDE_THREADS), down(threadIdx.x / SIDE_THREADS),
          row(tile_row * TILE_SIDE + down * THREAD_ROWS),
          col(int64_t(blockIdx.x) * TILE_SIDE + across * CHUNK_SIZE) {}
    // Whether the first element is inside a tensor of this size.
    __device__ bool inside(int64_t rows, int64_t plane_cols) const { return row < rows && col < plane_cols; }
    // How many of the 8 rows are inside it.
    __device__ int rows_inside(int64_t rows) const {
        const int64_t rows_left = max(rows - row, int64_t(0));
        return int(min(rows_left, int64_t(THREAD_ROWS)));
    }
};
// The number of element (row, col) of plane p among all elements of a tensor. A row of the tensor has PLANES
// planes of plane_cols columns.
template <int PLANES> __device__ int64_t element_index(int64_t row, int64_t col, int p, int64_t plane_cols) {
    return (row * PLANES + p) * plane_cols + col;
}
inline dim3 tile_grid(int64_t rows, int64_t plane_cols) {
    return {block_count(plane_cols, TILE_SIDE), block_count(rows, TILE_SIDE)};
}

// ===========================================================================================================
// 2. The equations of norms and activation functions
//
// The code says which multiplications and additions are fused (__fmaf_rn) and which are not (__fmul_rn,
// __fadd_rn). If the compiler chose, it might choose differently in another kernel. As it is, a tensor has
// the same bits wherever it is computed.

// A norm: y = (x - mean) rstd weight + bias.
inline __device__ float norm_output(float x, RowStatistics statistics, float weight, float bias) {
    return __fmaf_rn(__fmul_rn(__fsub_rn(x, statistics.mean), statistics.rstd), weight, bias);
}
// A norm's bias of 8 columns. Without a bias (RMSNorm) they are zeros.
template <class Element> __device__ void load_bias(PlainView<Element> bias, int64_t col, ChunkValues& v) {
    for (int j = 0; j < CHUNK_SIZE; j++) v[j] = 0;
    if (bias.data) bias.load_values(col, v);
}

// SiLU(gate) x up, where silu(u) = u sigmoid(u).
inline __device__ float gated_silu(float gate, float up) {
    return __fmul_rn(__fmul_rn(gate, sigmoid(gate)), up);
}
// The gradients of gate and up, from d, the gradient of gated_silu(). silu'(u) = s + u s (1 - s).
inline __device__ void gated_silu_backward(float gate, float up, float d, float& dgate, float& dup) {
    const float s = sigmoid(gate), silu = __fmul_rn(gate, s);
    dgate = __fmul_rn(__fmul_rn(d, up), __fmaf_rn(silu, __fsub_rn(1.0f, s), s));
    dup = __fmul_rn(d, silu);
}

// GELU, the activation function of GPT-2. In its tanh form it is u / 2 (1 + tanh(z)) = u sigmoid(2z), where z
// = A (u + B u^3), A = sqrt(2 / pi) and B = 0.044715.
constexpr float GELU_2A = 2 * 0.7978845608028654f, GELU_2AB = 2 * 0.7978845608028654f * 0.044715f;
inline __device__ float gelu_sigmoid(float u) {
    const float uu = __fmul_rn(u, u);
    return one_over_1_plus_exp2(__fmul_rn(u, __fmaf_rn(-LOG2_E * GELU_2AB, uu, -LOG2_E * GELU_2A)));
}
inline __device__ float gelu(float u) { return __fmul_rn(u, gelu_sigmoid(u)); }
// The gradient of u, from d, the gradient of gelu(u). gelu'(u) = s + u s (1 - s) 2z'(u). u^2 is limited to
// 128, so that the product of an infinite slope and a zero does not become NaN. This changes no result: from
// |u| = 11 on, s or 1 - s is zero.
inline __device__ float gelu_backward(float u, float d) {
    const float s = gelu_sigmoid(u);
    const float slope = __fmaf_rn(3 * GELU_2AB, fminf(__fmul_rn(u, u), 128.0f), GELU_2A);
    const float bend = __fmul_rn(__fmul_rn(u, s), __fsub_rn(1.0f, s));
    return __fmul_rn(d, __fmaf_rn(bend, slope, s));
}

// ===========================================================================================================
// 3. Producers
//
// A producer gives a kernel the values of a LazyTensor: it loads them, or computes them from what is stored.
// A thread, whose first element is at (row, col), calls three functions:
//   thread_sources(row, col)     returns the ThreadSources, which all rows of the thread need: views of what
//                                is stored, starting at (row, col), and the weight and bias of a norm
//   load(sources, i)             returns a LoadedRow: what row + i needs. It only loads, so the loads of
//                                several rows can be on their way at once
//   compute(loaded, sources, v)  computes the FP32 values of a row from its LoadedRow: 8 columns of each
//                                plane

// The distance, in elements, from a thread's first row to its row i of a tensor with `cols` columns. It has
// 32 bits, so that a single instruction computes an address from that of the first row.
inline __device__ uint32_t row_offset(int i, int64_t cols) { return uint32_t(i) * uint32_t(cols); }

// The producer of the LazyTensors whose op is OP, and whose input is read through a StoredView (device.cuh).
// INPUT_PLANES is 2 where a thread takes gate and up of the input together, else 1. The activation's output,
// SiLU(gate) x up, has one plane.
template <LazyOp OP, class StoredView, int INPUT_PLANES = 1> struct LazyProducer {
    static constexpr bool NORM = OP == LazyOp::Norm, ACTIVATION = OP == LazyOp::Activation,
                          ACTIVATION_BACKWARD = OP == LazyOp::ActivationBackward;
    static constexpr int PLANES = ACTIVATION ? 1 : INPUT_PLANES;  // how many planes the result has
    using ComputeElement = typename StoredView::ComputeElement;
    using ComputeView = PlainView<ComputeElement>;

    StoredView input;          // (rows, INPUT_PLANES * plane_cols)
    int64_t rows, plane_cols;  // plane_cols: the columns of a plane
    // ActivationBackward:
    ComputeView dact;  // (rows, plane_cols)
    // Norm:
    const RowStatistics* row_statistics;  // (rows)
    ComputeView weight, bias;             // (plane_cols); bias.data is null for RMSNorm

    LazyProducer(const LazyTensor& x, StoredView input_view)
        : input(input_view), rows(x.rows), plane_cols(x.input.cols / INPUT_PLANES),
          dact(plain_view<ComputeElement>(x.dact.data)), row_statistics(x.row_statistics),
          weight(plain_view<ComputeElement>(x.weight)), bias(plain_view<ComputeElement>(x.bias)) {}

    // A producer uses only some fields of these two structs, and the compiler leaves out the others.
    struct ThreadSources {
        StoredView input_planes[INPUT_PLANES];
        ComputeView dact;
        const RowStatistics* row_statistics;
        ChunkValues weight_values, bias_values;
    };
    struct LoadedRow {
        typename StoredView::StoredChunk input_chunks[INPUT_PLANES];
        typename ComputeView::StoredChunk dact_chunk;
        RowStatistics statistics;
    };
    // The bytes of the fields that this producer uses, with padding: what a row takes in registers.
    static constexpr int BYTES = sizeof(LoadedRow::input_chunks) +
                                 ACTIVATION_BACKWARD * sizeof(LoadedRow::dact_chunk) +
                                 NORM * sizeof(LoadedRow::statistics);

    __device__ ThreadSources thread_sources(int64_t row, int64_t col) const {
        ThreadSources sources;
        for (int p = 0; p < INPUT_PLANES; p++)
            sources.input_planes[p] = input.starting_at(element_index<INPUT_PLANES>(row, col, p, plane_cols));
        if (ACTIVATION_BACKWARD) sources.dact = dact.starting_at(row * plane_cols + col);
        if (NORM) {
            sources.row_statistics = row_statistics + row;
            weight.load_values(col, sources.weight_values);
            load_bias(bias, col, sources.bias_values);
        }
        return sources;
    }
    __device__ LoadedRow load(const ThreadSources& sources, int i) const {
        LoadedRow loaded;
        for (int p = 0; p < INPUT_PLANES; p++)
            loaded.input_chunks[p] = sources.input_planes[p].load(row_offset(i, INPUT_PLANES * plane_cols));
        if (ACTIVATION_BACKWARD) loaded.dact_chunk = sources.dact.load(row_offset(i, plane_cols));
        if (NORM) loaded.statistics = sources.row_statistics[i];
        return loaded;
    }
    __device__ void compute(const LoadedRow& loaded, const ThreadSources& sources,
                            ChunkValues (&v)[PLANES]) const {
        ChunkValues x[INPUT_PLANES], d;  // d: of dact
        for (int p = 0; p < INPUT_PLANES; p++) input.unpack(loaded.input_chunks[p], x[p]);
        if (ACTIVATION_BACKWARD) dact.unpack(loaded.dact_chunk, d);
        for (int j = 0; j < CHUNK_SIZE; j++) {
            if constexpr (NORM) {
                v[0][j] =
                    norm_output(x[0][j], loaded.statistics, sources.weight_values[j], sources.bias_values[j]);
            } else if constexpr (ACTIVATION && INPUT_PLANES == 2) {
                v[0][j] = gated_silu(x[0][j], x[1][j]);
            } else if constexpr (ACTIVATION) {
                v[0][j] = gelu(x[0][j]);
            } else if constexpr (ACTIVATION_BACKWARD && INPUT_PLANES == 2) {
                gated_silu_backward(x[0][j], x[1][j], d[j], v[0][j], v[1][j]);
            } else if constexpr (ACTIVATION_BACKWARD) {
                v[0][j] = gelu_backward(x[0][j], d[j]);
            } else {
                v[0][j] = x[0][j];
                if constexpr (INPUT_PLANES == 2) v[1][j] = x[1][j];
            }
        }
    }
};

// The host chooses the producer of x with one of two functions. They differ in what x.input may be:
//   with_producer()                     in FP32, in BF16, or in groups
//   with_producer_of_bf16_or_groups()   in BF16 or in groups. Quantizers use it, because FP8 goes with the
//                                       compute format BF16. So they are not compiled for FP32
// Both call this function with the view of x.input. It calls f with the producer, and f is compiled for each
// type of producer.
template <class StoredView, class F> void with_producer_of_view(const LazyTensor& x, StoredView input, F f) {
    if (x.op == LazyOp::Load) f(LazyProducer<LazyOp::Load, StoredView>(x, input));
    else if (x.op == LazyOp::Norm) f(LazyProducer<LazyOp::Norm, StoredView>(x, input));
    else if (x.op == LazyOp::Activation && x.gated)
        f(LazyProducer<LazyOp::Activation, StoredView, /*INPUT_PLANES=*/2>(x, input));
    else if (x.op == LazyOp::Activation) f(LazyProducer<LazyOp::Activation, StoredView>(x, input));
    else if (x.gated) f(LazyProducer<LazyOp::ActivationBackward, StoredView, /*INPUT_PLANES=*/2>(x, input));
    else f(LazyProducer<LazyOp::ActivationBackward, StoredView>(x, input));
}
template <class F> void with_producer_of_bf16_or_groups(const LazyTensor& x, F f) {
    require(x.input.format.element_format != Format::FP32,
            "FP8 goes with the compute format BF16, not with FP32");
    if (x.input.format == E4M3_PER_1x16) with_producer_of_view(x, groups_view(x.input), f);
    else with_producer_of_view(x, plain_view<bf16>(x.input.data), f);
}
template <class F> void with_producer(const LazyTensor& x, F f) {
    with_view(x.input, [&](auto input) { with_producer_of_view(x, input, f); });
}

// ===========================================================================================================
// 4. Rows

// How many of a thread's rows are loaded at once, if a row takes this many bytes of registers.
constexpr __host__ __device__ int rows_in_flight(int bytes) {
    if (bytes <= 16) return 8;
    return bytes <= 32 ? 4 : 2;
}

// Calls use(i, values, live) for each of the thread's 8 rows of the tensor that is produced, one after the
// other. It loads several rows before it uses the first of them, so that their loads are on their way at the
// same time. For example, this is thread 17, which has rows 8 to 15 and columns 8 to 15, if four rows are
// loaded at once and the tensor has two planes:
//
//                 plane 0, plane_cols wide     plane 1, plane_cols wide
//   column        0..7  8..15  16..23  ...     0..7  8..15  16..23  ...
//   rows 0..7      t0    t1     t2              t0    t1     t2
//   row  8         t16  [t17]   t18             t16  [t17]   t18         | four loads of both planes, and
//   row  9         t16  [t17]   t18             t16  [t17]   t18         | then use(0) to use(3)
//   row 10         t16  [t17]   t18             t16  [t17]   t18         |
//   row 11         t16  [t17]   t18             t16  [t17]   t18         |
//   rows 12..15    t16  [t17]   t18             t16  [t17]   t18         | the same: use(4) to use(7)
//                       values[0]                    values[1]
//
// `live` is false for a chunk outside the tensor. No load has a condition. In place of a row past the last
// one, a thread loads the last row once more, and in place of a chunk past the last column, the last chunk.
//
// Rule: a kernel that writes over what it reads (the codes of dgate_up over the groups of gate_up, for
// example) calls for_each_row() only in threads whose first element is inside the tensor
// (ThreadTile::inside()). There are two cases:
//   first element inside    The thread loads only elements of its own. In place of a row past the last one it
//                           loads its own last row again, which it may have overwritten. Then the values are
//                           wrong, but they are not live, so nobody uses them.
//   first element outside   The thread would load elements of another thread, which may be writing them: a
//                           race.
template <class Producer, class Use>
__device__ void for_each_row(const Producer& producer, const ThreadTile& thread_tile, Use use) {
    constexpr int IN_FLIGHT = rows_in_flight(Producer::BYTES);
    const int64_t rows = producer.rows, plane_cols = producer.plane_cols;
    // (With min() in place of these two conditions, some kernels would have 10% more instructions.)
    const int64_t row = thread_tile.row < rows ? thread_tile.row : rows - 1;
    const int64_t col = thread_tile.col < plane_cols ? thread_tile.col : plane_cols - CHUNK_SIZE;
    const auto sources = producer.thread_sources(row, col);
    const int rows_inside = thread_tile.rows_inside(rows);
    const int last_row = max(rows_inside - 1, 0);  // of the thread's rows 0 to 7
    // In how many rows the thread's chunk is live: in none if its columns lie past the last column.
    const int live_rows = thread_tile.col < plane_cols ? rows_inside : 0;
#pragma unroll
    for (int first = 0; first < THREAD_ROWS; first += IN_FLIGHT) {
        typename Producer::LoadedRow loaded[IN_FLIGHT];
        for (int i = 0; i < IN_FLIGHT; i++) loaded[i] = producer.load(sources, min(first + i, last_row));
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            ChunkValues v[Producer::PLANES];
            producer.compute(loaded[i], sources, v);
            use(first + i, v, first + i < live_rows);
        }
    }
}

}  // namespace coat::gpu
