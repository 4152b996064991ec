// quantize_transpose.cu - a ladder: a BF16 matrix is quantized to FP8 with one scale, and its codes are
// written by rows and also transposed, from the simplest kernels to those that train (coat.cu). Each rung
// makes one change to the rung before it. Its text says what changes and why, which numbers were counted, and
// asks you to predict. What limits each rung, our own predictions, the measured times, and why some
// predictions failed are at the end of this file. This is the easiest ladder. If you have never seen CUDA,
// read README.md in this folder first: one page.
//
//   make build/ladder_quantize_transpose && build/ladder_quantize_transpose      all rungs
//   build/ladder_quantize_transpose 5                  rung 5 alone, for instance under a profiler
//
// The program prints the time of each rung for a matrix of 16384 x 4096. Codes must equal those of the CPU
// reference.
//
// Training does this to every gradient. FP8 GEMMs on Hopper reduce over contiguous elements only: dgrad reads
// the codes by rows, and wgrad reads them transposed. The amax is already known.
//
// What limits a rung. It uses four resources at the same time, and that which takes longest decides. Here is
// how long each takes for these 67 million elements. An H200 has 132 multiprocessors at about 1.8 GHz
// (README.md, "What the machine has"); "a clock" is one cycle of these:
//
//   memory           2 bytes of BF16 in, 1 + 1 out, at about 4.27 TB/s, the rate of a copy         63 us
//   instructions     a multiprocessor issues 4 a clock, each for 32 lanes:   2.2 us for each that every
//                    element takes. Within 63 us there is room for 28
//   shared memory    32 banks of 4 bytes a clock: 8.8 us for each access that every element takes, if the
//                    lanes of a warp use different banks or the same word; twice that if two lanes need
//                    different words of a bank, and so on
//   latency          what a load asks for arrives about 0.8 us later. Half of the bytes are loaded, at
//                    2.1 TB/s. So what arrives in the next 0.8 us must have been asked for already:
//                    2.1e12 x 0.8e-6 = 1.7 MB
//
// How many instructions a rung has was counted in its machine code, which cuobjdump -sass
// build/ladder_quantize_transpose prints (here that of nvcc 12.9): one follows a thread from the first line
// of a kernel to EXIT, along the branches that nearly every thread takes, counts a loop as often as it runs,
// and divides by the elements of the thread. On this path the two kernels of rung 1 have 47 and 56
// instructions, for one element: 103.
#include "ladder.h"

using namespace ladder;

namespace {

// What a kernel is given. rows and cols are multiples of 16.
struct Matrix {
    int64_t rows, cols;
    const bf16* x;            // (rows, cols)
    gpu::TensorScale* scale;  // has the amax
    uint8_t* codes;           // (rows, cols)
    uint8_t* transposed;      // (cols, rows)
};

// 1 / scale, where scale = amax / FMAX; FMAX of E5M2 is 57,344. __fdiv_rn divides and __frcp_rn takes a
// reciprocal, both rounded to the nearest FP32 number, whatever the compiler is told about fast arithmetic.
// So the GPU has the bits of the reference.
__device__ float inverse_scale(const Matrix& m) { return __frcp_rn(__fdiv_rn(m.scale->amax, 57344.0f)); }
// The code nearest to x / scale: one instruction converts, and __NV_SATFINITE saturates what is too large.
__device__ uint8_t encode(bf16 x, float inverse) {
    return __nv_cvt_float_to_fp8(__bfloat162float(x) * inverse, __NV_SATFINITE, __NV_E5M2);
}

// ===========================================================================================================
// Rung 1: two kernels, a thread for an element
//
// The first kernel divides by the scale and writes codes. The second one copies each code to its transposed
// place. Its reads are neighbours, but its writes are a column apart:
//
//   codes            row 0, column   0    1    2   ...  31      read by the lanes of a warp: one sector
//   transposed       row    0   byte 0   lane 0                 written by them: 32 rows, 32 sectors of 32
//                    row    1   byte 0   lane 1                 bytes, of which one byte each is new
//                    ...
//                    row   31   byte 0   lane 31
//
// Counted: 103 instructions for an element. 67 million bytes are written to 67 million sectors. The other 31
// bytes of a sector come from other rows, of other blocks.
//
// Predict: the time, if each of these writes sends 32 bytes to memory, and if the sectors are completed on
// the chip, in the L2 cache. Which do you believe?
__global__ void quantize_rung1(Matrix m) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < m.rows * m.cols) m.codes[i] = encode(m.x[i], inverse_scale(m));
}
__global__ void transpose_rung1(Matrix m) {
    const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= m.rows * m.cols) return;
    const int64_t row = i / m.cols;
    const int64_t col = i % m.cols;
    m.transposed[col * m.rows + row] = m.codes[i];
}

