// norm_to_fp8_data.h - for the ladder norm_to_fp8.cu: what a kernel is given; and, which a reader of the
// rungs can skip, the data of the program and how they are compared with the CPU reference.
#pragma once
#include "../../gpu/norm.h"
#include "../../reference/operators.h"
#include "../../reference/quantize.h"
#include "ladder.h"

namespace ladder {

// What a kernel is given. cols is a multiple of 16.
struct Tensors {
    int64_t rows, cols;
    const uint8_t* in;               // (rows, cols) codes
    const uint16_t* scales;          // (rows, cols / 16) BF16
    const bf16* weight;              // (cols)
    float* x;                        // (rows, cols) the input, dequantized: for rungs 1 and 2
    float* y;                        // (rows, cols) the normalized values: for rungs 1 to 3
    float* inverse;                  // (rows) 1 / rms: from rung 4 on
    gpu::TensorScale* tensor_scale;  // of the output; its amax is 0 at the start
    uint8_t* codes;                  // (rows, cols) the output
};

constexpr float EPS = 1e-5f;

using Rung = RungOf<const Tensors&>;

// A random matrix in FP8 groups, a random weight, and room for what rungs store.
class Case {
public:
    Case(int64_t rows, int64_t cols)
        : x_(random_bf16(rows * cols, 2.0f)), weight_(random_bf16(cols, 1.0f, 2)), device_x_(x_),
          zeros_(rows * cols), device_weight_(weight_), scales_(rows * cols / 16), in_(rows * cols),
          codes_(rows * cols), x32_(rows * cols), y32_(rows * cols), inverse_(rows), stats_(rows),
          tensor_scale_(1), norm_{{in_.get(), rows, cols, E4M3_PER_1x16, nullptr, scales_.get()},
                                  weight_on_device(),
                                  nullptr,
                                  stats_.get(),
                                  true,
                                  EPS},
          t_{.rows = rows,
             .cols = cols,
             .in = in_.get(),
             .scales = scales_.get(),
             .weight = weight_on_device(),
             .x = x32_.get(),
             .y = y32_.get(),
             .inverse = inverse_.get(),
             .tensor_scale = tensor_scale_.get(),
             .codes = codes_.get()} {
        gpu::quantize_to_groups(view_of(device_x_), norm_.input, /*write_back=*/false, nullptr, nullptr);
        zeros_.fill(0);
    }
    void run(const Rung& rung) {
        tensor_scale_.fill(0);
        if (rung.launch) rung.launch(t_);
        else run_as_in_training();
        gpu::check(cudaGetLastError(), "Launching a kernel failed");
    }
    // Codes are ordered like magnitudes: neighbours differ by 1.
    Verdict against_reference(const Rung& rung) {
        const int64_t rows = t_.rows, cols = t_.cols;
        std::vector<float> x, weight, y(rows * cols);
        for (uint16_t b : x_) x.push_back(reference::from_bf16(b));
        for (uint16_t b : weight_) weight.push_back(reference::from_bf16(b));
        x = reference::dequantize(reference::quantize(x.data(), rows, cols, E4M3_PER_1x16));
        reference::norm_forward<float>(true, EPS, rows, cols, x.data(), weight.data(), nullptr, y.data());
        const std::vector<uint8_t> expected =
            reference::quantize(y.data(), rows, cols, E4M3_PER_TENSOR).elements;
        codes_.poison();
        const std::vector<uint8_t> before = codes_.read();
        run(rung);
        const std::vector<uint8_t> codes = codes_.read();
        if (codes == before) return {.written = false};
        int64_t differ = 0, far = 0;
        for (int64_t i = 0; i < rows * cols; i++) {
            differ += codes[i] != expected[i];
            far += std::abs(codes[i] - expected[i]) > 1;
        }
        if (far > 0) return {.right = false, .text = std::to_string(far) + " codes"};
        if (differ == 0) return {.right = true, .text = "equal"};
        return {.right = true, .text = std::to_string(differ) + " by one"};
    }

private:
    const std::vector<uint16_t> x_, weight_;
    Buffer<uint16_t> device_x_, zeros_, device_weight_, scales_;
    Buffer<uint8_t> in_, codes_;
    Buffer<float> x32_, y32_, inverse_;
    Buffer<gpu::RowStatistics> stats_;
    Buffer<gpu::TensorScale> tensor_scale_;
    const gpu::Norm norm_;
    const Tensors t_;

    // x + 0: the groups, the statistics and the amax, as residual_add leaves them in training.
    void run_as_in_training() const {
        gpu::residual_add(view_of(device_x_), view_of(zeros_), norm_, /*plain_sum=*/{},
                          /*norm_output_amax_to_raise=*/&tensor_scale_.get()->amax, nullptr);
        gpu::quantize_operand(gpu::lazy_norm(norm_),
                              {{t_.codes, t_.rows, t_.cols, E4M3_PER_TENSOR, t_.tensor_scale}}, nullptr,
                              nullptr);
    }
    gpu::TensorRef view_of(const Buffer<uint16_t>& x) const {
        return {x.get(), int64_t(x_.size() / weight_.size()), int64_t(weight_.size()), PLAIN_BF16};
    }
    const bf16* weight_on_device() const { return reinterpret_cast<const bf16*>(device_weight_.get()); }
};

// What main() returns.
inline int climb_norm_to_fp8(int argc, char** argv, const std::vector<Rung>& rungs) {
    return print_error_of([&] {
        // The small one's rows are no whole number of warps or chunks of a block.
        Case small(301, 1040), large(16384, 4096);
        printf("RMSNorm, E4M3 1x16 to E4M3 tensor, 16384 x 4096: ");
        return climb(rungs, copying(3.25 * 16384 * 4096), argc, argv, small, large);
    });
}

}  // namespace ladder
