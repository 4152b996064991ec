// gpu/quantize.cuh - how a thread block makes the FP8 codes of a tile, and stores them row-major, transposed,
// or both. All kernels that make the codes of GEMM operands share this file: coat.cu, and for other cases
// gpu/other_scaling.cu (other recipes), gpu/column_sums.cu (biases) and gpu/sharding_kernels.cu (several
// GPUs).
//
//   1. transposed codes, which pass through shared memory
//   2. the codes of a tile, row-major and transposed
//
// If you left out rungs 5 to 7 of dev/ladders/quantize_transpose.cu, read them first. (Operand in
// gpu/tensors.h says which GEMM reads transposed codes.)
//
// A thread has 8 x 8 elements of a tile: in each of 8 rows a chunk of 8 columns (gpu/lazy_tensor.cuh, part
// 1). The thread stores row-major codes itself: the 8 codes of a chunk lie side by side. Of a column it has
// only 8 codes, and its warp 16: half a sector of 32 bytes, which would take as long to store as a whole one.
// So for transposed codes the thread writes its codes to shared memory. From there the threads of the block
// read them column by column, and store the 128 codes of a column side by side: four whole sectors.
#pragma once
#include "lazy_tensor.cuh"

namespace coat::gpu {

// ===========================================================================================================
// 1. Transposed codes, which pass through shared memory

// Four rows of four bytes become four columns of four bytes, as rung 6 of the ladder draws it.
// __byte_perm(a, b, 0x5140) takes, from the lowest byte of the result on, bytes 0, 4, 1 and 5 of the eight of
// a and b: a0 b0 a1 b1.
inline __device__ void transpose_4x4(const uint32_t (&row)[4], uint32_t (&column)[4]) {
    const uint32_t rows01_columns01 = __byte_perm(row[0], row[1], 0x5140);  // a0 b0 a1 b1
    const uint32_t rows01_columns23 = __byte_perm(row[0], row[1], 0x7362);  // a2 b2 a3 b3
    const uint32_t rows23_columns01 = __byte_perm(row[2], row[3], 0x5140);  // c0 d0 c1 d1
    const uint32_t rows23_columns23 = __byte_perm(row[2], row[3], 0x7362);  // c2 d2 c3 d3
    column[0] = __byte_perm(rows01_columns01, rows23_columns01, 0x5410);    // a0 b0 c0 d0
    column[1] = __byte_perm(rows01_columns01, rows23_columns01, 0x7632);    // a1 b1 c1 d1
    column[2] = __byte_perm(rows01_columns23, rows23_columns23, 0x5410);    // a2 b2 c2 d2
    column[3] = __byte_perm(rows01_columns23, rows23_columns23, 0x7632);    // a3 b3 c3 d3
}

// The codes of a tile in shared memory. These terms describe it:
//
//   word    Four rows of one column: 4 bytes. A column has words 0 to 31. Thread (across, down) has two words
//           of each of its eight columns: word 2 * down, the upper one, is its rows 0 to 3, and word
//           2 * down + 1, the lower one, its rows 4 to 7
//   slot    Where a word is in its column, 0 to 31. A column has as many slots as shared memory has banks, 32
//           of 4 bytes each: the slot is also the bank
//   piece   Four words of a column, in four neighbouring slots: 16 rows, which one thread reads at once
//
// The slot of a word depends on the thread that writes it (`^` is exclusive or):
//
//   slot = word ^ (2 * across) ^ (down & 1)
//
// So no two lanes of a warp need the same bank at once, neither to write nor to read: rung 7 of the ladder
// says why, and draws the tile. Piece p is in the four slots from 4 * (p ^ (across / 2)) on. Its words are
// there in the order 0, 1, 3, 2 if `across` is even, and in the order 3, 2, 0, 1 if it is odd.
struct TransposeTile {
    static constexpr int WORDS = TILE_SIDE / 4;  // of a column
    static constexpr int PIECE_ROWS = 16;
    static constexpr int PIECES = TILE_SIDE / PIECE_ROWS;  // of a column
    static_assert(THREAD_ROWS == 8 && CHUNK_SIZE == 8, "a thread has two words of each of eight columns");
    uint32_t words[TILE_SIDE][WORDS];  // (column, slot)

