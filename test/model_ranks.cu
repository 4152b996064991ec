// model_ranks.cu - the model on several GPUs, a rank on each: it has the bits of one GPU wherever the
// arithmetic allows it, whatever is shared out. All tests but the first need two GPUs.
#include <dlfcn.h>

#include "../program/plan.h"
#include "help/gpu_models.h"
#include "help/program.h"
#include "help/several_ranks.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::gpu_models;
using namespace coat::test::several_ranks;

namespace {

int gpus() {
    int n = 0;
    return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}
#define GPUS_TEST_CASE(name) TEST_CASE("gpu: " name* doctest::skip(gpus() < 2))

std::vector<int64_t> numbers_of_ranks() {
    std::vector<int64_t> numbers = {2, 3, 4, 8};
    while (numbers.back() > gpus()) numbers.pop_back();
    return numbers;
}

}  // namespace

GPU_TEST_CASE("ranks: processes that share one GPU have the bits of one with as many micro-batches") {
    setenv("COAT_SHARE_GPU", "1", 1);
    for (const char* recipe : {"coat", "bf16"}) {
        RunFolder folder;
        const std::string flags =
            "--device gpu --data text --batch 2 --seq 16 --sample-every 0 --warmup 1 "
            "--steps 3 --recipe " +
            std::string(recipe) + " --model '" + untied_model(folder, recipe) + "' ";
        require_success(train(folder, flags + "--accumulate 6 --out one"));
        for (int ranks : {2, 3}) {
            const std::string out = concat(ranks);
            CAPTURE(recipe);
            CAPTURE(out);
            require_success(
                train(folder, concat(flags, "--out ", out, " --ranks ", ranks, " --accumulate ", 6 / ranks)));
            check_same_tensors(folder.path / "one/step-000003", folder.path / out / "step-000003");
        }
    }
    unsetenv("COAT_SHARE_GPU");
}

GPU_TEST_CASE("ranks: before the first step of delayed scaling, the report counts every weight once") {
    setenv("COAT_SHARE_GPU", "1", 1);
    RunFolder folder;
    const std::string model = untied_model(folder, "te");
    auto weights = [&](const std::string& flags) {  // that were quantized, as the report says
        const Ended run = train(folder,
                                "--device gpu --data text --batch 2 --seq 16 --steps 0 --recipe te "
                                "--model '" +
                                    model + "' " + flags);
        require_success(run);
        const size_t line = run.out.find("\nweights  ");
        REQUIRE(line != std::string::npos);
        return number_after(run.out.substr(line), "dB |");
    };
    const double one = weights("--ranks 1");
    CHECK(one > 0);
    CHECK(weights("--ranks 2") == one);
    unsetenv("COAT_SHARE_GPU");
}

GPUS_TEST_CASE("ranks: the same bits every time, in every recipe and mode") {
    std::vector<Setup> setups;
    for (const char* recipe : RECIPES)
        for (bool tied : {true, false}) setups.push_back(setup_of(recipe, tied ? GPT2 : LLAMA, tied));
    for (const char* mode : MODES) setups.push_back(with_mode(setup_of("coat", LLAMA, false), mode));
    for (const char* mode : {"gradients", "master"})
        setups.push_back(with_mode(setup_of("te", GPT2, true), mode));
    for (const char* recipe : {"coat", "bf16"}) setups.push_back(setup_of(recipe, QWEN2, false));
    setups.push_back(setup_of("coat", LLAMA, false));
    setups.back().accumulate = 3;
    setups.push_back(tiny_setup(wide_heads(false), "coat", "coat", 2, 128));
    for (const Setup& setup : setups)
        for (int64_t ranks : numbers_of_ranks()) {
            CAPTURE(setup.recipe.name);
            CAPTURE(setup.config.name);
            CAPTURE(setup.keep_gradients);
            CAPTURE(setup.accumulate);
            CAPTURE(ranks);
            const Run first = train_ranks(setup, ranks, 3, make_gpu);
            CHECK((train_ranks(setup, ranks, 3, make_gpu) == first));
        }
}

GPUS_TEST_CASE("ranks: where sums are FP32, R GPUs have the bits of one with R times the micro-batches") {
    for (const char* recipe : {"fp32", "bf16", "coat", "rowwise", "deepseek", "colossal"})
        for (int64_t ranks : numbers_of_ranks()) {
            CAPTURE(recipe);
            CAPTURE(ranks);
            Setup setup = setup_of(recipe, LLAMA, false), one = setup;
            setup.accumulate = ceil_div(5, ranks), one.accumulate = setup.accumulate * ranks;
            const Run expected = train_ranks(one, 1, 3, make_gpu);
            const Run got = train_ranks(setup, ranks, 3, make_gpu);
            CHECK((got.state == expected.state));
            CHECK((got.gradients == expected.gradients));
            CHECK(got.norms == expected.norms);
            for (size_t i = 0; i < got.losses.size(); i++)  // sums in double
                CHECK(got.losses[i] == doctest::Approx(expected.losses[i]).epsilon(1e-14));
        }
}

