// gpu/quantize.cuh - how a thread block makes the FP8 codes of a tile, and stores them row-major, transposed,
// or both. The quantizers of GEMM operands share this file: those of coat.cu and those of
// gpu/other_scaling.cu.
//
//   1. transposed codes, which pass through shared memory
//   2. the codes of a tile, row-major and transposed
//
// Transposed codes are made because a Hopper GPU's FP8 GEMM wants the dimension that it sums over contiguous
// in memory (Operand in gpu/tensors.h says which GEMM reads which codes).
//
// A thread has 8 x 8 elements of a tile: in each of 8 rows a chunk of 8 columns (gpu/lazy_tensor.cuh, part
// 1). The thread stores row-major codes itself: the 8 codes of a chunk lie side by side. Of a column it has
// only 8 codes, and its warp 16, but memory is written fastest in lines of 128 bytes. So for transposed codes
// the thread writes its codes to shared memory. From there the threads of the block read them column by
// column, and store the 128 codes of a column as a line.
#pragma once
#include "lazy_tensor.cuh"

namespace coat::gpu {

// ===========================================================================================================
// 1. Transposed codes, which pass through shared memory

// Four rows of four bytes become four columns of four bytes. __byte_perm(a, b, 0x5140) takes, from the lowest
// byte of the result on, bytes 0, 4, 1 and 5 of the eight of a and b: a0 b0 a1 b1.
inline __device__ void transpose4(uint32_t a, uint32_t b, uint32_t c, uint32_t d, uint32_t (&out)[4]) {
    const uint32_t ab01 = __byte_perm(a, b, 0x5140), cd01 = __byte_perm(c, d, 0x5140);
    const uint32_t ab23 = __byte_perm(a, b, 0x7362), cd23 = __byte_perm(c, d, 0x7362);
    out[0] = __byte_perm(ab01, cd01, 0x5410);
    out[1] = __byte_perm(ab01, cd01, 0x7632);
    out[2] = __byte_perm(ab23, cd23, 0x5410);
    out[3] = __byte_perm(ab23, cd23, 0x7632);
}

// The codes of a tile in shared memory: they are written as threads have them, and read column by column.
// (Rungs 2, 6 and 7 of dev/ladders/quantize_transpose.cu show what its layout gains.)
//
// Words. A word (32 bits) holds the codes of four rows of a column: word w has rows 4 w to 4 w + 3. A column
// of the tile has 128 rows, so it has 32 words, one for each of the 32 banks of shared memory. Thread
// (across, down) has eight rows of eight columns. Four of these rows are a quad: quad 0 is the upper four,
// quad 1 the lower four. The thread writes a word for each quad of each column:
//
//   word = 2 * down + quad
//
// Banks. Threads that lie side by side have the same `down`. If word w were in bank w, all of them would
// write to the same bank. So the words of a column are permuted, in another way for each `across`:
//
//   bank = word ^ (2 * across) ^ (down & 1)
//
// 2 * across separates the threads that lie side by side, and down & 1 the two rows of threads of a warp.
//
// For example thread (1, 1) has rows 8 to 15. Its quad 0 is rows 8 to 11. This is word 2 of its columns,
// 8 to 15, and goes to bank 2 ^ 2 ^ 1 = 1. The table shows where the words lie, named by their rows:
//
//   bank                0      1      2      3        4      5      6      7     ...     31
//   columns  0 -  7    0-3    4-7   12-15   8-11    16-19  20-23  28-31  24-27   ...  120-123
//   columns  8 - 15   12-15   8-11   0-3    4-7     28-31  24-27  16-19  20-23   ...  116-119
//   columns 16 - 23   16-19  20-23  28-31  24-27     0-3    4-7   12-15   8-11   ...  104-107
//   columns 24 - 31   28-31  24-27  16-19  20-23    12-15   8-11   0-3    4-7    ...  100-103
//
// Writing. The threads of a warp lie 16 across and two down. With one instruction each of them writes one
// word, all of the same quad. These words go to 32 different banks:
//   - Bits 1 to 4 of the bank are down ^ across. So 16 threads side by side have 16 different values.
//   - Bit 0 is quad ^ (down & 1). So one of the two rows of threads has the even banks, the other the odd.
//
// Reading. A lane reads a piece of a column, which is 16 rows, and stores it with one instruction. The four
// words of a piece lie in four neighbouring banks. Eight lanes read the eight pieces of a column: every bank
// once.
struct TransposeTile {
    static constexpr int WORDS = TILE / 4;  // the words of a column
    uint32_t words[TILE][WORDS];

