// reference/model.cpp - 6. The Model that the training loop drives, on the CPU: weights, moments, and a whole
// training step of COAT: forward, backward, clipping, update.
//
// step() and its parts come first. The rest can wait: the measurement of errors, the state by name, delayed
// scaling, and what several ranks exchange. With one rank, owned() is the whole parameter, from element 0 on,
// and the functions of the last part, "What ranks exchange", return what they are given or do nothing.
#include <algorithm>
#include <cstring>
#include <map>

#include "../common/state_tensors.h"
#include "network.h"
#include "optimizer.h"

namespace coat::reference {

using Floats = std::vector<float>;

namespace {

// The functions of the interface Model are marked with `override`. All others are their parts.
struct ReferenceModel : Model {
    // The state of one parameter. (With several ranks each has `weight_bits` and `remainder` whole, but
    // updates only the part that it owns. Its moments have only this part.)
    struct ParamState {
        std::vector<uint16_t> weight_bits;  // BF16
        std::vector<int16_t> remainder;     // of the FP32 masters; 0 without masters
        Moment m, v;
    };
    // The network has the gradients, and its own copy of the weights, in the compute format: forward and
    // backward read this copy.
    Network network_;
    const RunSettings& settings_ = network_.settings;
    const std::vector<Param>& params_ = network_.params;
    std::vector<ParamState> states_;  // by parameter
    // By parameter: the sums of gradients of several ranks; empty with one rank (reduce_gradients()).
    std::vector<Floats> gradient_sums_;

    explicit ReferenceModel(const RunSettings& settings)
        : network_(settings), states_(params_.size()), gradient_sums_(params_.size()) {
        for (size_t i = 0; i < states_.size(); i++) {
            const Param& p = params_[i];
            const OptimizerFormats& o = settings_.optimizer;
            const int64_t used = used_elements(settings_.config, p), owned_count = owned(settings_, p).count;
            ParamState& state = states_[i];
            state.m = Moment(o, p.moment_format(o.m_format), owned_count, /*second_moment=*/false);
            state.v = Moment(o, p.moment_format(o.v_format), owned_count, /*second_moment=*/true);
            state.weight_bits.resize(p.size());
            state.remainder.resize(p.size());
            for (int64_t e = 0; e < p.size(); e++) {
                const float initial =
                    initial_value(p.init_std, p.starts_at_one(), used, settings_.seed, i, e);
                split_master(initial, &state.weight_bits[e], &state.remainder[e]);
                if (!settings_.keep_masters) state.remainder[e] = 0;
                network_.param_values[i][e] = value_for_network(state, e);
            }
        }
    }

    // --- A step ---

    StepResult step(const int32_t* tokens, const int32_t* targets, const AdamWOptions& options) override {
        network_.forget_earlier_tensors();
        const int64_t tokens_of_rank = settings_.micro_batches_per_rank * settings_.B * settings_.T;
        // The number of scored targets in the whole step.
        const int64_t scored_target_count = sum_over_ranks(count_scored_targets(targets, tokens_of_rank));
        if (scored_target_count == 0) return {.loss = 0, .grad_norm = 0, .skipped = true};

        const double loss =
            forward_and_backward(tokens, targets, scored_target_count) / double(scored_target_count);
        const double grad_norm = gradient_norm();
        const bool finite = true_on_all_ranks(network_.all_finite);
        // If the norm after clipping is below 2^62, the square of each gradient fits every format of v. (If
        // the norm is infinite, clipping gives infinity * 0 = NaN. NaN is not below 2^62, so the step is
        // skipped.)
        const float clip_factor = compute_clip_factor(options, grad_norm);
        const bool skipped = !finite || !(grad_norm * clip_factor < 0x1p62);
        if (!skipped) update_all(options, clip_factor);
        return {.loss = loss,
                .grad_norm = grad_norm,
                .skipped = skipped,
                .scored_target_count = scored_target_count};
    }

