// coat.cu - the paper's section 5 on the GPU: quantizers, group scaling and the kernels of the FP8 precision
// flow (interface and rules: coat.cuh; the same operators on the CPU, with the same names: reference.cpp).
// The types View, Values, Dense, Groups and TensorScale are those of gpu/tensor.cuh.
//
// Read it in this order:
//   1. quantize in groups: the simplest quantizer, one kernel of a dozen lines
//   2. tiles and producers: how all other kernels go through a tensor and compute what is not stored
//   3. group scaling: the amax of a tensor
//   4. per-tensor FP8, row-major and transposed
//   5. other granularities: per row, 1x128, 128x128, 1x32
//   6. the quantization report
//   7. quantize(): the kernel for each format
//   8. fused kernels: the input of an activation; a bias gradient
//   9. delayed scaling
//
// Words that all sections use:
//   code      an FP8 value as it is stored, before it is multiplied by its scale
//   1x16 group  16 neighbouring elements of a token that share a scale (section 5 of the paper)
//   chunk     8 neighbouring elements of a row: what a thread loads, computes and stores at once
//   tile      128 x 128 elements: what a thread block works on
//   live      false where a thread's place lies outside the tensor: it computes, but stores nothing
//   amax      the largest magnitude of a tensor; to take it is to update it with an atomicMax
//   Storage   how a tensor lies in memory: dense BF16 or FP32, or 1x16 groups (gpu/tensor.cuh)
//   Lazy      a tensor that is described, not stored; a producer computes its values inside a kernel
//
//   tensor, tiles side by side        tile, 16 x 16 threads           thread, 8 rows x 1 chunk
//   +-------+-------+-------+         t0   t1   t2  ... t15           row 0  x x x x x x x x
//   |  128  |       |       |         t16  t17  t18 ... t31           row 1  x x x x x x x x
//   | x 128 |       |       |         ...                             ...
//   +-------+-------+-------+         t240 ...          t255          row 7  x x x x x x x x
//
// Every kernel here is bound by memory bandwidth; what a kernel costs is the bytes that it moves.
// dev/ladders/quantize_transpose.cu shows how part 4 of this file became fast, starting from four lines.
#include "coat.cuh"

#include "gpu/layers.cuh"

namespace coat::gpu {
namespace {

// ===========================================================================================================
// 1. Quantize in groups of 1 x 16 (paper section 5, granularity)
//
// scale = amax / 448 of the group, code = E4M3(x / scale).
// Two neighbouring threads hold one group, eight elements each. The group never crosses a token: an outlier
// costs precision only in its own 16 elements. Groups::store (gpu/tensor.cuh) finds the amax, rounds the
// scale up to BF16 and writes codes and scale.
//
// In a training step this kernel runs for --attention groups, and for gate and up where nobody needs the amax
// of the activation's output beforehand (linear layers that are not FP8, or are not scaled per tensor just in
// time). embedding_forward, residual_add and quantize_gate_up_kernel write all other groups in passing, with
// the same Groups::store.

constexpr int GROUP_THREADS = 256;
__global__ void __launch_bounds__(GROUP_THREADS)
    quantize_groups_kernel(Dense<bf16> x, int64_t chunks, Groups groups, bool back) {
    const int64_t chunk = int64_t(blockIdx.x) * GROUP_THREADS + threadIdx.x,
                  i = min(chunk, chunks - 1) * CHUNK;
    const bool live = chunk < chunks;
    Values v;
    x.values(x.load(i), v);
    groups.store(i, v, live);  // v becomes scale * code
    if (back) x.store(i, v, live);
}
// x (BF16) goes to groups; with `back`, x becomes what they hold.
void quantize_groups(const View& x, const View& groups, bool back, QuantStats* stats, cudaStream_t s) {
    require(x.quant.format == Format::BF16 && in_groups(groups.quant) && x.rows == groups.rows &&
                x.cols == groups.cols && x.cols % GROUP == 0,
            "only BF16 is quantized in groups, in the same shape and with a multiple of 16 columns");
    if (x.rows == 0) return;
    measure_groups(stored(x), stats, s);
    const int64_t chunks = x.rows * x.cols / CHUNK;
    quantize_groups_kernel<<<blocks(chunks, GROUP_THREADS), GROUP_THREADS, 0, s>>>(
        dense<bf16>(x.codes), chunks, groups_of(groups), back);
    CHECK_LAUNCH("quantize in groups");
}

// ===========================================================================================================
// 2. Tiles and producers
//
// A block works on a tile of 128 rows x 128 columns, a thread on 8 rows x 8 columns of it: so every access of
// a warp covers whole 128-byte lines, including those of the transposed result.
//
// A producer computes a tensor on the fly. For 8 columns of one row,
//   cursor(row, col)      is what a thread remembers of its place: pointers, and a norm's weights;
//   load(cursor, i)       fetches what row + i needs, so that several rows' loads are in flight;
//   compute(raw, cursor)  converts it to FP32 values.
// A producer with two PLANES makes [plane 0 | plane 1] side by side, each `width` columns wide: the gradients
// of gate and up. One with two HALVES reads such a tensor, [gate | up]. Additions and multiplications are
// spelled out, so that every kernel that computes a tensor computes the same bits.

constexpr int TILE = 128;               // rows and columns of a tile
constexpr int ROWS = 8;                 // of one thread
constexpr int ACROSS = TILE / CHUNK;    // a block has ACROSS x ACROSS threads
constexpr int TILE_THREADS = ACROSS * ACROSS;
// Blocks that a multiprocessor has at once, which leaves 64 registers a thread; 3 and 5 were slower.
constexpr int TILE_BLOCKS = 4;

struct TilePlace {
    int across, down;
    int64_t row, col;  // the thread's first
    __device__ explicit TilePlace(int64_t tile_row = blockIdx.y)
        : across(threadIdx.x % ACROSS), down(threadIdx.x / ACROSS), row(tile_row * TILE + down * ROWS),
          col(int64_t(blockIdx.x) * TILE + across * CHUNK) {}
};
dim3 tile_grid(int64_t rows, int64_t width) { return {blocks(width, TILE), blocks(rows, TILE)}; }

// Elements from a thread's first row to its row i: 32 bits hold them, which makes an address a single
// instruction.
__device__ uint32_t row_offset(int i, int64_t width) {
    return static_cast<uint32_t>(i) * static_cast<uint32_t>(width);
}

// Calls use(i, values, live) for the thread's 8 rows in turn, with the loads of several rows in flight (what
// that gains: version 4 of dev/ladders/quantize_transpose.cu). All lanes call it: a place outside the tensor
// has live = false and reads the last row or chunk again, so that no load has a condition.
template <class Producer, class Use>
__device__ void for_each_row(const Producer& x, const TilePlace& at, int64_t rows, Use use) {
    constexpr int BYTES = sizeof(typename Producer::Raw), IN_FLIGHT = BYTES <= 16 ? 8 : BYTES <= 32 ? 4 : 2;
    const auto cursor = x.cursor(min(at.row, rows - 1), min(at.col, x.width - CHUNK));
    const int inside = static_cast<int>(min(max(rows - at.row, int64_t(0)), int64_t(ROWS)));
    const int live_rows = at.col < x.width ? inside : 0;
#pragma unroll
    for (int first = 0; first < ROWS; first += IN_FLIGHT) {
        typename Producer::Raw raw[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) raw[i] = x.load(cursor, min(first + i, max(inside - 1, 0)));
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; i++) {
            Values v[Producer::PLANES];
            x.compute(raw[i], cursor, v);
            use(first + i, v, first + i < live_rows);
        }
    }
}
// The same row by row, for kernels whose time does not matter. Eight copies of a large `use` would be a third
// of what this file takes to compile.
template <class Producer, class Use>
__device__ void for_each_row_in_turn(const Producer& x, const TilePlace& at, int64_t rows, Use use) {
#pragma unroll 1
    for (int i = 0; i < ROWS; i++) {
        const auto cursor = x.cursor(min(at.row + i, rows - 1), min(at.col, x.width - CHUNK));
        Values v[Producer::PLANES];
        x.compute(x.load(cursor, 0), cursor, v);
        use(i, v, at.row + i < rows && at.col < x.width);
    }
}

// A stored tensor (N, width). With HALVES = 2 a tensor (N, 2 width) that is read by its halves, such as
// [gate | up].
template <class Storage, int HALVES = 1>
struct StoredProducer {
    static constexpr int PLANES = HALVES;
    using In = Storage;
    using Compute = typename Storage::Compute;
    struct Cursor {
        Storage half[HALVES];
    };
    struct Raw {
        typename Storage::Raw half[HALVES];
    };
    Storage x;
    int64_t width;

