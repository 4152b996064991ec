// program/report.cpp - what a run prints and logs: its start, its steps and its end, and what it measures on
// held-out text (validation.cpp).
#include <algorithm>
#include <cmath>

#include "../data/files.h"
#include "validation.h"
#include "generate.h"
#include "plan.h"
#include "report.h"
#include "train_step.h"

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// The start

// The end of the start-up line of the log: what becomes of a file that exists, or why a new one begins.
static const char* log_before(const Run& run) {
    if (fs::exists(run.flags.log)) return "; what the file has stays, new lines follow it";
    const bool restored = run.flags.resumes() && !run.flags.given("log");
    return restored ? "; the file of the checkpoint's run is not here, so it begins anew" : "";
}

RunSettings settings_of_last_rank(const Run& run) {
    RunSettings last = run.settings;
    last.rank = last.ranks - 1;
    return last;
}

// What the tokens of plain text are, and how a user gets others. A model folder decides that itself.
static std::string text_of_bytes(const Run& run) {
    const int64_t V = run.settings.config.V;
    std::string text = "tokens: the bytes of the text";
    if (V > 256) text += concat(", 256 of the vocabulary's ", V);
    if (!run.weights_folder.empty()) return text + ", since " + run.weights_folder + " has no tokenizer";
    return text + "; data/tokenize.py makes others (--tokenizer gpt2, or --train-bpe 4096)";
}

// How often the run sees its training text: "900, with 29,491,200 tokens: 0.34 epochs of the training text".
static std::string steps_text(const Run& run) {
    const int64_t steps = run.flags.steps, tokens = steps * run.step_tokens();
    const double epochs = double(tokens) / double(run.corpus.train.size());
    char number[32] = "less than 0.01";
    if (epochs >= 0.01) std::snprintf(number, sizeof number, "%.2f", epochs);
    return concat(with_commas(steps), ", with ", with_commas(tokens), " tokens: ", number,
                  " epochs of the training text");
}

// When the run validates: "before the first step, every 50 and after the last".
static std::string validation_text(const Run& run) {
    const int64_t every = run.flags.eval_every;
    return concat(run.flags.resumes() ? "" : "before the first step, ",
                  every > 0 ? concat("every ", every, " and ") : "", "after the last");
}

// The peak of the learning rate, and the warm-up: "0.003, the default of 771,200 new weights; 100 steps of
// warm-up".
static std::string learning_rate_text(const Run& run) {
    const Flags& flags = run.flags;
    char rate[32];
    std::snprintf(rate, sizeof rate, "%g", flags.lr);
    std::string text = rate;
    if (!flags.given("lr") && !flags.resumes())
        text += run.weights_folder.empty()
                    ? concat(", the default of ", with_commas(parameter_count(run.settings.config)),
                             " new weights")
                    : ", the default of weights from a folder";
    const int64_t warmup = warmup_steps(flags.warmup, flags.steps);
    text += concat("; ", with_noun(warmup, "step"), " of warm-up");
    if (warmup < flags.warmup)
        text += concat(", a tenth of the run, since --warmup ", flags.warmup, " is longer than --steps ",
                       flags.steps);
    return text;
}

