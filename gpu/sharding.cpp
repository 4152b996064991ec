// gpu/sharding.cpp - what travels between the GPUs of a run, and when (gpu/sharding.h).
#include "sharding.h"

#include "../coat.h"
#include "sharding_kernels.h"

namespace coat::gpu {
namespace {

// A point in a stream that another stream can wait for.
class Event : UniqueHandle<cudaEvent_t, cudaEventDestroy> {
public:
    void record(cudaStream_t stream) {
        unless_dry_run(stream, "record an event", [&] {
            if (!handle)
                check(cudaEventCreateWithFlags(&handle, cudaEventDisableTiming),
                      "Creating a CUDA event failed");
            check(cudaEventRecord(handle, stream), "Recording a CUDA event failed");
        });
    }
    // What is put on the stream from now on waits for the point. If none has been recorded, nothing waits.
    void make_wait(cudaStream_t stream) const {
        if (handle) check(cudaStreamWaitEvent(stream, handle, 0), "Waiting for a CUDA event failed");
    }
};

// A run on several GPUs. Transfers are put on a stream of their own.
class Zero3Sharding : public Sharding {
public:
    Zero3Sharding(const GpuContext& context, const MemoryMap& memory, ParameterTensors& parameter_tensors,
                  const ScaleTable& scale_table, std::shared_ptr<Transport> transport)
        : Sharding(scale_table.linear_layer_count), settings_(context.settings), context_(context),
          memory_(memory), parameter_tensors_(parameter_tensors), scale_table_(scale_table),
          compute_stream_(context.stream), comm_stream_(transport == nullptr),
          transport_(std::move(transport)), matrices_(size_t(head_weight_set()) + 1) {
        list_matrices();
        if (transport_) transport_->attach(context.arena.begin(), memory.received.flags, comm_stream_);
    }

    // --- Weights
    void gather_weights(int64_t weight_set, Direction direction) override {
        gather(weight_set);
        is_gathered_[weight_set % 2].make_wait(compute_stream_);
        // In backward the weight set of the first linear layer is the last: the embeddings are not read
        // again.
        const int64_t next = direction == Direction::Forward ? weight_set + 1 : weight_set - 1;
        if (next > EMBEDDING_WEIGHT_SET && next <= head_weight_set()) gather(next);
    }
    void combine_amaxes_of_ranks() override {
        // Of all w, which are first in the table; with delayed scaling of all operands
        const int64_t n =
            scale_table_.delayed() ? scale_table_.entry_count() : scale_table_.linear_layer_count;
        const int64_t bytes = n * int64_t(sizeof(TensorScale));
        TensorScale* const all = memory_.received.scale_tables;
        copy_async(all + settings_.rank * n, scale_table_.entries(), bytes, compute_stream_);
        all_gather(all, bytes);
        combine_amaxes(scale_table_.entries(), all, n, settings_.ranks, settings_.recipe.w.element_format,
                       compute_stream_);
    }
    void forget_gathered_weights() override {
        for (int64_t& weight_set : in_buffer_) weight_set = NONE;
    }
    QuantStats sum_weight_quant_stats(const QuantStats& mine) const override {
        if (!sends_codes()) return mine;
        QuantStats sum;
        for (const QuantStats& theirs : settings_.communicator->all_gather(mine)) sum += theirs;
        return sum;
    }

    // --- Gradients
    void wait_for_gradient_buffer(int64_t bucket) override {
        is_sent_[buffer_of(bucket)].make_wait(compute_stream_);
    }
    bool sends_gradients() const override { return true; }
    // Each rank gets the gradients of what it owns from all others, and adds them to its sums.
    void reduce_gradients(int64_t bucket, bool first_micro_batch) override {
        const BucketRange& b = parameter_tensors_.buckets[bucket];
        const int64_t me = settings_.rank, element_bytes = parameter_tensors_.bytes_per_gradient;
        std::vector<Transfer> transfers;
        for (size_t i = b.first_param; i < b.end_param; i++)
            for (int64_t other = 0; other < settings_.ranks; other++)
                if (other != me)
                    transfers.push_back({.with = other,
                                         .send = gradient_at(i, owned_by(i, other).first),
                                         .there = place_of_received(i, me, other),
                                         .send_bytes = padded_count(owned_by(i, other)) * element_bytes,
                                         .receive = place_of_received(i, other, me),
                                         .receive_bytes = padded_count(owned_by(i, me)) * element_bytes});
        wait_for_compute();
        send(transfers);
        for (size_t i = b.first_param; i < b.end_param; i++)
            add_gradients(parameter_tensors_.owned_gradient_sum(i), first_micro_batch,
                          {.mine = gradient_at(i, owned_by(i, me).first),
                           .received = place_of_received(i, /*from=*/me == 0 ? 1 : 0, me),
                           .format = parameter_tensors_.format_of_gradients.element_format,
                           .n = padded_count(owned_by(i, me)),
                           .rank = me,
                           .ranks = settings_.ranks},
                          comm_stream_);
        is_sent_[buffer_of(bucket)].record(comm_stream_);
    }
    void wait_for_transfers() override {
        sent_so_far_.record(comm_stream_);
        sent_so_far_.make_wait(compute_stream_);
    }

