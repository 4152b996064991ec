// gpu/tiles.cuh - how kernels go through a tensor, and how they compute a tensor that is not stored.
//
//   1. tiles: what a thread block and a thread work on; loads in flight; sums over columns; transposed codes
//   2. producers of what a Lazy describes: a stored tensor, a norm's or activation's output, its gradient
//
//   tensor, tiles side by side        tile, 16 x 16 threads           thread, 8 rows x 1 chunk
//   +-------+-------+-------+         t0   t1   t2  ... t15           row 0  x x x x x x x x
//   |  128  |       |       |         t16  t17  t18 ... t31           row 1  x x x x x x x x
//   | x 128 |       |       |         ...                             ...
//   +-------+-------+-------+         t240 ...          t255          row 7  x x x x x x x x
#pragma once
#include "coat.cuh"

namespace coat::gpu {

// ===========================================================================================================
// 1. Tiles
//
// A block works on a tile of 128 rows x 128 columns, a thread on 8 rows x 8 columns of it: so a warp reads
// BF16 values and writes codes in whole 128-byte lines, also those of the transposed result.

constexpr int TILE = 128;             // rows and columns of a tile
constexpr int ROWS = 8;               // of one thread
constexpr int ACROSS = TILE / CHUNK;  // a block has ACROSS x ACROSS threads
constexpr int TILE_THREADS = ACROSS * ACROSS;
// Blocks that a multiprocessor has at once, which leaves 64 registers a thread; 3 and 5 were slower.
constexpr int TILE_BLOCKS = 4;

struct TilePlace {
    int across, down;
    int64_t row, col;  // the thread's first
    __device__ explicit TilePlace(int64_t tile_row = blockIdx.y)
        : across(threadIdx.x % ACROSS), down(threadIdx.x / ACROSS), row(tile_row * TILE + down * ROWS),
          col(int64_t(blockIdx.x) * TILE + across * CHUNK) {}
    __device__ bool inside(int64_t rows, int64_t width) const { return row < rows && col < width; }
};
inline dim3 tile_grid(int64_t rows, int64_t width) { return {blocks(width, TILE), blocks(rows, TILE)}; }

// Elements from a thread's first row to its row i: in 32 bits, so that an address is a single instruction.
inline __device__ uint32_t row_offset(int i, int64_t width) {
    return static_cast<uint32_t>(i) * static_cast<uint32_t>(width);
}

// Calls use(i, values, live) for the thread's 8 rows of x, a producer (part 2), in turn, with the loads of
// several rows in flight (what that gains: version 4 of dev/ladders/quantize_transpose.cu). All lanes call
// it: a place outside the tensor has live = false and reads the last row or chunk again, so that no load has
// a condition.
template <class Producer, class Use>
__device__ void for_each_row(const Producer& x, const TilePlace& at, int64_t rows, Use use) {
    constexpr int IN_FLIGHT = Producer::BYTES <= 16 ? 8 : Producer::BYTES <= 32 ? 4 : 2;
    const int64_t row = at.row < rows ? at.row : rows - 1;
    const int64_t col = at.col < x.width ? at.col : x.width - CHUNK;
    const auto cursor = x.cursor(row, col);
    const int inside = static_cast<int>(min(max(rows - at.row, int64_t(0)), int64_t(ROWS)));
    const int live_rows = at.col < x.width ? inside : 0;
#pragma unroll
    for (int first = 0; first < ROWS; first += IN_FLIGHT) {
        typename Producer::Raw raw[IN_FLIGHT];
        for (int i = 0; i < IN_FLIGHT; i++) raw[i] = x.load(cursor, min(first + i, max(inside - 1, 0)));
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            Values v[Producer::PLANES];
            x.compute(raw[i], cursor, v);
            use(first + i, v, first + i < live_rows);
        }
    }
}
// Every thread has a number for each of its 8 columns. They are combined over the block's 16 rows of threads,
// in order: take(column, result).
template <class Producer, class T, class Combine, class Take>
__device__ void combine_columns(const Producer& x, const TilePlace& at,
                                const T (&mine)[Producer::PLANES][CHUNK], T (&columns)[ACROSS][TILE + 1],
                                Combine combine, Take take) {
    for (int p = 0; p < Producer::PLANES; p++) {
        __syncthreads();
        for (int j = 0; j < CHUNK; j++) columns[at.down][at.across * CHUNK + j] = mine[p][j];
        __syncthreads();
        const int64_t col = int64_t(blockIdx.x) * TILE + threadIdx.x;
        if (threadIdx.x >= TILE || col >= x.width) continue;
        T all = 0;
        for (int i = 0; i < ACROSS; i++) all = combine(all, columns[i][threadIdx.x]);
        take(p * x.width + col, all);
    }
}