    // A thread calls it twice: with the codes of its upper four rows (`lower` is 0), and with those of its
    // lower four (`lower` is 1).
    __device__ void write(const ThreadTile& thread_tile, int lower, const uint2 (&codes)[4]) {
        uint32_t columns[CHUNK_SIZE / 4][4];  // a word of each of the eight columns
        transpose_4x4({codes[0].x, codes[1].x, codes[2].x, codes[3].x}, columns[0]);
        transpose_4x4({codes[0].y, codes[1].y, codes[2].y, codes[3].y}, columns[1]);
        const int word = 2 * thread_tile.down + lower;
        const int slot = word ^ (2 * thread_tile.across) ^ (thread_tile.down & 1);
        for (int j = 0; j < CHUNK_SIZE; j++)
            words[thread_tile.across * CHUNK_SIZE + j][slot] = columns[j / 4][j % 4];
    }
    // The codes of rows 16 * piece to 16 * piece + 15 of a column.
    __device__ uint4 read_piece(int col, int piece) const {
        const int across = col / CHUNK_SIZE;
        const int piece_slot = piece ^ (across / 2);
        const uint4 four = *reinterpret_cast<const uint4*>(&words[col][4 * piece_slot]);
        const uint4 if_even{four.x, four.y, four.w, four.z};  // the order of the words, if `across` is even
        const uint4 if_odd{four.z, four.w, four.y, four.x};
        return across % 2 == 0 ? if_even : if_odd;  // as a conditional expression it needs no branch
    }
};

// Stores the transposed codes of a thread block's tiles, one for each plane, in out (columns, rows). `rows`
// is a multiple of 16. tile_row is that of ThreadTile. All threads call the function.
template <int PLANES>
__device__ void store_transposed(const TransposeTile (&tiles)[PLANES], int64_t tile_row, int64_t rows,
                                 int64_t plane_cols, uint8_t* out) {
    __syncthreads();
    constexpr int PIECES = TransposeTile::PIECES;
    const int64_t first_row = tile_row * TILE_SIDE;
    const int64_t first_col = int64_t(blockIdx.x) * TILE_SIDE;
    const int cols = int(min(int64_t(TILE_SIDE), plane_cols - first_col));
#pragma unroll
    for (int p = 0; p < PLANES; p++) {
        for (int i = threadIdx.x; i < TILE_SIDE * PIECES; i += TILE_THREADS) {
            const int col = i / PIECES, piece = i % PIECES;
            const int64_t row = first_row + piece * TransposeTile::PIECE_ROWS;
            if (col >= cols || row >= rows) continue;
            store_in_one_instruction(out + (p * plane_cols + first_col + col) * rows + row,
                                     tiles[p].read_piece(col, piece));
        }
    }
}

// ===========================================================================================================
// 2. The codes of a tile, row-major and transposed

// The codes of a chunk, once for row-major and once for transposed storage. With one scale for the tensor
// both are the same. (In the recipes rowwise and deepseek they have different scales: this can wait.)
struct ChunkCodes {
    uint2 row_major, transposed;
};
inline __device__ ChunkCodes same_in_both(uint2 codes) { return {.row_major = codes, .transposed = codes}; }

// Computes a tile, and stores its codes: in row_major unless this is null, and if TRANSPOSED in transposed.
// make_codes(row, plane, values, live) returns the codes of a chunk. coat's kernel needs only the values.
// (The other arguments can wait: `row` counts the thread's own rows, 0 to 7, and `live` is that of
// for_each_row().) All threads call quantize_tile(). A kernel that calls it twice puts a __syncthreads()
// between: the second call writes to the shared memory that the first reads.
template <bool TRANSPOSED, class Producer, class MakeCodes>
__device__ void quantize_tile(const Producer& producer, int64_t tile_row, uint8_t* row_major,
                              uint8_t* transposed, MakeCodes make_codes) {
    constexpr int PLANES = Producer::PLANES;
    // Without TRANSPOSED nothing uses the tiles, and the compiler leaves them out.
    __shared__ __align__(16) TransposeTile tiles[PLANES];
    const ThreadTile thread_tile(tile_row);
    // Where the row-major codes of the thread's first row go; unused if row_major is null. (Computed in the
    // loop below, these addresses would take more instructions.)
    uint8_t* codes_of_first_row[PLANES];
    for (int p = 0; p < PLANES; p++)
        codes_of_first_row[p] =
            row_major + element_index<PLANES>(thread_tile.row, thread_tile.col, p, producer.plane_cols);
    // Codes on their way to `tiles`: first those of the thread's upper four rows, then of its lower four.
    uint2 four_rows[PLANES][4];

    // Codes may overwrite what is read, so a thread outside the tensor leaves out this loop (the rule at
    // for_each_row()). It must not return: store_transposed() synchronizes all threads of the block.
    if (thread_tile.inside(producer.rows, producer.plane_cols)) {
        for_each_row(producer, thread_tile, [&](int i, const ChunkValues(&v)[PLANES], bool live) {
            for (int p = 0; p < PLANES; p++) {
                const ChunkCodes codes = make_codes(i, p, v[p], live);
                if (live && row_major)
                    store_in_one_instruction(
                        codes_of_first_row[p] + row_offset(i, PLANES * producer.plane_cols), codes.row_major);
                four_rows[p][i % 4] = codes.transposed;
                if (TRANSPOSED && i % 4 == 3) tiles[p].write(thread_tile, i / 4, four_rows[p]);
            }
        });
    }
    if (TRANSPOSED) store_transposed(tiles, tile_row, producer.rows, producer.plane_cols, transposed);
}

}  // namespace coat::gpu
