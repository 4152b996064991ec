// bench.cu - where the time of a training step goes. It measures the ceilings of this GPU, then each operator
// of the step by itself at the shapes of a model, then the whole step.
//
//   make bench                                                                     the runs in the table RUNS
//   make bench BENCH_ARGS="--model llama-2-7b --recipe bf16 --batch 4 --seq 2048"  another run
//   build/bench --model gpt2 --only norm                                           operators named *norm*
//   build/bench --only sizes                                                       FP8 GEMMs against BF16's
//
// The floor of an operator is the longer of two times: its bytes (every input read once, every output written
// once) at copy bandwidth, and its FLOPs at the rate of a large GEMM in the same formats. Percentages are
// floor / time. They can exceed 100%: a copy also writes, and small gradients draw less power than random
// values.
//
// Times are medians between CUDA events, on random values, after the L2 cache was filled with other data. The
// operators (bench_operators.h) are those that model.cu launches, with the same shapes and formats, and as
// often. The step differs from their sum by small launches (clearing and adding sums, checks), by gaps
// between launches, by data that one operator leaves in the cache for the next, and by the clock, which is
// lower when the GPU is hot.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "../gpu/gpu_model.h"
#include "bench_operators.h"

namespace {

using namespace coat;
using namespace coat::dev;
using namespace coat::gpu;
using nlohmann::ordered_json;

constexpr int REST = 300, STEPS = 20;

struct Run {
    const char* model;
    int64_t batch, seq, accumulate;
};
constexpr Run RUNS[] = {{"llama-2-7b", 8, 2048, 1}, {"tinyllama-1.1b", 16, 2048, 1}, {"gpt2", 64, 1024, 8}};

// -----------------------------------------------------------------------------------------------------------
// The clock

class Clock {
public:
    // Zero at the beginning of every timed operation.
    float* amax_to_raise() const { return amax_to_raise_.get(); }