// ===========================================================================================================
// Rung 2: the transpose goes through shared memory
//
// What changes: the second kernel. A block reads a tile of 32 x 32 codes by rows, writes it to shared memory,
// waits until all of its threads have done so, and reads it back by columns. Now 32 lanes write 32
// neighbouring bytes of one row of the result:
//
//   tile             column  0   1  ...  31           transposed     byte   0   1  ...  31
//   row 0   warp 0:  lane    0   1  ...  31           row 0  warp 0: lane   0   1  ...  31    column 0
//   row 1   warp 1:  lane    0   1  ...  31           row 1  warp 1: lane   0   1  ...  31    column 1
//
// Counted: 92 instructions for an element. Codes are written, read again and written transposed: 5 bytes an
// element.
//
// Predict: how many sectors does a warp write now with one store? What is the time?
constexpr int SIDE = 32;  // rows and columns of a tile
constexpr int TALL = 8;   // a block has 32 x 8 threads

// The grid is (cols / 32, rows / 32): blockIdx.x is the number of the tile in its row of tiles, blockIdx.y
// that of the row. A thread of the block has the place (threadIdx.x, threadIdx.y), and every eighth row.
__global__ void transpose_rung2(Matrix m) {
    __shared__ uint8_t tile[SIDE][SIDE];
    const int64_t row0 = static_cast<int64_t>(blockIdx.y) * SIDE;
    const int64_t col0 = static_cast<int64_t>(blockIdx.x) * SIDE;
    for (int y = threadIdx.y; y < SIDE; y += TALL) {
        const int x = threadIdx.x;
        if (row0 + y >= m.rows || col0 + x >= m.cols) continue;
        tile[y][x] = m.codes[(row0 + y) * m.cols + col0 + x];
    }
    __syncthreads();
    for (int x = threadIdx.y; x < SIDE; x += TALL) {
        const int y = threadIdx.x;
        if (row0 + y >= m.rows || col0 + x >= m.cols) continue;
        m.transposed[(col0 + x) * m.rows + row0 + y] = tile[y][x];
    }
}

// ===========================================================================================================
// Rung 3: one kernel
//
// What changes: a thread stores a code in memory and in the tile when it has computed it. Nothing is read
// back: the first kernel goes, with its start, its addresses and its division by the scale, which each thread
// now does once for four elements. The kernel below is a template: PADDING is a
// blank that is filled in when it is compiled, with 0 here and with 1 in rung 4.
//
// Counted: 51 instructions for an element. 14 of them are for the scale and the start: a thread executes 56,
// but for four elements only. And a thread has one load of 2 bytes on its way. The next one comes after the
// store of the code, because for all that the compiler knows `codes` could be where `x` is.
//
// Predict: the time of instructions, and that of latency, with 2,048 threads on each multiprocessor.

// Rungs 3 and 4. PADDING: bytes after each row of the tile. The grid is that of rung 2.
template <int PADDING> __global__ void rungs3_and_4(Matrix m) {
    __shared__ uint8_t tile[SIDE][SIDE + PADDING];
    const float inverse = inverse_scale(m);
    const int64_t row0 = static_cast<int64_t>(blockIdx.y) * SIDE;
    const int64_t col0 = static_cast<int64_t>(blockIdx.x) * SIDE;
    for (int y = threadIdx.y; y < SIDE; y += TALL) {
        const int x = threadIdx.x;
        if (row0 + y >= m.rows || col0 + x >= m.cols) continue;
        const int64_t i = (row0 + y) * m.cols + col0 + x;
        const uint8_t code = encode(m.x[i], inverse);
        m.codes[i] = code;
        tile[y][x] = code;
    }
    __syncthreads();
    for (int x = threadIdx.y; x < SIDE; x += TALL) {
        const int y = threadIdx.x;
        if (row0 + y >= m.rows || col0 + x >= m.cols) continue;
        m.transposed[(col0 + x) * m.rows + row0 + y] = tile[y][x];
    }
}