    __device__ Cursor cursor(int64_t row, int64_t col) const {
        Cursor at;
#pragma unroll
        for (int h = 0; h < HALVES; h++) at.half[h] = x.from((row * HALVES + h) * width + col);
        return at;
    }
    __device__ Raw load(const Cursor& at, int i) const {
        Raw raw;
#pragma unroll
        for (int h = 0; h < HALVES; h++) raw.half[h] = at.half[h].load(row_offset(i, HALVES * width));
        return raw;
    }
    __device__ void compute(const Raw& raw, const Cursor&, Values (&v)[PLANES]) const {
#pragma unroll
        for (int h = 0; h < HALVES; h++) x.values(raw.half[h], v[h]);
    }
};

template <class Storage>
struct NormProducer {  // y = (x - mean) / std * weight + bias
    static constexpr int PLANES = 1;
    using In = Storage;
    using Compute = typename Storage::Compute;
    struct Cursor {
        Storage in;
        const float2* stats;
        Values weight, bias;
    };
    struct Raw {
        typename Storage::Raw x;
        float2 stats;
    };
    Storage in;
    NormParameters<Compute> parameters;
    const float2* stats;
    int64_t width;

    __device__ Cursor cursor(int64_t row, int64_t col) const {
        Cursor at;
        at.in = in.from(row * width + col);
        at.stats = stats + row;
        parameters.load(col, at.weight, at.bias);
        return at;
    }
    __device__ Raw load(const Cursor& at, int i) const {
        return {at.in.load(row_offset(i, width)), at.stats[i]};
    }
    __device__ void compute(const Raw& raw, const Cursor& at, Values (&v)[1]) const {
        Values x;
        in.values(raw.x, x);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) v[0][j] = normalized(x[j], raw.stats, at.weight[j], at.bias[j]);
    }
};

// GELU in its tanh form is u sigmoid(2z) with z = sqrt(2 / pi) (u + 0.044715 u^3), since 1 + tanh(z) = 2
// sigmoid(2z).
constexpr float GELU_2A = 2 * 0.7978845608028654f, GELU_2AB = 2 * 0.7978845608028654f * 0.044715f;
__device__ float gelu_sigmoid(float u) {
    const float uu = __fmul_rn(u, u);
    return sigmoid_of_exp2(__fmul_rn(u, __fmaf_rn(-LOG2_E * GELU_2AB, uu, -LOG2_E * GELU_2A)));
}
template <bool GATED>
__device__ float activated(float first, float second) {  // silu(gate) * up, or gelu(u)
    return GATED ? __fmul_rn(__fmul_rn(first, sigmoid(first)), second)
                 : __fmul_rn(first, gelu_sigmoid(first));
}

// The activation's output (N, F): SiLU(gate) * up, or GELU. Its input is (N, 2F) = [gate | up], or (N, F).
template <class Storage, bool GATED>
struct ActivationProducer : StoredProducer<Storage, GATED ? 2 : 1> {
    static constexpr int PLANES = 1, HALVES = GATED ? 2 : 1;
    using GateUp = StoredProducer<Storage, HALVES>;

    __device__ void compute(const typename GateUp::Raw& raw, const typename GateUp::Cursor& at,
                            Values (&v)[1]) const {
        Values x[HALVES];
        GateUp::compute(raw, at, x);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) v[0][j] = activated<GATED>(x[0][j], x[HALVES - 1][j]);
    }
};

// The gradient of the activation's input, from that of its output, dact (N, F).
template <class Storage, bool GATED>
struct ActivationBackwardProducer : StoredProducer<Storage, GATED ? 2 : 1> {
    static constexpr int PLANES = GATED ? 2 : 1;
    using GateUp = StoredProducer<Storage, PLANES>;
    using Dact = Dense<typename Storage::Compute>;
    struct Cursor {
        typename GateUp::Cursor gate_up;
        Dact dact;
    };
    struct Raw {
        typename GateUp::Raw gate_up;
        typename Dact::Raw dact;
    };
    Dact dact;

