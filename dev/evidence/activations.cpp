// activations.cpp - the quantization error of each FP8 granularity in the forward pass of a trained model,
// layer by layer (paper section 5, figure 4a).
//
//   build/evidence_activations CHECKPOINT [BATCH] > activations.json
//
// BATCH is a number of sequences; the default is the micro-batch of the run.
//
// Two tables. `tensors` quantizes each tensor by itself within an FP32 forward pass: noise / signal of the
// inputs of norms, activation functions and linear layers. `streams` runs the forward pass with all of them
// quantized in one way and compares the residual stream after each layer with that of FP32, so errors
// accumulate as in training. Weights are those of the checkpoint.
//
// The forward pass is written here a second time, from the operators of reference.h, because the CPU
// reference does not expose its intermediate tensors. As a check, the loss must equal that of the CPU
// reference with the same formats, to the last bit; otherwise the program fails.
#include <cmath>
#include <functional>
#include <future>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "../../data/checkpoint.h"
#include "../../reference.h"

namespace {

using namespace coat;
using Json = nlohmann::ordered_json;
using Values = std::vector<float>;

struct Way {
    const char* name;
    Quant nonlinear, linear;  // inputs of norms and activation functions; inputs of linear layers
};
constexpr Quant group(int rows, int cols) { return {Format::E4M3, {rows, cols}, Format::BF16}; }
const Way WAYS[] = {
    {"FP32", Q_F32, Q_F32},
    {"BF16", Q_BF16, Q_BF16},
    {"linear layers only, per tensor", Q_BF16, Q_E4M3},
    {"per tensor", Q_E4M3, Q_E4M3},
    {"1x16", group(1, 16), group(1, 16)},
    {"1x128", group(1, 128), group(1, 128)},
    {"4x4", group(4, 4), group(4, 4)},
    {"mixed: 1x16, linear layers per tensor", Q_GROUP, Q_E4M3},
};
const std::pair<const char*, Quant> GRANULARITIES[] = {
    {"per tensor", Q_E4M3}, {"1x16", group(1, 16)}, {"1x128", group(1, 128)}, {"4x4", group(4, 4)}};

struct Batch {
    int64_t B, T;
    std::vector<int32_t> tokens, targets;
};

enum class Reader : uint8_t { Nonlinear, Linear };
// Returns what an operator reads instead of x (N, cols).
using Replace =
    std::function<Values(Reader who, int64_t layer, const char* tensor, const Values& x, int64_t cols)>;
using AfterLayer = std::function<void(int64_t layer, const Values& stream)>;

// The forward pass of Network in reference.cpp with an FP32 residual stream. run() returns the mean loss.
class Forward {
public:
    Forward(const ModelConfig& c, std::map<std::string, Values> weights, const Batch& batch)
        : c_(c), w_(std::move(weights)), batch_(batch) {}

    double run(const Replace& replace, const AfterLayer& after) const {
        const int64_t N = batch_.B * batch_.T, C = c_.C;
        const Values &embedding = w_.at("embedding"),
                     *positions = c_.arch.rope ? nullptr : &w_.at("positions");
        Values x(N * C);
        for (int64_t n = 0; n < N; n++)
            for (int64_t i = 0; i < C; i++) {
                x[n * C + i] = embedding[batch_.tokens[n] * C + i];
                if (positions) x[n * C + i] += (*positions)[n % batch_.T * C + i];
            }
        for (int64_t l = 0; l < c_.L; l++) {
            block(l, x, replace);
            after(l, x);
        }
        const Values y = norm("final_norm", x);
        Values logits(N * c_.padded_V());
        const float* head = w_.at(c_.tied ? "embedding" : "head").data();
        reference::matmul<float>(N, c_.padded_V(), C, {y.data(), C, 1}, {head, 1, C}, logits.data());
        return reference::cross_entropy(N, c_.V, c_.padded_V(), logits.data(), batch_.targets.data(), 0.0f) /
               static_cast<double>(N);
    }

private:
    const ModelConfig c_;
    const std::map<std::string, Values> w_;
    const Batch& batch_;

