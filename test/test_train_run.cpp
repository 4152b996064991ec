// test_train_run.cpp - runs of ./train: what it prints, logs and saves, and that a resumed run has the bits
// of one that was not stopped.
#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>

#include "../data/checkpoint.h"
#include "../plan.h"
#include "program.h"

using namespace coat;
using namespace coat::test;

namespace {

namespace fs = std::filesystem;

}  // namespace

TEST_CASE("train: saves checkpoints at the requested interval and keeps the newest") {
    Folder folder;
    const Ended ended = tiny(folder, "--steps 5 --save-every 2 --out often");
    require_success(ended);
    for (const char* step : {"2", "4", "5"})
        CHECK(ended.out.find("saved | step " + std::string(step) + " | ") != std::string::npos);
    CHECK(!fs::exists(folder.path / "often/step-000004"));
    CHECK(fs::exists(folder.path / "often/step-000005"));
}

TEST_CASE("train: a run prints steps, validates, samples, saves and logs, in lines that can be parsed") {
    Folder folder;
    const Ended ended = train(folder,
                              "--device cpu --data text --batch 4 --seq 32 --steps 12 --warmup 2 --lr 1e-2 "
                              "--eval-every 5 --sample-every 6 "
                              "--prompt 'int ' --log log");
    CHECK(ended.error.empty());
    REQUIRE(ended.code == 0);
    int steps = 0;
    std::istringstream lines(ended.out);
    for (std::string line; std::getline(lines, line);) {
        int step, of;
        double loss, norm, lr, ms, rate;
        steps += std::sscanf(line.c_str(), "step %d/%d | loss %lf | norm %lf | lr %lf | %lf ms | %lf tok/s",
                             &step, &of, &loss, &norm, &lr, &ms, &rate) == 7;
    }
    CHECK(steps == 12);
    CHECK(ended.out.find("sample | step 6 | ") != std::string::npos);
    CHECK(ended.out.find(" ms per token\n----------\nint ") != std::string::npos);
    CHECK(ended.out.find("expansion factor k") != std::string::npos);
    CHECK(fs::exists(folder.path / "out" / "step-000012" / "model.safetensors"));

    std::map<std::string, int> kinds;
    std::istringstream log(read_file(folder.path / "log"));
    nlohmann::json last;
    for (std::string line; std::getline(log, line);) {
        last = nlohmann::json::parse(line);
        const std::string kind = last.at("kind");
        if (kind == "step") CHECK(last.at("step") == kinds[kind] + 1);
        for (const char* field : {"loss", "grad_norm", "lr", "ms", "tokens_per_second"})
            if (kind == "step") CHECK(last.at(field).is_number());
        kinds[kind]++;
    }
    CHECK(kinds == std::map<std::string, int>{{"settings", 1}, {"step", 12}, {"validation", 4}, {"end", 1}});
    CHECK(last.at("kind") == "end");
    CHECK(last.at("validation").get<double>() <
          last.at("first_validation").get<double>() - 0.5);  // it learnt
}

TEST_CASE("train: the same seed gives the same bits, and another seed does not") {
    Folder folder;
    require_success(tiny(folder, "--steps 4 --out a"));
    require_success(shell(folder, "OMP_NUM_THREADS=3 '" + program() + "'" + TINY +
                                      "--steps 4 --out b"));  // whatever the number of threads
    require_success(tiny(folder, "--steps 4 --out c --seed 2"));
    CHECK(weights_and_state(folder.path / "a/step-000004") ==
          weights_and_state(folder.path / "b/step-000004"));
    CHECK(weights_and_state(folder.path / "a/step-000004") !=
          weights_and_state(folder.path / "c/step-000004"));
}

TEST_CASE("train: a finished run continues with a larger --steps") {
    Folder folder;
    require_success(tiny(folder, "--schedule constant --steps 6 --out whole"));
    require_success(tiny(folder, "--schedule constant --steps 3 --out parts"));
    require_success(train(folder, "--device cpu --resume parts --steps 6"));
    CHECK(weights_and_state(folder.path / "whole/step-000006") ==
          weights_and_state(folder.path / "parts/step-000006"));
    CHECK(!fs::exists(folder.path / "parts/step-000003"));
}

TEST_CASE("train: --recompute changes no bits, and a run may resume with or without it") {
    Folder folder;
    require_success(tiny(folder, "--schedule constant --steps 6 --out on"));
    require_success(tiny(folder, "--schedule constant --steps 3 --recompute off --out off"));
    require_success(train(folder, "--device cpu --resume off --steps 5"));
    require_success(train(folder, "--device cpu --resume off --steps 6 --recompute on"));
    for (const char* file : {"model.safetensors", "optimizer.safetensors"})
        CHECK(read_file(folder.path / "on/step-000006" / file) ==
              read_file(folder.path / "off/step-000006" / file));
}