// Four rows of four bytes become four columns of four bytes.
inline __device__ void transpose4(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t (&out)[4]) {
    const uint32_t ab01 = __byte_perm(a, b, 0x5140), cd01 = __byte_perm(c, d, 0x5140);
    const uint32_t ab23 = __byte_perm(a, b, 0x7362), cd23 = __byte_perm(c, d, 0x7362);
    out[0] = __byte_perm(ab01, cd01, 0x5410);
    out[1] = __byte_perm(ab01, cd01, 0x7632);
    out[2] = __byte_perm(ab23, cd23, 0x5410);
    out[3] = __byte_perm(ab23, cd23, 0x7632);
}

// The codes of a tile in shared memory, by columns (why: versions 2 and 5 of the ladder). A word holds four
// rows of a column. A column has 32 words, as many as there are banks, so that word b of any column lies in
// bank b. The drawing in coat.cu, part 3, shows which word is where, and why no two lanes meet in a bank.
struct TransposeTile {
    static constexpr int WORDS = TILE / 4;  // of a column
    uint32_t words[TILE][WORDS];

    // A thread calls it twice: for its rows 0 ... 3 (half 0) and 4 ... 7 (half 1), for its eight columns.
    __device__ void write(const TilePlace& at, int half, const uint2 (&codes)[4]) {
        uint32_t columns[CHUNK / 4][4];
        transpose4(codes[0].x, codes[1].x, codes[2].x, codes[3].x, columns[0]);
        transpose4(codes[0].y, codes[1].y, codes[2].y, codes[3].y, columns[1]);
        const int unswizzled = 2 * at.down + half;
        const int bank = unswizzled ^ (2 * at.across) ^ (at.down & 1);
        for (int j = 0; j < CHUNK; j++) words[at.across * CHUNK + j][bank] = columns[j / 4][j % 4];
    }
    // The four words of rows 16 * piece ... + 15 of a column, put back into the order of the rows: d.0, d.1
    // of a thread whose `down` is even, and e.0, e.1 of the next one. In columns of an even chunk they lie as
    // d.0 d.1 e.1 e.0, of an odd chunk as e.1 e.0 d.0 d.1.
    __device__ uint4 rows16(int col, int piece) const {
        const int chunk = col / CHUNK;
        const int bank = 4 * (piece ^ (chunk / 2));
        const uint4 four = *reinterpret_cast<const uint4*>(&words[col][bank]);
        const uint4 of_even{four.x, four.y, four.w, four.z};
        const uint4 of_odd{four.z, four.w, four.y, four.x};
        return chunk % 2 == 0 ? of_even : of_odd;  // as a conditional expression it needs no branch
    }
};
// Writes the block's tiles, one a plane, to out (columns, rows), rows a multiple of 16. All threads call it.
template <int PLANES>
__device__ void store_transposed(const TransposeTile (&tiles)[PLANES], int64_t rows, int64_t width,
                                 uint8_t* out) {
    __syncthreads();
    constexpr int PIECES = TILE / 16;  // of a column, 16 rows each
    const int64_t row0 = int64_t(blockIdx.y) * TILE, col0 = int64_t(blockIdx.x) * TILE;
    const int cols = static_cast<int>(min(int64_t(TILE), width - col0));
#pragma unroll
    for (int p = 0; p < PLANES; p++)
        for (int i = threadIdx.x; i < TILE * PIECES; i += TILE_THREADS) {
            const int col = i / PIECES, piece = i % PIECES;
            const int64_t row = row0 + piece * 16;
            if (col >= cols || row >= rows) continue;
            put(out + (p * width + col0 + col) * rows + row, tiles[p].rows16(col, piece));
        }
}

// ===========================================================================================================
// 2. Producers
//
// A producer computes a tensor on the fly, what a Lazy (coat.cuh) describes. For 8 columns of one row,
//   cursor(row, col)      is what a thread remembers of its place: pointers, and a norm's weights;
//   load(cursor, i)       fetches what row + i needs, so that several rows' loads are in flight;
//   compute(raw, cursor, values)  converts it to FP32 values.
// A tensor such as [gate | up] has two planes side by side, each `width` columns wide: it is GATED. A
// producer reads INPUTS planes and makes PLANES: SiLU(gate) x up reads two and makes one. Additions and
// multiplications are spelled out, so that every kernel that computes a tensor computes the same bits.