    // The median time of an operation that does not wait for the GPU.
    double seconds(const std::function<void()>& run) const {
        // A GPU is slower after long GEMMs: all operations start after the same light work.
        for (int i = 0; i < REST; i++) dev::flush_cache();
        return dev::median_seconds(run, [&] { clear_async(amax_to_raise(), sizeof(float), nullptr); });
    }

private:
    dev::Buffer<float> amax_to_raise_{1};
};

// -----------------------------------------------------------------------------------------------------------
// Ceilings of this GPU

using Ceilings = std::map<std::string, double>;  // name -> bytes or FLOPs per second

double copy_rate(Clock& clock) {
    constexpr int64_t BYTES = 1 << 30;
    Memory memory;
    const TensorRef from = memory.random(1, BYTES / 2, Format::BF16);
    void* to = memory.take(BYTES);
    return 2 * BYTES / clock.seconds([&] { copy_async(to, from.data, BYTES, nullptr); });
}
double gemm_rate(Clock& clock, const std::string& name) {
    constexpr int64_t SIDE = 8192;
    Memory memory;
    CublasGemms gemms(memory.take(CublasGemms::SCRATCH_BYTES),
                      {true, false, false});  // fast sums in fprop alone
    const Format compute = name == "fp32 GEMM" ? Format::FP32 : Format::BF16;
    const TensorFormat a = name == FAST    ? E4M3_PER_TENSOR
                           : name == EXACT ? E5M2_PER_TENSOR
                                           : TensorFormat{compute};
    const Operand x = random_operand(memory, SIDE, SIDE, a, compute),
                  w = random_operand(memory, SIDE, SIDE, a.is_fp8() ? E4M3_PER_TENSOR : a, compute);
    const TensorRef out = memory.random(SIDE, SIDE, compute);
    const GemmKind kind = name == EXACT ? GemmKind::Dgrad : GemmKind::Fprop;
    return 2.0 * SIDE * SIDE * SIDE / clock.seconds([&] { gemms.run(kind, x, w, out, nullptr); });
}
Ceilings measure_ceilings(Clock& clock, const Recipe& r) {
    Ceilings rates{{COPY, copy_rate(clock)}};
    for (GemmKind kind : {GemmKind::Fprop, GemmKind::Dgrad, GemmKind::Wgrad})
        for (const TensorFormat& q : {TensorFormat{r.compute_format}, r.x}) {
            const char* name = gemm_ceiling(kind, q, r);
            if (!rates.count(name)) rates[name] = gemm_rate(clock, name);
        }
    return rates;
}

// Square GEMMs x w^T in BF16 and, as Colossal-AI has them, in FP8 with fast sums: alone, with x quantized
// each time (amax, then codes), and with x and w.
ordered_json measure_sizes(Clock& clock) {
    ordered_json rows;
    for (const int64_t side : {1024, 2048, 3072, 4096, 8192, 12288}) {
        Memory memory;
        CublasGemms gemms(memory.take(CublasGemms::SCRATCH_BYTES), {true, true, true});
        const TensorRef x = memory.random(side, side, Format::BF16),
                        w = memory.random(side, side, Format::BF16),
                        out = memory.random(side, side, Format::BF16);
        const Operand x8 = memory.allocate_operand(side, side, E4M3_PER_TENSOR, true, false),
                      w8 = memory.allocate_operand(side, side, E4M3_PER_TENSOR, true, false);
        auto quantized = [&](const TensorRef& from, const Operand& to) {
            compute_amax(lazy_load(from), &to.tensor.tensor_scale->amax, nullptr);
            quantize_operand(lazy_load(from), to, nullptr, nullptr);
        };
        auto gemm = [&](const Operand& a, const Operand& b) {
            gemms.run(GemmKind::Fprop, a, b, out, nullptr);
        };
        quantized(x, x8), quantized(w, w8);
        const double bf16 = clock.seconds([&] { gemm(Operand{.tensor = x}, Operand{.tensor = w}); }),
                     alone = clock.seconds([&] { gemm(x8, w8); }),
                     with_x = clock.seconds([&] { quantized(x, x8), gemm(x8, w8); }),
                     with_both = clock.seconds([&] { quantized(x, x8), quantized(w, w8), gemm(x8, w8); });
        std::printf("%6ld: BF16 %.1f us; FP8 %.2f times as fast, with x quantized %.2f, with x and w %.2f\n",
                    side, bf16 * 1e6, bf16 / alone, bf16 / with_x, bf16 / with_both);
        rows.push_back(
            {{"side", side}, {"bf16", bf16}, {"alone", alone}, {"x", with_x}, {"both", with_both}});
    }
    return rows;
}

// -----------------------------------------------------------------------------------------------------------
// The operators of a step

struct Row {
    StepOperator of;
    double seconds, floor;  // of one run
};

std::vector<Row> measure_operators(const RunSettings& s, Clock& clock, const Ceilings& ceilings,
                                   const std::string& only) {
    std::vector<Row> rows;
    const Measure measure = [&](const StepOperator& o, const std::function<void()>& run) {
        const double floor = std::max(o.flops / ceilings.at(o.ceiling), o.bytes / ceilings.at(COPY));
        rows.push_back({o, clock.seconds(run), floor});
    };
    StepOperators(s, /*stream=*/nullptr, clock.amax_to_raise(), measure, only);
    return rows;
}

// -----------------------------------------------------------------------------------------------------------
// The whole step

// Sorted. A step waits for the GPU itself.
std::vector<double> step_seconds(const RunSettings& s) {
    const std::unique_ptr<Model> model = make_gpu_model(s);
    std::vector<int32_t> tokens = made_up_tokens(s.micro_batches_per_rank * s.B * s.T + 1, s.config.V);
    std::vector<double> times;
    for (int64_t step = 0; step <= STEPS; step++) {  // the first includes start-up costs
        const auto begin = std::chrono::steady_clock::now();
        if (model->step(tokens.data(), tokens.data() + 1, {step + 1, 1e-4f}).skipped)
            throw Error("A step was skipped, so its time is not valid.");
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        if (step) times.push_back(took.count());
    }
    std::sort(times.begin(), times.end());
    return times;
}

void print_rows(const std::vector<Row>& rows) {
    std::printf("  %-64s %7s %10s %14s %6s %10s %10s\n", "operator", "a step", "us each", "", "floor",
                "ms a step", "floor, ms");
    const char* group = "";
    for (const auto& [o, seconds, floor] : rows) {
        if (o.group != group) std::printf("  %s\n", group = o.group);
        const bool computes = o.flops > 0;
        std::printf("    %-62s %7.5g %10.1f %6.*f %-7s %5.0f%% %10.2f %10.2f\n", o.name.c_str(), o.count,
                    seconds * 1e6, computes ? 0 : 2, (computes ? o.flops : o.bytes) / seconds * 1e-12,
                    computes ? "TFLOP/s" : "TB/s", 100 * floor / seconds, o.count * seconds * 1e3,
                    o.count * floor * 1e3);
    }
}

ordered_json bench(const RunSettings& s, Clock& clock, const Ceilings& ceilings, const std::string& only) {
    const auto [micro_batches, B, T] = std::array<long long, 3>{s.micro_batches_per_rank, s.B, s.T};
    std::printf("\n%s, recipe %s, %lld x %lld x %lld tokens a step\n", s.config.name.c_str(), s.recipe.name,
                micro_batches, B, T);
    const std::vector<Row> rows = measure_operators(s, clock, ceilings, only);
    print_rows(rows);
    ordered_json report{{"model", s.config.name}, {"recipe", s.recipe.name}, {"batch", B}, {"seq", T}};
    report["accumulate"] = micro_batches;
    double sum = 0, floors = 0;
    for (const auto& [o, seconds, floor] : rows) {
        ordered_json row{{"group", o.group}, {"name", o.name}, {"count", o.count}};
        row.update({{"seconds", seconds}, {"floor", floor}});
        report["operators"].push_back(row);
        sum += o.count * seconds;
        floors += o.count * floor;
    }
    if (!only.empty()) return report;
    const std::vector<double> times = step_seconds(s);
    const double step = times[times.size() / 2], speed = double(micro_batches * B * T) / step;
    std::printf("\n  sum of the operators %.2f ms, of their floors %.2f ms\n", sum * 1e3, floors * 1e3);
    std::printf("  whole step, median of %zu: %.2f ms (%.2f to %.2f), %.0f tokens/s, %.3f times the floors\n",
                times.size(), step * 1e3, times.front() * 1e3, times.back() * 1e3, speed, step / floors);
    report["step"] = {{"seconds", step}, {"tokens_per_second", speed}, {"floors", floors}};
    return report;
}

// -----------------------------------------------------------------------------------------------------------
// The program

using Flags = std::map<std::string, std::string>;

Flags parse(int argc, char** argv) {
    Flags flags{{"--model", ""},      {"--recipe", "coat"}, {"--batch", ""}, {"--seq", ""},
                {"--accumulate", ""}, {"--kv-heads", ""},   {"--json", ""},  {"--only", ""}};
    for (int i = 1; i < argc; i += 2) {
        if (!flags.count(argv[i]) || i + 1 == argc)
            throw Error(argv[i], " is not a flag with a value; there are --model, --recipe, --batch, --seq, ",
                        "--accumulate, --kv-heads, --json and --only.");
        flags[argv[i]] = argv[i + 1];
    }
    return flags;
}

std::vector<RunSettings> all_settings(const Flags& flags) {
    auto number = [&](const char* flag, int64_t otherwise) {
        const int64_t n = flags.at(flag).empty() ? otherwise : std::atoll(flags.at(flag).c_str());
        if (n < 1) throw Error(flag, " must be a number from 1.");
        return n;
    };
    std::vector<RunSettings> list;
    const std::string& wanted = flags.at("--model");
    const Recipe& recipe = find_row(recipes(), flags.at("--recipe"), "--recipe");
    auto add = [&](const Run& r) {
        RunSettings s{find_row(known_models(), r.model, "--model"),
                      recipe,
                      find_row(optimizers(), recipe.default_optimizer, "--optimizer"),
                      number("--batch", r.batch),
                      number("--seq", r.seq),
                      number("--accumulate", r.accumulate)};
        if (s.config.V == 0) s.config.V = 256;  // bytes
        s.config.NKV = number("--kv-heads", s.config.NKV);
        require_supported(s);
        list.push_back(s);
    };
    for (const Run& r : RUNS)
        if (wanted.empty() || wanted == r.model) add(r);
    if (list.empty())
        add({wanted.c_str(), 8, std::min<int64_t>(2048, find_row(known_models(), wanted, "--model").max_T),
             1});
    return list;
}

}  // namespace

