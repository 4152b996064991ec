// quantize_transpose.cu - a ladder: a BF16 matrix is quantized to FP8 with one scale, and its codes are
// written by rows and also transposed, from the simplest kernels to those that train (coat.cu). Each rung
// makes one change to the rung before it. Its text says what changes and why, which numbers were counted, and
// asks you to predict. The answer to each rung is at the end of this file: what limits it, what we predicted,
// what was measured, and why. `make read` shows each answer, folded, below its question. This is the easiest
// ladder. If you have never seen CUDA, read README.md in this folder first: one page.
//
//   make build/ladder_quantize_transpose && build/ladder_quantize_transpose      all rungs
//   build/ladder_quantize_transpose 5                  rung 5 alone, for instance under a profiler
//
// The program prints the time of each rung for a matrix of 16384 x 4096. Codes must equal those of the CPU
// reference.
//
// Training does this to every gradient: the GEMM for the gradient of x reads the codes by rows, and that for
// the gradient of the weight reads them transposed (lesson 5 of the course; the next part says why). The
// amax, the largest magnitude of the matrix, is already known.
//
// What limits a rung. It uses four resources at the same time, and that which takes longest decides. The
// matrix has 16384 x 4096 = 67.1e6 elements. An H200 has 132 multiprocessors at about 1.8e9 clocks a second
// (README.md, "What the machine has"). So the resources take this long:
//
//   resource        time                                             because
//   memory          15.7 us x an element's bytes, in and out         67.1e6 / 4.27e12
//   instructions    2.2 us x an element's instructions               67.1e6 / (132 x 4 x 32 x 1.8e9)
//   shared memory   8.8 us x an element's accesses                   67.1e6 / (132 x 32 x 1.8e9)
//   latency         200 us / the elements that a thread loads        67.1e6 / (132 x 2,048) x 0.8e-6
//                   at a time
//
//   memory          4.27e12 bytes a second are the rate of a copy.
//   instructions    In a clock a multiprocessor starts (issues) 4, each for the 32 lanes of a warp.
//   shared memory   In a clock 32 lanes are answered, if they need words of different banks, or the same
//                   word. If two lanes need different words of a bank, it takes two clocks, and so on.
//   latency         What a load asks for arrives 0.8 us later. 132 x 2,048 threads run at once. With an
//                   element each they have to wait 67.1e6 / (132 x 2,048) = 250 times.
//
// For example, no rung can do with less than 2 bytes of BF16 in and 1 + 1 out: 4 x 15.7 = 63 us of memory.
// Within this time there is room for 63 / 2.2 = 28 instructions for each element.
//
// Latency can also be expressed in bytes. Of the 4 bytes of an element 2 are loaded, at 2.1e12 a second, and
// arrive 0.8 us later. So if memory is never to wait, 2.1e12 x 0.8e-6 = 1.7 MB have been asked for at any
// moment.
//
// How many instructions a rung has was counted in its machine code, which cuobjdump -sass
// build/ladder_quantize_transpose prints. One follows a thread from the first line of a kernel to EXIT, along
// the branches that nearly every thread takes, and counts a loop as often as it runs. Then one divides by the
// elements of the thread. On this path the two kernels of rung 1 have 47 and 56 instructions, for one
// element: 103. (This is machine code of nvcc 12.9. The measured program was built by 13.0.)
#include "../../gpu/quantize.cuh"
#include "neighbours.h"
#include "quantize_transpose_data.h"

using namespace ladder;