    __device__ Cursor cursor(int64_t row, int64_t col) const {
        return {GateUp::cursor(row, col), dact.from(row * this->width + col)};
    }
    __device__ Raw load(const Cursor& at, int i) const {
        return {GateUp::load(at.gate_up, i), at.dact.load(row_offset(i, this->width))};
    }
    __device__ void compute(const Raw& raw, const Cursor& at, Values (&v)[PLANES]) const {
        Values x[PLANES], d;
        GateUp::compute(raw.gate_up, at.gate_up, x);
        dact.values(raw.dact, d);
#pragma unroll
        for (int j = 0; j < CHUNK; j++) {
            const float u = x[0][j];
            if (GATED) {  // silu'(u) = s + u s (1 - s)
                const float s = sigmoid(u), silu = __fmul_rn(u, s), up = x[PLANES - 1][j];
                v[0][j] = __fmul_rn(__fmul_rn(d[j], up), __fmaf_rn(silu, __fsub_rn(1.0f, s), s));
                v[PLANES - 1][j] = __fmul_rn(d[j], silu);
            } else {  // gelu'(u) = s + u s (1 - s) 2z'(u). From |u| = 11 on, s or 1 - s is zero
                const float s = gelu_sigmoid(u),
                            slope = __fmaf_rn(3 * GELU_2AB, fminf(__fmul_rn(u, u), 128.0f), GELU_2A);
                const float bend = __fmul_rn(__fmul_rn(u, s), __fsub_rn(1.0f, s));
                v[0][j] = __fmul_rn(d[j], __fmaf_rn(bend, slope, s));
            }
        }
    }
};

// What a producer's values can be, so that kernels exist only where they are used. Only gradients are
// quantized to E5M2 and summed over tokens. Gradients are always needed transposed too, because wgrad reads
// g^T. So a producer that makes only gradients has no kernel without the transpose.
enum class ProducerRole { Input, Gradient, Any };
template <class Producer>
constexpr ProducerRole PRODUCER_ROLE = ProducerRole::Input;  // of a linear layer
template <class T>
constexpr ProducerRole PRODUCER_ROLE<StoredProducer<Dense<T>>> = ProducerRole::Any;
template <class Storage, bool GATED>
constexpr ProducerRole PRODUCER_ROLE<ActivationBackwardProducer<Storage, GATED>> = ProducerRole::Gradient;

// Calls f with the producer of a lazily computed tensor.
template <class F>
void with_producer(const Lazy& x, F f) {
    require(x.cols % 16 == 0, "the columns are not a multiple of 16");
    with_storage(x.input, [&](auto in) {
        using Storage = decltype(in);
        using T = typename Storage::Compute;
        const Dense<T> dact = dense<T>(x.dact.codes);
        const int64_t width = x.op == LazyOp::ActivationBackward ? x.dact.cols : x.cols;
        const NormParameters<T> parameters{dense<T>(x.norm.weight), dense<T>(x.norm.bias)};
        if (x.op == LazyOp::Stored) f(StoredProducer<Storage>{in, width});
        else if (x.op == LazyOp::Norm) f(NormProducer<Storage>{in, parameters, x.norm.stats, width});
        else if (x.op == LazyOp::Activation && x.gated) f(ActivationProducer<Storage, true>{{in, width}});
        else if (x.op == LazyOp::Activation) f(ActivationProducer<Storage, false>{{in, width}});
        else if (x.gated) f(ActivationBackwardProducer<Storage, true>{{in, width}, dact});
        else f(ActivationBackwardProducer<Storage, false>{{in, width}, dact});
    });
}
// The same for kernels that FP8 needs: they exist for the compute dtype BF16 only.
template <class F>
void with_bf16_producer(const Lazy& x, F f) {
    with_producer(x, [&](auto producer) {
        if constexpr (std::is_same_v<typename decltype(producer)::Compute, bf16>) f(producer);
        else require(false, "FP8 goes with the compute dtype BF16, not with FP32");
    });
}

// Values rounded to BF16 or stored as FP32.
template <class Producer>
__global__ void __launch_bounds__(TILE_THREADS, 2) write_kernel(Producer x, int64_t rows, EitherDense out) {
    const TilePlace at;
    for_each_row(x, at, rows, [&](int i, Values(&v)[Producer::PLANES], bool live) {
#pragma unroll
        for (int p = 0; p < Producer::PLANES; p++)
            out.store(((at.row + i) * Producer::PLANES + p) * x.width + at.col, v[p], live);
    });
}

}  // namespace

Lazy stored(const View& x) { return {LazyOp::Stored, x.rows, x.cols, x}; }
Lazy norm(const Norm& n) {
    return {LazyOp::Norm, n.in.rows, n.in.cols, n.in, {}, false, n};
}
Lazy activation(bool gated, const View& gate_up) {
    return {LazyOp::Activation, gate_up.rows, gate_up.cols / (gated ? 2 : 1), gate_up, {}, gated};
}
Lazy activation_backward(bool gated, const View& gate_up, const View& dact) {
    require(dact.rows == gate_up.rows && dact.cols * (gated ? 2 : 1) == gate_up.cols,
            "dact and gate_up differ in shape");
    require(dact.quant.format == (gate_up.quant.fp8() ? Format::BF16 : gate_up.quant.format),
            "dact is not in the compute dtype");
    return {LazyOp::ActivationBackward, gate_up.rows, gate_up.cols, gate_up, dact, gated};
}

// ===========================================================================================================
// 3. Group scaling (paper section 5): the amax of a tensor in two stages
//
// Stage one: each thread block takes the maximum of its tile. (The paper takes 1xG groups; the result is the
// same.) Stage two: an atomicMax over the blocks, which gives the same result in any order. Our kernels that
// write a tensor take its amax in passing. This kernel is for the rest: what a GEMM or attention writes,
// values that no kernel stores, and weights that AdamW did not just update.

namespace {

template <class Producer>
__global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS)
    amax_kernel(Producer x, int64_t rows, TensorScale* out) {
    float top = 0;
    for_each_row(x, TilePlace(), rows, [&](int, const Values(&v)[Producer::PLANES], bool) {
#pragma unroll
        for (int p = 0; p < Producer::PLANES; p++)
#pragma unroll
            for (int j = 0; j < CHUNK; j++) top = larger(top, v[p][j]);
    });
    update_amax_by_block<TILE_THREADS>(&out->amax, magnitude(top));
}

}  // namespace

void amax(const Lazy& x, TensorScale* out, cudaStream_t s) {
    if (x.rows == 0) return;
    with_bf16_producer(x, [&](auto producer) {
        amax_kernel<<<tile_grid(x.rows, producer.width), TILE_THREADS, 0, s>>>(producer, x.rows, out);
        CHECK_LAUNCH("amax");
    });
}

// ===========================================================================================================
// 4. Per-tensor FP8: codes = encode(x / s) with s = amax / FMAX, row-major and transposed

