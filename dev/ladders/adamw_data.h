// adamw_data.h - for the ladder adamw.cu: what a kernel is given; and, which a reader of the rungs can skip,
// the data of the program and how they are compared with the CPU reference.
#pragma once
#include "../../common/recipes.h"
#include "../../gpu/gradient_norm.h"
#include "../../gpu/initialize.h"
#include "../../reference/optimizer.h"
#include "ladder.h"

namespace ladder {

// ===========================================================================================================
// 1. What a kernel is given

constexpr int SPAN = MOMENT_GROUP_SIZE;  // the parameters of a span: 128

struct MaxAndK {  // of a moment group: two of the four fields of a span
    float max, k;
};
struct Moment {
    uint8_t* codes;  // (n)
    float* max;      // (n / 128)
    float* k;        // (n / 128)
    __device__ MaxAndK max_and_k(int64_t span) const { return {max[span], k[span]}; }
    __device__ void set_max_and_k(int64_t span, const MaxAndK& s) const {
        max[span] = s.max;
        k[span] = s.k;
    }
};
// n is a multiple of 128.
struct State {
    int64_t n;
    uint16_t* weight;      // (n) BF16
    int16_t* remainder;    // (n) what the weight lacks of its FP32 master
    const bf16* gradient;  // (n)
    Moment m, v;
};
// The constants of a step: beta1, one_minus_beta1, beta2, one_minus_beta2, bias_correction1 (1 - beta1^t),
// bias_correction2_sqrt (the root of 1 - beta2^t), lr, eps and decay. The two here are for rung 4.
struct Constants : reference::AdamWConstants {
    float root_factor, scaled_eps;
};

using Rung = RungOf<const State&, const Constants&>;

// ===========================================================================================================
// 2. Data on the GPU, and the comparison with the CPU reference

constexpr AdamWOptions SETTINGS{10, 1e-2f};  // step, learning rate

inline Constants constants_of_step() {
    Constants c{reference::adamw_constants(SETTINGS, /*decays=*/true, /*clip_factor=*/1), 0, 0};
    c.root_factor = c.bias_correction1 / c.bias_correction2_sqrt;
    c.scaled_eps = c.bias_correction1 * c.eps;
    return c;
}

// What differs from the CPU reference. Codes are compared in moment groups that have the same k.
struct Difference {
    int64_t weights = 0;         // masters that differ by more than 1e-4 of the learning rate
    int64_t max = 0;             // of moment groups: by more than 1e-5 of it
    int64_t k = 0, far_k = 0;    // of moment groups: at all; by more than 1/256
    int64_t codes = 0, far = 0;  // at all; by more than one
};

class Optimizer {
public:
    explicit Optimizer(int64_t n)
        : n_(n), weight_(n), gradient_(n), m_(n), v_(n), remainder_(n), fields_(4 * n / SPAN), param_(1),
          gradient_state_(1) {
        const gpu::MomentRef m{m_.get(), fields(0), fields(1), Format::E4M3};
        const gpu::MomentRef v{v_.get(), fields(2), fields(3), Format::E4M3};
        param_.write({{0, n, m, v, true, nullptr}});
        gradient_state_.write({{0, 0, 1.0f, 0}});
    }
    // Random weights and gradients; the moments after three steps from zero. Two spans have no gradient, so
    // their moments stay zero.
    void reset() {
        const Param p{"", Role::LinearWeight, 1, n_, 0.02f, 0, 0, -1};
        const Range all{0, n_};
        auto values = [&](uint64_t param_index) -> gpu::InitializeArguments {
            return {.owned = all, .param_index = param_index, .used = n_, .seed = 1};
        };
        gpu::initialize({weight_.get(), remainder_.get(), Format::BF16}, 0, p, values(0), nullptr);
        gpu::initialize({gradient_.get(), nullptr, Format::BF16}, 0, p, values(1), nullptr);
        gpu::check(cudaMemset(gradient_.get() + 3 * SPAN, 0, 2 * SPAN * sizeof(uint16_t)), "Clearing failed");
        m_.fill(0);
        v_.fill(0);
        std::vector<float> initial(fields_.size, 0.0f);
        for (int64_t g = 0; g < n_ / SPAN; g++) {
            initial[1 * (n_ / SPAN) + g] = 1.0f;  // k of m
            initial[3 * (n_ / SPAN) + g] = 1.0f;  // k of v
        }
        fields_.write(initial);
        for (int step = 0; step < 3; step++) run_as_in_training();
    }
    // Gradients of the same signs and of other sizes. With those of the steps before, all moments of a moment
    // group would change by the same factor, and no code would change. With other signs some m would be the
    // small difference of two numbers, and k would depend on their last bits.
    void change_gradient() {
        std::vector<uint16_t> gradient = gradient_.read();
        for (int64_t i = 0; i < n_; i++) {
            const float larger = reference::from_bf16(gradient[i]) * float(1 + i % 7);
            gradient[i] = reference::to_bf16(larger);
        }
        gradient_.write(gradient);
    }
    void run(const Rung& rung) {
        if (rung.launch) rung.launch(state(), constants_of_step());
        else run_as_in_training();
        gpu::check(cudaGetLastError(), "Launching a kernel failed");
    }
    Verdict against_reference(const Rung& rung) {
        reset();
        change_gradient();
        const std::vector<uint16_t> weight = weight_.read(), gradient = gradient_.read();
        const std::vector<int16_t> remainder = remainder_.read();
        std::vector<float> master(n_), g(n_), m(n_), v(n_);
        for (int64_t i = 0; i < n_; i++) {
            master[i] = reference::join_master(weight[i], remainder[i]);
            g[i] = reference::from_bf16(gradient[i]);
        }
        reference_moment(m_, 0).load(m.data());
        reference_moment(v_, 2).load(v.data());
        const std::vector<uint8_t> codes_m = m_.read(), codes_v = v_.read();
        const std::vector<float> fields = fields_.read();
        reference::adamw(constants_of_step(), n_, g.data(), master.data(), m.data(), v.data());
        run(rung);
        const std::vector<uint16_t> new_weight = weight_.read();
        const std::vector<int16_t> new_remainder = remainder_.read();
        if (new_weight == weight && new_remainder == remainder && m_.read() == codes_m &&
            v_.read() == codes_v && fields_.read() == fields)
            return {.written = false};
        Difference d;
        for (int64_t i = 0; i < n_; i++) {
            const double now = reference::join_master(new_weight[i], new_remainder[i]);
            d.weights += !(std::abs(now - master[i]) <= 1e-4 * SETTINGS.lr);
        }
        compare(m, reference_moment(m_, 0), d);
        compare(v, reference_moment(v_, 2), d);
        return verdict(d);
    }

private:
    const int64_t n_;
    Buffer<uint16_t> weight_, gradient_;
    Buffer<uint8_t> m_, v_;
    Buffer<int16_t> remainder_;
    Buffer<float> fields_;  // (4, n / 128): max and k of m, max and k of v
    Buffer<gpu::AdamWParam> param_;
    Buffer<gpu::GradientState> gradient_state_;

