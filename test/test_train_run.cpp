// test_train_run.cpp - runs of ./train: what they print, log and save, and that a resumed run is
// bit-identical to one that was not stopped.
#include <doctest/doctest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>

#include "../data/checkpoint.h"
#include "../plan.h"
#include "../reference.h"
#include "program.h"

using namespace coat;
using namespace coat::test;

TEST_CASE("train: saves checkpoints at the requested interval and keeps the newest") {
    RunFolder folder;
    const Ended ended = tiny(folder, "--steps 5 --save-every 2 --out often");
    require_success(ended);
    for (const char* step : {"2", "4", "5"})
        CHECK(contains(ended.out, "saved | step " + std::string(step) + " | "));
    CHECK(!fs::exists(folder.path / "often/step-000004"));
    CHECK(fs::exists(folder.path / "often/step-000005"));
}

TEST_CASE("train: a run prints steps, validates, samples, saves and logs, in lines that can be parsed") {
    RunFolder folder;
    const Ended ended = train(folder,
                              "--device cpu --data text --batch 4 --seq 32 --steps 12 --warmup 2 --lr 1e-2 "
                              "--eval-every 5 --sample-every 6 --prompt 'int ' --log log");
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
    CHECK(contains(ended.out, "sample | step 6 | "));
    CHECK(contains(ended.out, " ms per token\n----------\nint "));
    CHECK(contains(ended.out, "expansion factor k"));
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
    CHECK(kinds == std::map<std::string, int>{
                       {"settings", 1}, {"step", 12}, {"validation", 4}, {"sample", 2}, {"end", 1}});
    CHECK(last.at("kind") == "end");
    // The model learns.
    CHECK(last.at("validation").get<double>() < last.at("first_validation").get<double>() - 0.5);
}

TEST_CASE("train: the same seed gives the same bits, and another seed does not") {
    RunFolder folder;
    require_success(tiny(folder, "--steps 4 --out a"));
    // With any number of threads.
    require_success(shell(folder, "OMP_NUM_THREADS=3 '" + program() + "'" + TINY + "--steps 4 --out b"));
    require_success(tiny(folder, "--steps 4 --out c --seed 2"));
    CHECK(weights_and_state(folder.path / "a/step-000004") ==
          weights_and_state(folder.path / "b/step-000004"));
    CHECK(weights_and_state(folder.path / "a/step-000004") !=
          weights_and_state(folder.path / "c/step-000004"));
}

TEST_CASE("train: a finished run continues with a larger --steps") {
    RunFolder folder;
    require_success(tiny(folder, "--schedule constant --steps 6 --out whole"));
    require_success(tiny(folder, "--schedule constant --steps 3 --out parts"));
    require_success(train(folder, "--device cpu --resume parts --steps 6"));
    CHECK(weights_and_state(folder.path / "whole/step-000006") ==
          weights_and_state(folder.path / "parts/step-000006"));
    CHECK(!fs::exists(folder.path / "parts/step-000003"));
}

TEST_CASE("train: --master none saves a smaller checkpoint") {
    RunFolder folder;
    require_success(tiny(folder, "--steps 3 --master none --out lean"));
    require_success(tiny(folder, "--steps 3 --out default"));
    ModelConfig config = find_row(models(), "llama-tiny", "");
    config.V = 256;
    const auto size = [&](const char* run) {
        return int64_t(fs::file_size(folder.path / run / "step-000003/optimizer.safetensors"));
    };
    CHECK(size("default") - size("lean") > 2 * parameter_count(config));
}

TEST_CASE("train: --gradients none changes no bits") {
    RunFolder folder;
    require_success(tiny(folder, "--steps 2 --warmup 0 --clip 0 --gradients none --out dropped"));
    require_success(tiny(folder, "--steps 2 --warmup 0 --clip 0 --out kept"));
    for (const char* file : {"model.safetensors", "optimizer.safetensors"}) {
        std::string dropped = read_file(folder.path / "dropped/step-000002" / file);
        // The file of the moments stores this flag.
        const size_t mode = dropped.find("\"gradients\":\"none\"");
        if (mode != std::string::npos) dropped.replace(mode, 18, "\"gradients\":\"kept\"");
        CHECK((dropped == read_file(folder.path / "kept/step-000002" / file)));
    }
}