namespace {

// Four rows of four bytes become four columns of four bytes.
__device__ void transpose4(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t (&out)[4]) {
    const uint32_t ab01 = __byte_perm(a, b, 0x5140), cd01 = __byte_perm(c, d, 0x5140);
    const uint32_t ab23 = __byte_perm(a, b, 0x7362), cd23 = __byte_perm(c, d, 0x7362);
    out[0] = __byte_perm(ab01, cd01, 0x5410), out[1] = __byte_perm(ab01, cd01, 0x7632);
    out[2] = __byte_perm(ab23, cd23, 0x5410), out[3] = __byte_perm(ab23, cd23, 0x7632);
}

// The codes of a tile in shared memory, by columns (why: versions 2 and 5 of the ladder). The 128 rows of a
// column follow each other, in words of 4 rows. Word w of a column is kept at w ^ (2 * the column's chunk) ^
// (the lowest bit of the thread's `down`). With this swizzle both the writes (of 16 threads across and 2 down
// at once) and the reads (8 lanes, 16 bytes each of one column) use every bank once.
struct TransposeTile {
    uint32_t words[TILE * TILE / 4];

    // Takes the codes of the thread's rows 4 h ... 4 h + 3.
    __device__ void write(const TilePlace& at, int h, const uint2 (&codes)[4]) {
        uint32_t columns[CHUNK / 4][4];
        transpose4(codes[0].x, codes[1].x, codes[2].x, codes[3].x, columns[0]);
        transpose4(codes[0].y, codes[1].y, codes[2].y, codes[3].y, columns[1]);
        uint32_t* to =
            words + at.across * CHUNK * (TILE / 4) + ((2 * at.down + h) ^ 2 * at.across ^ (at.down & 1));
#pragma unroll
        for (int j = 0; j < CHUNK; j++) to[j * (TILE / 4)] = columns[j / 4][j % 4];
    }
    __device__ uint4 rows16(int col, int piece) const {  // rows 16 * piece ... + 15 of one column
        const int chunk = col / CHUNK;
        const uint4 q = *reinterpret_cast<const uint4*>(&words[col * (TILE / 4) + 4 * (piece ^ chunk >> 1)]);
        return chunk & 1 ? uint4{q.z, q.w, q.y, q.x} : uint4{q.x, q.y, q.w, q.z};
    }
};
// Writes the block's tiles, one for each plane, to out, which is (columns, rows). All threads call it.
template <int PLANES>
__device__ void flush(const TransposeTile (&tiles)[PLANES], int64_t rows, int64_t width, uint8_t* out) {
    __syncthreads();
    constexpr int PIECES = TILE / 16;  // of a column, 16 rows each
    const int64_t row0 = int64_t(blockIdx.y) * TILE, col0 = int64_t(blockIdx.x) * TILE;
    const int cols = static_cast<int>(min(int64_t(TILE), width - col0));
#pragma unroll
    for (int p = 0; p < PLANES; p++)
#pragma unroll
        for (int i = threadIdx.x; i < TILE * PIECES; i += TILE_THREADS) {
            const int col = i / PIECES, piece = i % PIECES;
            const int64_t row = row0 + piece * 16;
            if (col >= cols || row >= rows) continue;
            const uint4 q = tiles[p].rows16(col, piece);
            uint8_t* to = out + (p * width + col0 + col) * rows + row;
            if (rows % 16 == 0) {
                put(to, q);
                continue;
            }
            const uint32_t words[4] = {q.x, q.y, q.z, q.w};
#pragma unroll
            for (int j = 0; j < 16; j++)
                if (row + j < rows) to[j] = static_cast<uint8_t>(words[j / 4] >> j % 4 * 8);
        }
}

static_assert(info(Format::E5M2).max == 128 * info(Format::E4M3).max,
              "amax / 57344 is amax / 448 / 128, exactly");
template <bool E5M2>
__device__ float per_tensor_scale(float amax, bool power_of_two) {  // scale_of(FMAX, amax), faster
    if (!(amax > 0 && amax < INFINITY)) return 1.0f;
    const float scale = fmaxf(divide_by_448(amax) * (E5M2 ? 1 / 128.0f : 1.0f), 0x1p-126f);
    return power_of_two ? round_up_to_power_of_two(scale) : scale;
}

// Just-in-time scaling: the amax is known, the scale follows from it. Delayed scaling: the scale is known,
// and this single pass also takes the amax for later steps.
template <class Producer, bool E5M2, bool TRANSPOSED>
__global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS)
    quantize_kernel(Producer x, int64_t rows, TensorScale* tensor, bool power_of_two, uint8_t* codes,
                    uint8_t* transposed) {
    constexpr int PLANES = Producer::PLANES;
    __shared__ __align__(16) TransposeTile tiles[PLANES];
    const TilePlace at;
    const bool delayed = tensor->delayed > 0;
    const float scale = delayed ? tensor->delayed : per_tensor_scale<E5M2>(tensor->amax, power_of_two),
                inverse = __frcp_rn(scale);
    // The block's amax, if scaling is delayed. In shared memory it costs just-in-time scaling no register.
    __shared__ uint32_t most;
    if (delayed) {
        if (threadIdx.x == 0) most = 0;
        __syncthreads();
    }
    uint8_t* to[PLANES];
#pragma unroll
    for (int p = 0; p < PLANES; p++) to[p] = codes + (at.row * PLANES + p) * x.width + at.col;
    uint2 four[PLANES][4];
    for_each_row(x, at, rows, [&](int i, const Values(&v)[PLANES], bool live) {
#pragma unroll
        for (int p = 0; p < PLANES; p++) {
            if (delayed) {
                float top = 0;
                for (int j = 0; j < CHUNK; j++) top = larger(top, v[p][j]);
                // A thread outside the tensor reloads the last row, which may already hold codes.
                const uint32_t row_top = __reduce_max_sync(0xFFFFFFFFu, live ? magnitude(top) : 0);
                if (threadIdx.x % 32 == 0) atomicMax(&most, row_top);
            }
            four[p][i % 4] = encode(E5M2, v[p], inverse);
            if (live && codes) put(to[p] + row_offset(i, PLANES * x.width), four[p][i % 4]);
            if (TRANSPOSED && i % 4 == 3) tiles[p].write(at, i / 4, four[p]);
        }
    });
    if (TRANSPOSED && transposed) flush(tiles, rows, x.width, transposed);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0)
        tensor->scale = scale;  // written last, so that it delays no load of x
    if (!delayed) return;
    __syncthreads();
    if (threadIdx.x == 0) update_amax(&tensor->amax, most);
}