    // Forward and backward of all micro-batches of the step. Afterwards the network has the gradients of the
    // mean loss over all scored targets. Returns the sum of the losses, of all ranks.
    double forward_and_backward(const int32_t* tokens, const int32_t* targets, int64_t scored_target_count) {
        const int64_t micro_batch_tokens = settings_.B * settings_.T;
        const int64_t micro_batches = settings_.micro_batches_per_rank;
        const double loss_weight = 1.0 / double(scored_target_count);
        std::vector<double> losses;  // by micro-batch
        clear_gradients();
        for (int64_t i = 0; i < micro_batches; i++) {
            const int64_t first = i * micro_batch_tokens;
            losses.push_back(network_.run_micro_batch(tokens + first, targets + first, loss_weight,
                                                      /*backward=*/true));
            reduce_gradients(/*is_last_micro_batch=*/i == micro_batches - 1);
        }
        double sum = 0;
        for (double loss : losses_of_all_ranks(losses)) sum += loss;
        return sum;
    }

    // The norm of all gradients: sqrt(sum of g^2).
    double gradient_norm() const {
        double sum = 0;
        for (const Floats& gradient : network_.gradients) add_squares(gradient, sum);
        return std::sqrt(sum);
    }

    // Adds the squares of a gradient to `sum`, in parts of UNIT_SIZE elements, as on GPUs. There a part
    // belongs to one rank. So the sum has the same bits for any number of ranks.
    static void add_squares(const Floats& gradient, double& sum) {
        for (size_t first = 0; first < gradient.size(); first += UNIT_SIZE) {
            const size_t end = std::min<size_t>(gradient.size(), first + UNIT_SIZE);
            double sum_of_part = 0;
            for (size_t e = first; e < end; e++) sum_of_part += double(gradient[e]) * gradient[e];
            sum += sum_of_part;
        }
    }

    // Updates all parameters with the gradients times clip_factor.
    void update_all(const AdamWOptions& options, float clip_factor) {
        const uint64_t key = rounding_key(settings_.seed, options.update_number);
        for (size_t i = 0; i < params_.size(); i++) {
            update_parameter(i, adamw_constants(options, params_[i].decays(), clip_factor), key);
            refresh_weight(i);
        }
        if (settings_.recipe.scale_source == ScaleSource::Delayed) update_delayed_scales();
    }

    // Updates states_[i], the elements that this rank owns: dequantizes the moments, computes AdamW in FP32,
    // and quantizes the moments again. key: the key of the random bits by which weights without masters are
    // rounded.
    void update_parameter(size_t i, const AdamWConstants& constants, uint64_t key) {
        ParamState& state = states_[i];
        const auto [first, n] = owned(settings_, params_[i]);
        Floats master(n), m(n), v(n);
        for (int64_t e = 0; e < n; e++)
            master[e] = join_master(state.weight_bits[first + e], state.remainder[first + e]);
        state.m.load(m.data());
        state.v.load(v.data());
        adamw(constants, n, network_.gradients[i].data() + first, master.data(), m.data(), v.data());
        state.m.store(m.data(), network_.stats_of(MeasuredKind::Moment1));
        state.v.store(v.data(), network_.stats_of(MeasuredKind::Moment2));
        for (int64_t e = 0; e < n; e++) {
            const int64_t at = first + e;  // in the parameter
            if (settings_.keep_masters) split_master(master[e], &state.weight_bits[at], &state.remainder[at]);
            else state.weight_bits[at] = round_stochastically(master[e], key, params_[i].flat_offset + at);
        }
    }

    // Sets the network's copy of weight i, after states_[i] has changed.
    void refresh_weight(size_t i) {
        const auto [first, n] = owned(settings_, params_[i]);
        Floats weight(n);
        for (int64_t e = 0; e < n; e++) weight[e] = value_for_network(states_[i], first + e);
        network_.param_values[i] = gather_parameter(i, weight);
    }
    // Element e of a weight as the network reads it: the BF16 weight, or the master if the compute format is
    // FP32.
    float value_for_network(const ParamState& state, int64_t e) const {
        if (settings_.recipe.compute_format == Format::BF16) return from_bf16(state.weight_bits[e]);
        return join_master(state.weight_bits[e], state.remainder[e]);
    }

    void clear_gradients() {
        for (Floats& gradient : network_.gradients) std::fill(gradient.begin(), gradient.end(), 0.0f);
        for (Floats& sum : gradient_sums_) std::fill(sum.begin(), sum.end(), 0.0f);
    }

    // --- What else one asks of a model ---