    Values norm(const std::string& name, const Values& x) const {
        Values y(x.size());
        const float* bias = c_.arch.rms ? nullptr : w_.at(name + ".bias").data();
        const int64_t N = static_cast<int64_t>(x.size()) / c_.C;
        reference::norm_forward(c_.arch.rms, c_.norm_eps, N, c_.C, x.data(), w_.at(name + ".weight").data(),
                                bias, y.data());
        return y;
    }
    Values linear(const std::string& name, const Values& x, int64_t in) const {
        const Values& w = w_.at(name);
        const int64_t N = static_cast<int64_t>(x.size()) / in, out = static_cast<int64_t>(w.size()) / in;
        Values y(N * out);
        reference::matmul<float>(N, out, in, {x.data(), in, 1}, {w.data(), 1, in}, y.data());
        const auto found = w_.find(name + ".bias");
        const Values* bias = found == w_.end() ? nullptr : &found->second;
        for (int64_t i = 0; bias && i < N * out; i++) y[i] += (*bias)[i % out];
        return y;
    }
    static void add(Values& x, const Values& y) {
        for (size_t i = 0; i < x.size(); i++) x[i] += y[i];
    }

    void block(int64_t l, Values& x, const Replace& replace) const {
        const std::string name = "layers." + std::to_string(l) + ".";
        const int64_t N = batch_.B * batch_.T;
        auto nonlinear = [&](const char* tensor, const Values& t, int64_t cols) {
            return replace(Reader::Nonlinear, l, tensor, t, cols);
        };
        auto linear_of = [&](const char* layer, const char* tensor, const Values& t, int64_t cols) {
            return linear(name + layer, replace(Reader::Linear, l, tensor, t, cols), cols);
        };
        Values qkv =
            linear_of("qkv", "norm 1 output", norm(name + "norm1", nonlinear("norm 1 input", x, c_.C)), c_.C);
        if (c_.arch.rope) reference::rope(c_, batch_.B, batch_.T, qkv.data(), false);
        Values attention(N * c_.q_cols()), lse(N * c_.NH), h(N * c_.F);
        reference::attention_forward(c_, batch_.B, batch_.T, qkv.data(), attention.data(), lse.data());
        add(x, linear_of("attention_out", "attention output", attention, c_.q_cols()));
        const Values up =
            linear_of("up", "norm 2 output", norm(name + "norm2", nonlinear("norm 2 input", x, c_.C)), c_.C);
        const Values input = nonlinear(c_.arch.gated ? "gate, up" : "GELU input", up, c_.gate_up_cols());
        reference::activation_forward(c_.arch.gated, N, c_.F, input.data(), h.data());
        add(x, linear_of("down", c_.arch.gated ? "SiLU(gate) x up" : "GELU output", h, c_.F));
    }
};

Setup setup_of(const ModelConfig& config, const Way& way, const Batch& batch) {
    const Recipe recipe = {way.name,      Format::F32, way.linear,          Q_F32,                 Q_F32,
                           way.nonlinear, Q_F32,       Scaling::JustInTime, ACCUMULATIONS[1],      ""};
    return {config, recipe, find_row(optimizers(), "bf16", "--optimizer"), batch.B, batch.T};
}

std::map<std::string, Values> weights_of(Model& model) {
    std::map<std::string, Values> weights;
    for (const StateTensor& t : weight_tensors(model.setup().config)) {
        std::vector<uint16_t> bits(t.size());
        model.read(t.name, bits.data());
        Values& values = weights[t.name];
        for (uint16_t b : bits) values.push_back(reference::from_bf16(b));
    }
    return weights;
}

// Windows in random order, since neighbouring windows of a corpus are alike.
Batch validation_batch(const Json& settings, int64_t B) {
    const int64_t T = std::stoll(settings.at("seq").get<std::string>());
    if (B < 1) B = std::stoll(settings.at("batch").get<std::string>());
    Batch batch{B, T, std::vector<int32_t>(B * T), std::vector<int32_t>(B * T)};
    Loader(load_corpus(settings.at("data").get<std::string>()).validation, B, T, 1)
        .next(batch.tokens.data(), batch.targets.data());
    return batch;
}

Json tensors(const Forward& forward, int64_t batch_rows) {
    Json rows = Json::array();
    const Replace measure = [&](Reader who, int64_t layer, const char* tensor, const Values& x,
                                int64_t cols) {
        Json row = {{"layer", layer},
                    {"tensor", tensor},
                    {"read_by", who == Reader::Linear ? "linear layer" : "non-linear layer"}};
        for (const auto& [name, quant] : GRANULARITIES) {
            QuantStats stats;
            reference::quantize(x.data(), batch_rows, cols, quant, &stats);
            row["noise_to_signal"][name] = stats.noise / stats.signal;
        }
        rows.push_back(row);
        return x;
    };
    forward.run(measure, [](int64_t, const Values&) {});
    return rows;
}

// All tensors quantized in one way. `exact` is the FP32 stream after each layer; the first way (FP32) fills
// it.
Json stream(const Forward& forward, const std::string& checkpoint, const ModelConfig& config,
            const Batch& batch, const Way& way, std::vector<Values>& exact) {
    Json mse = Json::array(), relative = Json::array();
    const Replace quantized = [&](Reader who, int64_t, const char*, const Values& x, int64_t cols) {
        return reference::dequantize(reference::quantize(x.data(), batch.B * batch.T, cols,
                                                         who == Reader::Linear ? way.linear : way.nonlinear));
    };
    const double loss = forward.run(quantized, [&](int64_t layer, const Values& x) {
        if (&way == WAYS) exact.push_back(x);
        double noise = 0, signal = 0;
        for (size_t i = 0; i < x.size(); i++) {
            const double was = exact[layer][i], error = x[i] - was;
            noise += error * error, signal += was * was;
        }
        mse.push_back(noise / static_cast<double>(x.size())), relative.push_back(noise / signal);
    });
    const auto model = make_reference(setup_of(config, way, batch));
    load_weights(checkpoint, *model);
    const double expected = model->evaluate(batch.tokens.data(), batch.targets.data());
    if (loss != expected)
        throw Error(std::string(way.name) + ": the loss is " + std::to_string(loss) +
                    ", but the reference computes " + std::to_string(expected) + ".");
    return {{"way", way.name}, {"loss", loss}, {"mean_square_error", mse}, {"noise_to_signal", relative}};
}

Json streams(const Forward& forward, const std::string& checkpoint, const ModelConfig& config,
             const Batch& batch) {
    std::vector<Values> exact;
    auto measure = [&](const Way& way) { return stream(forward, checkpoint, config, batch, way, exact); };
    Json rows = Json::array();
    rows.push_back(measure(WAYS[0]));
    std::vector<std::future<Json>> others;  // in parallel, since creating a model uses one thread
    for (const Way& way : WAYS)
        if (&way != WAYS) others.push_back(std::async(std::launch::async, measure, std::cref(way)));
    for (auto& other : others) rows.push_back(other.get());
    return rows;
}

Json report(const std::string& checkpoint, int64_t B) {
    const LoopState state = read_loop_state(checkpoint);
    const Batch batch = validation_batch(Json::parse(state.settings), B);
    const ModelConfig config = read_model_config(checkpoint);
    const auto model = make_reference(setup_of(config, WAYS[0], batch));
    load_weights(checkpoint, *model);
    const Forward forward(config, weights_of(*model), batch);
    return {{"step", state.step},
            {"sequences", batch.B},
            {"tokens_each", batch.T},
            {"layers", config.L},
            {"hidden", config.C},
            {"tensors", tensors(forward, batch.B * batch.T)},
            {"streams", streams(forward, checkpoint, config, batch)}};
}

}  // namespace

int main(int argc, char** argv) {
    try {
        if (argc != 2 && argc != 3)
            throw Error(
                "Usage: evidence_activations CHECKPOINT [BATCH], where CHECKPOINT is the --out folder of "
                "./train.");
        std::cout << report(coat::find_checkpoint(argv[1]), argc == 3 ? std::atoll(argv[2]) : 0).dump(1)
                  << "\n";
    } catch (const std::exception& e) {
        std::cerr << e.what() << "\n";
        return 1;
    }
}
