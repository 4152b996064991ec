// gpu/exchange.cuh - what travels between the GPUs of a run, and when (step by step: dev/WALK.md).
//
//   gradients   after a bucket's backward: each rank sends to every other rank the gradients that the
//               receiver owns. The receiver adds them in the order of the ranks, in FP32, and rounds once. If
//               sums are FP32, they have the bits of one GPU that adds up as many micro-batches. For that, a
//               micro-batch must add to a gradient once; it adds more often to a tied embedding, and to the
//               head if it has more than HEAD_TOKENS tokens.
//   weights     before a stage (plan.h, weight_stages) computes, its matrices are gathered into one of two
//               buffers, while the stage before still computes with the other. Vectors are sent after the
//               update, because every rank keeps them whole.
#pragma once
#include "state.cuh"

namespace coat::gpu {

class Exchange {
public:
    Exchange(Device& device, State& state, Peers& peers)
        : device_(device), setup_(device.setup), state_(state), peers_(peers),
          stages_(weight_stages(setup_.config)) {
        if (!peers_.several()) return;
        std::vector<int64_t> owned_of(state_.buckets.size());
        for (const Param& p : state_.params) owned_of[p.bucket] += peers_.padded(p, peers_.rank);
        const int64_t largest = *std::max_element(owned_of.begin(), owned_of.end());
        received_ = device_.arena.take((peers_.count - 1) * largest * state_.gradient_bytes);
        // Codes are smaller. With delayed scaling the first step has none.
        const bool codes = gathers_codes(setup_) && setup_.recipe.scaling == Scaling::JustInTime;
        for (const std::vector<size_t>& stage : stages_) {
            int64_t bytes = 0;
            for (size_t i : stage) bytes += gathered_bytes(i, codes);
            buffer_bytes_ = std::max(buffer_bytes_, bytes);
        }
        for (uint8_t*& buffer : buffers_) buffer = device_.arena.take(buffer_bytes_);
    }

    // --- Gradients
    // Make the computation wait until the gradients of a bucket (of all buckets) have been sent, and their
    // place may be written again.
    void wait_for_bucket(int64_t bucket) const { sent_[place_of(bucket)].make_wait(device_.stream); }
    void wait_for_buckets() const {
        for (const Event& e : sent_) e.make_wait(device_.stream);
    }
    // The computation has launched all that writes a bucket's gradients of one micro-batch. Each rank gets
    // the gradients of what it owns from all others, and adds them to its sums.
    // first: of the micro-batches of the step.
    void add_bucket(int64_t bucket, bool first) {
        const BucketRange& b = state_.buckets[bucket];
        const int64_t each = state_.gradient_bytes;
        // By parameter, then by rank.
        std::vector<Transfer> parts;
        uint8_t* to = received_;
        for (size_t i = b.first; i < b.last; i++)
            for (int64_t r = 0; r < peers_.count; r++) {
                const Param& p = state_.params[i];
                if (r == peers_.rank) continue;
                const int64_t mine = peers_.padded(p, peers_.rank) * each;
                parts.push_back({r, owned_gradient(i, r), peers_.padded(p, r) * each, to, mine});
                to += mine;
            }
        peers_.wait_for_compute();
        peers_.exchange(Peers::Topic::Gradients, bucket, parts);
        const uint8_t* from = received_;
        for (size_t i = b.first; i < b.last; i++) {
            const Param& p = state_.params[i];
            const int64_t mine = peers_.padded(p, peers_.rank);
            add_gradients(state_.gradient_sums(i), first, owned_gradient(i, peers_.rank), from,
                          state_.gradient_quant.format, mine, peers_.rank, peers_.count, peers_.stream());
            from += (peers_.count - 1) * mine * each;
        }
        sent_[place_of(bucket)].record(peers_.stream());
    }