// ===========================================================================================================
// Rung 4: a byte of padding
//
// What changes: rungs3_and_4<1>. A row of the tile has 33 bytes in place of 32. Byte b of shared memory is in
// bank b / 4 modulo 32. The lanes of a warp read a column, so their bytes are a row apart:
//
//   lane (row of the tile)    0    1    2    3    4    5    6    7    8   ...  31
//   32 bytes a row: bank      0    8   16   24    0    8   16   24    0   ...  24    4 banks, 8 lanes each
//   33 bytes a row: bank      0    8   16   24    1    9   17   25    2   ...  31    every bank once
//
// Predict: what does a read of the tile take, before and now? By how much does the rung become faster?

// ===========================================================================================================
// Rung 5: eight elements a thread
//
// What changes: a thread loads 8 elements, 16 bytes, with one instruction, and stores their codes, 8 bytes,
// with one. The tile has 64 x 64 codes. Then a thread collects 8 rows of a column, and stores 8 bytes
// transposed.
//
//   x, a row         bytes 0 - 15   16 - 31   ...   112 - 127     8 lanes: 128 bytes of a row
//   lane                   0           1                 7        a load of a warp: 4 rows, 16 sectors
//   transposed       bytes 0 - 7     8 - 15   ...    56 - 63      8 lanes: 64 bytes of a row
//
// Inside the block codes still go to the tile and come back one byte at a time: 16 accesses for 8 elements,
// each with two lanes in a bank. (A row of the tile has 68 bytes, 17 whole words, so byte c of row r is in
// bank 17 r + c / 4 modulo 32. A warp reads four columns, the bytes of one word, each from eight rows:
//
//   row                        0    8   16   24   32   40   48   56     17 x 8 = 136 is 8 modulo 32
//   bank of column 0 to 3      0    8   16   24    0    8   16   24     4 banks, two rows each
//
// With 65 bytes, as in rung 4, reading would need no bank twice, but writing still would.)
//
// Counted: 19 instructions for an element. A thread still has one load on its way, but now of 16 bytes.
//
// Predict: the times of the four resources, and that of the rung.
//
// Three names are new. Piece<Element, N> (ladder.h) is N neighbouring elements in registers of a thread:
// load() and store() are one instruction each, and piece[j] is element j. gpu::Values (gpu/device.cuh) is
// eight FP32 numbers. gpu::encode<Format::E5M2>(values, inverse), there too, makes eight codes of them, two
// with each instruction that converts; they are a uint2, two words of four codes.
constexpr unsigned THREADS = 256;  // of a block, here and in the next rungs
constexpr int CHUNK = 8;

__device__ Piece<uint8_t, CHUNK> encode8(const Piece<bf16, CHUNK>& x, float inverse) {
    gpu::Values values;
    for (int j = 0; j < CHUNK; j++) values[j] = __bfloat162float(x[j]);
    return {gpu::encode<Format::E5M2>(values, inverse)};
}

__global__ void rung5(Matrix m) {  // grid (cols / 64, rows / 64)
    constexpr int TILE = 64;
    constexpr int CHUNKS = TILE / CHUNK;  // of a row or column of the tile
    __shared__ uint8_t tile[TILE][TILE + 4];
    const float inverse = inverse_scale(m);
    const int64_t row0 = static_cast<int64_t>(blockIdx.y) * TILE;
    const int64_t col0 = static_cast<int64_t>(blockIdx.x) * TILE;
    for (int i = threadIdx.x; i < TILE * CHUNKS; i += THREADS) {
        const int y = i / CHUNKS;
        const int x = i % CHUNKS * CHUNK;
        if (row0 + y >= m.rows || col0 + x >= m.cols) continue;
        const int64_t at = (row0 + y) * m.cols + col0 + x;
        const Piece<uint8_t, CHUNK> codes = encode8(Piece<bf16, CHUNK>::load(m.x + at), inverse);
        codes.store(m.codes + at);
        for (int j = 0; j < CHUNK; j++) tile[y][x + j] = codes[j];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILE * CHUNKS; i += THREADS) {
        const int x = i / CHUNKS;
        const int y = i % CHUNKS * CHUNK;
        if (row0 + y >= m.rows || col0 + x >= m.cols) continue;
        Piece<uint8_t, CHUNK> column;
        for (int j = 0; j < CHUNK; j++) column[j] = tile[y + j][x];
        column.store(m.transposed + (col0 + x) * m.rows + row0 + y);
    }
}

