// gpu/exchange.cuh - what travels between the GPUs of a run, and when (step by step: dev/WALK.md).
//
//   gradients   after a bucket's backward: each rank sends to every other rank the gradients that the
//               receiver owns. The receiver adds them in the order of the ranks, in FP32, and rounds once. So
//               the sum has the bits of one GPU that adds up as many micro-batches, if sums are FP32.
//   weights     --shard optimizer: after the update, each rank sends what it has updated.
//               --shard all: before a stage (plan.h, weight_stages) computes, its matrices are gathered into
//               one of two buffers, while the stage before still computes with the other.
#pragma once
#include "state.cuh"

namespace coat::gpu {

class Exchange {
public:
    Exchange(const Device& device, State& state, Peers& peers)
        : device_(device), setup_(device.setup), state_(state), peers_(peers),
          stages_(weight_stages(setup_.config)), ready_(stages_.size()) {}

    // --- Gradients
    // Make the computation wait until the gradients of a bucket (of all buckets) have been sent, and their
    // place may be written again.
    void wait_for_bucket(int64_t bucket) const { sent_[place_of(bucket)].make_wait(device_.stream); }
    void wait_for_buckets() const {
        for (const Event& e : sent_) e.make_wait(device_.stream);
    }
    // The computation has launched all that writes a bucket's gradients of one micro-batch. Each rank gets
    // the gradients of what it owns from all others, and adds them to its sums. The last micro-batch of a
    // step makes the sums whole on every rank, unless they are sharded. first, last: micro-batch of the step.
    void add_bucket(int64_t bucket, bool first, bool last) {
        const BucketRange& b = state_.buckets[bucket];
        const int64_t each = state_.gradient_bytes;
        const bool every_rank_keeps_sums = setup_.shard == Shard::None;
        // By parameter, then by rank.
        uint8_t* const received = device_.work<uint8_t>(Work::ReceivedGradients);
        std::vector<Transfer> parts, sums;
        uint8_t* to = received;
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
        const uint8_t* from = received;
        for (size_t i = b.first; i < b.last; i++) {
            const Param& p = state_.params[i];
            const int64_t mine = peers_.padded(p, peers_.rank);
            uint8_t* const whole = state_.gradient_sums(i);
            uint8_t* const sum =
                whole + (every_rank_keeps_sums ? peers_.own(p, peers_.rank).first * each : 0);
            add_gradients(sum, first, owned_gradient(i, peers_.rank), from, state_.gradient_quant.format,
                          mine, {peers_.rank, peers_.count}, peers_.stream());
            from += (peers_.count - 1) * mine * each;
            if (every_rank_keeps_sums && last) peers_.add_gather(p, each, sum, whole, sums);
        }
        if (!sums.empty()) peers_.exchange(Peers::Topic::Sums, bucket, sums);
        sent_[place_of(bucket)].record(peers_.stream());
    }

    // --- Weights
    // After an update, or after weights have been written. send: what this rank owns goes to the others.
    void weights_changed(bool send) {
        forget_gathered();
        if (!peers_.several()) return;
        state_.combine_amaxes();
        if (setup_.shard == Shard::None || !send) return;
        // Sends parameters that every rank keeps whole, and of which each has updated a part.
        auto complete = [&](Peers::Topic topic, int64_t number, const std::vector<size_t>& params) {
            const int64_t each = state_.weight_bytes;
            std::vector<Transfer> transfers;
            for (size_t i : params) {
                const Param& p = state_.params[i];
                uint8_t* const whole = state_.kept_weights(i);
                peers_.add_gather(p, each, whole + peers_.own(p, peers_.rank).first * each, whole, transfers);
            }
            peers_.exchange(topic, number, transfers);
        };
        std::vector<size_t> vectors;
        for (size_t i = 0; i < state_.params.size(); i++)
            if (state_.params[i].rows == 1) vectors.push_back(i);
        peers_.wait_for_compute();
        complete(Peers::Topic::Vectors, 0, vectors);
        if (setup_.shard == Shard::All) return peers_.make_compute_wait();
        for (size_t stage = 0; stage < stages_.size(); stage++) {
            const bool sent_already = setup_.config.tied && static_cast<int64_t>(stage) == head_stage();
            if (!sent_already) complete(Peers::Topic::Weights, static_cast<int64_t>(stage), stages_[stage]);
            ready_[stage].record(peers_.stream());
        }
    }
    // The computation is about to launch what reads the weights of a stage. Makes it wait until they are
    // there, and begins to gather the stage that comes next (NONE: nothing).
    static constexpr int64_t NONE = -1;
    void make_ready(int64_t stage, int64_t next, QuantStats* stats) {
        if (!peers_.several()) return;
        ready_[stage].make_wait(device_.stream);  // with --shard optimizer; else never recorded: no wait
        if (setup_.shard != Shard::All) return;
        if (in_buffer_[current_] != stage) {
            current_ = !current_;
            if (in_buffer_[current_] != stage) gather(stage, current_, stats);
        }
        gathered_[current_].make_wait(device_.stream);
        if (next != NONE && in_buffer_[!current_] != next) gather(next, !current_, stats);
    }
    void make_all_ready() {
        for (const Event& e : ready_) e.make_wait(device_.stream);
    }
    int64_t head_stage() const { return static_cast<int64_t>(stages_.size()) - 1; }
    // --shard all: whether weights of linear layers travel as codes (not while a delayed scale is missing).
    bool sends_codes() const { return gathers_codes(setup_) && !state_.some_without_history; }
    void forget_gathered() { in_buffer_[0] = in_buffer_[1] = NONE; }

private:
    const Device& device_;
    const Setup& setup_;
    State& state_;
    Peers& peers_;
    const std::vector<std::vector<size_t>> stages_;
    std::vector<Event> ready_;     // by stage, with --shard optimizer: its weights are whole
    Event sent_[3];                // by place of gradients: it may be written again
    Event gathered_[2];            // by buffer
    int64_t in_buffer_[2] = {NONE, NONE};  // the stage in it
    bool current_ = false;         // the buffer that was used last

    // Gradients of one micro-batch, what `rank` owns.
    const uint8_t* owned_gradient(size_t i, int64_t rank) const {
        return state_.gradient_from(i, peers_.own(state_.params[i], rank).first);
    }
    int place_of(int64_t bucket) const {  // as gpu_layout() in plan.cpp
        return bucket == 0 && setup_.config.tied ? 2 : static_cast<int>(bucket % 2);
    }

    // Gathers the matrices of a stage into a buffer: as FP8 codes, which each rank makes of its part with the
    // scale of the whole, or as they are.
    void gather(int64_t stage, bool buffer, QuantStats* stats) {
        const int64_t size = device_.place(Work::GatheredWeights).bytes / 2;
        uint8_t* to = device_.work<uint8_t>(Work::GatheredWeights) + buffer * size;
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
            to += round_up(p.padded_size() * each, GPU_ALIGNMENT);
        }
        peers_.exchange(Peers::Topic::Gather, 4 * stage + 2 * as_codes + buffer, transfers);
        gathered_[buffer].record(peers_.stream());
        in_buffer_[buffer] = stage;
    }
};

}  // namespace coat::gpu