    double validation_loss(const int32_t* tokens, const int32_t* targets) override {
        network_.forget_earlier_tensors();
        const double divisor = divisor_of_mean(targets, settings_.B * settings_.T);
        const double sum = network_.run_micro_batch(tokens, targets, 1.0 / divisor, /*backward=*/false);
        // (The sum is divided, as in step(). Equal losses then have the same bits.)
        return network_.all_finite ? sum / divisor : NAN;
    }

    void next_logits(const int32_t* tokens, int64_t n, float* logits) override {
        network_.forget_earlier_tensors();
        const Floats padded = network_.next_logits(tokens, n);
        std::copy_n(padded.begin(), settings_.config.V, logits);
    }

    const RunSettings& settings() const override { return settings_; }

    // =======================================================================================================
    // What can wait
    //
    // --- The errors of quantization ---

    QuantReport measure_quantization(const int32_t* tokens, const int32_t* targets) override {
        network_.forget_earlier_tensors();
        clear_gradients();
        QuantReport report;
        network_.stats_by_kind = report.stats_by_kind;
        const double loss_weight = 1.0 / divisor_of_mean(targets, settings_.B * settings_.T);
        network_.run_micro_batch(tokens, targets, loss_weight, /*backward=*/true);
        // k_m and k_v are the k of the moments that are stored now. The errors are those of moments that
        // would be stored next: by an update with these gradients, with the default betas and without
        // clipping. Afterwards the state is what it was.
        for (size_t i = 0; i < params_.size(); i++) {
            const ParamState before = states_[i];
            report.k_m.insert(report.k_m.end(), before.m.expansion_exponents.begin(),
                              before.m.expansion_exponents.end());
            report.k_v.insert(report.k_v.end(), before.v.expansion_exponents.begin(),
                              before.v.expansion_exponents.end());
            const AdamWConstants constants =
                adamw_constants({.update_number = 1, .lr = 0}, /*decays=*/false, /*clip_factor=*/1);
            update_parameter(i, constants, /*key=*/0);
            states_[i] = before;
        }
        network_.stats_by_kind = nullptr;
        return report;
    }

    // --- The state by name, for checkpoints ---

    void read(const std::string& name, void* out) override {
        const auto [data, bytes] = memory_of(name);
        if (bytes) std::memcpy(out, data, bytes);
    }
    void write(const std::string& name, const void* in) override {
        const auto [data, bytes] = memory_of(name, /*to_write=*/true);
        if (bytes) std::memcpy(data, in, bytes);
        refresh_weight(param_index_of(params_, name));
    }

    // The place in memory of the elements of a state tensor that this rank owns.
    struct Memory {
        void* data;
        size_t bytes;
    };
    template <class Element> static Memory part_of(std::vector<Element>& elements, const Range& r) {
        return {.data = elements.data() + r.first, .bytes = r.count * sizeof(Element)};
    }
    template <class Element> static Memory whole(std::vector<Element>& elements) {
        return {.data = elements.data(), .bytes = elements.size() * sizeof(Element)};
    }

    // The memory of the tensor with this name. Gradients can only be read.
    Memory memory_of(const std::string& name, bool to_write = false) {
        const size_t i = param_index_of(params_, name);
        const Range own = owned(settings_, params_[i]);
        ParamState& state = states_[i];
        std::map<std::string, Memory> places = {{"", part_of(state.weight_bits, own)},
                                                {".m", whole(state.m.elements)},
                                                {".m.max", whole(state.m.max_magnitudes)},
                                                {".m.k", whole(state.m.expansion_exponents)},
                                                {".v", whole(state.v.elements)},
                                                {".v.max", whole(state.v.max_magnitudes)},
                                                {".v.k", whole(state.v.expansion_exponents)}};
        if (settings_.keep_masters) places[".remainder"] = part_of(state.remainder, own);
        if (settings_.keep_gradients && !to_write) places[".gradient"] = part_of(network_.gradients[i], own);
        for (OperandKind o : LINEAR_OPERANDS) {
            DelayedScale& d = network_.delayed_scales[i][int(o)];
            if (d.history.empty()) continue;
            places[concat(suffix_of(o), ".history")] = whole(d.history);
            places[concat(suffix_of(o), ".scale")] = {.data = &d.scale, .bytes = sizeof d.scale};
        }
        const auto place = places.find(name.substr(params_[i].name.size()));
        if (place == places.end()) throw_no_such_tensor(name);
        return place->second;
    }

