// gpu/exchange.cuh - what travels between the GPUs of a run, and when (step by step: dev/WALK.md).
//
//   gradients   after a bucket's backward: each rank sends to every other rank the gradients that the
//               receiver owns. The receiver adds them in the order of the ranks, in FP32, and rounds once. If
//               sums are FP32 and a micro-batch adds to each once, they have the bits of one GPU that adds up
//               as many micro-batches. (To a tied embedding, and to the head of many tokens, it adds more.)
//   weights     a stage is the embeddings, a linear layer, or the head. While one computes, the matrices of
//               the stage that comes next in this pass are gathered; each of the two has a buffer. A stage
//               has the number of its bucket of gradients.
#pragma once
#include "state.cuh"

namespace coat::gpu {

class Exchange {
public:
    // It comes before the State, whose size differs from rank to rank: what is received lies before that, at
    // the same place on every rank (peers.cuh).
    Exchange(Device& device, State& state, Peers& peers)
        : setup_(device.setup), cuda_(device.stream), state_(state), peers_(peers) {
        if (!peers_.several()) return;
        const std::vector<Param> params = parameters(setup_.config);
        int64_t most_received = 0, most_gathered = 0;
        for (const BucketRange& b : bucket_ranges(params)) {
            int64_t elements = 0, gathered = 0;
            for (size_t i = b.first; i < b.last; i++) {
                const int64_t units = ceil_div(ceil_div(params[i].size(), SHARD_UNIT), peers_.count);
                elements += params[i].rows > 1 ? units * SHARD_UNIT : params[i].padded_size();
                gathered += gathered_bytes(params[i]);
            }
            most_received = std::max(most_received, (peers_.count - 1) * elements);
            most_gathered = std::max(most_gathered, gathered);
        }
        received_ = device.arena.take(most_received * info(gradient_format(setup_)).bytes);
        for (uint8_t*& buffer : buffers_) buffer = device.arena.take(most_gathered);
    }

    // --- Gradients
    // Makes the computation wait until what was in the place of a bucket's gradients has been sent.
    void wait_for_bucket(int64_t bucket) const { sent_[place_of(bucket)].make_wait(cuda_); }
    // The computation has launched all that writes a bucket's gradients of one micro-batch (first: of the
    // step). Each rank gets the gradients of what it owns from all others, and adds them to its sums.
    void add_bucket(int64_t bucket, bool first) {
        const BucketRange& b = state_.buckets[bucket];
        const int64_t me = peers_.rank, each = state_.gradient_bytes;
        std::vector<Transfer> transfers;
        for (size_t i = b.first; i < b.last; i++)
            for (int64_t other = 0; other < peers_.count; other++)
                if (other != me)
                    transfers.push_back({.with = other,
                                         .send = gradients_for(i, other),
                                         .there = received(i, me, other),
                                         .send_bytes = padded(own(i, other)) * each,
                                         .receive = received(i, other, me),
                                         .receive_bytes = padded(own(i, me)) * each});
        peers_.wait_for_compute();
        peers_.exchange(transfers);
        for (size_t i = b.first; i < b.last; i++)
            add_gradients(state_.gradient_sums(i), first, gradients_for(i, me),
                          received(i, me == 0 ? 1 : 0, me), state_.gradient_quant.format, padded(own(i, me)),
                          me, peers_.count, peers_.stream());
        sent_[place_of(bucket)].record(peers_.stream());
    }