void print_start(const Run& run) {
    const RunSettings s = settings_of_last_rank(run);
    const ModelConfig& config = s.config;
    const auto print = [](const auto&... parts) { std::printf("%s\n", printable(concat(parts...)).c_str()); };
    print("model: ", config.name, ", ", with_commas(parameter_count(config)),
          " parameters: ", with_noun(config.L, "layer"), ", hidden size ", config.C, ", ",
          with_noun(config.NH, "head"), ", vocabulary ", config.V, "; ",
          run.weights_folder.empty() ? "random weights" : "weights of " + run.weights_folder);
    print("recipe: ", recipe_text(s));
    print("optimizer: ", s.optimizer.name, ": ", s.optimizer.about,
          s.keep_masters ? "; FP32 master weights" : "; no master weights, rounded stochastically");
    const std::string why =
        run.why_no_gpu.empty() ? "" : " (no GPU can be used here: " + run.why_no_gpu + ")";
    print("device: ", run.flags.device, why);
    print("batch: ", with_commas(run.step_tokens()), " tokens, ",
          with_noun(micro_batches_of_step(s), "micro-batch"), " of ", s.B, " x ", s.T,
          s.ranks > 1 ? " on " + with_noun(s.ranks, "rank") : "");
    if (run.flags.steps > 0) print("learning rate: ", learning_rate_text(run));
    if (!run.flags.plan) {
        const std::vector<MemoryRow> plan = run.flags.on_gpu() ? gpu_memory_plan(s) : memory_plan(s);
        const std::string copies =
            run.flags.on_gpu() ? ""
                               : concat(", and ", gigabytes(cpu_copies_bytes(s)),
                                        " GB for the FP32 weights and gradients with which the CPU computes");
        print("memory: ", gigabytes(total_bytes(plan)), " GB", copies, s.ranks > 1 ? " on each rank" : "",
              "; --plan lists the parts");
        print("checkpoints: ", run.flags.saves_checkpoints() ? "in " + run.flags.out : "none are saved");
    }
    if (run.flags.resumes()) print("continuing step ", run.state.step, " of ", run.weights_folder);
    if (const Corpus& text = run.corpus; text.validation.size())
        print("text: ", run.flags.data, ", ", with_commas(text.train.size()), " tokens to train on, ",
              with_commas(text.validation.size()), " held out: ", text.held_out_rule);
    if (run.corpus.train.size() && run.flags.steps > 0) {
        print("steps: ", steps_text(run), "; validation ", validation_text(run));
    }
    if (run.corpus.tokens_are_bytes) print(text_of_bytes(run));
    for (const std::string& sentence : sentences_of(run.corpus.left_out)) print(sentence);
    if (!run.flags.log.empty()) print("log: ", run.flags.log, log_before(run));
    for (const ordered_json& change : run.resumed.changes) print("changed: ", change.get<std::string>());
    if (!run.resumed.changes.empty()) print("Earlier steps ran with the earlier values of these flags.");
    std::printf("\n");
}

// -----------------------------------------------------------------------------------------------------------
// Steps

// "5.5452", or "not finite": for a NaN printf would write "nan" or "-nan".
static std::string finite_text(double x, int decimals, const char* unit = "") {
    if (!std::isfinite(x)) return "not finite";
    char text[64];
    std::snprintf(text, sizeof text, "%.*f%s", decimals, x, unit);
    return text;
}

// "3m28s" or "5h7m".
static std::string duration(double seconds) {
    const int64_t whole = std::llround(seconds), minutes = whole / 60;
    if (minutes < 60) return concat(minutes, "m", whole % 60, "s");
    return concat(minutes / 60, "h", minutes % 60, "m");
}

double flops_per_token(const ModelConfig& config, int64_t T) {
    double weights = 0;
    for (const Param& p : parameters(config))
        if (p.is_linear_weight() || p.role == (config.tied ? Role::Embedding : Role::Head))
            weights += double(used_elements(config, p));
    return 6 * (weights + double(config.L * config.q_cols() * T));
}

void print_step(Run& run, const StepResult& result, float lr, double seconds, double seconds_left) {
    const int64_t step = run.state.step, steps = run.flags.steps;
    const double rate = run.step_tokens() / seconds;
    const double tflops = flops_per_token(run.settings.config, run.settings.T) * rate * 1e-12;
    const char* note = "";
    if (result.skipped)
        note = result.scored_target_count ? " | skipped: not finite or too large"
                                          : " | skipped: no token counts";
    std::printf(
        "step %*ld/%ld | loss %s | norm %s | lr %.3e | %.0f ms | %.0f tok/s | %.3g TFLOP/s | %s left%s\n",
        int(std::to_string(steps).size()), step, steps, finite_text(result.loss, 4).c_str(),
        finite_text(result.grad_norm, 4).c_str(), lr, seconds * 1e3, rate, tflops,
        duration(seconds_left).c_str(), note);
    run.write_to_log("step", {{"skipped", result.skipped},
                              {"loss", result.loss},
                              {"grad_norm", result.grad_norm},
                              {"lr", lr},
                              {"ms", seconds * 1e3},
                              {"tokens_per_second", rate},
                              {"tflops", tflops}});
}