// ===========================================================================================================
// Rung 6: 8 x 8 elements a thread, transposed in registers
//
// What changes: a thread has 8 rows of 8 columns of a tile of 128 x 128. The 16 x 16 threads of a block lie
// over it so. Thread (across, down) is number 16 * down + across, and a warp is two rows of this drawing:
//
//                       columns    0 - 7        8 - 15     ...   120 - 127
//   rows   0 -   7                 thread 0     thread 1         thread 15         down 0
//   rows   8 -  15                 thread 16    thread 17        thread 31         down 1
//     ...
//   rows 120 - 127                 thread 240   thread 241       thread 255        down 15
//                                  across 0     across 1         across 15
//
// All 8 loads of a thread are on their way before the first is used. The thread turns rows into columns by
// itself, four rows and four columns at a time, with instructions that pick any 4 of 8 bytes (__byte_perm):
//
//   row 0  a0 a1 a2 a3            a0 b0 c0 d0      a word: four rows of column 0
//   row 1  b0 b1 b2 b3    --->    a1 b1 c1 d1      a word of column 1
//   row 2  c0 c1 c2 c3            a2 b2 c2 d2
//   row 3  d0 d1 d2 d3            a3 b3 c3 d3
//
// From here on a *word* is four rows of one column: 4 bytes, one bank. A thread has two words of each of its
// columns. The upper word has its rows 0 to 3, the lower word its rows 4 to 7.
//
// The tile in shared memory consists of words: 32 for each of the 128 columns. There are as many banks, so
// word w of every column is in bank w. Four neighbouring words are a *piece*, 16 rows:
//
//   rows                0 - 3    4 - 7    8 - 11   12 - 15   16 - 19   ...   124 - 127
//   word, and its bank  0        1        2        3         4               31
//   written by down     0        0        1        1         2               15
//   it is that one's    upper    lower    upper    lower     upper           lower
//   read as             piece 0                              piece 1         piece 7
//
// All threads write their upper words first, one column after the other, and then their lower words. A lane
// reads a piece at once, 16 bytes, and stores it. Eight lanes with the pieces of one column write 128
// neighbouring bytes.
//
// Counted: 8 instructions for an element. Without conflicts, writing the words takes 2.2 us of shared memory.
//
// Predict: in how many banks are the words that the 16 threads of one `down` write at once? How long does
// writing take, and how much of that shows in the time?
constexpr int TILE = 128;             // rows and columns of a tile
constexpr int ACROSS = TILE / CHUNK;  // a block has 16 x 16 threads
constexpr int PIECE_ROWS = 16;        // four words of a column, which a thread reads and stores at once
constexpr int PIECES = TILE / PIECE_ROWS;

// Four rows of four bytes become four columns of four bytes. __byte_perm(a, b, 0x5140) takes, from the lowest
// byte of the result on, bytes 0, 4, 1 and 5 of the eight of a and b: a0 b0 a1 b1.
__device__ void transpose_4x4(const uint32_t (&row)[4], uint32_t (&column)[4]) {
    const uint32_t rows01_columns01 = __byte_perm(row[0], row[1], 0x5140);  // a0 b0 a1 b1
    const uint32_t rows01_columns23 = __byte_perm(row[0], row[1], 0x7362);  // a2 b2 a3 b3
    const uint32_t rows23_columns01 = __byte_perm(row[2], row[3], 0x5140);  // c0 d0 c1 d1
    const uint32_t rows23_columns23 = __byte_perm(row[2], row[3], 0x7362);  // c2 d2 c3 d3
    column[0] = __byte_perm(rows01_columns01, rows23_columns01, 0x5410);    // a0 b0 c0 d0
    column[1] = __byte_perm(rows01_columns01, rows23_columns01, 0x7632);    // a1 b1 c1 d1
    column[2] = __byte_perm(rows01_columns23, rows23_columns23, 0x5410);    // a2 b2 c2 d2
    column[3] = __byte_perm(rows01_columns23, rows23_columns23, 0x7632);    // a3 b3 c3 d3
}

// Where the words of the tile are. Here both functions return what they are given; rung 7 replaces them.
struct Unswizzled {
    // Which word of a column a thread writes first (turn 0) and second (turn 1): 0 is the upper, 1 the lower.
    static __device__ int upper_or_lower(int turn, int) { return turn; }
    // The place of a piece among the eight of its column, which belongs to the threads of this `across`.
    static __device__ int place(int piece, int) { return piece; }
};

