// quantize_transpose_data.h - for the ladder quantize_transpose.cu: what a kernel is given; and, which a
// reader of the rungs can skip, the data of the program and how they are compared with the CPU reference.
#pragma once
#include "../../reference/quantize.h"
#include "ladder.h"

namespace ladder {

// What a kernel is given. rows and cols are multiples of 16.
struct Matrix {
    int64_t rows, cols;
    const bf16* x;                   // (rows, cols)
    gpu::TensorScale* tensor_scale;  // has the amax
    uint8_t* codes;                  // (rows, cols)
    uint8_t* transposed;             // (cols, rows)
};

using Rung = RungOf<const Matrix&>;

// A random matrix with its amax, and room for its codes.
class Case {
public:
    Case(int64_t rows, int64_t cols)
        : bits_(random_bf16(size_t(rows * cols), 3.0f)), x_(bits_), codes_(bits_.size()),
          transposed_(bits_.size()), tensor_scale_(1), m{.rows = rows,
                                                         .cols = cols,
                                                         .x = reinterpret_cast<bf16*>(x_.get()),
                                                         .tensor_scale = tensor_scale_.get(),
                                                         .codes = codes_.get(),
                                                         .transposed = transposed_.get()} {
        tensor_scale_.fill(0);
        gpu::compute_amax(gpu::lazy_load({x_.get(), rows, cols, PLAIN_BF16}), &tensor_scale_.get()->amax,
                          nullptr);
    }
    void run(const Rung& rung) const {
        if (rung.launch) rung.launch(m);
        else run_as_in_training();
        gpu::check(cudaGetLastError(), "Launching a kernel failed");
    }
    Verdict against_reference(const Rung& rung) {
        std::vector<float> values;
        for (uint16_t b : bits_) values.push_back(reference::from_bf16(b));
        const std::vector<uint8_t> expected =
            reference::quantize(values.data(), m.rows, m.cols, E5M2_PER_TENSOR).elements;
        codes_.poison();
        transposed_.poison();
        const std::vector<uint8_t> before = codes_.read();
        run(rung);
        const std::vector<uint8_t> codes = codes_.read(), transposed = transposed_.read();
        if (codes == before && transposed == before) return {.written = false};
        int64_t wrong = 0, wrong_transposed = 0;
        for (int64_t row = 0; row < m.rows; row++) {
            for (int64_t col = 0; col < m.cols; col++) {
                const uint8_t code = expected[row * m.cols + col];
                wrong += codes[row * m.cols + col] != code;
                wrong_transposed += transposed[col * m.rows + row] != code;
            }
        }
        if (wrong + wrong_transposed == 0) return {.right = true, .text = "equal"};
        const std::string text =
            std::to_string(wrong) + " codes, " + std::to_string(wrong_transposed) + " transposed";
        return {.right = false, .text = text};
    }

private:
    std::vector<uint16_t> bits_;
    Buffer<uint16_t> x_;
    Buffer<uint8_t> codes_, transposed_;
    Buffer<gpu::TensorScale> tensor_scale_;
    const Matrix m;

    void run_as_in_training() const {
        const gpu::TensorRef x{x_.get(), m.rows, m.cols, PLAIN_BF16};
        gpu::quantize_operand(gpu::lazy_load(x),
                              {{m.codes, m.rows, m.cols, E5M2_PER_TENSOR, m.tensor_scale}, m.transposed},
                              nullptr, nullptr);
    }
};

// What main() returns.
inline int climb_quantize_transpose(int argc, char** argv, const std::vector<Rung>& rungs) {
    return print_error_of([&] {
        // The small one has tiles that are cut off at the right and below.
        Case small(208, 304), large(16384, 4096);
        printf("quantize to E5M2 and transpose, 16384 x 4096: ");
        return climb(rungs, copying(4.0 * 16384 * 4096), argc, argv, small, large);
    });
}

}  // namespace ladder