template <class Producer>
void quantize_per_tensor(const Producer& x, int64_t rows, const Operand& out, cudaStream_t s) {
    require(out.view.scales, "a per-tensor FP8 output needs its TensorScale");
    const bool e5m2 = out.view.quant.format == Format::E5M2;
    constexpr bool MAY_BE_E5M2 = PRODUCER_ROLE<Producer> != ProducerRole::Input,
                   ALWAYS_TRANSPOSED = PRODUCER_ROLE<Producer> == ProducerRole::Gradient;
    require(MAY_BE_E5M2 || !e5m2, "only gradients are quantized to E5M2");
    // By format (E4M3, E5M2), then by whether transposed codes are wanted. To compile fewer kernels, a
    // producer of inputs has E4M3 in both rows (the check above rejects E5M2), and one of gradients always
    // transposes in shared memory; only flush() is left out.
    constexpr decltype(&quantize_kernel<Producer, MAY_BE_E5M2, true>) KERNELS[2][2] = {
        {quantize_kernel<Producer, false, ALWAYS_TRANSPOSED>, quantize_kernel<Producer, false, true>},
        {quantize_kernel<Producer, MAY_BE_E5M2, ALWAYS_TRANSPOSED>,
         quantize_kernel<Producer, MAY_BE_E5M2, true>}};
    const auto kernel = KERNELS[e5m2][out.transposed != nullptr];
    kernel<<<tile_grid(rows, x.width), TILE_THREADS, 0, s>>>(
        x, rows, tensor_scale(out.view), out.view.quant.power_of_two,
        static_cast<uint8_t*>(out.view.codes), static_cast<uint8_t*>(out.transposed));
    CHECK_LAUNCH("quantize");
}

// Codes that exist already, transposed: of weights that were gathered from other GPUs as codes.
__global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS)
    transpose_codes_kernel(const uint8_t* codes, int64_t rows, int64_t cols, uint8_t* transposed) {
    __shared__ __align__(16) TransposeTile tiles[1];
    const TilePlace at;
    uint2 raw[ROWS / 4][4] = {};
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        if (at.row + i < rows && at.col < cols)
            raw[i / 4][i % 4] = *reinterpret_cast<const uint2*>(codes + (at.row + i) * cols + at.col);
#pragma unroll
    for (int h = 0; h < ROWS / 4; h++) tiles[0].write(at, h, raw[h]);
    flush(tiles, rows, cols, transposed);
}

// ===========================================================================================================
// 5. Other granularities: per row (torchao's rowwise), 1x128 and 128x128 (DeepSeek-V3), 1x32 (MXFP8)
//
// Row-major and transposed codes each have scales of their own. Again there are two passes: first the amaxes
// of all blocks, which are stored where their scales will be; then the codes, or the decoded values.

// Maps (row, col) of the tensor to its scale, in the layout that cuBLASLt expects (gpu/tensor.cuh, Operand).
struct ScaleGrid {
    float* scales;             // null: not wanted
    int row_shift, col_shift;  // log2 of a block's sides
    int64_t down, across;      // from one block's scale to the next one's
    int64_t count;             // of all scales
    __device__ float* at(int64_t row, int64_t col) const {
        return scales + (row >> row_shift) * down + (col >> col_shift) * across;
    }
};
constexpr int LOG_32 = 5, LOG_128 = 7, ALL = 62;
static_assert(PER_1x32.cols == 1 << LOG_32 && PER_1x128.cols == 1 << LOG_128 &&
              PER_128x128.rows == 1 << LOG_128 && PER_128x128.cols == 1 << LOG_128 && TILE == 1 << LOG_128);
// The scales of an operand's row-major or transposed codes, (N, K) with K the GEMM's reduction dimension.
ScaleGrid scale_grid(const Operand& out, bool transposed) {
    const View& v = out.view;
    const Granularity& g = v.quant.granularity;
    void* const scales = transposed ? out.transposed_scales : v.scales;
    float* const p = (transposed ? out.transposed : v.codes) ? static_cast<float*>(scales) : nullptr;
    const int64_t N = transposed ? v.cols : v.rows, K = transposed ? v.rows : v.cols,
                  count = v.quant.operand_scales(N, K);
    const bool square = g == PER_128x128;
    const int shift_n = square ? LOG_128 : 0,
              shift_k = g == PER_ROW ? ALL : g == PER_1x32 ? LOG_32 : LOG_128;
    const int64_t along_n = square ? round_up(ceil_div(K, 1 << LOG_128), 4) : 1,
                  along_k = g == PER_ROW ? 0 : square ? 1 : N;
    if (transposed) return {p, shift_k, shift_n, along_k, along_n, count};
    return {p, shift_n, shift_k, along_n, along_k, count};
}

// Every thread has a number for each of its 8 columns. They are combined over the block's 16 rows of threads,
// in order: take(column, result).
template <class Producer, class T, class Combine, class Take>
__device__ void combine_columns(const Producer& x, const TilePlace& at,
                                const T (&mine)[Producer::PLANES][CHUNK], T (&columns)[ACROSS][TILE + 1],
                                Combine combine, Take take) {
#pragma unroll
    for (int p = 0; p < Producer::PLANES; p++) {
        __syncthreads();
#pragma unroll
        for (int j = 0; j < CHUNK; j++) columns[at.down][at.across * CHUNK + j] = mine[p][j];
        __syncthreads();
        const int64_t col = int64_t(blockIdx.x) * TILE + threadIdx.x;
        if (threadIdx.x >= TILE || col >= x.width) continue;
        T all = 0;
        for (int i = 0; i < ACROSS; i++) all = combine(all, columns[i][threadIdx.x]);
        take(p * x.width + col, all);
    }
}

// Half a warp holds neighbouring columns, whose blocks mostly are one and the same: then one atomicMax serves
// all its lanes.
__device__ void update_amax_by_half_warp(float* amax, uint32_t top, bool live) {
    const uint32_t half = 0xFFFFu << (threadIdx.x & 16);
    const unsigned long long mine = reinterpret_cast<unsigned long long>(amax),
                             first = __shfl_sync(half, mine, 0, 16);
    if (__all_sync(half, !live || mine == first)) {  // where the first lane is not live, none is
        top = __reduce_max_sync(half, live ? top : 0);
        live = live && threadIdx.x % 16 == 0;
    }
    if (live) update_amax(amax, top);
}

// No recipe that scales by blocks saves groups: these combinations only have to work.
template <class Producer, class Use>
__device__ void for_each_row_of_blocks(const Producer& x, const TilePlace& at, int64_t rows, Use use) {
    if constexpr (std::is_same_v<typename Producer::In, Groups>) for_each_row_in_turn(x, at, rows, use);
    else for_each_row(x, at, rows, use);
}