int main(int argc, char** argv) try {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    const Flags flags = parse(argc, argv);
    std::vector<RunSettings> runs = all_settings(flags);
    const std::string missing = select_gpu();
    if (!missing.empty()) throw Error("The bench measures a GPU: " + missing + ".");
    for (RunSettings& s : runs) s.recipe = recipe_on_gpu(s.recipe, gpu_capability());
    cudaDeviceProp device;
    check(cudaGetDeviceProperties(&device, 0), "Asking for the GPU's properties failed");
    Clock clock;
    ordered_json report{{"device", device.name}, {"runs", ordered_json::array()}};
    if (flags.at("--only") == "sizes") {
        report["sizes"] = measure_sizes(clock);
    } else {
        const Ceilings ceilings = measure_ceilings(clock, runs[0].recipe);
        std::printf("%s; measured ceilings:\n", device.name);
        for (const auto& [name, rate] : ceilings)
            std::printf("  %-34s %8.*f %s\n", name.c_str(), name == COPY ? 2 : 0, rate * 1e-12,
                        name == COPY ? "TB/s" : "TFLOP/s");
        for (const RunSettings& s : runs)
            report["runs"].push_back(bench(s, clock, ceilings, flags.at("--only")));
    }
    if (flags.at("--json").empty()) return 0;
    std::ofstream file(flags.at("--json"));
    if (!(file << report.dump(1) << "\n"))
        throw Error(flags.at("--json") + " cannot be written; choose another --json.");
} catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
}