// Rungs 6 and 7. The grid is (cols / 128, rows / 128). __launch_bounds__(256, 4) promises blocks of 256
// threads and asks for four of them on a multiprocessor at once. So the compiler may give a thread at most
// 65,536 / 1,024 = 64 registers: a multiprocessor has 65,536.
template <class Layout> __global__ void __launch_bounds__(THREADS, 4) rungs6_and_7(Matrix m) {
    __shared__ __align__(16) uint32_t tile[TILE][TILE / 4];  // (column, word)
    const float inverse = inverse_scale(m);
    const int64_t row0 = static_cast<int64_t>(blockIdx.y) * TILE;
    const int64_t col0 = static_cast<int64_t>(blockIdx.x) * TILE;
    const int across = threadIdx.x % ACROSS;
    const int down = threadIdx.x / ACROSS;
    const int64_t row = row0 + down * 8;
    const int64_t col = col0 + across * CHUNK;
    if (row < m.rows && col < m.cols) {
        Piece<bf16, CHUNK> x[8];
        for (int i = 0; i < 8; i++) x[i] = Piece<bf16, CHUNK>::load(m.x + (row + i) * m.cols + col);
        uint2 codes[8];
        for (int i = 0; i < 8; i++) {
            const Piece<uint8_t, CHUNK> eight = encode8(x[i], inverse);
            eight.store(m.codes + (row + i) * m.cols + col);
            codes[i] = eight.word;
        }
        uint32_t words[2][2][4];  // (upper or lower, first or last four columns, column of these)
        for (int which = 0; which < 2; which++) {
            const uint2* rows = codes + 4 * which;
            transpose_4x4({rows[0].x, rows[1].x, rows[2].x, rows[3].x}, words[which][0]);
            transpose_4x4({rows[0].y, rows[1].y, rows[2].y, rows[3].y}, words[which][1]);
        }
        for (int turn = 0; turn < 2; turn++) {
            const int which = Layout::upper_or_lower(turn, across);
            const int word = 2 * down + which;                                // of each of the eight columns
            const int bank = 4 * Layout::place(word / 4, across) + word % 4;  // and its place in the column
            for (int j = 0; j < CHUNK; j++) {
                const uint32_t upper = words[0][j / 4][j % 4];
                const uint32_t lower = words[1][j / 4][j % 4];
                tile[across * CHUNK + j][bank] = which == 0 ? upper : lower;
            }
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILE * PIECES; i += THREADS) {
        const int x = i / PIECES;
        const int piece = i % PIECES;
        const int64_t piece_row = row0 + piece * PIECE_ROWS;
        if (piece_row >= m.rows || col0 + x >= m.cols) continue;
        const uint32_t* words = &tile[x][4 * Layout::place(piece, x / CHUNK)];
        uint8_t* to = m.transposed + (col0 + x) * m.rows + piece_row;
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(words);
    }
}

// ===========================================================================================================
// Rung 7: swizzled words
//
// What changes: where the words of a column are. Padding, as in rung 4, does not help: pieces are read 16
// bytes at a time, from an address that is a multiple of 16. So a column could only grow by a multiple of
// four words, eight columns by a multiple of 32, and the words would meet in one bank as before. Instead the
// words change places within their column, in another way for each `across`.
//
// How does one find such a layout? The words that a warp writes at once must be in different banks. Their
// threads differ in `across`, four bits, and in the last bit of `down`. In rung 6 `across` does not count in
// the bank at all, so its bits must be mixed in:
//   - a piece is read as a whole, so its four words stay together, and only its place may change, three bits
//     of the bank. These get the upper three bits of `across`: piece p is at place p ^ (across / 2);
//   - the last bit of `across` says which word is written first: the lower one where `across` is odd.
//
// `^` (exclusive or) permutes the places, so nothing is overwritten, and eight lanes that read the eight
// pieces of a column still use every bank once. Which word comes first does not change where it goes. These
// are the banks that a warp writes at once in its first turn, for the first of each thread's columns:
//
//   across                    0    1    2    3    4    5   ...  15
//   rung 6   down 0           0    0    0    0    0    0         0
//            down 1           2    2    2    2    2    2         2
//   rung 7   down 0           0    1    4    5    8    9        29
//            down 1           2    3    6    7   10   11        31
//
// Every bank is used once. In the first warp `across` is lane % 16 and `down` lane / 16, and a column of the
// tile has 32 words. So this command counts rung 7's first turn and draws its banks. With the first two of
// the four terms it draws those of rung 6:
//
//   python3 dev/ladders/banks.py "256*(lane%16) + 2*(lane//16) + 4*(lane%16//2) + lane%2"
//
// Predict: the time. coat.cu does the same for any format and for tensors that are computed on the fly. It
// writes four rows as soon as it has them, so that it needs fewer registers; its drawing is in part 3 there.
struct Swizzled {
    static __device__ int upper_or_lower(int turn, int across) { return turn ^ (across % 2); }
    static __device__ int place(int piece, int across) { return piece ^ (across / 2); }
};

// ===========================================================================================================
// Your rung
//
// Cover rungs 5 to 7, and write a kernel that does all of it at 60% of the copy bandwidth or more; then one
// at 85%. Begin with a copy of rung 4's kernel, and launch it in launch_my_kernel(). You may call every
// function above. Rows and columns are multiples of 16, but not of a tile.
//
//   make build/ladder_quantize_transpose && build/ladder_quantize_transpose 4 9
//
// compares it with the reference and measures it beside rung 4. Hints stand at the end of this file.
[[maybe_unused]] __global__ void my_kernel([[maybe_unused]] Matrix m) {}

void launch_my_kernel([[maybe_unused]] const Matrix& m) {
    // my_kernel<<<blocks, threads>>>(m);
}

// ===========================================================================================================
// The program: data, the comparison with the CPU reference, and the table

constexpr int FROM_TRAINING = 7, MINE = 8;
const std::vector<const char*> RUNGS = {"two kernels, a thread for an element",
                                        "the transpose goes through shared memory",
                                        "one kernel",
                                        "a byte of padding: other banks",
                                        "eight elements a thread",
                                        "8 x 8 elements a thread, transposed in registers",
                                        "swizzled words: no bank twice",
                                        "coat.cu, which trains",
                                        "my_kernel"};

void run(int rung, const Matrix& m) {
    const unsigned elements = static_cast<unsigned>(ceil_div(m.rows * m.cols, THREADS));
    const dim3 side(SIDE, TALL);
    auto tiles = [&](int64_t each) {
        return dim3(static_cast<unsigned>(ceil_div(m.cols, each)),
                    static_cast<unsigned>(ceil_div(m.rows, each)));
    };
    const gpu::TensorRef x{const_cast<bf16*>(m.x), nullptr, m.rows, m.cols, PLAIN_BF16};
    switch (rung) {
        case 0:
            quantize_rung1<<<elements, THREADS>>>(m);
            transpose_rung1<<<elements, THREADS>>>(m);
            break;
        case 1:
            quantize_rung1<<<elements, THREADS>>>(m);
            transpose_rung2<<<tiles(SIDE), side>>>(m);
            break;
        case 2: rungs3_and_4<0><<<tiles(SIDE), side>>>(m); break;
        case 3: rungs3_and_4<1><<<tiles(SIDE), side>>>(m); break;
        case 4: rung5<<<tiles(64), THREADS>>>(m); break;
        case 5: rungs6_and_7<Unswizzled><<<tiles(TILE), THREADS>>>(m); break;
        case 6: rungs6_and_7<Swizzled><<<tiles(TILE), THREADS>>>(m); break;
        case FROM_TRAINING:
            gpu::quantize(gpu::stored(x), {{m.codes, m.scale, m.rows, m.cols, E5M2_TENSOR}, m.transposed},
                          nullptr, nullptr);
            break;
        case MINE: launch_my_kernel(m); break;
    }
    gpu::check(cudaGetLastError(), "Launching a kernel failed");
}

class Case {
public:
    Case(int64_t rows, int64_t cols)
        : bits_(random_bf16(static_cast<size_t>(rows * cols), 3.0f)), x_(bits_), codes_(bits_.size()),
          transposed_(bits_.size()), scale_(1), m{.rows = rows,
                                                  .cols = cols,
                                                  .x = reinterpret_cast<bf16*>(x_.get()),
                                                  .scale = scale_.get(),
                                                  .codes = codes_.get(),
                                                  .transposed = transposed_.get()} {
        scale_.fill(0);
        gpu::compute_amax(gpu::stored({x_.get(), nullptr, rows, cols, PLAIN_BF16}), scale_.get(), nullptr);
    }
    Verdict against_reference(int rung) {
        std::vector<float> values;
        for (uint16_t b : bits_) values.push_back(reference::from_bf16(b));
        const std::vector<uint8_t> expected =
            reference::quantize(values.data(), m.rows, m.cols, E5M2_TENSOR).codes;
        codes_.poison();
        transposed_.poison();
        const std::vector<uint8_t> before = codes_.read();
        run(rung, m);
        const std::vector<uint8_t> codes = codes_.read(), transposed = transposed_.read();
        if (codes == before && transposed == before) return {.right = true, .written = false, .text = ""};
        int64_t wrong = 0, wrong_transposed = 0;
        for (int64_t row = 0; row < m.rows; row++) {
            for (int64_t col = 0; col < m.cols; col++) {
                const uint8_t code = expected[row * m.cols + col];
                wrong += codes[row * m.cols + col] != code;
                wrong_transposed += transposed[col * m.rows + row] != code;
            }
        }
        if (wrong + wrong_transposed == 0) return {.right = true, .written = true, .text = "equal"};
        const std::string text =
            std::to_string(wrong) + " codes, " + std::to_string(wrong_transposed) + " transposed";
        return {.right = false, .written = true, .text = text};
    }

private:
    std::vector<uint16_t> bits_;
    Buffer<uint16_t> x_;
    Buffer<uint8_t> codes_, transposed_;
    Buffer<gpu::TensorScale> scale_;

public:
    const Matrix m;
};

}  // namespace

