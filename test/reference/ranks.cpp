// ranks.cpp - several ranks on the CPU: whatever is shared out, they compute the same bits,
// and they train as one rank does that has all of their micro-batches.
#include <doctest/doctest.h>

#include "../../program/plan.h"
#include "../help/several_ranks.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::several_ranks;

namespace {

// Matrices have 1/2, 1, 3/8 and 3/4 units beyond whole ones: no number of ranks divides them all.
Setup setup_of(const std::string& recipe, const Architecture& arch, bool tied, int64_t accumulate = 1) {
    Setup s = tiny_setup(tiny_config(arch, tied), recipe, optimizer_of(recipe), 2, 16);
    s.accumulate = accumulate;
    return s;
}

float f32(const std::vector<uint8_t>& bytes, size_t i) {
    float x;
    std::memcpy(&x, bytes.data() + 4 * i, 4);
    return x;
}

}  // namespace

TEST_CASE("ranks: slices are whole shard units, in order, and together the whole tensor") {
    for (int64_t size : {1, 64, 8191, 8192, 8193, 22528, 1000000})
        for (int64_t ranks : {1, 2, 3, 4, 7, 200}) {
            int64_t next = 0;
            for (int64_t rank = 0; rank < ranks; rank++) {
                const Slice s = slice_of(size, rank, ranks);
                CHECK(s.first == next);
                CHECK((s.count == 0 || s.first % SHARD_UNIT == 0));
                next += s.count;
            }
            CHECK(next == size);
        }
}

TEST_CASE("ranks: where sums are FP32, R ranks have the bits of one rank with R times the micro-batches") {
    struct {
        const char* recipe;
        Architecture arch;
        int64_t each, ranks;
    } const runs[] = {{"fp32", LLAMA, 1, 2}, {"fp32", LLAMA, 1, 4}, {"fp32", GPT2, 2, 3},
                      {"bf16", GPT2, 5, 2},  {"bf16", GPT2, 1, 5},  {"coat", LLAMA, 3, 2},
                      {"coat", LLAMA, 2, 3}, {"coat", LLAMA, 1, 5}};
    for (const auto& [recipe, arch, each, ranks] : runs) {
        INFO(std::string(recipe), " ", each, " ", ranks);
        const Setup all = setup_of(recipe, arch, false, each * ranks);
        REQUIRE(gradient_format(all) == Format::F32);
        CHECK((train_ranks(setup_of(recipe, arch, false, each), ranks, 3) == train_ranks(all, 1, 3)));
    }
}

TEST_CASE("ranks: if the head is the embedding, its FP32 sums differ from one rank's, by rounding alone") {
    const Setup setup = setup_of("fp32", LLAMA, true, 2);
    const Run two = train_ranks(setup, 2, 1), one = train_ranks(setup_of("fp32", LLAMA, true, 4), 1, 1);
    CHECK(two.losses == one.losses);
    for (const auto& [name, bytes] : one.gradients) {
        CAPTURE(name);
        const auto& theirs = two.gradients.at(name);
        if (name != "embedding.gradient") {
            CHECK(bytes == theirs);
            continue;
        }
        float largest = 0, difference = 0;
        for (size_t i = 0; i < bytes.size() / 4; i++) {
            largest = std::max(largest, std::fabs(f32(bytes, i)));
            difference = std::max(difference, std::fabs(f32(bytes, i) - f32(theirs, i)));
        }
        CHECK(difference > 0);  // two parts of each micro-batch, added in another order
        CHECK(difference <= 16 * 0x1p-24f * largest);
    }
}

TEST_CASE("ranks: with uneven masks the loss is the mean over the targets of all ranks") {
    for (const auto& [recipe, each] : {std::pair{"fp32", int64_t(2)}, {"coat", 5}}) {
        const Setup setup = setup_of(recipe, LLAMA, false, each);
        const Run one = train_ranks(setup_of(recipe, LLAMA, false, each * 2), 1, 3, make_reference, true);
        CHECK((train_ranks(setup, 2, 3, make_reference, true) == one));
    }
}