    void run_as_in_training() {
        gpu::adamw(SETTINGS, optimizers()[0],
                   {.table = param_.get(),
                    .count = 1,
                    .elements = {0, n_},
                    .gradients = gradient_.get(),
                    .gradient_format = Format::BF16},
                   {weight_.get(), remainder_.get(), Format::BF16}, /*rounding_key=*/0, gradient_state_.get(),
                   nullptr);
    }
    float* fields(int which) const { return fields_.get() + which * (n_ / SPAN); }
    State state() const {
        return {n_,
                weight_.get(),
                remainder_.get(),
                reinterpret_cast<const bf16*>(gradient_.get()),
                {m_.get(), fields(0), fields(1)},
                {v_.get(), fields(2), fields(3)}};
    }
    // The moment that is now on the GPU, whose max is row `which` of the fields, and k the next row.
    reference::Moment reference_moment(const Buffer<uint8_t>& codes, int which) const {
        // (`which` is 0 for m, and 2 for v.)
        reference::Moment moment(find_row(optimizers(), "coat", "--optimizer"), Format::E4M3, n_,
                                 /*second_moment=*/which == 2);
        const std::vector<float> all = fields_.read();
        const auto max = all.begin() + which * (n_ / SPAN), k = max + n_ / SPAN;
        moment.elements = codes.read();
        moment.max_magnitudes.assign(max, k);
        moment.expansion_exponents.assign(k, k + n_ / SPAN);
        return moment;
    }
    void compare(const std::vector<float>& x, const reference::Moment& now, Difference& d) const {
        reference::Moment expected = now;
        expected.store(x.data());
        for (int64_t g = 0; g < n_ / SPAN; g++) {
            const float off = std::abs(now.expansion_exponents[g] - expected.expansion_exponents[g]);
            d.max += !(std::abs(now.max_magnitudes[g] - expected.max_magnitudes[g]) <=
                       1e-5f * expected.max_magnitudes[g]);
            d.k += !(off == 0);
            d.far_k += !(off <= 1 / 256.0f);
            if (!(off == 0)) continue;
            // Codes are ordered like magnitudes.
            for (int64_t i = g * SPAN; i < (g + 1) * SPAN; i++) {
                const int by = std::abs(now.elements[i] - expected.elements[i]);
                d.codes += by != 0;
                d.far += by > 1;
            }
        }
    }
    Verdict verdict(const Difference& d) const {
        if (d.weights) return {.right = false, .text = std::to_string(d.weights) + " weights"};
        if (d.max) return {.right = false, .text = "max of " + std::to_string(d.max) + " moment groups"};
        if (d.far_k) return {.right = false, .text = "k of " + std::to_string(d.far_k) + " moment groups"};
        if (d.far) return {.right = false, .text = std::to_string(d.far) + " codes"};
        if (d.codes == 0 && d.k == 0) return {.right = true, .text = "equal"};
        return {.right = true,
                .text = std::to_string(d.codes) + " by one, k of " + std::to_string(d.k) + " moment groups"};
    }
};

// What main() returns.
inline int climb_adamw(int argc, char** argv, const std::vector<Rung>& rungs) {
    return print_error_of([&] {
        // The small one has an odd number of spans: the last has no partner in its warp.
        constexpr int64_t SMALL = (1 << 20) + SPAN, LARGE = 1 << 28;
        Optimizer small(SMALL), large(LARGE);
        printf("FP8 AdamW, 2^28 parameters of 14.25 bytes; codes of 2^20: ");
        return climb(
            rungs, copying(14.25 * LARGE), argc, argv,
            [&](const Rung& rung) {
                large.reset();  // what a wrong rung leaves behind would change the time of the next
                return small.against_reference(rung);
            },
            [&](const Rung& rung) { large.run(rung); });
    });
}

}  // namespace ladder
