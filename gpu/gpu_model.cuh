// gpu/gpu_model.cuh - the Model that train.cpp drives, around the network of model.cu: steps and their
// micro-batches, evaluation, logits and the quantization report; and what happens to the gradients of a
// bucket before and after backward computes them.
#pragma once
#include <cstddef>

#include "layers.cuh"
#include "linear.cuh"

namespace coat::gpu {

class GpuModel : public Model {
public:
    // bytes: of the allocation; 0: a dry run, whose addresses are never used.
    GpuModel(const Setup& s, int64_t bytes, bool caches_weights)
        : device_(s, bytes), linear_{device_, state_, exchange_, gemms_, caches_weights} {
        clear(device_.results, sizeof(Results), cuda_);
        weights_changed();
    }

    // The bytes that a step takes, if this is a dry run.
    int64_t dry_step() {
        const std::vector<int32_t> tokens(step_tokens());
        step(tokens.data(), tokens.data(), {1, 0.0f});
        return arena_.most();
    }

    StepResult step(const int32_t* tokens, const int32_t* targets, const AdamW& adamw) override {
        const int64_t counted = sum_of_ranks(counted_targets(targets, step_tokens()));
        if (counted == 0) return {0, 0, true};
        begin(static_cast<double>(counted));
        adamw_ = &adamw;
        for (int64_t i = 0; i < setup_.accumulate; i++) {
            run(i, tokens + i * batch_tokens(), targets + i * batch_tokens());
            if (setup_.keep_gradients) check_loss(&device_.results->checked_loss);
        }
        peers_.make_compute_wait();
        if (setup_.keep_gradients) state_.update(adamw, 0, state_.buckets.size());
        weights_changed();
        state_.end_delayed_step();
        const Outcome outcome = finish();
        first_step_done_ = true;
        const bool skipped = outcome.gradients.skip != 0;
        if (!skipped && outcome.without_history == 0) state_.some_without_history = false;
        return {sum_of_ranks(outcome.loss), outcome.gradients.norm, skipped, counted};
    }

    double evaluate(const int32_t* tokens, const int32_t* targets) override {
        begin(divisor_of_mean(targets, batch_tokens()));
        start_pass(tokens, targets, setup_.B, setup_.T);
        pass(false);
        check_loss(&device_.results->outcome.loss);
        return finish().loss;
    }

    void next_logits(const int32_t* tokens, int64_t n, float* logits) override {
        begin(1);
        start_pass(tokens, tokens, 1, n);
        last_logits(gemms_.scratch);
        device_.fetch(logits, gemms_.scratch, config_.V * 4);
    }

    QuantReport quantization(const int32_t* tokens, const int32_t* targets) override {
        report_ = {};
        clear(device_.results->stats, sizeof(device_.results->stats), cuda_);
        begin(divisor_of_mean(targets, batch_tokens()), device_.results->stats);
        run(0, tokens, targets);
        peers_.make_compute_wait();
        device_.fetch(report_.kinds, device_.results->stats, sizeof(device_.results->stats));
        report_.k_m = state_.expansion_factors(false);
        report_.k_v = state_.expansion_factors(true);
        // Where weights travel as codes, each rank has measured those that it made.
        QuantStats& weights = report_.kinds[static_cast<int>(ReportKind::Weight)];
        if (exchange_.sends_codes()) weights = sum_of_ranks(weights);
        return report_;
    }

    void read(const std::string& name, void* out) override {
        peers_.make_compute_wait();
        device_.wait();
        state_.read(name, out);
    }
    void write(const std::string& name, const void* in) override {
        peers_.make_compute_wait();
        device_.wait();
        state_.write(name, in);
        weights_changed();
    }
    const Setup& setup() const override { return setup_; }

protected:
    // --- What model.cu computes, for N_ tokens of tokens_ and targets_
    // Results::outcome.loss += the sum of the losses * Results::loss_scale; and all gradients but the
    // embeddings', which embedding_backward() computes: order_ and token_rows_ sort their rows by token.
    virtual void pass(bool backward) = 0;
    virtual void embedding_backward(int64_t tokens) = 0;
    virtual void last_logits(void* logits) = 0;  // of the last token, in FP32
    virtual void make_cached_weights() = 0;

    // --- What it computes with
    Device device_;
    Arena& arena_ = device_.arena;
    const Setup& setup_ = device_.setup;
    const ModelConfig& config_ = setup_.config;
    const Recipe& recipe_ = setup_.recipe;
    const cudaStream_t cuda_ = device_.stream;
    Gemms gemms_{arena_.take(Gemms::SCRATCH), recipe_.fast_accumulation};
    const std::unique_ptr<Peers> connected_ = connect_gpus(setup_, arena_, cuda_);
    Peers& peers_ = *connected_;
    Exchange exchange_{device_, state_, peers_};
    State state_{device_, peers_};
    LinearContext linear_;
    const size_t head_weight_ = state_.number(config_.tied ? "embedding" : "head");
    int64_t B_ = 0, T_ = 0, N_ = 0;  // of the pass that runs: sequences, tokens of each, tokens in all