// Pass one. For the transposed codes a tile contributes 128 rows of each of its columns.
template <class Producer>
__global__ void __launch_bounds__(TILE_THREADS, 2)
    block_amaxes_kernel(Producer x, int64_t rows, ScaleGrid grid, ScaleGrid transposed) {
    constexpr int PLANES = Producer::PLANES;
    __shared__ uint32_t columns[ACROSS][TILE + 1];
    const TilePlace at;
    uint32_t tops[PLANES][CHUNK] = {};
    for_each_row_of_blocks(x, at, rows, [&](int i, const Values(&v)[PLANES], bool live) {
#pragma unroll
        for (int p = 0; p < PLANES; p++) {
            uint32_t top = 0;
#pragma unroll
            for (int j = 0; j < CHUNK; j++) {
                const uint32_t bits = live ? magnitude(v[p][j]) : 0;
                top = max(top, bits);
                tops[p][j] = max(tops[p][j], bits);
            }
            if (grid.scales) update_amax_by_half_warp(grid.at(at.row + i, p * x.width + at.col), top, live);
        }
    });
    if (!transposed.scales) return;
    if (transposed.row_shift < LOG_128) {  // several blocks below each other in a tile
        if (at.row >= rows || at.col >= x.width) return;
#pragma unroll
        for (int p = 0; p < PLANES; p++)
#pragma unroll
            for (int j = 0; j < CHUNK; j++)
                update_amax(transposed.at(at.row, p * x.width + at.col + j), tops[p][j]);
        return;
    }
    combine_columns(
        x, at, tops, columns, [](uint32_t a, uint32_t b) { return max(a, b); },
        [&](int64_t col, uint32_t top) { update_amax(transposed.at(int64_t(blockIdx.y) * TILE, col), top); });
}

// Amaxes become scales in place. A block with a value that is not finite gets the scale NaN, so that no code
// hides it.
__global__ void block_scales_kernel(float* scales, int64_t n, float fmax, bool power_of_two,
                                    TensorScale* tensor) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    const float amax = i < n ? scales[i] : 0.0f;
    if (i < n)
        scales[i] = amax < INFINITY ? scale_of(fmax, amax, power_of_two) : __uint_as_float(0x7FC00000u);
    if (tensor) update_amax_by_warp(&tensor->amax, magnitude(amax));
}

// Pass two.
template <class Producer>
__global__ void __launch_bounds__(TILE_THREADS, 2)
    quantize_blocks_kernel(Producer x, int64_t rows, bool e5m2, ScaleGrid grid, ScaleGrid transposed_grid,
                           uint8_t* codes, uint8_t* transposed) {
    constexpr int PLANES = Producer::PLANES;
    __shared__ __align__(16) TransposeTile tiles[PLANES];
    const TilePlace at;
    const int64_t row0 = int64_t(blockIdx.y) * TILE;
    Values inverse[PLANES] = {};  // 1 / scale of the thread's columns, for the transposed codes
#pragma unroll
    for (int p = 0; p < PLANES; p++)
#pragma unroll
        for (int j = 0; j < CHUNK; j++)
            if (transposed && at.col < x.width)
                inverse[p][j] = __frcp_rn(*transposed_grid.at(row0, p * x.width + at.col + j));
    uint2 four[PLANES][4];
    for_each_row_of_blocks(x, at, rows, [&](int i, const Values(&v)[PLANES], bool live) {
#pragma unroll
        for (int p = 0; p < PLANES; p++) {
            const int64_t row = at.row + i, col = p * x.width + at.col;
            if (codes && live)
                put(codes + row * PLANES * x.width + col, encode(e5m2, v[p], __frcp_rn(*grid.at(row, col))));
            if (!transposed) continue;
            Values scaled;
#pragma unroll
            for (int j = 0; j < CHUNK; j++) scaled[j] = __fmul_rn(v[p][j], inverse[p][j]);
            four[p][i % 4] = encode(e5m2, scaled, 1.0f);
            if (i % 4 == 3) tiles[p].write(at, i / 4, four[p]);
        }
    });
    if (transposed) flush(tiles, rows, x.width, transposed);
}

// x, quantized and decoded again.
__device__ float quantize_and_decode(bool e5m2, float x, float scale) {
    return decode2(e5m2, encode2(e5m2, __fmul_rn(x, __frcp_rn(scale)), 0)).x * scale;
}

// Pass two where Hopper has no GEMM of such blocks: what the codes hold, in BF16 and row-major, with the
// scales of either grid.
template <class Producer>
__global__ void __launch_bounds__(TILE_THREADS, 2)
    decode_blocks_kernel(Producer x, int64_t rows, bool e5m2, ScaleGrid grid, Dense<bf16> out) {
    constexpr int PLANES = Producer::PLANES;
    const TilePlace at;
    for_each_row_in_turn(x, at, rows, [&](int i, const Values(&v)[PLANES], bool live) {
        for (int p = 0; live && p < PLANES; p++) {
            const int64_t row = at.row + i, col = p * x.width + at.col;
            Values y;
#pragma unroll
            for (int j = 0; j < CHUNK; j++) y[j] = quantize_and_decode(e5m2, v[p][j], *grid.at(row, col + j));
            out.store(row * PLANES * x.width + col, y, true);
        }
    });
}

template <class Producer>
void quantize_blocks(const Producer& x, int64_t rows, const Operand& out, cudaStream_t s) {
    const Quant& q = out.view.quant;
    require(q.granularity == PER_ROW || q.granularity == PER_1x128 || q.granularity == PER_128x128 ||
                q.decoded(),
            "no kernel scales by such blocks");
    require(q.scale_format == Format::F32, "the scales of an operand are FP32");
    const ScaleGrid grids[2] = {scale_grid(out, false), scale_grid(out, true)};
    void* const codes[2] = {out.view.codes, out.transposed};
    const dim3 tiles = tile_grid(rows, x.width);
    const bool e5m2 = q.format == Format::E5M2;
    for (int t : {0, 1}) {
        const ScaleGrid& g = grids[t];
        require(!codes[t] == !g.scales, "codes and their scales come together");
        if (g.scales)
            check(cudaMemsetAsync(g.scales, 0, g.count * sizeof(float), s), "Clearing scales failed");
    }
    block_amaxes_kernel<<<tiles, TILE_THREADS, 0, s>>>(x, rows, grids[0], grids[1]);
    CHECK_LAUNCH("block_amaxes");
    for (const ScaleGrid& g : grids) {
        if (!g.scales) continue;
        block_scales_kernel<<<blocks(g.count, 256), 256, 0, s>>>(g.scales, g.count, info(q.format).max,
                                                                 q.power_of_two, out.amax);
        CHECK_LAUNCH("block_scales");
    }
    for (int t : {0, 1}) {
        if (!q.decoded() || !grids[t].scales) continue;
        decode_blocks_kernel<<<tiles, TILE_THREADS, 0, s>>>(x, rows, e5m2, grids[t], dense<bf16>(codes[t]));
        CHECK_LAUNCH("decode_blocks");
    }
    if (q.decoded()) return;
    quantize_blocks_kernel<<<tiles, TILE_THREADS, 0, s>>>(x, rows, e5m2, grids[0], grids[1],
                                                          static_cast<uint8_t*>(codes[0]),
                                                          static_cast<uint8_t*>(codes[1]));
    CHECK_LAUNCH("quantize_blocks");
}

