// gpu/exchange.cuh - what travels between the GPUs of a run, and when (step by step: dev/WALK.md).
//
//   gradients   after a bucket's backward: each rank sends to every other rank the gradients that the
//               receiver owns. The receiver adds them in the order of the ranks, in FP32, and rounds once. If
//               sums are FP32, they have the bits of one GPU that adds up as many micro-batches; if they are
//               BF16, one GPU rounds more often. For equal bits a micro-batch must add to a gradient once; it
//               adds more often to a tied embedding, and to the head if it has more than HEAD_TOKENS tokens.
//   weights     before a stage computes (the embeddings, a linear layer, or the head), its matrices are
//               gathered into one of two buffers, while the stage before still computes with the other.
//               Vectors are sent after the update, because every rank keeps them whole.
#pragma once
#include "state.cuh"

namespace coat::gpu {

class Exchange {
public:
    // It comes before the State: its buffers are the first that ranks take (comm.cuh).
    Exchange(Device& device, State& state, Peers& peers)
        : setup_(device.setup), cuda_(device.stream), state_(state), peers_(peers), stages_(1) {
        if (!peers_.several()) return;
        const std::vector<Param> params = parameters(setup_.config);
        for (size_t i = 0; i < params.size(); i++)
            if (params[i].rows == 1) vectors_.push_back(i);
            else if (params[i].bucket == 0) stages_[0].push_back(i);
            else stages_.push_back({i});
        if (setup_.config.tied) stages_.push_back({0});

        // No rank owns more of a parameter than this.
        std::vector<int64_t> owned(static_cast<size_t>(params.back().bucket) + 1);
        for (const Param& p : params)
            owned[p.bucket] += ceil_div(ceil_div(p.size(), SHARD_UNIT), peers_.count) * SHARD_UNIT;
        const int64_t largest = *std::max_element(owned.begin(), owned.end());
        received_ = device.arena.take((peers_.count - 1) * largest * info(gradient_format(setup_)).bytes);
        // Codes are smaller. With delayed scaling the first step has none.
        const bool codes = codes_travel_ && setup_.recipe.scaling == Scaling::JustInTime;
        int64_t buffer_bytes = 0;
        std::vector<std::vector<size_t>> gathered = stages_;
        gathered.push_back(vectors_);
        for (const std::vector<size_t>& together : gathered) {
            int64_t bytes = 0;
            for (size_t i : together) bytes += gathered_bytes(params[i], codes);
            buffer_bytes = std::max(buffer_bytes, bytes);
        }
        for (uint8_t*& buffer : buffers_) buffer = device.arena.take(buffer_bytes);
    }

    // --- Gradients
    // Makes the computation wait until what was in the place of a bucket's gradients has been sent.
    void wait_for_bucket(int64_t bucket) const { sent_[place_of(bucket)].make_wait(cuda_); }
    // The computation has launched all that writes a bucket's gradients of one micro-batch. Each rank gets
    // the gradients of what it owns from all others, and adds them to its sums.
    // first: of the micro-batches of the step.
    void add_bucket(int64_t bucket, bool first) {
        const BucketRange& b = state_.buckets[bucket];
        const int64_t me = peers_.rank, each = state_.gradient_bytes;
        std::vector<Transfer> transfers;
        for (size_t i = b.first; i < b.last; i++)
            for (int64_t r = 0; r < peers_.count; r++) {
                const Param& p = state_.params[i];
                if (r != me)
                    transfers.push_back({r, owned_gradient(i, r), received(i, me, r),
                                         peers_.padded(p, r) * each, received(i, r, me),
                                         peers_.padded(p, me) * each});
            }
        peers_.wait_for_compute();
        peers_.exchange(transfers);
        for (size_t i = b.first; i < b.last; i++)
            add_gradients(state_.gradient_sums(i), first, owned_gradient(i, me),
                          received(i, me == 0 ? 1 : 0, me), state_.gradient_quant.format,
                          peers_.padded(state_.params[i], me), me, peers_.count, peers_.stream());
        sent_[place_of(bucket)].record(peers_.stream());
    }