    // Where linear_.assigns, GEMMs write gradients and do not add. All other kernels add, so their gradients
    // are cleared first. A tied embedding has the head's part already.
    void begin_bucket(int64_t number) const {
        exchange_.wait_for_bucket(number);
        const BucketRange& bucket = state_.buckets[number];
        for (size_t i = bucket.first; linear_.assigns && i < bucket.last; i++) {
            const Param& p = state_.params[i];
            if (!p.role.linear && i != head_weight_)
                clear(state_.gradient(i).data, p.padded_size() * state_.gradient_bytes, cuda_);
        }
    }
    // Backward has a bucket's gradients and no longer needs its weights: the gradients are sent, and with
    // --gradients none the weights are updated.
    void end_bucket(int64_t bucket) {
        if (state_.stats) return state_.measure(bucket, report_);
        if (peers_.several()) exchange_.add_bucket(bucket, micro_batch_ == 0);
        if (setup_.keep_gradients) return;
        check_loss(&device_.results->checked_loss);
        state_.update(*adamw_, bucket, bucket + 1);
    }

    // Of the pass that runs, on the device.
    int32_t* const tokens_ = arena_.take<int32_t>(batch_tokens());
    int32_t* const targets_ = arena_.take<int32_t>(batch_tokens());
    int32_t* const order_ = arena_.take<int32_t>(batch_tokens());
    TokenRows* const token_rows_ = arena_.take<TokenRows>(batch_tokens());

private:
    CudaGraph first_micro_batch_, later_micro_batch_;
    bool first_step_done_ = false, cache_is_valid_ = false;
    int64_t micro_batch_ = 0;       // of the step that runs
    const AdamW* adamw_ = nullptr;  // of a step, while it runs
    QuantReport report_;            // while quantization is measured
    // What the GPU may still read while the host goes on.
    double loss_scale_ = 0;
    EmbeddingOrder embedding_order_;

    int64_t batch_tokens() const { return setup_.B * setup_.T; }
    int64_t step_tokens() const { return setup_.accumulate * batch_tokens(); }

    template <class T> T sum_of_ranks(const T& mine) const {
        if (!setup_.processes) return mine;
        T sum{};
        for (const T& theirs : setup_.processes->all_gather(mine)) sum += theirs;
        return sum;
    }

    void start_pass(const int32_t* tokens, const int32_t* targets, int64_t B, int64_t T) {
        B_ = B, T_ = T, N_ = B * T;
        device_.send(tokens_, tokens, N_ * 4);
        device_.send(targets_, targets, N_ * 4);
    }
    // Before a step, or a pass of its own, over `counted` targets. Makes the FP8 copies of the weights, if
    // they are cached and not up to date. With delayed scaling that takes their amaxes of the step.
    void begin(double counted, QuantStats* stats = nullptr) {
        loss_scale_ = 1.0 / counted;
        device_.send(&device_.results->loss_scale, &loss_scale_, sizeof(double));
        clear(device_.results, offsetof(Results, loss_scale), cuda_);  // what stands before it
        state_.stats = stats;
        if (state_.delayed_scaling()) {
            state_.clear_amaxes();
            cache_is_valid_ = false;
            exchange_.forget_gathered();
        }
        if (!linear_.caches_weights || (cache_is_valid_ && !stats)) return;
        make_cached_weights();
        cache_is_valid_ = true;
    }
    void weights_changed() {
        cache_is_valid_ = false;
        exchange_.weights_changed();
    }

    // One micro-batch. Forward and backward are replayed from a CUDA graph, unless a launch may differ from
    // the last one: in the first step of all, which loads kernels and chooses the GEMMs' algorithms, while
    // quantization is measured, when buckets are sent or updated on the way, and while an operand may lack
    // its delayed scale. Meanwhile the host sorts the tokens for the gradient of the embedding.
    void run(int64_t micro_batch, const int32_t* tokens, const int32_t* targets) {
        micro_batch_ = micro_batch;
        linear_.assigns = micro_batch == 0 || peers_.several();
        start_pass(tokens, targets, setup_.B, setup_.T);
        auto work = [&] { pass(true); };
        const bool by_bucket = peers_.several() || !setup_.keep_gradients;
        if (!first_step_done_ || state_.stats || by_bucket || state_.some_without_history) work();
        else (linear_.assigns ? first_micro_batch_ : later_micro_batch_).run(cuda_, work);
        embedding_order_ = embedding_order(tokens, N_);
        const int64_t distinct = static_cast<int64_t>(embedding_order_.tokens.size());
        device_.send(order_, embedding_order_.order.data(), N_ * 4);
        device_.send(token_rows_, embedding_order_.tokens.data(), distinct * int64_t(sizeof(TokenRows)));
        embedding_backward(distinct);
    }

    // *checked = the loss so far; NaN, so that the update skips the step, if a code hides infinity or NaN.
    void check_loss(double* checked) {
        checked_loss(state_.scale(0), state_.scale_count, &device_.results->outcome.loss, checked, cuda_);
    }
    Outcome finish() {
        Outcome outcome{};
        device_.fetch(&outcome, &device_.results->outcome, sizeof outcome);
        return outcome;
    }
};

}  // namespace coat::gpu