// ===========================================================================================================
// 6. The quantization report: what quantizing does to a tensor. Kernels of their own, so that training pays
// nothing for it.

// Where the scale of an element is: one for the tensor, in a grid of blocks, or (where neither is given) its
// group's own.
struct ScaleSource {
    const TensorScale* tensor = nullptr;
    ScaleGrid blocks{};
    bool power_of_two = false;  // of the tensor's scale

    __device__ float at(float fmax, int64_t row, int64_t col, float group) const {
        if (blocks.scales) return *blocks.at(row, col);
        if (!tensor) return group;
        return tensor->delayed > 0 ? tensor->delayed : scale_of(fmax, tensor->amax, power_of_two);
    }
};

template <class Producer>
__global__ void __launch_bounds__(TILE_THREADS)
    measure_kernel(Producer x, int64_t rows, ScaleSource scales, bool e5m2, float fmax, QuantStats* stats) {
    const TilePlace at;
    Counts counts;
    for_each_row_in_turn(x, at, rows, [&](int i, const Values(&v)[Producer::PLANES], bool live) {
        for (int p = 0; p < Producer::PLANES; p++) {
            const float group = Groups::group_scale(v[p]);  // both threads of a group compute it
#pragma unroll 1
            for (int j = 0; live && j < CHUNK; j++) {
                const float scale = scales.at(fmax, at.row + i, p * x.width + at.col + j, group);
                const float back = quantize_and_decode(e5m2, v[p][j], scale);
                // Half a step beyond FMAX is 1/28 of FMAX for E4M3 and 1/14 for E5M2; this is a little less.
                const float limit = fmax * scale * (1 + (e5m2 ? 0x1p-4f : 0x1p-5f));
                counts.add(v[p][j], back);
                counts.saturated += fabsf(v[p][j]) > limit;
                counts.flushed += v[p][j] != 0 && back == 0;
            }
        }
    });
    counts.add_to(stats);
}
template <class Producer>
void measure(const Producer& x, int64_t rows, const ScaleSource& scales, Format f, QuantStats* stats,
             cudaStream_t s) {
    if (!stats || rows == 0) return;
    const dim3 grid = tile_grid(rows, x.width);
    measure_kernel<<<grid, TILE_THREADS, 0, s>>>(x, rows, scales, f == Format::E5M2, info(f).max, stats);
    CHECK_LAUNCH("measure");
}

// An operand that is scaled by blocks counts once for each set of scales that it has.
template <class Producer>
void measure_blocks(const Producer& x, int64_t rows, const Operand& out, QuantStats* stats, cudaStream_t s) {
    for (bool transposed : {false, true}) {
        const ScaleGrid grid = scale_grid(out, transposed);
        const bool again = transposed && out.view.codes && out.view.quant.granularity.symmetric();
        if (grid.scales && !again) measure(x, rows, {nullptr, grid}, out.view.quant.format, stats, s);
    }
}

}  // namespace

void measure_groups(const Lazy& x, QuantStats* stats, cudaStream_t s) {
    if (stats)
        with_bf16_producer(x, [&](auto producer) { measure(producer, x.rows, {}, Format::E4M3, stats, s); });
}

// ===========================================================================================================
// 7. quantize(): the kernel for each format

void quantize(const Lazy& x, const Operand& out, QuantStats* stats, cudaStream_t s) {
    // The row-major codes may have rows beyond x's, which are left as they are: the GEMM wants a multiple of
    // 16 rows.
    require(
        x.cols == out.view.cols && (x.rows == out.view.rows || (x.rows < out.view.rows && !out.transposed)),
        "a tensor and its quantized form differ in shape");
    if (x.rows == 0) return;
    const Quant& q = out.view.quant;
    if (!q.fp8())
        return with_producer(x, [&](auto producer) {
            const dim3 grid = tile_grid(x.rows, producer.width);
            write_kernel<<<grid, TILE_THREADS, 0, s>>>(producer, x.rows, either_dense(out.view));
            CHECK_LAUNCH("write");
        });
    if (in_groups(q)) {
        require(x.op == LazyOp::Stored, "only a stored tensor is quantized in groups");
        return quantize_groups(x.input, out.view, false, stats, s);
    }
    with_bf16_producer(x, [&](auto producer) {
        if (q.granularity == PER_TENSOR) {
            // Measured first, because the codes may overwrite x.
            measure(producer, x.rows, {tensor_scale(out.view), {}, q.power_of_two}, q.format, stats, s);
            quantize_per_tensor(producer, x.rows, out, s);
        } else {
            quantize_blocks(producer, x.rows, out, s);
            measure_blocks(producer, x.rows, out, stats, s);
        }
    });
}

void dequantize(const View& x, const View& out, cudaStream_t s) {
    require(!out.quant.fp8(), "a dequantized tensor is BF16 or FP32");
    quantize(stored(x), {out}, nullptr, s);
}

void transpose_codes(const View& codes, void* transposed, cudaStream_t s) {
    require(codes.quant.fp8() && codes.cols % CHUNK == 0, "codes are FP8 and have a multiple of 8 columns");
    transpose_codes_kernel<<<tile_grid(codes.rows, codes.cols), TILE_THREADS, 0, s>>>(
        static_cast<const uint8_t*>(codes.codes), codes.rows, codes.cols, static_cast<uint8_t*>(transposed));
    CHECK_LAUNCH("transpose_codes");
}

void quantize_and_dequantize(const View& x, const View& groups, QuantStats* stats, cudaStream_t s) {
    quantize_groups(x, groups, true, stats, s);
}

// ===========================================================================================================
// 8. Fused kernels of the precision flow

