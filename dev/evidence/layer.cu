// layer.cu - time and memory of one layer, forward and backward, in every recipe that this GPU supports
// (paper table 6).
//
//   build/evidence_layer [HIDDENxSEQ[xBATCH] ...] > layer.json
//   default: 2048x2048 2048x4096 4096x2048 4096x4096, with 4 sequences each
//
// One layer is a fourth of the difference between models of 5 layers and of 1, so that embedding, head, loss
// and host time cancel. The layers are those of Llama-2-7B, scaled to the hidden size. Weights and tokens are
// random. Times are medians by the host's clock; every call ends when the GPU is done:
//   forward      evaluating a batch; the FP8 weights are already there
//   backward     the time that a third micro-batch adds to a step of two, minus forward
//   once a step  the step of two minus two micro-batches: FP8 weights, their transposes, gradient norm, AdamW
// Memory is what is saved for backward: as planned, and as measured by the driver (the memory of a layer
// minus what the plan says everything else in it takes).
#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>

#include "../../coat.cuh"
#include "../../plan.h"

namespace {

using namespace coat;
using Json = nlohmann::ordered_json;

constexpr int64_t SHALLOW = 1, DEEP = 5;
constexpr int REPEATS = 11;

struct Shape {
    int64_t hidden, seq, batch = 4;
};

Setup setup_of(const Shape& shape, const Recipe& recipe, int64_t layers, int64_t micro_batches) {
    ModelConfig c = find_row(models(), "llama-2-7b", "--model");
    const int64_t head_size = c.HS();
    c.F = c.F * shape.hidden / c.C;
    c.C = shape.hidden, c.L = layers, c.NH = c.NKV = shape.hidden / head_size,
    c.max_T = std::max(c.max_T, shape.seq);
    return {c,           recipe,    find_row(optimizers(), recipe.optimizer, "--optimizer"),
            shape.batch, shape.seq, micro_batches};
}

double median_ms(const std::function<void()>& call) {
    call();
    std::vector<double> ms;
    for (int i = 0; i < REPEATS; i++) {
        const auto before = std::chrono::steady_clock::now();
        call();
        ms.push_back(
            std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - before).count());
    }
    std::sort(ms.begin(), ms.end());
    return ms[ms.size() / 2];
}

double free_bytes() {
    size_t free = 0, total = 0;
    gpu::check(cudaMemGetInfo(&free, &total), "Asking for free memory failed");
    return static_cast<double>(free);
}

struct Measured {  // of a model, or of a layer
    double forward, step, bytes;
};

Measured measure(const Setup& s) {
    const double before = free_bytes();
    const auto model = make_gpu(s);
    const double bytes = before - free_bytes();
    std::mt19937_64 random(1);
    std::vector<int32_t> tokens(s.accumulate * s.B * s.T), targets(tokens.size());
    for (auto* list : {&tokens, &targets})
        for (int32_t& token : *list)
            token = static_cast<int32_t>(random() % static_cast<uint64_t>(s.config.V));
    const double forward = median_ms([&] { model->evaluate(tokens.data(), targets.data()); });
    AdamW adamw{0, 1e-5f};
    const double step = median_ms([&] {
        adamw.step++;
        adamw.norm_correction = model->step(tokens.data(), targets.data(), adamw).norm_correction;
    });
    return {forward, step, bytes};
}

Measured of_layer(const Shape& shape, const Recipe& recipe, int64_t micro_batches) {
    const Measured one = measure(setup_of(shape, recipe, SHALLOW, micro_batches)),
                   more = measure(setup_of(shape, recipe, DEEP, micro_batches));
    const double layers = DEEP - SHALLOW;
    return {(more.forward - one.forward) / layers, (more.step - one.step) / layers,
            (more.bytes - one.bytes) / layers};
}

// All memory of a layer
double planned_bytes(const Shape& shape, const Recipe& recipe, int64_t micro_batches) {
    GpuFacts facts;
    facts.cache_fp8_weights = recipe.w.fp8();
    auto total = [&](int64_t layers) {
        return static_cast<double>(gpu_layout(setup_of(shape, recipe, layers, micro_batches), facts).total);
    };
    return (total(DEEP) - total(SHALLOW)) / static_cast<double>(DEEP - SHALLOW);
}

Json row(const Shape& shape, const Recipe& recipe) {
    const Measured two = of_layer(shape, recipe, 2), three = of_layer(shape, recipe, 3);
    const double micro_batch = three.step - two.step;
    const Setup s = setup_of(shape, recipe, DEEP, 3);
    const double saved = saved_bytes_per_token_and_layer(s) * static_cast<double>(s.B * s.T);
    return {{"hidden", shape.hidden},
            {"seq", shape.seq},
            {"batch", shape.batch},
            {"recipe", recipe.name},
            {"forward_ms", two.forward},
            {"backward_ms", micro_batch - two.forward},
            {"once_a_step_ms", two.step - 2 * micro_batch},
            {"saved_bytes", saved},
            {"saved_bytes_by_the_driver", saved + three.bytes - planned_bytes(shape, recipe, 3)}};
}

Shape shape_named(const std::string& text) {
    Shape shape{0, 0};
    char rest = 0;
    const int found = std::sscanf(text.c_str(), "%" SCNd64 "x%" SCNd64 "x%" SCNd64 "%c", &shape.hidden,
                                  &shape.seq, &shape.batch, &rest);
    if (found == 2 || found == 3) return shape;
    throw Error(text + " is not a shape; write HIDDENxSEQ or HIDDENxSEQxBATCH, for example 4096x2048.");
}

}  // namespace

int main(int argc, char** argv) {
    try {
        const std::string reason = why_no_gpu();
        if (!reason.empty()) throw Error("This measures a GPU: " + reason + ".");
        std::vector<Shape> shapes;
        for (int i = 1; i < argc; i++) shapes.push_back(shape_named(argv[i]));
        if (shapes.empty()) shapes = {{2048, 2048}, {2048, 4096}, {4096, 2048}, {4096, 4096}};
        cudaDeviceProp device;
        gpu::check(cudaGetDeviceProperties(&device, 0), "Asking for the GPU's name failed");
        Json report = {{"device", device.name}, {"rows", Json::array()}, {"refused", Json::object()}};
        for (const Shape& shape : shapes)
            for (const Recipe& recipe : recipes()) try {
                    if (recipe.compute != Format::F32) report["rows"].push_back(row(shape, recipe));
                } catch (const Error& error) {
                    report["refused"][recipe.name] = error.what();
                }
        std::cout << report.dump(1) << "\n";
    } catch (const std::exception& e) {
        std::cerr << e.what() << "\n";
        return 1;
    }
}