int main(int argc, char** argv) try {
    // The small one has tiles that are cut off at the right and below.
    Case small(208, 304), large(16384, 4096);
    printf("quantize to E5M2 and transpose, 16384 x 4096: ");
    return climb(
        RUNGS, copying(4.0 * 16384 * 4096), argc, argv,
        [&](int rung) { return small.against_reference(rung); }, [&](int rung) { run(rung, large.m); });
} catch (const Error& e) {
    fprintf(stderr, "%s\n", e.what());
    return 1;
}

// Hints for your rung. Read one, and try it, before you read the next.
//
// 1. How many bytes does a lane of rung 4 load with one instruction, and how many could it?
// 2. Which work does each thread of rung 4 do once, however many elements it has?
// 3. For 60%: a thread takes 8 elements of a row, and later 8 rows of a column. The tile must be large enough
//    for both. Count the lanes that meet in a bank before you choose its padding.
// 4. For 85%: how many loads of a thread are on their way at once? The compiler moves no load before a store
//    that might overwrite it: issue all loads yourself before you use the first.
// 5. Bytes of two words become any word with one __byte_perm. How many of them transpose 4 x 4 bytes?
// 6. Draw the banks that a warp writes at once. Which bits of a thread's number are not in the bank's number?
// 7. Beyond rung 7 little is left: what would the time be if only memory counted? Then look at the first and
//    the last microseconds: 4,096 tiles are 7.8 times as many as run at once.