    // --- Weights
    // After an update, or after weights have been written. send: what this rank owns goes to the others.
    void weights_changed(bool send) {
        forget_gathered();
        if (!peers_.several()) return;
        state_.combine_amaxes();
        if (!send) return;
        const int64_t each = state_.weight_bytes;
        std::vector<Transfer> vectors;
        for (size_t i = 0; i < state_.params.size(); i++) {
            const Param& p = state_.params[i];
            if (p.rows > 1) continue;
            uint8_t* const whole = state_.kept_weights(i);
            peers_.add_gather(p, each, whole + peers_.own(p, peers_.rank).first * each, whole, vectors);
        }
        peers_.wait_for_compute();
        peers_.exchange(Peers::Topic::Vectors, 0, vectors);
        peers_.make_compute_wait();
    }
    // The computation is about to launch what reads the weights of a stage. Makes it wait until they are
    // there, and begins to gather the stage that comes next (NONE: nothing).
    static constexpr int64_t NONE = -1;
    void make_ready(int64_t stage, int64_t next, QuantStats* stats) {
        if (!peers_.several()) return;
        if (in_buffer_[current_] != stage) {
            current_ = !current_;
            if (in_buffer_[current_] != stage) gather(stage, current_, stats);
        }
        gathered_[current_].make_wait(device_.stream);
        if (next != NONE && in_buffer_[!current_] != next) gather(next, !current_, stats);
    }
    int64_t head_stage() const { return static_cast<int64_t>(stages_.size()) - 1; }
    // Whether weights of linear layers travel as codes (not while a delayed scale is missing).
    bool sends_codes() const { return gathers_codes(setup_) && !state_.some_without_history; }
    void forget_gathered() { in_buffer_[0] = in_buffer_[1] = NONE; }

private:
    Device& device_;
    const Setup& setup_;
    State& state_;
    Peers& peers_;
    const std::vector<std::vector<size_t>> stages_;
    Event sent_[3];                        // by place of gradients: it may be written again
    Event gathered_[2];                    // by buffer
    int64_t in_buffer_[2] = {NONE, NONE};  // the stage in it
    bool current_ = false;                 // the buffer that was used last
    uint8_t *received_ = nullptr, *buffers_[2] = {};
    int64_t buffer_bytes_ = 0;

    int64_t gathered_bytes(size_t i, bool as_codes) const {
        const Param& p = state_.params[i];
        const int64_t each = as_codes && p.role.linear ? 1 : state_.weight_bytes;
        return round_up(p.padded_size() * each, GPU_ALIGNMENT);
    }
    // Gradients of one micro-batch, what `rank` owns.
    const uint8_t* owned_gradient(size_t i, int64_t rank) const {
        return state_.gradient_from(i, peers_.own(state_.params[i], rank).first);
    }
    int place_of(int64_t bucket) const {  // as State takes them
        return bucket == 0 && setup_.config.tied ? 2 : static_cast<int>(bucket % 2);
    }

    // Gathers the matrices of a stage into a buffer: as FP8 codes, which each rank makes of its part with the
    // scale of the whole, or as they are.
    void gather(int64_t stage, bool buffer, QuantStats* stats) {
        uint8_t* to = buffers_[buffer];
        const bool as_codes = sends_codes();
        std::vector<Transfer> transfers;
        peers_.wait_for_compute();
        for (size_t i : stages_[stage]) {
            const Param& p = state_.params[i];
            const bool codes = as_codes && p.role.linear;
            const Quant quant = codes ? setup_.recipe.w : state_.compute;
            AmaxAndScale* const scale = codes ? state_.weight_scale(i) : nullptr;
            const int64_t each = info(quant.format).bytes;
            const Slice own = peers_.own(p, peers_.rank);
            uint8_t* const mine = to + own.first * each;
            const View slice = state_.weight_slice(i);
            const View part{mine, scale, slice.rows, slice.cols, quant};
            if (!codes) copy(mine, slice.data, own.count * each, peers_.stream());
            else quantize(stored(slice), {part}, stats, peers_.stream());
            peers_.add_gather(p, each, mine, to, transfers);
            state_.gathered[i] = {to, scale, p.rows, p.cols, quant};
            to += gathered_bytes(i, codes);
        }
        peers_.exchange(Peers::Topic::Gather, 4 * stage + 2 * as_codes + buffer, transfers);
        gathered_[buffer].record(peers_.stream());
        in_buffer_[buffer] = stage;
    }
};

}  // namespace coat::gpu