    // --- Weights
    // After an update, or after weights have been written.
    void weights_changed() {
        forget_gathered();
        state_.combine_amaxes();
    }
    // The computation is about to launch what reads the weights of a stage. Makes it wait until they are
    // there, and begins to gather the stage before or after it, which comes next (NONE: nothing).
    static constexpr int64_t NONE = -1;
    void make_ready(int64_t stage, int64_t next) {
        if (!peers_.several()) return;
        gather(stage);
        gathered_[stage % 2].make_wait(cuda_);
        if (next != NONE) gather(next);
    }
    int64_t head_stage() const { return static_cast<int64_t>(state_.buckets.size()) - 1; }
    // Whether weights of linear layers travel as codes (not while a delayed scale is missing).
    bool sends_codes() const { return codes_travel_ && !state_.some_without_history; }
    void forget_gathered() { in_buffer_[0] = in_buffer_[1] = NONE; }

private:
    const Setup& setup_;
    const cudaStream_t cuda_;
    State& state_;
    Peers& peers_;
    // Every rank knows a per-tensor scale before it has the whole weight.
    const bool codes_travel_ = linear_formats(setup_).w.fp8() && setup_.recipe.w.granularity == PER_TENSOR;
    Event sent_[3];                        // by place of gradients: it may be written again
    Event gathered_[2];                    // by buffer: those of even and of odd stages
    int64_t in_buffer_[2] = {NONE, NONE};  // the stage in it
    uint8_t *received_ = nullptr, *buffers_[2] = {};

    int64_t gathered_bytes(const Param& p) const {  // at most: codes are smaller
        return round_up(p.padded_size() * info(setup_.recipe.compute).bytes, GPU_ALIGNMENT);
    }
    Range own(size_t i, int64_t rank) const { return owned(state_.params[i], rank, peers_.count); }
    // Gradients of one micro-batch, of what `rank` owns.
    const uint8_t* gradients_for(size_t i, int64_t rank) const {
        return state_.gradient_from(i, own(i, rank).first);
    }
    // Where rank `to` gets its part of them from another: by parameter of the bucket, then by sender.
    uint8_t* received(size_t i, int64_t from, int64_t to) const {
        int64_t elements = (from - (from > to)) * padded(own(i, to));
        for (size_t j = state_.buckets[state_.params[i].bucket].first; j < i; j++)
            elements += (peers_.count - 1) * padded(own(j, to));
        return received_ + elements * state_.gradient_bytes;
    }
    // Of a stage: those of its bucket; or the embedding, where it is the head as well.
    std::vector<size_t> matrices(int64_t stage) const {
        std::vector<size_t> all;
        const BucketRange& b = state_.buckets[stage];
        for (size_t i = b.first; i < b.last; i++)
            if (state_.params[i].rows > 1) all.push_back(i);
        return all.empty() ? std::vector<size_t>{0} : all;
    }
    int place_of(int64_t bucket) const {  // as State takes them
        return bucket == 0 && setup_.config.tied ? 2 : static_cast<int>(bucket % 2);
    }

    void quantize_pieces(const View& from, const View& to) const {
        const std::vector<View> values = pieces_for_grids(from), codes = pieces_for_grids(to);
        for (size_t i = 0; i < values.size(); i++)
            quantize(stored(values[i]), {.view = codes[i], .delayed = state_.delayed_scaling()},
                     state_.stats_of(ReportKind::Weight), peers_.stream());
    }

    // As FP8 codes, which each rank makes of its part with the scale of the whole, or as the weights are.
    void gather(int64_t stage) {
        if (in_buffer_[stage % 2] == stage) return;
        uint8_t* to = buffers_[stage % 2];
        std::vector<Transfer> transfers;
        peers_.wait_for_compute();
        for (size_t i : matrices(stage)) {
            const Param& p = state_.params[i];
            const bool codes = sends_codes() && p.role.linear;
            const Quant quant = codes ? setup_.recipe.w : state_.compute;
            AmaxAndScale* const scale = codes ? state_.weight_scale(i) : nullptr;
            auto part = [&](int64_t r) {
                const int64_t each = info(quant.format).bytes;
                return Range{own(i, r).first * each, padded(own(i, r)) * each};
            };
            const Range mine = part(peers_.rank);
            const View kept = state_.owned_weight(i),
                       made{to + mine.first, scale, kept.rows, kept.cols, quant};
            if (codes) quantize_pieces(kept, made);
            else copy(made.data, kept.data, mine.count, peers_.stream());
            peers_.add_gather(to, part, transfers);
            state_.gathered[i] = {to, scale, p.rows, p.cols, quant};
            to += gathered_bytes(p);
        }
        peers_.exchange(transfers);
        gathered_[stage % 2].record(peers_.stream());
        in_buffer_[stage % 2] = stage;
    }
};

}  // namespace coat::gpu