// ===========================================================================================================
// Measured on an H200, 16384 x 4096:
//
//   rung                                                           us  % of copy  speed-up  codes
//    1  two kernels, a thread for an element                    1214.7         5%         -  equal
//    2  the transpose goes through shared memory                 330.8        19%     3.67x  equal
//    3  one kernel                                               211.9        30%     1.56x  equal
//    4  a byte of padding: other banks                           204.3        31%     1.04x  equal
//    5  eight elements a thread                                   78.4        81%     2.60x  equal
//    6  8 x 8 elements a thread, transposed in registers          71.7        88%     1.09x  equal
//    7  swizzled words: no bank twice                             70.6        90%     1.02x  equal
//    8  coat.cu, which trains                                     71.1        89%     0.99x  equal
//
// What limits each rung, and what we predicted before it was measured (rung 3: after):
//
//   rung   instructions   shared memory   memory         latency   predicted                      measured
//    1      230                             79 to 570    200+200   600 or more                      1,215
//    2      200            80               79           200+50    250                                331
//    3      110            80               63           200       200 (before measuring: 130)        212
//    4      110            18               63           200       10% faster at most                 204
//    5       42            35               63            25       75                                  78
//    6       18            37               63                     72: most of the 35 are hidden       72
//    7       18             4               63                     70                                  71
//
// Latency: 2,048 threads on each of 132 multiprocessors have one load of an element on its way, 0.54 MB of
// BF16. Loading 134 MB takes 250 times 0.8 us, and so does loading as many codes of one byte. In rungs 1 and
// 2 two kernels follow each other, so their latencies add up. The second kernel of rung 2 has four loads of
// a thread on their way (in the machine code of nvcc 13.0): its stores go to shared memory, where `codes`
// cannot be. In rung 5 a load has 16 bytes. Banks: a column of a tile with 32 bytes a row is in 4 banks, so
// reading it takes 8 x 8.8 us in rungs 2 and 3, and 8.8 in rung 4. In rung 6 the 16 words of one `down` are
// in one bank: 16 times 2.2 us.
//
// Rung 1 took twice as long as predicted. Measured alone, its kernels take 177 and 1,026 us. The second one
// writes 67.1 million sectors, one byte each: 1,026 us x 132 x 1.8e9 / 67.1e6 = 3.6 clocks of a
// multiprocessor for each. Which way was it, 2.1 GB of memory, or the L2 cache? A kernel that writes the same
// bytes and reads nothing takes 1,027 us. And a matrix of 2048 x 2048, all of which stays in the L2 cache,
// takes 3.8 clocks a sector, as long as the large one. So sectors are completed on the chip (the threads
// that run at once have 66 rows, and a sector has 32), and the 2.1 GB do not travel: we predicted the wrong
// thing. What counts is how many sectors multiprocessors send to the L2 cache, however little is in
// them. The opposite order, where lanes read 32 sectors and write neighbours, takes 393 us: the other 31
// bytes of a sector that was read wait in the multiprocessor's own cache.
//
// Rung 2: 32 neighbouring bytes are one sector, and a warp's store wants no other, where rung 1's wanted 32.
//
// Rung 2 was predicted from instructions, 250 us for both kernels. Measured alone, they take 177 and 153 us:
//
//                     instructions   shared memory   memory   latency   measured
//   first kernel      104                            47       200       177
//   second kernel      99            80              31        50       153
//
// The first one is limited by latency, which we learned in rung 3. (There the first prediction, 130 us, had
// seen the instructions alone, too.) It is faster than the 200 us of the rule: a load takes 0.7 us here. The
// second one does not fit: none of its resources takes 153 us. Its instructions and its shared memory would,
// one after the other, take 179, and the threads of a block do wait for each other between them, at the
// barrier. How far the other blocks of a multiprocessor fill that time was not measured.
//
// Rung 4 is a good change in the wrong place: eight times fewer clocks of shared memory, 4% of the time.