void print_end(Run& run, double validation, const StepTimes& times) {
    const LoopState& state = run.state;
    const int64_t skipped = state.step - state.updates;
    ordered_json end = {
        {"first_validation", state.first_validation}, {"validation", validation}, {"skipped", skipped}};
    std::printf(
        "\nDone: %s in %s with validation and saving; %ld skipped. Validation loss %.4f -> %.4f nats per "
        "token.\n",
        with_noun(times.steps, "step").c_str(), duration(times.seconds).c_str(), skipped,
        state.first_validation, validation);
    if (times.steps > 1) {
        const double seconds_per_step = times.seconds_of_later_steps / double(times.steps - 1);
        const double rate = double(run.step_tokens()) / seconds_per_step;
        const int64_t first = state.step - times.steps + 2;
        const std::string steps =
            first < state.step ? concat("Steps ", first, " to ", state.step) : concat("Step ", first);
        std::printf("%s took %.0f ms%s: %.0f tok/s without validation and saving.\n", steps.c_str(),
                    seconds_per_step * 1e3, first < state.step ? " each" : "", rate);
        end["tokens_per_second"] = rate;
    }
    run.write_to_log("end", end);
    const std::string command = command_to_try(run.last_checkpoint, run.settings.config);
    if (!command.empty()) std::printf("To use the model: %s\n", printable(command).c_str());
}

// -----------------------------------------------------------------------------------------------------------
// What was measured on validation text

double validate_and_report(Run& run) {
    const Validation validation = measure_validation(run);
    std::printf("validation | step %ld | loss %.4f | %s\n", run.state.step, validation.loss,
                with_noun(validation.targets, "token").c_str());
    run.write_to_log("validation", {{"loss", validation.loss}, {"tokens", validation.targets}});
    return validation.loss;
}

void report_sample(Run& run) {
    const Sample sample = draw_sample(run);
    if (sample.tokens.empty()) return;
    const auto text = [&](int64_t begin, int64_t end) {
        const std::vector<int32_t> part(sample.tokens.begin() + begin, sample.tokens.begin() + end);
        return printable(run.corpus.vocabulary.decode(part), "\n\t");
    };
    std::printf(
        "sample | step %ld\n---------- held-out text\n%s\n---------- continued by the "
        "model\n%s\n----------\n",
        run.state.step, text(0, sample.prompt).c_str(),
        text(sample.prompt, std::ssize(sample.tokens)).c_str());
    run.write_to_log("sample", {{"tokens", sample.tokens}, {"prompt", sample.prompt}});
}

// The SNR of a kind of tensor: "31.6 dB", "no error", or "not finite" if a value is NaN or infinite.
static std::string snr_text(const QuantStats& s) {
    return s.noise == 0 ? "no error" : finite_text(s.snr_db(), 1, " dB");
}

// Prints a row for each kind of tensor that was quantized. If there is none, as with a recipe without FP8, it
// prints no title either.
static void print_kinds(const QuantReport& report) {
    bool has_title = false;
    for (size_t kind = 0; kind < std::size(report.stats_by_kind); kind++) {
        const QuantStats& s = report.stats_by_kind[kind];
        if (s.elements == 0) continue;
        if (!has_title)
            std::printf("\n%-17s | SNR        | quantized   | saturated | flushed to zero\n", "Quantization");
        has_title = true;
        std::printf("%-17s | %10s | %11ld | %9ld | %ld (%.3f%%)\n", MEASURED_KIND_NAMES[kind],
                    snr_text(s).c_str(), s.elements, s.saturated, s.flushed, 100.0 * s.flushed / s.elements);
    }
}

std::array<float, 5> quartiles(std::vector<float> numbers) {
    std::sort(numbers.begin(), numbers.end());
    const auto at = [&](double part) { return numbers[size_t(part * (numbers.size() - 1))]; };
    return {at(0), at(0.25), at(0.5), at(0.75), at(1)};
}

static void print_expansion(const char* moments, const std::vector<float>& k) {
    if (k.empty()) return;
    const auto [smallest, first, median, third, largest] = quartiles(k);
    std::printf("expansion exponent k of %s: smallest %.2f, quartiles %.2f %.2f %.2f, largest %.2f\n",
                moments, smallest, first, median, third, largest);
}

void report_quantization(Run& run) {
    const QuantReport report = measure_quantization(run);
    print_kinds(report);
    const auto is_finite = [](const QuantStats& s) {
        return std::isfinite(s.signal) && std::isfinite(s.noise);
    };
    if (!std::all_of(std::begin(report.stats_by_kind), std::end(report.stats_by_kind), is_finite))
        std::printf("Some values are not finite: the run has diverged. Begin again with a lower --lr.\n");
    if (report.moments_were_sampled)
        std::printf("Of large parameters, a part of the moments was measured.\n");
    print_expansion("first moments", report.k_m);
    print_expansion("second moments", report.k_v);
}

}  // namespace coat