namespace {

// The input of the activation is quantized in groups. The same pass takes the amax of the activation's
// output.
template <bool READS_SAVED, class Producer>
__global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS)
    quantize_gate_up_kernel(Producer x, int64_t rows, Groups groups, TensorScale* act) {
    constexpr int PLANES = Producer::PLANES;
    const TilePlace at;
    Groups to[PLANES];
#pragma unroll
    for (int p = 0; p < PLANES; p++) to[p] = groups.from((at.row * PLANES + p) * x.width + at.col);
    float top = 0;
    for_each_row(x, at, rows, [&](int i, Values(&v)[PLANES], bool live) {
        auto take_amax = [&] {
#pragma unroll
            for (int j = 0; j < CHUNK; j++)
                top = larger(top, activated<PLANES == 2>(v[0][j], v[PLANES - 1][j]));
        };
        if (!READS_SAVED) take_amax();
#pragma unroll
        for (int p = 0; p < PLANES; p++) to[p].store(row_offset(i, PLANES * x.width), v[p], live);
        if (READS_SAVED) take_amax();  // store left in v the values that the groups have
    });
    // Lanes outside the tensor hold a copied chunk with a meaningless group scale: they do not count.
    update_amax_by_block<TILE_THREADS>(&act->amax, at.col < x.width ? magnitude(top) : 0);
}

// Column sums in two stages. One: a block adds up every COLUMN_PARTIALS-th tile of 128 columns, and takes the
// amax in passing. Two: reduce_partials (gpu/layers.cuh) adds up these sums, in order.
constexpr int COLUMN_BLOCKS = 3;  // resident blocks: the sums need registers beside those of a tile's rows
template <class Producer>
__global__ void __launch_bounds__(TILE_THREADS, COLUMN_BLOCKS)
    column_sums_kernel(Producer x, int64_t rows, bool to_bf16, float* partials, TensorScale* out) {
    constexpr int PLANES = Producer::PLANES;
    __shared__ float sums[ACROSS][TILE + 1];
    const TilePlace at;
    Values sum[PLANES] = {};
    float top = 0;
    for (int64_t tile = blockIdx.y; tile * TILE < rows; tile += COLUMN_PARTIALS)
        for_each_row(x, TilePlace(tile), rows, [&](int, const Values(&v)[PLANES], bool live) {
#pragma unroll
            for (int p = 0; p < PLANES; p++)
#pragma unroll
                for (int j = 0; j < CHUNK; j++) {
                    if (live) sum[p][j] += to_bf16 ? round_to_bf16(v[p][j]) : v[p][j];
                    top = larger(top, v[p][j]);
                }
        });
    if (out) update_amax_by_block<TILE_THREADS>(&out->amax, magnitude(top));
    combine_columns(
        x, at, sum, sums, [](float a, float b) { return a + b; },
        [&](int64_t col, float total) { partials[int64_t(blockIdx.y) * PLANES * x.width + col] = total; });
}

}  // namespace

void quantize_gate_up(bool gated, const View& x, const View& groups, bool reads_saved, TensorScale* act_amax,
                      QuantStats* stats, cudaStream_t s) {
    require(x.quant.format == Format::BF16 && in_groups(groups.quant) && x.rows == groups.rows &&
                x.cols == groups.cols,
            "quantize_gate_up is from BF16 to groups of the same shape");
    if (x.rows == 0) return;
    if (!act_amax) return quantize(stored(x), {groups}, stats, s);
    measure_groups(stored(x), stats, s);
    auto launch = [&](auto producer) {
        const auto kernel = reads_saved ? quantize_gate_up_kernel<true, decltype(producer)>
                                        : quantize_gate_up_kernel<false, decltype(producer)>;
        kernel<<<tile_grid(x.rows, producer.width), TILE_THREADS, 0, s>>>(producer, x.rows, groups_of(groups),
                                                                          act_amax);
        CHECK_LAUNCH("quantize_gate_up");
    };
    if (gated) launch(StoredProducer<Dense<bf16>, 2>{dense<bf16>(x.codes), x.cols / 2});
    else launch(StoredProducer<Dense<bf16>>{dense<bf16>(x.codes), x.cols});
}

void column_sums(const Lazy& x, Format rounding, const View& gradient, float* workspace, TensorScale* out,
                 cudaStream_t s) {
    require(gradient.rows * gradient.cols == x.cols,
            "a bias gradient has another length than the rows that it sums");
    with_producer(x, [&](auto producer) {
        if constexpr (PRODUCER_ROLE<decltype(producer)> != ProducerRole::Input) {
            const dim3 grid(blocks(producer.width, TILE), COLUMN_PARTIALS);
            column_sums_kernel<<<grid, TILE_THREADS, 0, s>>>(producer, x.rows, rounding == Format::BF16,
                                                             workspace, out);
            CHECK_LAUNCH("column_sums");
        } else {
            require(false, "only gradients are summed over tokens");
        }
    });
    reduce_partials(workspace, COLUMN_PARTIALS, gradient, s);
}

// ===========================================================================================================
// 9. Delayed scaling

namespace {

// A block has one operand's history, which moves up by one from its end on: what is read has not been
// overwritten yet.
constexpr int HISTORY_THREADS = 256;
__global__ void __launch_bounds__(HISTORY_THREADS)
    end_delayed_step_kernel(TensorScale* scales, float* histories, int length, int margin, float fmax,
                            const uint32_t* skipped, uint32_t* empty) {
    __shared__ uint32_t most;
    if (*skipped) return;
    TensorScale& tensor = scales[blockIdx.x];
    float* history = histories + int64_t(blockIdx.x) * length;
    const float amax = tensor.amax;
    if (threadIdx.x == 0) most = 0;
    uint32_t top = 0;
    for (int first = (length - 1) / HISTORY_THREADS * HISTORY_THREADS; first >= 0; first -= HISTORY_THREADS) {
        const int i = first + threadIdx.x;
        const float value = i >= length ? 0.0f : i == 0 ? amax : history[i - 1];
        __syncthreads();
        if (i < length) history[i] = value;
        top = max(top, magnitude(value));
    }
    top = __reduce_max_sync(0xFFFFFFFFu, top);
    if (threadIdx.x % 32 == 0) atomicMax(&most, top);
    __syncthreads();
    if (threadIdx.x != 0) return;
    const float wanted = ldexpf(__uint_as_float(most), margin);
    if (wanted > 0 && wanted < INFINITY) tensor.delayed = scale_of(fmax, wanted);
    if (!(tensor.delayed > 0)) atomicAdd(empty, 1u);
    else tensor.scale = tensor.delayed;  // a rank without a part of this weight receives only codes
}

}  // namespace

void end_delayed_step(TensorScale* scales, int64_t n, float* histories, int length, int margin, Format fp8,
                      const uint32_t* skipped, uint32_t* empty, cudaStream_t s) {
    if (n == 0) return;
    end_delayed_step_kernel<<<static_cast<unsigned>(n), HISTORY_THREADS, 0, s>>>(
        scales, histories, length, margin, info(fp8).max, skipped, empty);
    CHECK_LAUNCH("end_delayed_step");
}

}  // namespace coat::gpu