    // --- Delayed scaling ---

    // After a step, the amax of each operand goes into its history: the largest of all ranks. Without FP8
    // operands (LinearFormats::fallback) there are no amaxes, and nothing changes.
    void update_delayed_scales() {
        if (!linear_formats(settings_).x.is_fp8()) return;
        for (auto& operands : network_.delayed_scales)
            for (OperandKind o : LINEAR_OPERANDS) {
                DelayedScale& d = operands[int(o)];
                if (d.history.empty()) continue;  // not a linear layer, or just-in-time scaling
                d.amax = largest_over_ranks(d.amax);
                d.update_history_and_scale(format_of(linear_formats(settings_), o).element_format);
            }
    }

    // --- What ranks exchange ---

    // A value, or a vector of values, of each rank, in the order of the ranks. With one rank this is a list
    // with `mine` alone.
    template <class Element> std::vector<Element> all_gather(const Element& mine) const {
        return settings_.communicator ? settings_.communicator->all_gather(mine) : std::vector<Element>{mine};
    }

    int64_t sum_over_ranks(int64_t mine) const {
        int64_t sum = 0;
        for (int64_t theirs : all_gather(mine)) sum += theirs;
        return sum;
    }
    float largest_over_ranks(float mine) const {
        for (float theirs : all_gather(mine)) mine = std::max(mine, theirs);
        return mine;
    }
    // Ranks send a char, because a vector<bool> does not store its elements as an array.
    bool true_on_all_ranks(bool mine) const {
        for (char theirs : all_gather(char(mine))) mine = mine && theirs;
        return mine;
    }
    // The losses of all ranks, in the order of the micro-batches: micro-batch i of rank r is number
    // i * ranks + r of the step. losses: of this rank, by micro-batch.
    std::vector<double> losses_of_all_ranks(const std::vector<double>& losses) const {
        const std::vector<std::vector<double>> losses_by_rank = all_gather(losses);
        std::vector<double> of_all;
        for (size_t i = 0; i < losses.size(); i++)
            for (const std::vector<double>& theirs : losses_by_rank) of_all.push_back(theirs[i]);
        return of_all;
    }

    // This is called after every micro-batch. With one rank it does nothing, because network_.gradients adds
    // up all micro-batches. With several ranks, network_.gradients has the gradients of one micro-batch. They
    // are added to gradient_sums_, and then cleared:
    //   sum = round(sum + g_0 + g_1 + ...)     g_r is the gradient of rank r
    // The additions are in FP32 and in the order of the ranks. After the last micro-batch, gradient_sums_ and
    // network_.gradients are swapped, because the update reads network_.gradients.
    void reduce_gradients(bool is_last_micro_batch) {
        if (!settings_.communicator) return;
        for (size_t i = 0; i < params_.size(); i++) {
            Floats &sum = gradient_sums_[i], &mine = network_.gradients[i];
            sum.resize(mine.size());  // once: of zeros
            const std::vector<Floats> gradients_by_rank = all_gather(mine);
            for (size_t e = 0; e < sum.size(); e++) {
                for (const Floats& gradient : gradients_by_rank) sum[e] += gradient[e];
                sum[e] = round_to(gradient_format(settings_), sum[e]);
            }
            std::fill(mine.begin(), mine.end(), 0.0f);
        }
        if (is_last_micro_batch) network_.gradients.swap(gradient_sums_);
    }

    // The whole of parameter i. mine: the elements that this rank owns. A vector is not sent, because every
    // rank owns the whole vector.
    Floats gather_parameter(size_t i, const Floats& mine) const {
        if (params_[i].is_vector()) return mine;
        Floats parameter;
        for (const Floats& part : all_gather(mine))
            parameter.insert(parameter.end(), part.begin(), part.end());
        return parameter;
    }
};

}  // namespace

}  // namespace coat::reference

std::unique_ptr<coat::Model> coat::make_reference_model(const RunSettings& settings) {
    return std::make_unique<reference::ReferenceModel>(settings);
}