    // --- Weights
    // After an update, or after weights have been written. send: what this rank owns goes to the others.
    void weights_changed(bool send) {
        forget_gathered();
        if (!peers_.several()) return;
        state_.combine_amaxes();
        if (!send) return;
        gather(vectors_, buffers_[0]);
        for (size_t i : vectors_)
            copy(state_.kept_weights(i), state_.gathered[i].data,
                 state_.params[i].size() * state_.weight_bytes, peers_.stream());
        peers_.make_compute_wait();
    }
    // The computation is about to launch what reads the weights of a stage. Makes it wait until they are
    // there, and begins to gather the stage that comes next (NONE: nothing).
    static constexpr int64_t NONE = -1;
    void make_ready(int64_t stage, int64_t next) {
        if (!peers_.several()) return;
        if (in_buffer_[current_] != stage) current_ = !current_;
        fill(current_, stage);
        gathered_[current_].make_wait(cuda_);
        if (next != NONE) fill(!current_, next);
    }
    int64_t head_stage() const { return static_cast<int64_t>(stages_.size()) - 1; }
    // Whether weights of linear layers travel as codes (not while a delayed scale is missing).
    bool sends_codes() const { return codes_travel_ && !state_.some_without_history; }
    void forget_gathered() { in_buffer_[0] = in_buffer_[1] = NONE; }

private:
    const Setup& setup_;
    const cudaStream_t cuda_;
    State& state_;
    Peers& peers_;
    // As numbers of parameters: the matrices of each stage; and the vectors.
    std::vector<std::vector<size_t>> stages_;
    std::vector<size_t> vectors_;
    const bool codes_travel_ = codes_travel(linear_formats(setup_).w);
    Event sent_[3];                        // by place of gradients: it may be written again
    Event gathered_[2];                    // by buffer
    int64_t in_buffer_[2] = {NONE, NONE};  // the stage in it
    bool current_ = false;                 // the buffer that was used last
    uint8_t *received_ = nullptr, *buffers_[2] = {};

    // Every rank knows a per-tensor scale before it has the whole weight.
    static bool codes_travel(const Quant& w) { return w.fp8() && w.granularity == PER_TENSOR; }
    int64_t gathered_bytes(const Param& p, bool as_codes) const {
        const int64_t each = as_codes && p.role.linear ? 1 : info(setup_.recipe.compute).bytes;
        return round_up(p.padded_size() * each, GPU_ALIGNMENT);
    }
    // Gradients of one micro-batch, what `rank` owns.
    const uint8_t* owned_gradient(size_t i, int64_t rank) const {
        return state_.gradient_from(i, peers_.own(state_.params[i], rank).first);
    }
    // Where rank `to` gets its part of them from another: by parameter of the bucket, then by sender.
    uint8_t* received(size_t i, int64_t from, int64_t to) const {
        int64_t elements = (from - (from > to)) * peers_.padded(state_.params[i], to);
        for (size_t j = state_.buckets[state_.params[i].bucket].first; j < i; j++)
            elements += (peers_.count - 1) * peers_.padded(state_.params[j], to);
        return received_ + elements * state_.gradient_bytes;
    }
    int place_of(int64_t bucket) const {  // as State takes them
        return bucket == 0 && setup_.config.tied ? 2 : static_cast<int>(bucket % 2);
    }

    void fill(bool buffer, int64_t stage) {
        if (in_buffer_[buffer] == stage) return;
        gather(stages_[stage], buffers_[buffer]);
        gathered_[buffer].record(peers_.stream());
        in_buffer_[buffer] = stage;
    }
    // Gathers weights: as FP8 codes, which each rank makes of its part with the scale of the whole, or as
    // they are.
    void gather(const std::vector<size_t>& params, uint8_t* to) {
        std::vector<Transfer> transfers;
        peers_.wait_for_compute();
        for (size_t i : params) {
            const Param& p = state_.params[i];
            const bool codes = sends_codes() && p.role.linear;
            const Quant quant = codes ? setup_.recipe.w : state_.compute;
            AmaxAndScale* const scale = codes ? state_.weight_scale(i) : nullptr;
            auto part = [&](int64_t r) {
                const int64_t each = info(quant.format).bytes;
                return Slice{peers_.own(p, r).first * each, peers_.padded(p, r) * each};
            };
            const Slice mine = part(peers_.rank);
            const View own = state_.owned_weight(i), made{to + mine.first, scale, own.rows, own.cols, quant};
            if (codes) quantize(stored(own), {made}, state_.stats_of(Kind::Weight), peers_.stream());
            else copy(made.data, own.data, mine.count, peers_.stream());
            peers_.add_gather(to, part, transfers);
            state_.gathered[i] = {to, scale, p.rows, p.cols, quant};
            to += gathered_bytes(p, codes);
        }
        peers_.exchange(transfers);
    }
};

}  // namespace coat::gpu