    // --- Small values
    void all_gather(void* rows, int64_t bytes) override {
        std::vector<Transfer> transfers;
        const auto row_of = [&](int64_t rank) { return Range{.first = rank * bytes, .count = bytes}; };
        add_gather(static_cast<uint8_t*>(rows), row_of, transfers);
        wait_for_compute();
        send(transfers);
        wait_for_transfers();
    }

private:
    static constexpr int64_t NONE = -1;
    const RunSettings& settings_;
    const GpuContext& context_;
    const MemoryMap& memory_;
    ParameterTensors& parameter_tensors_;
    const ScaleTable& scale_table_;
    const cudaStream_t compute_stream_;
    const Stream comm_stream_;
    const std::shared_ptr<Transport> transport_;  // null in a dry run: nothing travels
    std::vector<std::vector<size_t>> matrices_;   // by weight set: its parameters
    // Whether weights of linear layers can travel as FP8 codes: if they have one scale per tensor, which
    // every rank knows before it has the whole weight.
    const bool codes_travel_ =
        linear_formats(settings_).w.is_fp8() && settings_.recipe.w.granularity == PER_TENSOR;
    Event launched_so_far_, sent_so_far_;
    Event is_sent_[3];  // by buffer of gradients: its gradients are sent, so it may be written again
    // By buffer of weights, one for even and one for odd weight sets: the weight set in it is gathered
    Event is_gathered_[2];
    int64_t in_buffer_[2] = {NONE, NONE};  // by buffer of weights: the weight set in it

    // What is put on the stream from now on runs after what the computation has launched so far.
    void wait_for_compute() {
        launched_so_far_.record(compute_stream_);
        launched_so_far_.make_wait(comm_stream_);
    }
    // Where ranks are threads of one process, their hosts meet before and after they launch transfers. The
    // reason: before CUDA loads a kernel, it waits for all GPUs of the process. Suppose that one of them
    // waits for a transfer which the host of another rank is about to launch. If that host loads a kernel
    // first, both wait for ever.
    void send(const std::vector<Transfer>& transfers) {
        if (!transport_) return;
        if (settings_.communicator->ranks_are_threads) settings_.communicator->all_gather(0);
        transport_->send(transfers);
        if (settings_.communicator->ranks_are_threads) settings_.communicator->all_gather(0);
    }
    // Rank r has the bytes part(r) of `whole`. Adds the transfers after which every rank has all of them.
    template <class Part> void add_gather(uint8_t* whole, Part part, std::vector<Transfer>& transfers) const {
        const Range mine = part(settings_.rank);
        for (int64_t other = 0; other < settings_.ranks; other++)
            if (other != settings_.rank)
                transfers.push_back({.with = other,
                                     .send = whole + mine.first,
                                     .there = whole + mine.first,
                                     .send_bytes = mine.count,
                                     .receive = whole + part(other).first,
                                     .receive_bytes = part(other).count});
    }

    // --- Gradients
    Range owned_by(size_t i, int64_t rank) const {
        return owned(parameter_tensors_.params[i], rank, settings_.ranks);
    }
    // Where backward writes this element of the gradient of parameter i.
    uint8_t* gradient_at(size_t i, int64_t element) const {
        uint8_t* const begin = static_cast<uint8_t*>(parameter_tensors_.gradients[i].data);
        return begin + element * parameter_tensors_.bytes_per_gradient;
    }
    // Where rank `to` receives its part of the gradient of parameter i from rank `from`. The parts lie in the
    // order of the bucket's parameters, and for each parameter in the order of the senders.
    uint8_t* place_of_received(size_t i, int64_t from, int64_t to) const {
        int64_t elements = (from - (from > to)) * padded_count(owned_by(i, to));
        for (size_t j = parameter_tensors_.buckets[parameter_tensors_.params[i].bucket].first_param; j < i;
             j++)
            elements += (settings_.ranks - 1) * padded_count(owned_by(j, to));
        return memory_.received.gradients + elements * parameter_tensors_.bytes_per_gradient;
    }
    // The buffer to which backward writes the gradients of a bucket: that of even buckets, that of odd ones,
    // or that of a tied embedding (gpu/memory_map.cpp, allocate_gradient_buffers()).
    int buffer_of(int64_t bucket) const { return bucket == 0 && settings_.config.tied ? 2 : int(bucket % 2); }