GPUS_TEST_CASE("ranks: GPUs write the checkpoints of one, and fewer of them continue with the same bits") {
    for (int64_t ranks : numbers_of_ranks())
        for (const char* recipe : {"fp32", "coat"}) {
            Setup setup = setup_of(recipe, LLAMA, false);
            setup.accumulate = 5 * ranks;  // more than four, so that gradients are FP32 sums
            check_checkpoints(setup, ranks, ranks % 2 ? 1 : ranks / 2, make_gpu);
        }
}

GPUS_TEST_CASE("ranks: with uneven masks the loss is the mean over the targets of all GPUs") {
    for (const char* recipe : {"fp32", "coat"}) {
        Setup setup = setup_of(recipe, LLAMA, false), one = setup;
        setup.accumulate = 5, one.accumulate = 10;
        const Run expected = train_ranks(one, 1, 3, make_gpu, true);
        const Run got = train_ranks(setup, 2, 3, make_gpu, true);
        CHECK((got.state == expected.state));
        CHECK((got.gradients == expected.gradients));
        for (size_t i = 0; i < got.losses.size(); i++)  // sums in double
            CHECK(got.losses[i] == doctest::Approx(expected.losses[i]).epsilon(1e-14));
    }
}

GPUS_TEST_CASE("ranks: NCCL and the copy engines give the same bits") {
    if (!dlopen("libnccl.so.2", RTLD_NOW | RTLD_LOCAL)) {
        MESSAGE("NCCL is not installed here, so it is not tested.");
        return;
    }
    for (const char* mode : {"", "gradients"}) {
        const Setup setup = with_mode(setup_of("coat", GPT2, true), mode);
        const Run copies = train_ranks(setup, 2, 3, make_gpu);
        setenv("COAT_NCCL", "libnccl.so.2", 1);
        const Run nccl = train_ranks(setup, 2, 3, make_gpu);
        unsetenv("COAT_NCCL");
        CHECK((copies == nccl));
    }
}

GPUS_TEST_CASE("ranks: a NaN on one GPU skips the step on all") {
    with_ranks(setup_of("coat", LLAMA, false), 2, [&](const Setup& own) {
        const std::unique_ptr<Model> model = make_gpu(own);
        const Slice kept_here = kept(own, weight_tensors(own.config).at(0));
        std::vector<uint16_t> w(static_cast<size_t>(kept_here.count));
        model->read("embedding", w.data());
        for (int64_t i = 0; i < own.config.C && kept_here.first == 0 && i < kept_here.count; i++)
            w[size_t(i)] = 0x7FC0;
        model->write("embedding", w.data());
        const std::vector<int32_t> fine(size_t(own.B * own.T), 3), bad(fine.size(), 0);
        if (!model->step((own.rank == 1 ? bad : fine).data(), fine.data(), {1, 1e-3f}).skipped)
            throw Error("The step was not skipped.");
    });
}

GPUS_TEST_CASE("ranks: weights that are loaded are whole on every GPU") {
    for (const char* recipe : {"fp32", "coat"}) {
        const Setup setup = setup_of(recipe, LLAMA, false);
        std::vector<int32_t> tokens, targets;
        Text(3, setup.config.V).next(setup.B, setup.T, &tokens, &targets);
        Training trained = training_on(make_gpu, setup);
        trained.step();
        const Snapshot state = snapshot(*trained.model);
        const double expected = trained.model->evaluate(tokens.data(), targets.data());
        std::vector<double> losses(2);
        with_ranks(setup, 2, [&](const Setup& own) {
            const std::unique_ptr<Model> model = make_gpu(own);
            for (const StateTensor& t : state_tensors(own))
                model->write(t.name, state.at(t.name).data() + kept(own, t).first * t.bytes);
            losses[size_t(own.rank)] = model->evaluate(tokens.data(), targets.data());
        });
        CHECK(losses == std::vector<double>(2, expected));
    }
}

GPUS_TEST_CASE("ranks: GPUs evaluate, generate and report as one does") {
    const Setup setup = setup_of("coat", LLAMA, false);
    std::vector<int32_t> tokens, targets;
    Text(3, setup.config.V).next(setup.B, setup.T, &tokens, &targets);
    struct Seen {
        double loss = 0;
        Floats logits;
        QuantReport report;
    };
    auto look = [&](int64_t ranks) {
        std::vector<Seen> seen(static_cast<size_t>(ranks));
        with_ranks(setup, ranks, [&](const Setup& own) {
            const std::unique_ptr<Model> model = make_gpu(own);
            Seen& here = seen[size_t(own.rank)];
            here.loss = model->evaluate(tokens.data(), targets.data());
            here.logits.resize(size_t(own.config.V));
            model->next_logits(tokens.data(), 7, here.logits.data());
            here.report = model->quantization(tokens.data(), targets.data());
        });
        for (const Seen& s : seen) CHECK((s.loss == seen[0].loss && s.logits == seen[0].logits));
        return seen[0];
    };
    const Seen one = look(1), two = look(2);
    CHECK(two.loss == one.loss);
    CHECK(two.logits == one.logits);
    for (Kind kind : {Kind::NormInput, Kind::LinearInput, Kind::Weight, Kind::Gradient}) {
        const QuantStats &a = one.report.kinds[int(kind)], &b = two.report.kinds[int(kind)];
        CHECK(a.snr_db() == doctest::Approx(b.snr_db()).epsilon(0.01));
        if (kind != Kind::Weight) CHECK(a.elements == b.elements);  // gathered once where used twice
    }
}
