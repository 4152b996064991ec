// program/validation.cpp - what a run measures on validation text: the loss, a sample, and how well FP8
// represents its tensors. report.cpp prints it.
#include <algorithm>
#include <cmath>

#include "checkpoints.h"
#include "validation.h"
#include "generate.h"

namespace coat {

// How many validation windows are evaluated: those of --eval-tokens, or all that there are. The number does
// not depend on --batch or on the number of ranks. So the validation loss of one run can be compared with
// that of another.
static int64_t evaluated_window_count(const Run& run) {
    return std::clamp<int64_t>(run.flags.eval_tokens / run.settings.T, 1, run.validation_loader->windows());
}

// Reads micro-batch `number` of the evaluated windows. If fewer than B windows are left for it, or none,
// windows are repeated without targets. A repeated window adds nothing to the loss, and has no new values
// that could raise an amax.
static void read_validation_batch(Run& run, int64_t number) {
    const int64_t T = run.settings.T;
    const int64_t first = number * run.settings.B;
    const int64_t windows = evaluated_window_count(run);
    run.tokens.resize(run.micro_batch_tokens());
    run.targets.resize(run.micro_batch_tokens());
    read_or_fail_together(run, [&] {
        for (int64_t i = 0; i < run.settings.B; i++) {
            const bool is_left = first + i < windows;
            const int64_t repeated = first < windows ? first : 0;
            run.validation_loader->read(is_left ? first + i : repeated, &run.tokens[i * T],
                                        &run.targets[i * T]);
            if (!is_left) std::fill_n(&run.targets[i * T], T, NO_TARGET);
        }
    });
}

// Each rank computes its share of the micro-batches. With FP8 operands the last digits of the loss depend on
// --batch, because the values of a micro-batch share a scale.
Validation measure_validation(Run& run) {
    const int64_t batches = ceil_div(evaluated_window_count(run), run.settings.B);
    struct LossSum {
        double loss;
        int64_t targets;
    } sum{0, 0};
    for (int64_t first = 0; first < batches; first += run.settings.ranks) {  // one micro-batch for each rank
        read_validation_batch(run, first + run.settings.rank);
        const int64_t targets = count_scored_targets(run.targets.data(), run.micro_batch_tokens());
        const double mean = run.model->validation_loss(run.tokens.data(), run.targets.data());
        const LossSum mine{.loss = mean * double(targets), .targets = targets};
        for (const LossSum& theirs : run.processes.all_gather(mine)) {
            sum.loss += theirs.loss;
            sum.targets += theirs.targets;
        }
    }
    if (sum.targets == 0) throw Error("No token of the held-out --data counts in the loss; give other data.");
    const double loss = sum.loss / double(sum.targets);
    if (!std::isfinite(loss))
        throw Error("The validation loss is not finite after step ", run.state.step,
                    "; begin again with a lower --lr, or with other weights.");
    return {.loss = loss, .targets = sum.targets};
}

// The seed follows from the step, so a resumed run draws the same samples as a run that was not stopped.
Sample draw_sample(const Run& run) {
    constexpr int64_t LONGEST = 240;
    const int64_t T = run.settings.T;
    Sample sample{.tokens = sample_prompt(run.corpus.validation, T), .prompt = 0};
    sample.prompt = std::ssize(sample.tokens);
    if (sample.tokens.empty()) return sample;
    generate_tokens(*run.model, run.processes,
                    {.temperature = run.flags.temperature,
                     .most = std::min(T - sample.prompt, LONGEST),
                     .end_token = run.corpus.vocabulary.end_token,
                     .seed = run.settings.seed * 1'000'003 + uint64_t(run.state.step)},
                    sample.tokens);
    return sample;
}

// The values of all ranks, in the order of the ranks.
static std::vector<float> values_on_all_ranks(const Run& run, const std::vector<float>& mine) {
    std::vector<float> all;
    for (const std::vector<float>& theirs : run.processes.all_gather(mine))
        all.insert(all.end(), theirs.begin(), theirs.end());
    return all;
}

// Every rank measures the same micro-batch, but only the moments that it owns.
QuantReport measure_quantization(Run& run) {
    const bool trained = run.flags.steps > 0;  // --steps 0 updates no moments
    read_validation_batch(run, 0);
    QuantReport report = run.model->measure_quantization(run.tokens.data(), run.targets.data());
    for (MeasuredKind kind : {MeasuredKind::Moment1, MeasuredKind::Moment2}) {
        QuantStats sum;
        for (const QuantStats& theirs : run.processes.all_gather(report.stats_by_kind[int(kind)]))
            sum += theirs;
        report.stats_by_kind[int(kind)] = trained ? sum : QuantStats();
    }
    report.moments_were_sampled = report.moments_were_sampled && trained;
    report.k_m = trained ? values_on_all_ranks(run, report.k_m) : std::vector<float>();
    report.k_v = trained ? values_on_all_ranks(run, report.k_v) : std::vector<float>();
    return report;
}

}  // namespace coat