    // A thread calls it twice, with its eight columns of its upper four rows (quad 0) and of the lower four
    // (quad 1).
    __device__ void write(const TilePlace& place, int quad, const uint2 (&codes)[4]) {
        uint32_t columns[CHUNK / 4][4];
        transpose4(codes[0].x, codes[1].x, codes[2].x, codes[3].x, columns[0]);
        transpose4(codes[0].y, codes[1].y, codes[2].y, codes[3].y, columns[1]);
        const int word = 2 * place.down + quad;  // it has rows 4 * word ... + 3
        const int bank = word ^ (2 * place.across) ^ (place.down & 1);
        for (int j = 0; j < CHUNK; j++) words[place.across * CHUNK + j][bank] = columns[j / 4][j % 4];
    }
    // Rows 16 * piece ... + 15 of a column. Columns 0 - 7, 16 - 23, ... have the four words of a piece in the
    // order 0-3, 4-7, 12-15, 8-11; the other columns in the order 12-15, 8-11, 0-3, 4-7. Here they get back
    // into the order of their rows.
    __device__ uint4 rows16(int col, int piece) const {
        const int chunk = col / CHUNK;
        const int bank = 4 * (piece ^ (chunk / 2));
        const uint4 four = *reinterpret_cast<const uint4*>(&words[col][bank]);
        const uint4 even_chunk{four.x, four.y, four.w, four.z};
        const uint4 odd_chunk{four.z, four.w, four.y, four.x};
        return chunk % 2 == 0 ? even_chunk : odd_chunk;  // as a conditional expression it needs no branch
    }
};

// Stores the transposed codes of a thread block's tiles, one for each plane, in out (columns, rows). `rows`
// is a multiple of 16. All threads call the function. tile_row: the number of the tile, counted down the
// tensor.
template <int PLANES>
__device__ void store_transposed(const TransposeTile (&tiles)[PLANES], int64_t tile_row, int64_t rows,
                                 int64_t width, uint8_t* out) {
    __syncthreads();
    constexpr int PIECES = TILE / 16;  // the pieces of a column, 16 rows each
    const int64_t first_row = tile_row * TILE;
    const int64_t first_col = static_cast<int64_t>(blockIdx.x) * TILE;
    const int cols = static_cast<int>(min(static_cast<int64_t>(TILE), width - first_col));
#pragma unroll
    for (int p = 0; p < PLANES; p++) {
        for (int i = threadIdx.x; i < TILE * PIECES; i += TILE_THREADS) {
            const int col = i / PIECES, piece = i % PIECES;
            const int64_t row = first_row + piece * 16;
            if (col >= cols || row >= rows) continue;
            store_at_once(out + (p * width + first_col + col) * rows + row, tiles[p].rows16(col, piece));
        }
    }
}

// ===========================================================================================================
// 2. The codes of a tile, row-major and transposed

// The codes of a chunk, once for row-major and once for transposed storage. With one scale for the tensor the
// two are equal. (In the recipes rowwise and deepseek they have different scales: this can wait.)
struct ChunkCodes {
    uint2 row_major, transposed;
};
inline __device__ ChunkCodes same_in_both(uint2 codes) { return {.row_major = codes, .transposed = codes}; }

// Computes a tile, and stores its codes: row-major in `codes` unless this is null, and if TRANSPOSED also in
// `transposed`. make_codes(row, plane, values, live) returns the codes of a chunk: `row` counts the thread's
// own rows, 0 to 7, and `live` is that of for_each_row(). All threads call store_codes(). Between two calls
// in a kernel there is a __syncthreads(): the second call writes to the shared memory that the first reads.
template <bool TRANSPOSED, class Producer, class MakeCodes>
__device__ void store_codes(const Producer& producer, int64_t tile_row, int64_t rows, uint8_t* codes,
                            uint8_t* transposed, MakeCodes make_codes) {
    constexpr int PLANES = Producer::PLANES;
    // Without TRANSPOSED nothing uses the tiles, and the compiler leaves them out.
    __shared__ __align__(16) TransposeTile tiles[PLANES];
    const TilePlace place(tile_row);
    // Where the codes of the thread's first row go; unused if codes is null.
    uint8_t* codes_of_first_row[PLANES];
    for (int p = 0; p < PLANES; p++)
        codes_of_first_row[p] = codes + (place.row * PLANES + p) * producer.width + place.col;
    uint2 four_rows[PLANES][4];

    // A thread outside the tensor must not even read: codes may overwrite what is read, and reading while
    // another thread writes is a race.
    if (place.inside(rows, producer.width))
        for_each_row(producer, place, rows, [&](int i, const ChunkValues(&v)[PLANES], bool live) {
            for (int p = 0; p < PLANES; p++) {
                const ChunkCodes chunk = make_codes(i, p, v[p], live);
                if (live && codes)
                    store_at_once(codes_of_first_row[p] + row_offset(i, PLANES * producer.width),
                                  chunk.row_major);
                four_rows[p][i % 4] = chunk.transposed;
                if (TRANSPOSED && i % 4 == 3) tiles[p].write(place, i / 4, four_rows[p]);
            }
        });
    if (TRANSPOSED) store_transposed(tiles, tile_row, rows, producer.width, transposed);
}

}  // namespace coat::gpu