// ===========================================================================================================
// On paper: for those without a GPU. Answers follow; cover them. `python3 dev/ladders/banks.py "8 * lane"`
// counts sectors and clocks for any such index, and draws the banks: that of a, and of the layout of your
// rung.
//
// How many sectors of 32 bytes does a warp's load want, and how many clocks of shared memory does its access
// take? Lane is the number of the thread in its warp; x is an array of float in memory, aligned to 128 bytes;
// s is a __shared__ array of float.
//
//   a   x[lane]                  e   s[lane]
//   b   x[lane + 1]              f   s[2 * lane]
//   c   x[8 * lane]              g   s[32 * lane]
//   d   x[31 - lane]             h   s[33 * lane]
//                                i   s[lane / 4]
//                                j   s[32 * lane + (lane ^ 5)]
//
//   k   How many rows of a tile of 32 bytes a row (rung 2) could a warp read by columns without a conflict,
//       if each row had 36 bytes?
//   l   Rung 5 without its padding of 4 bytes: in how many banks are the bytes tile[y + j][x] that a warp
//       reads at once? (Four neighbouring x, from a multiple of 4 on, each with y = 0, 8, ..., 56.)
//
// a 4: 128 neighbouring bytes. b 5: they begin 4 bytes later. c 32: each lane has a sector of its own. d 4:
// the order does not matter. e 1. f 2: lanes l and l + 16 meet. g 32: all in bank 0. h 1: bank (33 lane) % 32
// is lane. i 1: four lanes read the same word, which is one answer. j 1: bank lane ^ 5, a permutation; this
// is a swizzle. k All 32: 36 bytes are nine words, row r is in bank 9 r modulo 32, and 9 is odd. l One: rows
// of 64 bytes are 16 words, so row y + j is in bank 16 (y + j) + x / 4 modulo 32, the same for all eight y,
// and the four x are bytes of one word. Eight words of one bank take eight clocks.