TEST_CASE(
    "train: with --gradients none a checkpoint has the norm correction; with --master none it is smaller") {
    Folder folder;
    require_success(tiny(folder, "--steps 3 --gradients none --master none --out lean"));
    require_success(tiny(folder, "--steps 3 --out usual"));
    const auto norm_correction = [&](const char* run) {
        return nlohmann::json::parse(read_file(folder.path / run / "step-000003/trainer.json"))
            .at("norm_correction")
            .get<std::vector<double>>();
    };
    ModelConfig config = find_row(models(), "llama-tiny", "");
    config.V = 256;
    const std::vector<double> lean = norm_correction("lean");
    REQUIRE(int64_t(lean.size()) == parameters(config).back().bucket + 1);
    CHECK(lean[0] == 1);
    CHECK(std::is_sorted(lean.begin(), lean.end()));  // the norm of fewer buckets is smaller
    CHECK(lean.back() > 2);
    CHECK(norm_correction("usual").empty());
    const auto size = [&](const char* run) {
        return int64_t(fs::file_size(folder.path / run / "step-000003/optimizer.safetensors"));
    };
    CHECK(size("usual") - size("lean") > 2 * parameter_count(config));
}

TEST_CASE("train: with --gradients none the first step is clipped by its own norm") {
    Folder folder;
    require_success(tiny(folder, "--steps 1 --warmup 0 --gradients none --out spent"));
    require_success(tiny(folder, "--steps 1 --warmup 0 --out kept"));
    for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
        std::string spent = read_file(folder.path / "spent/step-000001" / file);
        const size_t mode =
            spent.find("\"gradients\":\"none\"");  // the moments' file says which run it is of
        if (mode != std::string::npos) spent.replace(mode, 18, "\"gradients\":\"kept\"");
        CHECK((spent == read_file(folder.path / "kept/step-000001" / file)));
    }
}

TEST_CASE(
    "train: with --gradients none a first step that is not finite still clips the buckets that it updates") {
    // Layer 1's gates are 0, so that its huge weights add nothing forward; backward, the gradient of a gate
    // is infinite.
    Setup setup{find_row(models(), "llama-tiny", ""), find_row(recipes(), "fp32", ""),
                find_row(optimizers(), "fp32", ""), 2, 16};
    setup.config.V = 256, setup.keep_gradients = false;
    const std::unique_ptr<Model> model = make_reference(setup);
    const int64_t half = setup.config.F * setup.config.C;
    std::vector<uint16_t> up(2 * half, 0), down(half, 0x7B80);  // 2^120
    std::fill(up.begin() + half, up.end(), 0x7180);             // 2^100
    std::fill(down.begin(), down.begin() + half / 2,
              0xFB00);  // -2^119: else the sum over a row of the gradient might cancel
    model->write("layers.1.gate_up", up.data());
    model->write("layers.1.down", down.data());
    Folder folder;
    const std::string start = save_checkpoint((folder.path / "start").string(), *model, {});
    const Ended ended = tiny(
        folder, "--steps 1 --warmup 0 --recipe fp32 --gradients none --clip 1e-3 --model '" + start + "'");
    require_success(ended);
    CHECK(ended.out.find("1 skipped") != std::string::npos);
    const std::string checkpoint = (folder.path / "out/step-000001").string();
    CHECK(read_loop_state(checkpoint).norm_correction.empty());
    load_checkpoint(checkpoint, *model);
    double squares = 0;
    for (const Param& p : parameters(setup.config)) {
        std::vector<float> m(static_cast<size_t>(p.size()));
        model->read(p.name + ".m", m.data());
        double own = 0;
        for (float x : m) own += double(x) * x;
        INFO(p.name);
        CHECK(std::sqrt(own) <=
              0.1 * 1e-3 *
                  (1 + 1e-5));  // (1 - beta1) times the gradient, clipped by a norm that is at least its own
        squares += own;
    }
    CHECK(squares > 0);
}

TEST_CASE("train: a run can start from the model folder that another run saved") {
    Folder folder;
    require_success(tiny(folder, "--steps 8 --lr 1e-2 --warmup 1"));
    const double trained =
        number_after(tiny(folder, "--steps 0 --model out/step-000008").out, "validation | step 0 | loss ");
    const double resumed =
        number_after(train(folder, "--device cpu --resume out --steps 0").out, "validation | step 8 | loss ");
    CHECK(trained < std::log(256.0) - 0.5);
    // The folder's weights are BF16, the run's master is FP32: in the coat recipe GEMMs read BF16 weights, so
    // the loss is the same.
    CHECK(trained == resumed);
}