// GELU in its tanh form is u sigmoid(2z) with z = sqrt(2 / pi) (u + 0.044715 u^3), since 1 + tanh(z) = 2
// sigmoid(2z).
constexpr float GELU_2A = 2 * 0.7978845608028654f, GELU_2AB = 2 * 0.7978845608028654f * 0.044715f;
inline __device__ float gelu_sigmoid(float u) {
    const float uu = __fmul_rn(u, u);
    return sigmoid_of_exp2(__fmul_rn(u, __fmaf_rn(-LOG2_E * GELU_2AB, uu, -LOG2_E * GELU_2A)));
}
template <bool GATED> __device__ float activated(float first, float second) {  // silu(gate) * up, or gelu(u)
    return GATED ? __fmul_rn(__fmul_rn(first, sigmoid(first)), second)
                 : __fmul_rn(first, gelu_sigmoid(first));
}
// The gradients of gate and up, or (one plane) of u, from d, that of the activation's output.
template <bool GATED>
__device__ void activated_backward(float first, float second, float d, float& d_first, float& d_second) {
    if (GATED) {  // silu'(u) = s + u s (1 - s)
        const float s = sigmoid(first), silu = __fmul_rn(first, s);
        d_first = __fmul_rn(__fmul_rn(d, second), __fmaf_rn(silu, __fsub_rn(1.0f, s), s));
        d_second = __fmul_rn(d, silu);
    } else {  // gelu'(u) = s + u s (1 - s) 2z'(u). From |u| = 11 on, s or 1 - s is zero
        const float s = gelu_sigmoid(first),
                    slope = __fmaf_rn(3 * GELU_2AB, fminf(__fmul_rn(first, first), 128.0f), GELU_2A),
                    bend = __fmul_rn(__fmul_rn(first, s), __fsub_rn(1.0f, s));
        d_first = __fmul_rn(d, __fmaf_rn(bend, slope, s));
    }
}

template <LazyOp OP, class Storage, bool GATED = false> struct Producer {
    static constexpr bool NORM = OP == LazyOp::Norm, ACTIVATION = OP == LazyOp::Activation,
                          BACKWARD = OP == LazyOp::ActivationBackward;
    static constexpr int INPUTS = GATED ? 2 : 1, PLANES = ACTIVATION ? 1 : INPUTS;
    using Compute = typename Storage::Compute;
    struct Cursor {
        Storage in[INPUTS];
        Dense<Compute> dact;
        const float2* stats;
        Values weight, bias;
    };
    struct Raw {  // a producer uses some of these, of BYTES bytes
        typename Storage::Raw in[INPUTS];
        typename Dense<Compute>::Raw dact;
        float2 stats;
    };
    static constexpr int BYTES = sizeof(Raw::in) + (BACKWARD ? sizeof(Raw::dact) : NORM ? sizeof(float2) : 0);
    Storage in;  // (N, INPUTS * width)
    int64_t width;
    Lazy of;

    __device__ Cursor cursor(int64_t row, int64_t col) const {
        Cursor at;
        for (int h = 0; h < INPUTS; h++) at.in[h] = in.from((row * INPUTS + h) * width + col);
        if (BACKWARD) at.dact = dense<Compute>(of.dact.data).from(row * width + col);
        if (NORM) at.stats = of.norm.stats + row, load_parameters<Compute>(of.norm, col, at.weight, at.bias);
        return at;
    }
    __device__ Raw load(const Cursor& at, int i) const {
        Raw raw;
        for (int h = 0; h < INPUTS; h++) raw.in[h] = at.in[h].load(row_offset(i, INPUTS * width));
        if (BACKWARD) raw.dact = at.dact.load(row_offset(i, width));
        if (NORM) raw.stats = at.stats[i];
        return raw;
    }
    __device__ void compute(const Raw& raw, const Cursor& at, Values (&v)[PLANES]) const {
        Values x[INPUTS], d;
        for (int h = 0; h < INPUTS; h++) in.values(raw.in[h], x[h]);
        if (BACKWARD) at.dact.values(raw.dact, d);
        for (int j = 0; j < CHUNK; j++) {
            const float first = x[0][j], second = x[INPUTS - 1][j];
            if (NORM) v[0][j] = normalized(first, raw.stats, at.weight[j], at.bias[j]);
            else if (ACTIVATION) v[0][j] = activated<GATED>(first, second);
            else if (BACKWARD) activated_backward<GATED>(first, second, d[j], v[0][j], v[PLANES - 1][j]);
            else v[0][j] = first, v[PLANES - 1][j] = second;
        }
    }
};

// Calls f with the producer of a lazily computed tensor. BF16_ONLY: for a kernel that serves FP8 alone.
template <bool BF16_ONLY = false, class F> void with_producer(const Lazy& x, F f) {
    with_storage(x.input, [&](auto in) {
        using Storage = decltype(in);
        const int64_t cols = x.input.cols;
        if constexpr (BF16_ONLY && !std::is_same_v<typename Storage::Compute, bf16>)
            require(false, "FP8 goes with the compute dtype BF16, not with FP32");
        else if (x.op == LazyOp::Stored) f(Producer<LazyOp::Stored, Storage>{in, cols, x});
        else if (x.op == LazyOp::Norm) f(Producer<LazyOp::Norm, Storage>{in, cols, x});
        else if (x.op == LazyOp::Activation && x.gated)
            f(Producer<LazyOp::Activation, Storage, true>{in, cols / 2, x});
        else if (x.op == LazyOp::Activation) f(Producer<LazyOp::Activation, Storage>{in, cols, x});
        else if (x.gated) f(Producer<LazyOp::ActivationBackward, Storage, true>{in, cols / 2, x});
        else f(Producer<LazyOp::ActivationBackward, Storage>{in, cols, x});
    });
}

}  // namespace coat::gpu