TEST_CASE("train: a run can start from the model folder that another run saved") {
    RunFolder folder;
    require_success(tiny(folder, "--steps 8 --lr 1e-2 --warmup 1"));
    const double trained =
        number_after(tiny(folder, "--steps 0 --model out/step-000008").out, "validation | step 0 | loss ");
    const double resumed =
        number_after(train(folder, "--device cpu --resume out --steps 0").out, "validation | step 8 | loss ");
    CHECK(trained < std::log(256.0) - 0.5);
    // The folder has BF16 weights, the run FP32 masters. In the coat recipe GEMMs read BF16 weights, so the
    // losses are equal.
    CHECK(trained == resumed);
}

namespace {

// Changes the weights so that one channel of the feed-forward block of layer 0 overflows where the token is
// '~', and is zero elsewhere.
void write_fragile(Model& model) {
    const ModelConfig& c = model.setup().config;
    for (const Param& p : parameters(c)) {
        std::vector<uint16_t> w(static_cast<size_t>(p.size()));
        model.read(p.name, w.data());
        auto at = [&](int64_t row, int64_t col) -> uint16_t& {
            return w[static_cast<size_t>(row * p.cols + col)];
        };
        if (p.name == "embedding")
            for (int64_t token = 0; token < p.rows; token++)
                at(token, 0) = token == '~' ? reference::to_bf16(1.0f) : 0;
        if (p.name == "layers.0.attention_out" || p.name == "layers.0.down")
            for (int64_t col = 0; col < p.cols; col++) at(0, col) = 0;
        if (p.name == "layers.0.gate_up") {
            std::fill(w.begin(), w.end(), uint16_t{0});
            at(0, 0) = at(c.F, 0) = reference::to_bf16(0x1p64f);
        }
        model.write(p.name, w.data());
    }
}

}  // namespace

TEST_CASE("train: bias correction counts updates, not steps") {
    Setup setup{find_row(models(), "llama-tiny", ""), find_row(recipes(), "fp32", ""),
                find_row(optimizers(), "fp32", ""), 2, 16};
    setup.config.V = 256, setup.config.tied = false;
    const std::unique_ptr<Model> model = make_reference(setup);
    write_fragile(*model);
    RunFolder folder;
    std::string text = read_file(folder.path / "text");
    for (size_t at = 0; at < text.size() * 4 / 5; at += 32)
        text[at] = '~';  // none in the validation data
    write_file(folder.path / "text", text);
    const std::string start = save_checkpoint(folder / "start", *model, {});
    const std::string flags =
        "--recipe fp32 --schedule constant --warmup 0 --lr 1e-6 --weight-decay 0 --eval-every 0 --model '" +
        start + "' ";
    tiny(folder, flags + "--steps 15 --out '' --log log");  // may succeed or not
    int64_t first = 0;  // the first step that is an update
    for (const auto& line : logged(folder, "step"))
        if (!first && !line.at("skipped").get<bool>()) first = line.at("step");
    REQUIRE(first > 1);
    require_success(tiny(folder, flags + "--out out --steps " + std::to_string(first)));
    const std::string checkpoint = find_checkpoint(folder / "out");
    CHECK(read_loop_state(checkpoint).step == first);
    CHECK(read_loop_state(checkpoint).updates == 1);

    auto masters = [&](const Param& p) {
        std::vector<uint16_t> weight(static_cast<size_t>(p.size()));
        std::vector<int16_t> remainder(weight.size());
        model->read(p.name, weight.data());
        model->read(p.name + ".remainder", remainder.data());
        std::vector<float> values;
        for (size_t i = 0; i < weight.size(); i++)
            values.push_back(reference::join_master(weight[i], remainder[i]));
        return values;
    };
    const std::vector<Param> params = parameters(setup.config);
    const auto down =
        std::find_if(params.begin(), params.end(), [](const Param& p) { return p.name == "layers.3.down"; });
    REQUIRE(down != params.end());
    load_weights(start, *model);  // as the run does, without the remainders of the first weights
    const std::vector<float> before = masters(*down);
    load_checkpoint(checkpoint, *model);
    const std::vector<float> after = masters(*down);
    std::vector<double> moved;
    for (size_t i = 0; i < before.size(); i++) moved.push_back(std::fabs(double(after[i]) - before[i]));
    std::nth_element(moved.begin(), moved.begin() + std::ptrdiff_t(moved.size() / 2), moved.end());
    // The first update is the learning rate: m / sqrt(v) is 1.
    CHECK(moved[moved.size() / 2] / 1e-6 == doctest::Approx(1).epsilon(0.01));
}