TEST_CASE("ranks: BF16 sums over ranks are rounded once, so they differ from one rank's by rounding alone") {
    for (const char* recipe : {"bf16", "coat"}) {
        CAPTURE(recipe);
        const Setup setup = setup_of(recipe, LLAMA, false);
        REQUIRE(gradient_format(setup) == Format::BF16);
        const Run four = train_ranks(setup, 4, 1), one = train_ranks(setup_of(recipe, LLAMA, false, 4), 1, 1);
        CHECK(four.losses == one.losses);  // sums in double
        // The gradients of each micro-batch alone: four times as large.
        std::vector<Snapshot> parts;
        Text text(1, setup.config.V);
        for (int i = 0; i < 4; i++) {
            const std::unique_ptr<Model> model = make_reference(setup);
            std::vector<int32_t> tokens, targets;
            text.next(setup.B, setup.T, &tokens, &targets);
            model->step(tokens.data(), targets.data(), {1, 0.0f});
            parts.push_back(whole_tensors(*model, gradient_tensors(setup.config)));
        }
        int64_t different = 0, wrong = 0;
        for (const auto& [name, bytes] : four.gradients)
            for (size_t i = 0; i < bytes.size() / 4; i++) {
                float sum = 0, magnitudes = 0;
                for (const Snapshot& part : parts) {
                    sum += f32(part.at(name), i) / 4;
                    magnitudes += std::fabs(f32(part.at(name), i)) / 4;
                }
                wrong += f32(bytes, i) != reference::round_to(Format::BF16, sum);
                const float difference = std::fabs(f32(bytes, i) - f32(one.gradients.at(name), i));
                // Roundings to 8 bits: of four parts and their sum, and of one rank's four partial sums.
                wrong += !(difference <= 6.1f * 0x1p-8f * magnitudes);
                different += difference > 0;
            }
        CHECK(wrong == 0);
        CHECK(different > 0);
    }
}

TEST_CASE("ranks: a NaN on one rank skips the step on all") {
    for (const char* mode : {"", "gradients"})
        with_ranks(with_mode(setup_of("coat", LLAMA, false), mode), 3, [&](const Setup& own) {
            const std::unique_ptr<Model> model = make_reference(own);
            // The first row of the embedding is NaN. Only the tokens of rank 1 have token 0.
            const StateTensor embedding = weight_tensors(own.config).at(0);
            const Slice kept_here = kept(own, embedding);
            std::vector<uint16_t> w(static_cast<size_t>(kept_here.count));
            model->read("embedding", w.data());
            for (int64_t i = 0; i < own.config.C && i < kept_here.count; i++) w[size_t(i)] = 0x7FC0;
            model->write("embedding", w.data());
            const Snapshot before = snapshot(*model);
            const std::vector<int32_t> fine(size_t(own.B * own.T), 3), bad(fine.size(), 0);
            const StepResult skipped =
                model->step((own.rank == 1 ? bad : fine).data(), fine.data(), {1, 1e-3f});
            const bool same = snapshot(*model) == before;
            const StepResult done = model->step(fine.data(), fine.data(), {1, 1e-3f});
            if (!skipped.skipped || !same) throw Error("The step was not skipped.");
            if (done.skipped || !(snapshot(*model) != before)) throw Error("A good step was skipped.");
        });
}

TEST_CASE("ranks: delayed scales come from the amaxes of all ranks") {
    const Setup setup = setup_of("te", LLAMA, false);
    std::vector<Snapshot> states(3);
    with_ranks(setup, 3, [&](const Setup& own) {
        const std::unique_ptr<Model> model = make_reference(own);
        RankTraining(*model).step();
        for (const StateTensor& t : scaling_tensors(own.config, own.recipe)) {  // every rank has all of them
            auto& bytes = states[size_t(own.rank)][t.name];
            bytes.resize(size_t(t.total_bytes()));
            model->read(t.name, bytes.data());
        }
    });
    CHECK((states[1] == states[0]));
    CHECK((states[2] == states[0]));
    // X and W of the first layer do not depend on scales. One rank sees all micro-batches, too.
    Setup all = setup;
    all.accumulate = 3;
    const Run one = train_ranks(all, 1, 1);
    for (const StateTensor& t : scaling_tensors(setup.config, setup.recipe))
        if (t.name.rfind("layers.0.qkv", 0) == 0 && !contains(t.name, OPERAND_NAMES[2])) {
            CAPTURE(t.name);
            CHECK((states[0].at(t.name) == one.state.at(t.name)));
        }
}

TEST_CASE("ranks: moments with one scale per tensor cannot be shared out") {
    Setup setup = setup_of("bf16", LLAMA, true);
    setup.optimizer = find_row(optimizers(), "fp8lm", "");
    setup.ranks = 2;
    check_error([&] { validate(setup); }, "--optimizer fp8lm", "use one rank");
}