namespace {

constexpr unsigned THREADS = 256;  // of a block; in rungs 2 to 4 they are 32 x 8

// A kernel is given a Matrix m (quantize_transpose_data.h):
//   m.x                      the matrix (rows, cols), in BF16
//   m.codes                  the codes (rows, cols), a byte each
//   m.transposed             the same codes, transposed (cols, rows)
//   m.tensor_scale->amax     the amax of the matrix
// rows and cols are multiples of 16.

// How many blocks it takes if each has this many elements. ceil_div(a, b) is a / b, rounded up.
unsigned blocks_with(const Matrix& m, int64_t elements) {
    return unsigned(ceil_div(m.rows * m.cols, elements));
}
// The grid if each block has a square of `side` columns and `side` rows.
dim3 tiles_of(const Matrix& m, int64_t side) {
    return dim3(unsigned(ceil_div(m.cols, side)), unsigned(ceil_div(m.rows, side)));
}

// 1 / scale, where scale = amax / FMAX; FMAX of E5M2 is 57,344. __fdiv_rn divides and __frcp_rn takes a
// reciprocal, both rounded to the nearest FP32 number, whatever the compiler is told about fast arithmetic.
// So the GPU has the bits of the reference.
__device__ float inverse_scale(const Matrix& m) {
    return __frcp_rn(__fdiv_rn(m.tensor_scale->amax, 57344.0f));
}
// The code nearest to x / scale: one instruction converts, and __NV_SATFINITE saturates what is too large.
__device__ uint8_t encode(bf16 x, float inverse) {
    return __nv_cvt_float_to_fp8(__bfloat162float(x) * inverse, __NV_SATFINITE, __NV_E5M2);
}

// ===========================================================================================================
// How an FP8 GEMM is fed
//
// Why are codes needed in two orders? Tensor cores multiply tiles. On Hopper, the H200's generation, one
// instruction, wgmma, multiplies a tile of A, 64 rows with 32 codes each, by a tile of B, 32 codes of each of
// up to 256 columns, and adds the products to sums that lie in registers. The dimension that is summed over
// is called K. The tiles lie in shared memory, and of FP8 the instruction takes one order only: the 32 codes
// along K are neighbours, in A and in B. Such an operand is *K-major*.
//
//   A, row i          byte   0    1    2   ...  31          32 codes along K, side by side
//   B, column j       byte   0    1    2   ...  31          32 codes along K, side by side
//
// For BF16 the instruction has a bit for each operand that says "it lies in the other order", and transposes
// while it reads. For FP8 it has none (the manual of PTX says so of wgmma.mma_async), and what copies tiles
// from memory to shared memory moves rows of bytes as they are. So cuBLASLt takes FP8 operands on Hopper in
// this order alone, which its manual calls TN, and they have to be stored so.
//
// Picture: dev/figures/fed.svg | Eight codes that one sum needs, for the gradient of x and for that of the
// weight. g is the gradient of a linear layer's output.
//
// For the gradient of x, sums run along a row of g. For the gradient of the weight they run along a column,
// whose codes are a whole row apart: that GEMM needs g transposed. The three GEMMs of a linear layer:
//
//   GEMM     computes        sums over    reads, each K-major
//   fprop    y = x w^T       in           x (tokens, in)                  w (out, in)
//   dgrad    dx = g w        out          g (tokens, out)                 w transposed (in, out)
//   wgrad    dw = g^T x      tokens       g transposed (out, tokens)      x transposed (in, tokens)
//
// So each of x, w and g is needed in both orders. A GEMM could transpose by itself, on the way to shared
// memory. It would do what this ladder does each time that it loads a tile, and it loads the same tile of g
// again for many tiles of its result. The quantizer transposes once. Its price is the last of the four bytes
// of an element: 16 of the 63 us. With one scale for the tensor both orders have the same codes.

// ===========================================================================================================
// Rung 1: two kernels, a thread for an element
//
// The first kernel divides by the scale and writes codes. The second one copies each code from (row, column)
// to (column, row) of the result. Its reads are neighbours, but its writes are a column apart:
//
//   codes            row 0, column   0    1    2   ...  31      read by the lanes of a warp: one sector
//   transposed       row    0   byte 0   lane 0                 written by them: 32 rows, 32 sectors of 32
//                    row    1   byte 0   lane 1                 bytes, of which one byte each is new
//                    ...
//                    row   31   byte 0   lane 31
//
// Counted: 103 instructions for an element. 67 million bytes are written, each to a sector of its own. The
// other 31 bytes of a sector come from other rows, of other blocks.
//
// Predict: the time if each of these writes sends 32 bytes to memory, and the time if sectors are first
// completed on the chip, in the L2 cache. Which do you believe?
__global__ void quantize_rung1(Matrix m) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < m.rows * m.cols) m.codes[i] = encode(m.x[i], inverse_scale(m));
}
__global__ void transpose_rung1(Matrix m) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= m.rows * m.cols) return;
    const int64_t row = i / m.cols;
    const int64_t col = i % m.cols;
    m.transposed[col * m.rows + row] = m.codes[i];
}
void launch_rung1(const Matrix& m) {
    quantize_rung1<<<blocks_with(m, THREADS), THREADS>>>(m);
    transpose_rung1<<<blocks_with(m, THREADS), THREADS>>>(m);
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
// Counted: 92 instructions for an element. x is read, codes are written, read again and written transposed: 5
// bytes an element. A thread loads its four codes of the tile before it waits for the first.
//
// Predict: how many sectors does a warp write now with one store? What is the time?
constexpr int SIDE = 32;  // rows and columns of a tile
constexpr int TALL = 8;   // a block has 32 x 8 threads

// The grid is (cols / 32, rows / 32): blockIdx.x is the number of the tile in its row of tiles, blockIdx.y
// that of the row. Thread (threadIdx.x, threadIdx.y) of the block has column threadIdx.x of the tile, and
// every eighth row from threadIdx.y on.
__global__ void transpose_rung2(Matrix m) {
    __shared__ uint8_t tile[SIDE][SIDE];
    const int64_t row0 = int64_t(blockIdx.y) * SIDE;
    const int64_t col0 = int64_t(blockIdx.x) * SIDE;
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
void launch_rung2(const Matrix& m) {
    quantize_rung1<<<blocks_with(m, THREADS), THREADS>>>(m);
    transpose_rung2<<<tiles_of(m, SIDE), dim3(SIDE, TALL)>>>(m);
}

// ===========================================================================================================
// Rung 3: one kernel
//
// What changes: as soon as a thread has computed a code, it stores it both in memory and in the tile.
// Nothing is read back: the first kernel goes, with its start, its addresses and its division by the scale.
// Each thread now divides once for four elements. The kernel below is a template: PADDING is a blank
// (README.md, "What the compiler is told"), which is filled in where the kernel is launched, with 0 here and
// with 1 in rung 4.
//
// Counted: 51 instructions for an element. A thread spends 56 on the scale and on its start. It has only four
// elements: 14 for each. And it has one load of 2 bytes on its way. The next one comes after the store of the
// code, because for all that the compiler knows `codes` could be where `x` is.
//
// Predict: the time of instructions, and that of latency. 2,048 threads are on each multiprocessor: how many
// bytes have they asked for at any moment?

// Rungs 3 and 4. PADDING: bytes after each row of the tile. The grid is that of rung 2.
template <int PADDING> __global__ void rungs3_and_4(Matrix m) {
    __shared__ uint8_t tile[SIDE][SIDE + PADDING];
    const float inverse = inverse_scale(m);
    const int64_t row0 = int64_t(blockIdx.y) * SIDE;
    const int64_t col0 = int64_t(blockIdx.x) * SIDE;
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
void launch_rung3(const Matrix& m) { rungs3_and_4<0><<<tiles_of(m, SIDE), dim3(SIDE, TALL)>>>(m); }

// ===========================================================================================================
// Rung 4: a byte of padding
//
// What changes: rungs3_and_4<1>. A row of the tile has 33 bytes in place of 32. Byte b of shared memory is in
// bank b / 4 modulo 32. Lanes of a warp that need different words of one bank are a *conflict*: these words
// take a clock each. The lanes read a column, so their bytes are a row apart. For column 0:
//
//   lane (row of the tile)    0    1    2    3    4    5    6    7    8   ...  31
//   32 bytes a row: bank      0    8   16   24    0    8   16   24    0   ...  24    4 banks, 8 lanes each
//   33 bytes a row: bank      0    8   16   24    1    9   17   25    2   ...  31    every bank once
//
// Predict: what does a read of column 0 take, before and now? And of column 1, where lane 31 reads byte
// 31 x 33 + 1? By how much does the rung become faster?
void launch_rung4(const Matrix& m) { rungs3_and_4<1><<<tiles_of(m, SIDE), dim3(SIDE, TALL)>>>(m); }

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
// each with lanes that need different words of a bank. A row of the tile has 68 bytes, 17 whole words, so
// byte c of row r is in bank 17 r + c / 4 modulo 32. A warp writes in four rows, to these banks:
//
//   column                     0    8   16   24   32   40   48   56
//   row 0, lanes  0 -  7       0    2    4    6    8   10   12   14
//   row 1, lanes  8 - 15      17   19   21   23   25   27   29   31
//   row 2, lanes 16 - 23       2    4    6    8   10   12   14   16     row 0 has seven of these banks
//   row 3, lanes 24 - 31      19   21   23   25   27   29   31    1     row 1 has seven of these
//
// And it reads four columns, the bytes of one word, each from eight rows:
//
//   row                        0    8   16   24   32   40   48   56     17 x 8 = 136 is 8 modulo 32
//   bank of column 0 to 3      0    8   16   24    0    8   16   24     4 banks, two rows each
//
// Picture: dev/figures/rung5.svg | Rung 5. Red is what thread 9 loads and writes, golden what it reads and
// stores after the barrier. Its warp is grey.
//
// With 65 bytes, a byte of padding as in rung 4, reading would need no bank twice. But most writes still
// would: row 2 would have the banks of row 0. No padding of up to 32 bytes does away with both. banks.py
// counts and draws an access; this is the first of the two above:
//
//   python3 dev/ladders/banks.py "68*(lane//8) + 8*(lane%8)" --bytes 1
//
// Three names are new. Neighbours<Element, N> (neighbours.h) is N neighbouring elements in registers of a
// thread: load() and store() are one instruction each. Of such an x, x[j] is element j, and x.bits is all of
// them: for eight codes a uint2, two words of 32 bits, .x and .y, of four codes each. gpu::ChunkValues
// (gpu/device.cuh) is eight FP32 numbers. gpu::encode<Format::E5M2>(values, inverse), there too, makes eight
// codes of them, two with each instruction that converts.
//
// Counted: 19 instructions for an element. A thread still has one load on its way, but now of 16 bytes.
//
// Predict: the times of the four resources, and that of the rung.
constexpr int CHUNK_SIZE = 8;  // elements that a thread loads at once

__device__ Neighbours<uint8_t, CHUNK_SIZE> encode8(const Neighbours<bf16, CHUNK_SIZE>& x, float inverse) {
    gpu::ChunkValues values;
    for (int j = 0; j < CHUNK_SIZE; j++) values[j] = __bfloat162float(x[j]);
    return {gpu::encode<Format::E5M2>(values, inverse)};
}

__global__ void rung5(Matrix m) {  // grid (cols / 64, rows / 64)
    constexpr int TILE_SIDE = 64;
    constexpr int CHUNKS = TILE_SIDE / CHUNK_SIZE;  // of a row or column of the tile
    __shared__ uint8_t tile[TILE_SIDE][TILE_SIDE + 4];
    const float inverse = inverse_scale(m);
    const int64_t row0 = int64_t(blockIdx.y) * TILE_SIDE;
    const int64_t col0 = int64_t(blockIdx.x) * TILE_SIDE;
    for (int i = threadIdx.x; i < TILE_SIDE * CHUNKS; i += THREADS) {
        const int y = i / CHUNKS;
        const int x = i % CHUNKS * CHUNK_SIZE;
        if (row0 + y >= m.rows || col0 + x >= m.cols) continue;
        const int64_t at = (row0 + y) * m.cols + col0 + x;
        const Neighbours<uint8_t, CHUNK_SIZE> codes =
            encode8(Neighbours<bf16, CHUNK_SIZE>::load(m.x + at), inverse);
        codes.store(m.codes + at);
        for (int j = 0; j < CHUNK_SIZE; j++) tile[y][x + j] = codes[j];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILE_SIDE * CHUNKS; i += THREADS) {
        const int x = i / CHUNKS;
        const int y = i % CHUNKS * CHUNK_SIZE;
        if (row0 + y >= m.rows || col0 + x >= m.cols) continue;
        Neighbours<uint8_t, CHUNK_SIZE> column;
        for (int j = 0; j < CHUNK_SIZE; j++) column[j] = tile[y + j][x];
        column.store(m.transposed + (col0 + x) * m.rows + row0 + y);
    }
}
void launch_rung5(const Matrix& m) { rung5<<<tiles_of(m, 64), THREADS>>>(m); }

// ===========================================================================================================
// Rung 6: 8 x 8 elements a thread, transposed in registers
//
// What changes: a thread transposes what it has in its registers, and only whole words go through shared
// memory. First in small: a tile of 8 x 8 codes, and four threads, each of which has 4 rows of 4 columns.
//
//   who has what                        in the registers of A, after it    in shared memory: two words for
//                columns 0-3   4-7      has transposed: four words         each column, side by side
//   rows 0 - 3           A      B         rows 0 - 3 of column 0             column 0   A's word   C's word
//   rows 4 - 7           C      D         rows 0 - 3 of column 1             column 1   A's word   C's word
//                                         rows 0 - 3 of column 2               ...
//                                         rows 0 - 3 of column 3             column 4   B's word   D's word
//
// After a barrier a thread reads both words of two columns. Each pair is 8 rows of a column, which are
// neighbours in the result: one store.
//
// In full size a thread has 8 rows of 8 columns of a tile of 128 x 128. All that follows is in this picture:
//
// Picture: dev/figures/rung6.svg | Rung 6. Red and blue is what thread 17 loads and writes, golden what it
// reads and stores after the barrier: codes of other threads. Its warp is grey.
//
// The 16 x 16 threads of a block lie over the tile as follows. Thread (across, down) is number 16 * down +
// across, and a warp is two rows of this drawing:
//
//                       columns    0 - 7        8 - 15     ...   120 - 127
//   rows   0 -   7                 thread 0     thread 1         thread 15         down 0
//   rows   8 -  15                 thread 16    thread 17        thread 31         down 1
//     ...
//   rows 120 - 127                 thread 240   thread 241       thread 255        down 15
//                                  across 0     across 1         across 15
//
// A thread turns its rows into columns in its registers, four rows and four columns at a time, in two steps.
// Each step takes four instructions, which pick any 4 of the 8 bytes of two registers (__byte_perm):
//
//   row 0  a0 a1 a2 a3            a0 b0 a1 b1            a0 b0 c0 d0      a word: four rows of column 0
//   row 1  b0 b1 b2 b3            a2 b2 a3 b3            a1 b1 c1 d1      a word of column 1
//   row 2  c0 c1 c2 c3    --->    c0 d0 c1 d1    --->    a2 b2 c2 d2
//   row 3  d0 d1 d2 d3            c2 d2 c3 d3            a3 b3 c3 d3
//
// gpu::transpose_4x4() in gpu/quantize.cuh does this, for the ladder as for training.
//
// From here on a *word* is four rows of one column: 4 bytes, one bank. A thread has two words of each of its
// columns: the upper word has its rows 0 to 3, the lower word its rows 4 to 7. But in the result the
// neighbours of these bytes are the other rows of the column, which other threads have. So the words, and no
// longer single bytes, go through a tile in shared memory: 32 words for each of the 128 columns. There are as
// many banks, so word w of every column is in bank w. Four neighbouring words are a *piece*, 16 rows, which
// one thread reads at once:
//
//   rows of the column  0 - 3    4 - 7    8 - 11   12 - 15   16 - 19   ...   124 - 127
//   word, and its bank  0        1        2        3         4               31
//   written by down     0        0        1        1         2               15
//     as its            upper    lower    upper    lower     upper           lower
//   read as             piece 0                              piece 1         piece 7
//
// Who reads and writes which bytes, from the beginning to the end:
//
//   step                  thread 17: across 1, down 1               its warp: down 0 and 1
//   load x                rows 8 - 15 of columns 8 - 15:            a load: two rows, 256 bytes of each,
//                         8 loads of 16 bytes                       16 sectors
//   store codes           the same elements: 8 stores of 8 bytes    a store: two rows, 128 bytes of each,
//                                                                   8 sectors
//   transpose             in registers: 16 words                    no memory
//   write the tile        words 2 and 3 of columns 8 - 15:          a store: one word of 16 columns for
//                         the 8 upper ones, then the 8 lower        each down. In which banks? Predict
//   (barrier)
//   read the tile         piece 1 of columns 2, 34, 66 and 98:      a load: the 8 pieces of 4 columns,
//                         4 loads of 16 bytes                       512 bytes, every bank 4 times
//   store transposed      bytes 16 - 31 of rows 2, 34, 66, 98       a store: 128 bytes of each of 4 rows,
//                         of the result: 4 stores of 16 bytes       16 sectors
//
// All 8 loads of x are on their way before the first is used. A thread needs more registers than before, so
// only four blocks of 256 threads fit on a multiprocessor: half as many threads as in rung 3.
//
// Counted: 8 instructions for an element. A word has four elements, so without conflicts writing the words
// takes a quarter of 8.8 us, 2.2 us of shared memory, and reading them as much.
//
// Predict: in how many banks are the words that the 16 threads of one `down` write at once? How long does
// writing take, and how much of that shows in the time?
constexpr int TILE_SIDE = 128;                  // rows and columns of a tile
constexpr int ACROSS = TILE_SIDE / CHUNK_SIZE;  // a block has 16 x 16 threads
constexpr int PIECE_ROWS = 16;  // four words of a column, which a thread reads and stores at once
constexpr int PIECES = TILE_SIDE / PIECE_ROWS;

// Where the words of the tile are: a column has 32 slots for them, one in each bank. Here word w is in slot
// w, and piece p in the four slots from 4 * p on. Rung 7 replaces both functions.
struct Unswizzled {
    // The slot of a word in its column. Thread (across, down) writes it.
    static __device__ int slot(int word, int, int) { return word; }
    // The four words of a piece, in order, from a column that the threads of this `across` have written.
    static __device__ uint4 read_piece(const uint32_t* column, int piece, int) {
        return *reinterpret_cast<const uint4*>(column + 4 * piece);
    }
};

// Rungs 6 and 7. The grid is (cols / 128, rows / 128). __launch_bounds__(256, 4) promises blocks of 256
// threads and asks for four of them on a multiprocessor at once. So the compiler may give a thread at most
// 65,536 / 1,024 = 64 registers: a multiprocessor has 65,536.
template <class Layout> __global__ void __launch_bounds__(THREADS, 4) rungs6_and_7(Matrix m) {
    // (column, slot). It begins at a multiple of 16 bytes, as what is read 16 bytes at a time has to.
    __shared__ __align__(16) uint32_t tile[TILE_SIDE][TILE_SIDE / 4];
    const float inverse = inverse_scale(m);
    const int64_t row0 = int64_t(blockIdx.y) * TILE_SIDE;
    const int64_t col0 = int64_t(blockIdx.x) * TILE_SIDE;
    const int across = threadIdx.x % ACROSS;
    const int down = threadIdx.x / ACROSS;
    const int64_t row = row0 + down * 8;
    const int64_t col = col0 + across * CHUNK_SIZE;
    if (row < m.rows && col < m.cols) {
        Neighbours<bf16, CHUNK_SIZE> x[8];
        for (int i = 0; i < 8; i++) x[i] = Neighbours<bf16, CHUNK_SIZE>::load(m.x + (row + i) * m.cols + col);
        for (int lower = 0; lower < 2; lower++) {  // 0: the thread's upper four rows; 1: its lower four
            uint2 codes[4];  // of a row: .x is those of columns 0 to 3, .y those of columns 4 to 7
            for (int i = 0; i < 4; i++) {
                const Neighbours<uint8_t, CHUNK_SIZE> eight = encode8(x[4 * lower + i], inverse);
                eight.store(m.codes + (row + 4 * lower + i) * m.cols + col);
                codes[i] = eight.bits;
            }
            uint32_t words[2][4];  // of columns 0 to 3, and of columns 4 to 7
            gpu::transpose_4x4({codes[0].x, codes[1].x, codes[2].x, codes[3].x}, words[0]);
            gpu::transpose_4x4({codes[0].y, codes[1].y, codes[2].y, codes[3].y}, words[1]);
            const int slot = Layout::slot(2 * down + lower, across, down);  // the same in all eight columns
            for (int j = 0; j < CHUNK_SIZE; j++) tile[across * CHUNK_SIZE + j][slot] = words[j / 4][j % 4];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TILE_SIDE * PIECES; i += THREADS) {
        const int x = i / PIECES;
        const int piece = i % PIECES;
        const int64_t piece_row = row0 + piece * PIECE_ROWS;
        if (piece_row >= m.rows || col0 + x >= m.cols) continue;
        uint8_t* to = m.transposed + (col0 + x) * m.rows + piece_row;
        *reinterpret_cast<uint4*>(to) = Layout::read_piece(tile[x], piece, x / CHUNK_SIZE);
    }
}
void launch_rung6(const Matrix& m) { rungs6_and_7<Unswizzled><<<tiles_of(m, TILE_SIDE), THREADS>>>(m); }

// ===========================================================================================================
// Rung 7: swizzled words
//
// What changes: in which bank a word is. In rung 6 the words that the threads of one `down` write at once are
// in one bank, whatever their `across`. Padding after each column, as in rung 4, does not help: pieces are
// read 16 bytes at a time, from an address that is a multiple of 16. So a column could only grow by a
// multiple of four words, eight columns by a multiple of 32, and the words would meet in one bank as before.
// (Four words after every eight columns would help, and cost memory.)
//
// A column has 32 slots for words, one in each bank. In rung 6 word w is in slot w. Now the words of a column
// change slots, in another way for each `across`. This is called a *swizzle*.
//
// How does one find such a layout? One looks at bits. `across` has four, a3 to a0, and so has `down`, d3 to
// d0. The lanes of a warp differ in five of these: in a3 to a0, and in d0. The number of a bank has five
// bits, too: just enough to tell the lanes apart. A thread's words are 2 * down + lower, where `lower` is 0
// for the upper word and 1 for the lower one. With one instruction all lanes write words of the same `lower`:
//
//   bit of the slot, and bank     4          3          2          1          0
//   rung 6: the word              d3         d2         d1         d0         lower
//   rung 7                        d3 ^ a3    d2 ^ a2    d1 ^ a1    d0 ^ a0    lower ^ d0
//
// In rung 6 the lanes differ in bit 1 alone, so they have two banks. What is missing is mixed in with `^`
// (exclusive or):
//   - `across` goes into bits 4 to 1. Now the 16 lanes of one `down` have 16 different banks. But bit 0 is
//     still the same for all lanes, so the other 16 lanes have the same 16 banks.
//   - d0 goes into bit 0. Of the two values of `down` one is even and one is odd, so now each has 16 banks
//     of its own.
//
// In one line this is
//
//   slot = word ^ (2 * across) ^ (down & 1)
//
// Two things must remain true. They do:
//   - A slot has one word. In a column `across` is fixed, so from a slot one can compute the word: d3 to d0
//     from bits 4 to 1, then `lower` from bit 0.
//   - A piece can be read at once. Its four words differ in d0 and `lower` alone, so in bits 1 and 0 of the
//     slot: they remain neighbours. Piece p is in the four slots from 4 * (p ^ (across / 2)) on. But its
//     words have changed places. They are in the order 0, 1, 3, 2 if `across` is even, and 3, 2, 0, 1 if it
//     is odd. The thread that reads a piece puts its words in order, in registers.
//
// Here is the tile, a line for the first column of each `across`: which word is in which slot. A piece is
// what stands between two bars. When a warp with down 0 and 1 writes its upper words, its threads of down 0
// write the words in [ ], and those of down 1 the words in ( ):
//
//   slot, and bank           0    1    2    3  |  4    5    6    7  |  8    9   10   11  |  12   ...  31
//   rung 6   across 0       [0]   1   (2)   3  |  4    5    6    7  |  8    9   10   11  |  12        31
//            across 1       [0]   1   (2)   3  |  4    5    6    7  |  8    9   10   11  |  12        31
//            across 2       [0]   1   (2)   3  |  4    5    6    7  |  8    9   10   11  |  12        31
//            ...
//   rung 7   across 0       [0]   1    3   (2) |  4    5    7    6  |  8    9   11   10  |  12        30
//            across 1        3   (2)  [0]   1  |  7    6    4    5  | 11   10    8    9  |  15        29
//            across 2        4    5    7    6  | [0]   1    3   (2) | 12   13   15   14  |   8        26
//            across 3        7    6    4    5  |  3   (2)  [0]   1  | 15   14   12   13  |  11        25
//            ...
//
// The banks to which a warp writes its upper words:
//
//   across                    0    1    2    3    4    5   ...  15
//   rung 6   down 0           0    0    0    0    0    0         0
//            down 1           2    2    2    2    2    2         2
//   rung 7   down 0           0    2    4    6    8   10        30
//            down 1           3    1    7    5   11    9        29
//
// Picture: dev/figures/rung7.svg | The same for all 16 values of `across`: the upper words that a warp
// writes, and below how many of them each bank has.
//
// Every bank is used once. So it is when eight lanes read the eight pieces of a column: they read all of its
// slots, as in rung 6. In the first warp `across` is lane % 16 and `down` lane / 16, and from one `across` to
// the next are 8 columns of 32 words. So these commands count the clocks of a write, and draw its banks. The
// first is of rung 6:
//
//   python3 dev/ladders/banks.py "256*(lane%16) + 2*(lane//16)"
//   python3 dev/ladders/banks.py "256*(lane%16) + (2*(lane//16) ^ 2*(lane%16) ^ lane//16)"
//
// Counted: as rung 6. (Putting the words in order takes less than an instruction for an element.) Of its
// 37 us of shared memory, 4 are left.
//
// Row 8 of the table that the program prints is coat.cu, which does the same for any format and for tensors
// that are computed on the fly. Its tile, TransposeTile in gpu/quantize.cuh, has the layout of this rung.
//
// Predict: the time.
struct Swizzled {
    static __device__ int slot(int word, int across, int down) { return word ^ (2 * across) ^ (down & 1); }
    static __device__ uint4 read_piece(const uint32_t* column, int piece, int across) {
        const int piece_slot = piece ^ (across / 2);
        const uint4 four = *reinterpret_cast<const uint4*>(column + 4 * piece_slot);
        const uint4 if_even{four.x, four.y, four.w, four.z};  // the words in order, if `across` is even
        const uint4 if_odd{four.z, four.w, four.y, four.x};
        return across % 2 == 0 ? if_even : if_odd;
    }
};
void launch_rung7(const Matrix& m) { rungs6_and_7<Swizzled><<<tiles_of(m, TILE_SIDE), THREADS>>>(m); }

// ===========================================================================================================
// Your rung
//
// Cover rungs 5 to 7, and write a kernel that does all of it at 60% of the copy bandwidth or more; then one
// at 85%. Begin with a copy of rung 4's kernel, and launch it in launch_my_kernel(). You may call every
// function above. Rows and columns are multiples of 16, but not of a tile.
//
//   make build/ladder_quantize_transpose && build/ladder_quantize_transpose 4 9
//
// compares it with the reference and measures it beside rung 4. Hints stand at the end of this file. Without
// a GPU: layouts.py, in this folder, asks which thread loads what and where the words of a tile are, in
// rungs 4, 5 and 7, and checks your answers.
[[maybe_unused]] __global__ void my_kernel([[maybe_unused]] Matrix m) {}

void launch_my_kernel([[maybe_unused]] const Matrix& m) {
    // my_kernel<<<blocks, threads>>>(m);
}

}  // namespace

int main(int argc, char** argv) {
    return climb_quantize_transpose(argc, argv,
                                    {{"two kernels, a thread for an element", launch_rung1},
                                     {"the transpose goes through shared memory", launch_rung2},
                                     {"one kernel", launch_rung3},
                                     {"a byte of padding: other banks", launch_rung4},
                                     {"eight elements a thread", launch_rung5},
                                     {"8 x 8 elements a thread, transposed in registers", launch_rung6},
                                     {"swizzled words: no bank twice", launch_rung7},
                                     {"coat.cu, which trains", AS_IN_TRAINING},
                                     {"my_kernel", launch_my_kernel}});
}

// ===========================================================================================================
// Hints for your rung
//
// Read one, and try it, before you read the next.
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
// Measured on an H200
//
// For a matrix of 16384 x 4096. The rate of a copy was measured in the same run: 4.24 TB/s, or 63 us for the
// bytes of this matrix.
//
//   rung                                                           us  % of copy  speed-up  codes
//    1  two kernels, a thread for an element                    1189.4         5%         -  equal
//    2  the transpose goes through shared memory                 330.8        19%     3.60x  equal
//    3  one kernel                                               211.6        30%     1.56x  equal
//    4  a byte of padding: other banks                           204.2        31%     1.04x  equal
//    5  eight elements a thread                                   78.0        81%     2.62x  equal
//    6  8 x 8 elements a thread, transposed in registers          71.1        89%     1.10x  equal
//    7  swizzled words: no bank twice                             70.4        90%     1.01x  equal
//    8  coat.cu, which trains                                     71.0        89%     0.99x  equal

// ===========================================================================================================
// Answer to rung 1
//
//   limits      instructions 103 x 2.2 = 230 us, latency 200 + 200 us, memory 570 or 79 us
//   predicted   600 us or more
//   measured    1,189 us
//
// Memory: an element is 2 bytes in and 1 out in the first kernel. The second loads this 1, and writes 32
// bytes to memory, or 1 if sectors are completed before: 36 x 15.7 = 570 us, or 5 x 15.7 = 79 us. Latency:
// a thread has one load of an element on its way, 200 us, and 200 us again in the second kernel. The two
// kernels follow each other, so their latencies add up.
//
// This rung took twice as long as predicted. Measured alone, in another run, its kernels take 177 and 1,026
// us. The second one writes 67.1 million sectors, one byte each: 1,026 us x 132 x 1.8e9 / 67.1e6 = 3.6 clocks
// of a multiprocessor for each. Which way was it, 2.1 GB of memory, or the L2 cache? Two measurements tell. A
// kernel that writes the same bytes and reads nothing takes 1,027 us. And a matrix of 2048 x 2048, all of
// which stays in the L2 cache, takes 3.8 clocks a sector, as long as the large one. So sectors are completed
// on the chip (the threads that run at once have 66 rows of x, and a sector of the result needs 32 of them),
// and the 2.1 GB do not travel.
//
// We had predicted the wrong thing. What counts is how many sectors multiprocessors send to the L2 cache,
// however little is in them. The opposite order, where lanes read 32 sectors and write neighbours, takes 393
// us: the other 31 bytes of a sector that was read wait in the multiprocessor's own cache.

// ===========================================================================================================
// Answer to rung 2
//
//   limits      instructions 92 x 2.2 = 200 us, latency 200 + 200 / 4 us, memory 5 x 15.7 = 79 us,
//               shared memory (1 + 8) x 8.8 = 80 us
//   predicted   250 us
//   measured    331 us
//
// 32 neighbouring bytes are one sector, and a warp's store wants no other, where rung 1's wanted 32.
//
// The prediction began with the instructions of both kernels, 200 us. The 50 us above that were a guess:
// the counts do not give them. Measured alone, the kernels take 177 and 153 us. The first kernel has 47 of
// the 92 instructions, and 3 of the 5 bytes. Here are the times in us:
//
//                     instructions   shared memory   memory   latency   measured
//   first kernel      104                            47       200       177
//   second kernel      99            80              31        50       153
//
// The first one is limited by latency, which we learned only in rung 3. It is faster than the 200 us of the
// rule: a load takes 0.7 us here. The second one has four loads of a thread on their way (in the machine
// code of nvcc 13.0), so a quarter of the latency: its stores go to shared memory, where `codes` cannot be.
// Reading a column of its tile takes 8 x 8.8 us, for its 32 bytes are in 4 banks. (Rung 4 draws them.)
//
// None of the second kernel's resources takes 153 us. But a block waits at its barrier. If other blocks
// always filled that time, the longest of the four would decide, 99 us; if none did, the two longest would
// follow each other, 99 + 80 = 179 us. The 153 lie between.

// ===========================================================================================================
// Answer to rung 3
//
//   limits      latency 200 us, instructions 51 x 2.2 = 110 us, shared memory (1 + 8) x 8.8 = 80 us,
//               memory 63 us
//   predicted   130 us, before it was measured; 200 us after
//   measured    212 us
//
// The first prediction had seen the instructions alone. 2,048 x 132 threads with 2 bytes each have asked for
// 0.54 MB, where 1.7 MB are needed: this takes 250 x 0.8 us, as in rung 1's first kernel.

// ===========================================================================================================
// Answer to rung 4
//
//   limits      latency 200 us, instructions 110 us, memory 63 us, shared memory (1 + 1.75) x 8.8 = 24 us
//   predicted   10% faster at most
//   measured    204 us, 4% faster
//
// Reading a column took 8 clocks, for its 32 bytes are in 4 banks, 8 words each. Now column 0 takes 1. In
// columns 1, 2 and 3 the byte of lane 31 falls into word 256, which is in bank 0, as lane 0's byte is: 2
// clocks. So it goes on: one column of four takes 1 clock and three take 2, on average 1.75. A write takes 1.
// (With 4 bytes of padding every read takes 1, too: try it with banks.py.)
//
// This is a good change in the wrong place: a read takes a fifth of the clocks, the rung 4% less time.

// ===========================================================================================================
// Answer to rung 5
//
//   limits      memory 63 us, instructions 19 x 2.2 = 42 us, shared memory 4 x 8.8 = 35 us, latency
//               200 / 8 = 25 us
//   predicted   75 us
//   measured    78 us
//
// A load now has 8 elements, so an eighth of the latency. The tile takes two accesses an element, a write and
// a read, with two clocks each: in the tables above no bank has more than two of the words.

// ===========================================================================================================
// Answer to rung 6
//
//   limits      memory 63 us, shared memory 16 x 2.2 + 2.2 = 37 us, instructions 8 x 2.2 = 18 us
//   predicted   72 us: most of the 37 are hidden
//   measured    71 us
//
// The 16 words of one `down` are in one bank, so writing takes 16 times as long as without conflicts. Latency
// is no limit any more: a thread has 64 elements on its way. Half as many threads run as in rung 3, four
// blocks of 256 on a multiprocessor, so it is 2 x 200 / 64 = 6 us.

// ===========================================================================================================
// Answer to rung 7
//
//   limits      memory 63 us, instructions 18 us, shared memory 2.2 + 2.2 = 4 us
//   predicted   70 us
//   measured    70 us
//
// Shared memory was already hidden, so little is won. Memory is all that is left: 90% of the rate of a copy.

// ===========================================================================================================
// On paper: for those without a GPU
//
// The answers follow below. Cover them. `python3 dev/ladders/banks.py "8 * lane"` counts sectors and clocks
// for any such index, and draws the banks.
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
//   m   A layer has w (out, in), and its input is stored transposed: (in, tokens). Which of the three GEMMs
//       can read it as it is?
//   n   wgrad sums over tokens, and g has 4,096 columns. In how many sectors are 32 codes that follow each
//       other in its sum, of g as it is, and of g transposed?

// ===========================================================================================================
// Answers on paper
//
//   a   4: 128 neighbouring bytes.
//   b   5: they begin 4 bytes later.
//   c   32: each lane has a sector of its own.
//   d   4: the order does not matter.
//   e   1.
//   f   2: lanes l and l + 16 meet.
//   g   32: all in bank 0.
//   h   1: bank (33 lane) % 32 is lane.
//   i   1: four lanes read the same word, which is one answer.
//   j   1: bank lane ^ 5, a permutation; this is a swizzle.
//   k   All 32: 36 bytes are nine words, row r is in bank 9 r modulo 32, and 9 is odd.
//   l   One: rows of 64 bytes are 16 words, so row y + j is in bank 16 (y + j) + x / 4 modulo 32. That is the
//       same for all eight y, and the four x are bytes of one word. Eight words of one bank: eight clocks.
//   m   wgrad alone: it sums over tokens, which are neighbours there. fprop sums over `in`.
//   n   32: a column of g, whose codes are 4,096 bytes apart. Transposed they are neighbours: 1.
