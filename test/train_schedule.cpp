// train_schedule.cpp - numbers that a run prints: the learning rate, the operations for a token, and quartiles
// (program/train_step.h, program/report.h).
#include "../program/report.h"
#include "../program/train_step.h"
#include "help/model.h"

using namespace coat;
using namespace coat::test;

TEST_CASE("learning_rate: warms up and decays to a tenth along a cosine and stays within its bounds") {
    // Warm-up, steps, step, part of the peak
    const std::tuple<int64_t, int64_t, int64_t, double> rows[] = {{20, 300, 0, 0.05},  {20, 300, 19, 1},
                                                                  {20, 300, 20, 1},    {20, 300, 300, 0.1},
                                                                  {20, 300, 399, 0.1}, {0, 100, 50, 0.55}};
    for (const auto& [warmup, steps, step, part] : rows)
        CHECK(learning_rate(3e-3, warmup, steps, step) == float(3e-3 * part));
    for (int64_t step = 21; step < 400; step++)
        CHECK(learning_rate(3e-3, 20, 300, step) <= learning_rate(3e-3, 20, 300, step - 1));
}

TEST_CASE("learning_rate: a run of any length reaches the peak and ends at a tenth or in the warm-up") {
    for (int64_t steps = 1; steps <= 300; steps++)
        for (const int64_t warmup : {0, 1, 4, 100, 299, 1000}) {
            INFO(steps, " steps, warm-up ", warmup);
            float most = 0;
            for (int64_t step = 0; step < steps; step++)
                most = std::max(most, learning_rate(1, warmup, steps, step));
            CHECK(most == 1);
            CHECK(learning_rate(1, warmup, steps, 0) > 0);
            const float last = learning_rate(1, warmup, steps, steps - 1);
            if (steps - warmup_steps(warmup, steps) >= 2) CHECK((last > 0.1f && last < 0.1003f));
            else CHECK(last == 1);
        }
    CHECK((warmup_steps(100, 100) == 100 && warmup_steps(101, 100) == 10 && warmup_steps(100, 5) == 0));
}

TEST_CASE("flops_per_token: GEMMs and the head and causal attention") {
    // Llama-2-7B: 4 C^2 + 3 C F weights in each of 32 layers, and the head; attention over 2048 tokens.
    const double weights = 32 * (4 * 4096.0 * 4096 + 3 * 4096.0 * 11008) + 32000 * 4096.0;
    CHECK(flops_per_token(find_row(known_models(), "llama-2-7b", ""), 2048) ==
          6 * weights + 6 * 32 * 2048 * 4096.0);
    // GPT-2: the head is the embedding, and positions are looked up.
    CHECK(flops_per_token(find_row(known_models(), "gpt2", ""), 1024) ==
          6 * (12 * 12 * 768.0 * 768 + 50257 * 768.0) + 6 * 12 * 1024 * 768.0);
}

TEST_CASE("quartiles: of numbers in any order") {
    CHECK(quartiles({5, 1, 4, 2, 3}) == std::array<float, 5>{1, 2, 3, 4, 5});
    CHECK(quartiles({9, 8, 7, 6, 5, 4, 3, 2, 1}) == std::array<float, 5>{1, 3, 5, 7, 9});
    CHECK(quartiles({6, 6}) == std::array<float, 5>{6, 6, 6, 6, 6});
}