    // --- Weights
    // Whether weights of linear layers travel as codes now: not while a delayed scale is missing.
    bool sends_codes() const { return codes_travel_ && !scale_table_.any_empty_history; }

    void list_matrices() {
        for (size_t i = 0; i < parameter_tensors_.params.size(); i++) {
            const Param& p = parameter_tensors_.params[i];
            if (p.is_vector()) continue;
            int64_t weight_set = EMBEDDING_WEIGHT_SET;
            if (p.is_linear_weight()) weight_set = weight_set_of(parameter_tensors_.linear_layer_index(i));
            else if (p.role == Role::Head) weight_set = head_weight_set();
            matrices_[size_t(weight_set)].push_back(i);
        }
        if (settings_.config.tied) matrices_.back() = {parameter_tensors_.param_index("embedding")};
    }
    // Gathers a weight set, unless it is in its buffer.
    void gather(int64_t weight_set) {
        if (in_buffer_[weight_set % 2] == weight_set) return;
        uint8_t* to = memory_.received.matrices[weight_set % 2];
        std::vector<Transfer> transfers;
        wait_for_compute();
        for (size_t i : matrices_[size_t(weight_set)]) {
            parameter_tensors_.weights[i] = begin_to_gather(i, to, transfers);
            to += gathered_bytes(settings_, parameter_tensors_.params[i]);
        }
        send(transfers);
        is_gathered_[weight_set % 2].record(comm_stream_);
        in_buffer_[weight_set % 2] = weight_set;
    }
    // Writes this rank's part of a matrix to its place in the whole, which begins at `to`, and adds the
    // transfers of all parts. Returns the whole. What travels are FP8 codes, which each rank makes from its
    // part with the scale of the whole weight; or else the weights as they are.
    TensorRef begin_to_gather(size_t i, uint8_t* to, std::vector<Transfer>& transfers) const {
        const Param& p = parameter_tensors_.params[i];
        const bool codes = sends_codes() && p.is_linear_weight();
        const TensorFormat format = codes ? settings_.recipe.w : parameter_tensors_.format_of_weights;
        TensorScale* const scale =
            codes ? scale_table_.entry(OperandKind::W, parameter_tensors_.linear_layer_index(i)) : nullptr;
        const int64_t element_bytes = format_info(format.element_format).bytes;
        const auto part_of = [&](int64_t rank) {
            const Range elements = owned_by(i, rank);
            return Range{.first = elements.first * element_bytes,
                         .count = padded_count(elements) * element_bytes};
        };
        const Range mine = part_of(settings_.rank);
        if (codes) {
            const TensorRef part = parameter_tensors_.owned_weight(i);
            const TensorRef codes_of_part{.data = to + mine.first,
                                          .rows = part.rows,
                                          .cols = part.cols,
                                          .format = format,
                                          .tensor_scale = scale};
            quantize_operand(lazy_load(part), {.tensor = codes_of_part, .delayed = scale_table_.delayed()},
                             context_.quant_stats_of(MeasuredKind::Weight), comm_stream_);
        } else {
            copy_async(to + mine.first, parameter_tensors_.owned_weight_data(i), mine.count, comm_stream_);
        }
        add_gather(to, part_of, transfers);
        return {to, p.rows, p.cols, format, scale};
    }
};

}  // namespace

std::unique_ptr<Sharding> make_sharding(const GpuContext& context, const MemoryMap& memory,
                                        ParameterTensors& parameter_tensors, const ScaleTable& scale_table,
                                        std::shared_ptr<Transport> transport) {
    if (context.settings.ranks == 1) return std::make_unique<Sharding>(scale_table.linear_layer_count);
    return std::make_unique<Zero3Sharding>(context, memory, parameter_tensors, scale_table,
                                           std::move(transport));
}

}  // namespace coat::gpu
